"""EMA and SWA in files: the trained weights and the average, both come back, and a fit goes on bit for bit (S38)."""
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.swa import SWA
from learner.callbacks.tracker import SaveModelCallback
from tests.helpers import raises, synth_learner, weights
from tests.loader_helpers import equal
from tests.resume_helpers import AskAt, network, noisy_learner, record

kinds = pytest.mark.parametrize('make', [lambda: EMA(.9), lambda: EMA(.9, buffers='average', every=2, start='3it'),
                                         lambda: SWA(.3), lambda: SWA(0, '3it')], ids=['ema', 'buffers', 'swa', 'it'])

def state(learn): return {k: v.clone() for k, v in learn.model.state_dict().items()}

def averaged(learn):
    with learn.averaged(): return state(learn)


@kinds
@pytest.mark.parametrize('at_end', [False, True])
def test_best_model_has_both(make, at_end, tmp_path):
    "S38: the best file holds both; loading it reproduces the logged loss by the average, and trains on from the raw"
    learn = noisy_learner(tmp_path, cbs=make())
    kept = {}
    look = Callback(after_epoch=lambda cb: kept.update({cb.epoch: (state(cb.learn), cb.recorder.values[-1][1])}))
    look.order = 70
    learn.fit(3, 3e-2, cbs=[SaveModelCallback(), look])
    best = min(kept, key=lambda k: kept[k][1])

    file = torch.load(tmp_path/'models'/'model.pth')
    other = noisy_learner(tmp_path, cbs=make()).load('model')
    name = other.cbs[-1].name

    assert equal(dict(file['model']), kept[best][0]) and equal(state(other), kept[best][0])
    assert [*file[name]['model']] == [*file['model']] and equal(averaged(other), averaged(learn))
    if not at_end: learn = other
    assert learn.final_record is None or at_end
    assert equal(state(learn), kept[best][0])
    plain = network()
    plain.load_state_dict(file[name]['model'])
    assert equal({**plain.state_dict()}, averaged(learn))

def test_metric_is_reproduced(tmp_path):
    "S38 in numbers: validation data without noise gives the loss that was logged, after loading in another Learner"
    def make(): return synth_learner(EMA(.9), n=4, lr=.1, path=tmp_path, model=nn.Sequential(
        nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    learn = make()
    learn.fit(3, cbs=SaveModelCallback())
    best = min(row['valid_loss'] for row in learn.recorder.values)

    other = make().load('model')

    assert learn.validate()[0] == other.validate()[0] == best
    other.fit(1)
    assert other.ema.n_averaged > 4

@kinds
@pytest.mark.parametrize('n,here', [(8, True), (12, False), (13, True), (5, False), (14, False)])
def test_goes_on(make, n, here, tmp_path, capsys):
    "A fit that is stopped in training or validation ends bit for bit as one that was not, the average with it"
    whole = noisy_learner(tmp_path/'whole', cbs=[make(), Checkpoint('1000it')])
    whole.fit(3, 1e-2)
    learn = noisy_learner(tmp_path/'x', cbs=[make(), Checkpoint('1000it')])

    with pytest.raises(KeyboardInterrupt): learn.fit(3, 1e-2, cbs=AskAt(n))
    if here: learn.resume()
    else:
        learn = noisy_learner(tmp_path/'x', cbs=[make(), Checkpoint('1000it')])
        learn.fit(3, 1e-2, resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert equal(averaged(learn), averaged(whole))

def test_a_file_of_a_checkpoint_has_each_tensor_once(tmp_path):
    "The average is there by its name and among the states of callbacks, in the same memory; `load` takes both weights"
    learn = noisy_learner(tmp_path, cbs=[EMA(.9), Checkpoint('1000it')])
    learn.fit(1)

    file = torch.load(tmp_path/'models'/'checkpoints'/'run1_step5.ckpt')
    other = noisy_learner(tmp_path, cbs=EMA(.9)).load('checkpoints/run1_step5.ckpt')

    ours, theirs = file['ema']['model'], file['callbacks']['ema']['average']
    assert all(ours[k].data_ptr() == theirs[k].data_ptr() for k in theirs) and len(theirs) == 6
    assert equal(averaged(other), averaged(learn)) and equal(state(other), state(learn))

@pytest.mark.parametrize('save', ['save', 'save_state'])
def test_saved_while_the_average_is_in(save, tmp_path):
    "Within an evaluation the trained weights are saved as the model; within `averaged()` too, but by `learn.save`"
    learn = noisy_learner(tmp_path, cbs=EMA(.9))
    if save == 'save': learn.add_cb(Callback(after_validate=lambda cb: cb.learn.save('in')))
    learn.fit(1, 1e-2)
    raw, means = state(learn), averaged(learn)

    with learn.averaged(): path = getattr(learn, save)('block')

    found = torch.load(path)
    assert equal(dict(found['model']), means if save == 'save' else raw)
    if save == 'save':
        inside = torch.load(tmp_path/'models'/'in.pth')
        assert equal(dict(inside['model']), raw) and equal(dict(inside['ema']['model']), means) and 'ema' not in found

def test_files_without_an_average(tmp_path):
    "Weights from elsewhere begin a new average, and evaluations are with them until then"
    plain = noisy_learner(tmp_path)
    plain.fit(1, 1e-2)
    plain.save('plain', with_opt=False)
    learn = noisy_learner(tmp_path, cbs=EMA(.9))
    learn.fit(1, 1e-2)

    learn.load('plain')

    assert learn.ema.n_averaged == 0 and equal(state(learn), state(plain)) and learn.validate() == plain.validate()

def test_safetensors_says_what_it_leaves_out(tmp_path):
    "A file that holds tensors of one model only has the trained weights, with a warning"
    pytest.importorskip('safetensors', reason="the format's library is not installed")
    learn = noisy_learner(tmp_path, cbs=EMA(.9))
    learn.fit(1, 1e-2)

    with pytest.warns(UserWarning, match='and not `ema`'): learn.save('m.safetensors')

def test_loss_with_parameters(tmp_path):
    "They are averaged with the model's, saved with both, and come back"
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
        def forward(self, pred, y): return ((pred-y)**2).mean()*self.scale.exp().sum() - self.scale.sum()
    def make():
        loss = Scaled()
        return synth_learner(EMA(.9), n=4, lr=.1, path=tmp_path, loss_func=loss, splitter=lambda m: [
            *m.parameters(), *loss.parameters()])
    learn = make()
    learn.fit(2)
    raw = learn.loss_func.scale.item()
    path = learn.save('m')

    other = make().load('m')

    with learn.averaged(): mean = learn.loss_func.scale.item()
    assert torch.load(path)['ema']['loss']['scale'].item() == mean != raw == other.loss_func.scale.item()
    assert learn.validate() == other.validate()

def test_lr_find_leaves_it():
    "A sweep neither averages nor changes the average"
    learn = noisy_learner('.', cbs=EMA(.9))
    learn.fit(1, 1e-2)
    before, average = learn.state_hash(), averaged(learn)

    learn.lr_find(num_it=5, show_plot=False, suggest_funcs=None)

    assert equal(averaged(learn), average) and learn.state_hash() == before and learn.ema.n_averaged == 5

@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError])
def test_an_error_in_validation_saves_raw_weights(ex, tmp_path):
    "What a Checkpoint saves after a failed validation are the trained weights"
    trained = []
    learn = noisy_learner(tmp_path, cbs=[EMA(.9), Checkpoint('1000it'), Callback(
        after_loss=raises(ex, when=False), after_train=lambda cb: trained.append(weights(cb.learn)))])

    with pytest.raises(ex): learn.fit(1, 1e-2)

    saved = torch.load(next((tmp_path/'models'/'checkpoints').glob('run1_*')))
    names = [k for k, _ in learn.model.named_parameters()]
    assert equal([saved['model'][k] for k in names], trained[0]) and equal(weights(learn), trained[0])

def test_a_learner_without_the_callback_is_told(tmp_path):
    "That the file holds an average, by which it may have been chosen"
    synth_learner(EMA(), path=tmp_path).fit(1)
    learn = synth_learner(EMA(), path=tmp_path)
    learn.fit(1)
    learn.save('model')

    with pytest.warns(UserWarning, match="an average of weights too, 'ema', with which evaluations were done"):
        synth_learner(path=tmp_path).load('model', with_opt=False)
    synth_learner(EMA(), path=tmp_path).load('model')
