"""`learn.save` and `learn.load`: what is in the file, what comes back, and what is refused."""
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.files import DamagedFile
from learner.optim import SGD
from learner.plain import digest
from learner.utils import set_seed
from tests.helpers import raises, synth_learner
from tests.resume_helpers import network, noisy_learner


def trained(path, **kwargs):
    "A Learner whose optimizer knows something"
    learn = noisy_learner(path, **kwargs)
    learn.fit(1, 1e-2)
    return learn


def state(learn): return {k: v.clone() for k, v in learn.model.state_dict().items()}

def equal(a, b): return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())

def opt_digest(learn): return digest(learn.opt.state_dict())


# ---- what is saved and comes back

def test_all_comes_back(tmp_path):
    "Weights, buffers and the optimizer are as they were, and training goes on alike"
    learn = trained(tmp_path)
    learn.save('m')
    before, known = state(learn), opt_digest(learn)
    other = noisy_learner(tmp_path)

    assert other.load('m') is other
    loaded = equal(state(other), before), opt_digest(other) == known
    for one in (learn, other):
        set_seed(5)
        one.fit(1, 1e-2)

    assert loaded == (True, True) and equal(state(learn), state(other)) and not equal(state(learn), before)


@pytest.mark.parametrize('with_opt', [None, True, False])
def test_plain_torch_opens_it(with_opt, tmp_path):
    "A file holds what `torch.save` would write of `state_dict()`, or that as 'model' beside 'opt'"
    learn = trained(tmp_path)
    own = learn.model.state_dict()
    path, model = learn.save('m', with_opt=with_opt), network()

    found = torch.load(path, weights_only=True)

    if with_opt is not False: assert list(found) == ['model', 'opt']
    weights = found if with_opt is False else found['model']
    model.load_state_dict(weights)
    assert equal(model.state_dict(), own) and weights._metadata == own._metadata


class Versioned(nn.Linear):
    "Refuses weights of another version, as some models of torchvision do"
    _version = 3
    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get('version') != 3: raise ValueError(f"version {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_of_modules(tmp_path):
    "A module that looks at the version of its weights finds it in each kind of file"
    learn = synth_learner(model=nn.Sequential(Versioned(1, 1)), path=tmp_path)
    whole, bare, with_opt = learn.save_state('all'), learn.save('bare', with_opt=False), learn.save('m')

    learn.load_state(whole).load(whole).load(bare).load(with_opt)
    learn.model.load_state_dict(torch.load(bare))
    learn.model.load_state_dict(torch.load(with_opt)['model'])

    torch.save(dict(nn.Sequential(nn.Linear(1, 1)).state_dict()), tmp_path/'models'/'none.pth')
    with pytest.warns(UserWarning, match='unverified'): learn.load('none')
    torch.save(nn.DataParallel(Versioned(1, 1)).state_dict(), tmp_path/'models'/'wrapped.pth')
    with pytest.warns(UserWarning, match='unverified'):
        synth_learner(model=Versioned(1, 1), path=tmp_path).load('wrapped')
    older = nn.Sequential(nn.Linear(1, 1)).state_dict()
    torch.save(older, tmp_path/'models'/'older.pth')
    with pytest.warns(UserWarning, match='unverified'), pytest.raises(ValueError, match='version 1'):
        learn.load('older')


@pytest.mark.parametrize('file, expected', [('m', 'models/m.pth'), ('m.v2', 'models/m.v2.pth'), ('m.pt', 'models/m.pt'),
                                            ('sub/m.bin', 'models/sub/m.bin')])
def test_where_it_is(file, expected, tmp_path):
    "A file is below `path/model_dir`, with '.pth' unless it has a suffix of such files; an absolute path stays"
    learn = synth_learner(path=tmp_path, model_dir='models')

    assert learn.save(file) == tmp_path/expected
    assert learn.load(file).save(tmp_path/'x.pth') == tmp_path/'x.pth'


# ---- files of others

@pytest.mark.parametrize('make', [
    lambda sd: sd, dict, lambda sd: {f'module.{k}': v for k, v in sd.items()},
    lambda sd: dict(model=sd, opt=None), lambda sd: dict(model=sd, epoch=3, loss=.3, optimizer={'state': {}})],
    ids=['state_dict', 'dict', 'wrapped', 'fastai', 'script'])
def test_files_of_torch_save(make, tmp_path):
    "A `state_dict`, or a dict that has one as 'model', is loaded, and it is said that damage would go unnoticed"
    (tmp_path/'models').mkdir()
    learn, model = noisy_learner(tmp_path), network()
    torch.save(make(model.state_dict()), tmp_path/'models'/'m.pth')

    with pytest.warns(UserWarning, match='unverified'): learn.load('m')

    assert equal(state(learn), model.state_dict())


@pytest.mark.parametrize('by', ['save_state', 'Checkpoint'])
def test_whole_states(by, tmp_path):
    "Of a whole state the weights and the optimizer are taken, and nothing else is changed"
    learn = trained(tmp_path, cbs=Checkpoint() if by == 'Checkpoint' else None)
    path = learn.save_state('all') if by == 'save_state' else tmp_path/'models'/'checkpoints'/'run1_step5.ckpt'
    other = noisy_learner(tmp_path)

    other.load(path)

    assert equal(state(other), state(learn)) and opt_digest(other) == opt_digest(learn) and other.n_step == 0


def test_what_a_checkpoint_saves_at_an_error(tmp_path):
    "The weights and the optimizer at the time of an error are loaded from the file that a Checkpoint leaves then"
    learn = noisy_learner(tmp_path, cbs=[Checkpoint(), Callback(after_loss=raises(ZeroDivisionError, nth=4))])
    with pytest.raises(ZeroDivisionError): learn.fit(1, 1e-2)

    other = noisy_learner(tmp_path).load(tmp_path/'models'/'checkpoints'/'run1_error.pth', with_opt=True)

    assert equal(state(other), state(learn)) and opt_digest(other) == opt_digest(learn)


@pytest.mark.parametrize('content', [[1, 2], {1: torch.ones(2)}, torch.ones(2), 'text'], ids=range(4))
def test_no_weights(content, tmp_path):
    "A file of something else is refused, and what is in it is said"
    torch.save(content, tmp_path/'m.pth')

    with pytest.warns(UserWarning, match='unverified'), pytest.raises(ValueError, match=r'm.pth.* no weights by their'):
        synth_learner(path=tmp_path).load(tmp_path/'m.pth')


def test_dict_of_something_else(tmp_path):
    "So is a dict in which no name is one of the model's"
    torch.save(dict(weights={'a': torch.ones(1)}, epoch=3), tmp_path/'m.pth')

    with pytest.warns(UserWarning, match='unverified'), pytest.raises(ValueError, match=(
            r'nothing in `.*m.pth` fits this(.|\n)*not in the model: `weights` dict\(a=float32\[1\]\), `epoch`')):
        synth_learner(path=tmp_path).load(tmp_path/'m.pth', strict=False)


def test_state_dict_beside_others(tmp_path):
    "Weights are found under `state_dict`, as others save them"
    learn = synth_learner(path=tmp_path)
    torch.save(dict(state_dict={'module.a': torch.ones(1), 'module.b': torch.zeros(1)}, meta={}), tmp_path/'m.pth')

    with pytest.warns(UserWarning, match='unverified'): learn.load(tmp_path/'m.pth')

    assert [p.item() for p in learn.model.parameters()] == [1, 0]


@pytest.mark.parametrize('with_opt', [True, False])
def test_damaged(with_opt, tmp_path):
    "One flipped bit is found, and nothing is changed"
    learn = trained(tmp_path)
    path = learn.save('m', with_opt=with_opt)
    data = bytearray(path.read_bytes())
    data[len(data)//2] ^= 1
    path.write_bytes(data)
    other = noisy_learner(tmp_path)
    before = state(other)

    with pytest.raises(DamagedFile, match='m.pth is damaged'): other.load('m')

    assert equal(state(other), before) and other.opt is None


def test_not_there(tmp_path):
    "A missing file is named, with those that are there"
    learn = synth_learner(path=tmp_path)
    learn.save('there')

    with pytest.raises(FileNotFoundError, match=r'there\.pth.*m\.pth'): learn.load('m')


def test_what_cannot_be_saved(tmp_path):
    "What a file cannot hold is named, and the file of that name is as it was"
    learn = synth_learner(path=tmp_path)
    path = learn.save('m')
    old = path.read_bytes()
    learn.add_cb(Callback(before_save=lambda cb, state: state.update(note=dict(a=object()))))

    with pytest.raises(TypeError, match=r'`note\.a` is a `builtins\.object`'): learn.save('m')

    assert path.read_bytes() == old and [p.name for p in path.parent.iterdir()] == ['m.pth']


# ---- the optimizer

def test_optimizer_that_does_not_fit(tmp_path):
    "The state of another optimizer is an error that says how to go without it, and leaves the weights as they were"
    learn = trained(tmp_path)
    learn.save('m')
    other = noisy_learner(tmp_path, opt_func=SGD)
    before = state(other)

    with pytest.raises(ValueError, match='m.pth` does not fit: a state of Adam.*SGD(.|\n)*`with_opt=False` loads'):
        other.load('m')
    unchanged = equal(state(other), before)
    other.load('m', with_opt=False)

    assert unchanged and equal(state(other), state(learn)) and not other.opt.opt.state


@pytest.mark.parametrize('foreign', [dict(state=[], hypers=[]), nn.Linear(1, 1).state_dict(), [1]], ids=range(3))
def test_optimizer_of_another_package(foreign, tmp_path):
    "So is one of another package"
    learn = synth_learner(path=tmp_path)
    torch.save(dict(model=learn.model.state_dict(), opt=foreign), tmp_path/'m.pth')

    with pytest.warns(UserWarning), pytest.raises(ValueError, match="not this package's; `with_opt=False`"):
        learn.load(tmp_path/'m.pth')
    with pytest.warns(UserWarning, match='unverified'): learn.load(tmp_path/'m.pth', with_opt=False)


def test_no_optimizer(tmp_path):
    "Where an optimizer is asked for and there is none, it is an error when saving as when loading"
    learn = synth_learner(path=tmp_path)
    learn.save('m')
    learn.save('bare', with_opt=False)

    with pytest.raises(ValueError, match='no optimizer yet'): learn.save('other', with_opt=True)
    for file in ('m', 'bare'):
        with pytest.raises(ValueError, match='holds no state of an optimizer'): learn.load(file, with_opt=True)
        assert learn.load(file).opt is None


def test_weights_alone_leave_the_optimizer(tmp_path):
    "Without the optimizer's state the present one stays"
    learn = trained(tmp_path)
    learn.save('m')
    learn.fit(1, 1e-2)
    known = opt_digest(learn)

    learn.load('m', with_opt=False)

    assert opt_digest(learn) == known


# ---- within a fit

def test_within_a_fit(tmp_path):
    "A callback can save after a batch and load later: the optimizer goes on with the same parameters"
    seen = {}
    def save(cb):
        if cb.training and cb.n_step == 3: cb.learn.save('m')
    def load(cb):
        if cb.epoch == 0:
            seen.update(n=cb.opt.opt.state[cb.model[0].weight]['step'].item(), opt=cb.opt)
            cb.learn.train_bn = False  # for a fit to come, which makes another optimizer
            cb.learn.load('m')
            seen.update(back=cb.opt.opt.state[cb.model[0].weight]['step'].item())
    learn = noisy_learner(tmp_path)

    learn.fit(2, 1e-2, cbs=Callback(after_batch=save, after_epoch=load))

    ps = list(learn.model.parameters())
    assert (seen['n'], seen['back']) == (5, 3) and learn.opt is seen['opt']
    assert all(learn.opt.opt.state[p]['step'] == 8 for p in ps)
    assert {id(p) for g in learn.opt.opt.param_groups for p in g['params']} == {*map(id, ps)}


def test_events(tmp_path):
    "before_save can put something into the file, also beside weights alone, and after_load finds it"
    found = []
    cb = Callback(before_save=lambda cb, state: state.update(averaged={k: v/2 for k, v in state['model'].items()}),
                  after_load=lambda cb, state: found.append(state['averaged']))
    learn = noisy_learner(tmp_path, cbs=cb)
    learn.save('m')
    learn.save('alone', with_opt=False)

    learn.load('m').load('alone')

    assert [equal(o, {k: v/2 for k, v in state(learn).items()}) for o in found] == [True, True]


def test_before_load(tmp_path):
    "before_load can change what was read before it gets into the model"
    def double(cb, state): state['model'] = {k: v*2 for k, v in state['model'].items()}
    learn = noisy_learner(tmp_path)
    learn.save('m')

    other = noisy_learner(tmp_path, cbs=Callback(before_load=double)).load('m')

    assert equal(state(other), {k: v*2 for k, v in state(learn).items()})
