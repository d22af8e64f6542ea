"""What users of MMEngine complained about, by number: what files hold, and what is made of it."""
import shutil
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.tracker import SaveModelCallback
from learner.metrics import mae, mse
from tests.callbacks.test_tracker import scripted
from tests.helpers import synth_learner, weights
from tests.resume_helpers import noisy_learner
from tests.test_mmengine_complaints import StopAfter, two_epochs


def files(path): return sorted(p.name for p in path.rglob('*') if p.is_file())

def scores(path, values, *cbs): return scripted(values, *cbs, better=True, path=path)


# ---- the best, and all else

def test_4_files_open_with_weights_only(tmp_path):
    "Complaint 4: whatever is saved, with optimizer, average, schedule and random streams, needs no trust to be opened"
    learn = noisy_learner(tmp_path, cbs=EMA())

    learn.fit_one_cycle(2, 1e-2, cbs=[Checkpoint(monitor='accuracy'), StopAfter(7), SaveModelCallback(with_opt=True)])

    paths = [p for p in tmp_path.rglob('*') if p.is_file()]
    assert files(tmp_path) == ['model.pth', 'run1_best_accuracy.ckpt', 'run1_step7.ckpt']
    for path in paths: assert {'model', 'opt', 'ema'} <= torch.load(path, weights_only=True).keys()


def test_5_the_best_of_an_epoch_is_in_its_file(tmp_path):
    "Complaint 5: the file of an epoch knows the best score up to it, that epoch's own included"
    values = [.1, .5, .3, .9]

    scores(tmp_path, values).fit(4, cbs=Checkpoint('1ep', keep=None, monitor='score'))

    paths = [tmp_path/f'models/checkpoints/run1_step{i}.ckpt' for i in range(1, 5)]
    best = [torch.load(p, weights_only=True)['callbacks']['checkpoint']['best'] for p in paths]
    assert best == [{'score': v} for v in (.1, .5, .5, .9)]


def test_5_no_old_best_is_left(tmp_path):
    "Complaint 5: a better epoch after resuming replaces the best files of before; a worse one leaves them"
    seen = []
    for epoch in range(4):
        stop = Callback(after_epoch=lambda cb, epoch=epoch: cb.epoch == epoch and cb.learn.request_stop())
        cbs = Checkpoint(keep=1, monitor='score'), SaveModelCallback('score', n_best=1), stop
        scores(tmp_path, [.1, .5, .3, .9]).fit(4, cbs=cbs, resume=True)
        seen.append(files(tmp_path))

    assert seen == [[f'model_{best}.pth', 'run1_best_score.ckpt', f'run1_step{step}.ckpt']
                    for step, best in ((1, 0), (2, 1), (3, 1), (4, 3))]


def test_6_the_best_alone_is_kept(tmp_path):
    "Complaint 6: where only the best is wanted, nothing else is written"
    cbs = Checkpoint('100ep', monitor='score', at_end=False), SaveModelCallback('score')

    scores(tmp_path, [.1, .5, .9]).fit(3, cbs=cbs)

    assert files(tmp_path) == ['model.pth', 'run1_best_score.ckpt']


@pytest.mark.parametrize('cb, file', [(partial(SaveModelCallback, 'score', with_opt=True), 'model'),
                                      (partial(Checkpoint, monitor='score'), 'checkpoints/run1_best_score.ckpt')])
def test_7_the_best_has_its_optimizer(tmp_path, cb, file):
    "Complaint 7: with the best weights comes the optimizer as it was then, to train on from there"
    learn, best = scores(tmp_path, [.1, .9, .5]), {}
    def means(learn): return [s['exp_avg'].clone() for s in learn.opt.opt.state.values()]
    def look(cb): best[cb.epoch] = weights(cb.learn), means(cb.learn)
    learn.fit(3, cbs=[cb(), Callback(after_train=look)])

    other = scores(tmp_path, [.1])
    other.create_opt()
    other.load(file)

    assert [int(s['step']) for s in other.opt.opt.state.values()] == [2, 2]
    assert all(map(torch.equal, [*weights(other), *means(other)], [*best[1][0], *best[1][1]]))


# ---- averages

head = 4  # the number of its weight among all parameters


def net(seed=0, n_out=1, buffer=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, n_out))
    if buffer: model.register_buffer('scale', torch.ones(2))
    return model


def first_output(pred, y): return nn.functional.mse_loss(pred[:, :1], y)

def averaging(path, cbs=(EMA,), **kwargs):
    return synth_learner([*cbs], n=5, model=net(**kwargs), loss_func=first_output, path=path)


@pytest.mark.parametrize('kwargs', [dict(n_out=2), dict(buffer=True)], ids=str)
def test_19_an_average_of_another_head_is_loaded(tmp_path, kwargs):
    "Complaint 19: with another head or a new buffer what fits is loaded, of the average too; the rest is begun anew"
    learn, other = averaging(tmp_path), averaging(tmp_path, seed=1, **kwargs)
    learn.fit(1, .1)
    learn.save('a')
    own = weights(other)

    with pytest.warns(UserWarning, match='is loaded in part'): other.load('a', strict=False)
    with other.averaged(), learn.averaged():
        assert weights(other)[0].equal(weights(learn)[0])
        assert weights(other)[head].equal(own[head] if 'n_out' in kwargs else weights(learn)[head])
    other.fit(1, .1)


def test_19_a_head_that_is_left_out_is_not_in_the_average(tmp_path):
    "Complaint 19: a head that is not to be loaded is not evaluated with either, also if it has the same shape"
    learn, other = averaging(tmp_path), averaging(tmp_path, seed=1)
    learn.fit(1, .1)
    learn.save('a')
    own = weights(other)

    other.load('a', drop='2.*')

    assert weights(other)[head].equal(own[head])
    with other.averaged(): assert weights(other)[head].equal(own[head])


def test_19_an_average_under_other_names_is_loaded(tmp_path):
    "Complaint 19: names of the file that are changed are changed for the average too"
    learn, model = averaging(tmp_path), nn.Sequential(OrderedDict(body=net()))
    other = synth_learner([EMA], n=5, model=model, loss_func=first_output, path=tmp_path)
    learn.fit(1, .1)
    learn.save('a')

    other.load('a', rename={'^': 'body.'})

    with other.averaged(), learn.averaged(): assert all(map(torch.equal, weights(other), weights(learn)))


def test_19_trained_weights_are_not_the_average(tmp_path):
    "Complaint 19: a fit that goes on without the average is, once that is allowed, the one that never had it"
    whole = averaging(tmp_path/'whole', ())
    two_epochs(whole)
    two_epochs(averaging(tmp_path), cbs=[Checkpoint(), StopAfter(7)])
    learn = averaging(tmp_path, ())

    with pytest.raises(ValueError, match='`ema` is missing, whose state it holds'):
        two_epochs(learn, cbs=Checkpoint(), resume=True)
    two_epochs(learn, cbs=Checkpoint(), resume=True, allow='callbacks')

    assert all(map(torch.equal, weights(learn), weights(whole)))


# ---- what is there when a fit goes on

def test_20_other_metrics_after_resuming(tmp_path):
    "Complaint 20: a fit that goes on with other metrics has its first validation, and the rows of before"
    def fit(metrics, *cbs, **kwargs):
        learn = synth_learner(n=5, path=tmp_path, metrics=metrics)
        two_epochs(learn, cbs=[Checkpoint(), *cbs], **kwargs)
        return learn.history
    fit([mse], StopAfter(7))

    table = fit([mse, mae], resume=True)

    assert table.mse.notna().tolist() == [True, True] and table.mae.notna().tolist() == [False, True]


def test_20_a_history_is_not_needed(tmp_path):
    "Complaint 20: a file without a Recorder's history goes on in a fit that has one, which says so, and the other way"
    def fit(default_cbs, *cbs, **kwargs):
        learn = synth_learner(n=5, path=tmp_path, default_cbs=default_cbs)
        two_epochs(learn, cbs=[Checkpoint(), *cbs], **kwargs)
        return learn
    fit(False, StopAfter(2))

    with pytest.warns(UserWarning, match='holds no state of `recorder`: begun anew'):
        learn = fit(dict(progress=None), StopAfter(7), resume=True)
    assert len(learn.recorder.values) == 1 and learn.n_step == 7
    with pytest.raises(ValueError, match='`recorder` is missing, whose state it holds'): fit(False, resume=True)
    assert fit(False, resume=True, allow='callbacks').n_step == 10


def test_the_folder_may_move(tmp_path):
    "The absolute path in `last_checkpoint`: a folder that was moved goes on where it is now, and loads its best model"
    def fit(path, *cbs, **kwargs):
        learn = scores(path, [.1, .9, .5, .3])
        learn.fit(4, cbs=[Checkpoint(), SaveModelCallback('score'), *cbs], **kwargs)
        return learn
    whole = fit(tmp_path/'whole')
    fit(tmp_path/'here', StopAfter(3))
    shutil.move(tmp_path/'here', tmp_path/'there')

    learn = fit(tmp_path/'there', resume=True)

    assert learn.n_step == 4 and not (tmp_path/'here').exists()
    assert all(map(torch.equal, weights(learn), weights(whole)))
