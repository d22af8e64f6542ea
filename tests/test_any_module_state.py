"""Any nn.Module: what is saved of it and put back: requirements N5, N6, N12 to N14, N20 to N24, by their numbers."""
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from learner.callback import Callback
from learner.keep import kept
from learner.weights import weights_of
from tests.helpers import synth_learner, weights
from tests.loader_helpers import equal

find = dict(num_it=3, end_lr=1., stop_div=False, show_plot=False, suggest_funcs=None)


def copied(model): return {k: deepcopy(v) for k, v in weights_of(model).items()}

def learner(make, path, **kwargs):
    "A Learner whose model has the same weights each time"
    torch.manual_seed(0)
    return synth_learner(model=make(), path=path, n=3, lr=.1, **kwargs)

def round_trip(make, path, **kwargs):
    "A Learner that was trained and saved, and one that has loaded it"
    learn = learner(make, path, **kwargs)
    learn.fit(1)
    learn.save('m')
    return learn, learner(make, path, **kwargs).load('m')

def interrupted_and_resumed(make, path):
    "The weights after a fit of two epochs, and after one that was stopped within and gone on with by another Learner"
    whole, first, other = (learner(make, path) for _ in range(3))
    torch.manual_seed(0)
    whole.fit(2)
    torch.manual_seed(0)
    first.fit(2, cbs=Callback(save_point=lambda cb: cb.n_step == 3 and cb.learn.save_state('s')))
    other.fit(2, resume=path/'models'/'s.ckpt')
    return copied(whole.model), copied(other.model)


def then_fit(learn):
    "Everything that a fit from a fixed seed gives"
    torch.manual_seed(1)
    learn.fit(2)
    return copied(learn.model), learn.recorder.raw_losses, learn.opt.state_dict()['state'], torch.rand(1)


# ---- N5: what is in a file

class AllKinds(nn.Module):
    "A parameter and a buffer, None for each, and a buffer that is not part of the state"
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.register_parameter('bias', None)
        self.register_buffer('mean', torch.zeros(1))
        self.register_buffer('none', None)
        self.register_buffer('cache', torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training: self.mean, self.cache = self.mean + x.mean().detach(), self.cache+1
        return x*self.weight

def test_n05_a_file_holds_the_state_dict(tmp_path):
    "Parameters and persistent buffers are saved; None and other buffers are not, and the latter stay when it is loaded"
    learn = learner(AllKinds, tmp_path)
    learn.fit(1)
    path, other = learn.save('m', with_opt=False), learner(AllKinds, tmp_path)
    other.model.cache.fill_(7)

    other.load(path)

    assert [*torch.load(path)] == ['weight', 'mean'] and learn.model.cache == 3
    assert other.model.mean.equal(learn.model.mean) and learn.model.mean != 0
    assert (other.model.cache, other.model.none, other.model.bias) == (7, None, None)

def test_n05_a_whole_state_has_the_other_buffers_too(tmp_path):
    "What decides how training goes on is more: in a whole state, and after lr_find, those buffers are as they were"
    learn = learner(AllKinds, tmp_path)
    learn.fit(1)
    mean = learn.model.mean.clone()
    learn.lr_find(**find)

    other = learner(AllKinds, tmp_path).load_state(learn.save_state('s'))

    assert learn.model.cache == other.model.cache == 3 and learn.model.mean.equal(mean)


# ---- N6: tied parameters

class Tied(nn.Module):
    "A decoder with the weight of the encoder, transposed by the loss of its bias"
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
        self.dec.weight = self.enc.weight

    def forward(self, x): return self.dec(self.enc(x))

def is_tied(learn): return learn.model.dec.weight is learn.model.enc.weight

def test_n06_a_tied_parameter_is_trained_once():
    "It is in the optimizer once, and moves as torch's optimizer moves it"
    learn, by_hand = synth_learner(model=Tied(), n=1, opt_func=torch.optim.SGD, lr=.1), Tied()
    by_hand.load_state_dict(learn.model.state_dict())
    x, y = next(iter(learn.dls.train.dl))
    F.mse_loss(by_hand(x), y).backward()
    torch.optim.SGD(by_hand.parameters(), .1).step()

    learn.fit(1)

    assert learn.opt.all_params() == [*learn.model.parameters()] and len(learn.opt.all_params()) == 2
    assert learn.model.enc.weight.equal(by_hand.enc.weight) and is_tied(learn)

@pytest.mark.parametrize('splitter,where', [
    (lambda m: [[m.enc.weight], [m.dec.weight, m.dec.bias]], 'is in group 0 and in group 1'),
    (lambda m: [[m.enc.weight, m.dec.weight, m.dec.bias]], 'is in group 0 and in group 0')])
def test_n06_a_splitter_must_return_it_once(splitter, where):
    "A parameter that is in two groups, or twice in one, would be stepped twice: it is refused by name"
    with pytest.raises(ValueError, match=f'each parameter once; `enc.weight` {where}'):
        synth_learner(model=Tied(), splitter=splitter).fit(1)

def test_n06_a_tie_survives_files_and_copies(tmp_path):
    "Both names are in the file, and whatever is put back, the two are still one"
    learn, other = round_trip(Tied, tmp_path)
    learn.lr_find(**find)
    third = learner(Tied, tmp_path).load_state(learn.save_state('s'))

    found = torch.load(tmp_path/'models'/'m.pth')['model']

    assert [*found] == ['enc.weight', 'dec.weight', 'dec.bias'] and found['enc.weight'].equal(found['dec.weight'])
    assert all(is_tied(one) for one in (learn, other, third)) and equal(weights(other), weights(learn))
    assert deepcopy(learn.model).dec.weight is not learn.model.enc.weight and equal(weights(third), weights(learn))
    copy = deepcopy(learn.model)
    assert copy.dec.weight is copy.enc.weight


# ---- N12, N13: weights that are computed

def normed():
    "weight_norm and spectral_norm as parametrizations"
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(1, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)),
                         nn.Linear(4, 1))

originals = ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1', '1.bias',
             '1.parametrizations.weight.original', '1.parametrizations.weight.0._u', '1.parametrizations.weight.0._v',
             '2.weight', '2.bias']

def test_n12_parametrizations_are_saved_by_their_originals(tmp_path):
    "The originals and the vectors of spectral_norm are in the file, the weights computed from them are not"
    learn, other = round_trip(normed, tmp_path)
    whole, resumed = interrupted_and_resumed(normed, tmp_path)

    found = torch.load(tmp_path/'models'/'m.pth')['model']

    assert sorted(found) == sorted(originals) and equal(copied(other.model), copied(learn.model))
    assert equal(whole, resumed) and type(learn.model[0]).__name__ == 'ParametrizedLinear'
    assert learn.model[0].weight.equal(other.model[0].weight)

def test_n12_lr_find_leaves_parametrizations(tmp_path):
    "Also the vectors that spectral_norm changes in each training batch are as before"
    learn, fresh = learner(normed, tmp_path), learner(normed, tmp_path)
    fresh.model.load_state_dict(learn.model.state_dict())
    before = copied(learn.model)

    learn.lr_find(**find)

    assert equal(copied(learn.model), before) and equal(then_fit(learn), then_fit(fresh))

def test_n12_one_that_comes_in_a_block_goes_with_it():
    "A module that gets a parametrization while it is kept is of its own class afterwards, with its own weight"
    model = nn.Linear(1, 1)
    weight = model.weight

    with kept(model):
        parametrizations.weight_norm(model)
        model(torch.ones(2, 1)).sum().backward()

    assert type(model) is nn.Linear and model.weight is weight and weight.grad is None
    assert [*model.state_dict()] == ['weight', 'bias']

def test_n13_weight_norm_of_the_old_kind(tmp_path):
    "A module that torch cannot copy after its first batch is saved, loaded, gone on with, and swept by lr_find"
    def old():
        with pytest.warns(FutureWarning, match='deprecated'):
            return nn.Sequential(weight_norm(nn.Linear(1, 4)), nn.Linear(4, 1))
    learn, other = round_trip(old, tmp_path)
    before = copied(learn.model)
    learn.model(torch.ones(1, 1))

    with pytest.raises(RuntimeError, match='graph leaves'): deepcopy(learn.model)
    learn.lr_find(**find)
    again = learner(old, tmp_path).load_state(learn.save_state('s'))
    whole, resumed = interrupted_and_resumed(old, tmp_path)

    assert '0.weight_g' in before and equal(copied(learn.model), before) and equal(copied(again.model), before)
    assert equal(copied(other.model), before) and equal(whole, resumed) and learn.validate() == again.validate()


# ---- N14: wrappers

compiled = partial(torch.compile, backend='eager')
wraps = dict(compile=compiled, parallel=nn.DataParallel, compiled_parallel=lambda m: compiled(nn.DataParallel(m)),
             parallel_compiled=lambda m: nn.DataParallel(compiled(m)))

class Named(nn.Module):
    "Has children that are called as wrappers call theirs"
    def __init__(self): super().__init__(); self.module, self._orig_mod = nn.Linear(1, 2), nn.Linear(2, 1)
    def forward(self, x): return self._orig_mod(self.module(x))

named = ['module.weight', 'module.bias', '_orig_mod.weight', '_orig_mod.bias']

@pytest.mark.parametrize('wrap', wraps.values(), ids=wraps)
@pytest.mark.parametrize('wrapped', ['saved', 'loaded'])
def test_n14_files_have_the_models_own_names(wrap, wrapped, tmp_path):
    "Whichever side is wrapped, and how: names in the file are the model's own, also if it uses those of wrappers"
    a, b = learner(Named, tmp_path), learner(Named, tmp_path)
    (a if wrapped == 'saved' else b).model = wrap((a if wrapped == 'saved' else b).model)
    path = a.save('m', with_opt=False)

    b.load(path)
    whole = learner(Named, tmp_path).load_state(a.save_state('s'))

    assert [*torch.load(path)] == named
    assert equal(weights(a), weights(b)) and equal(weights(a), weights(whole))

def test_n14_compile_in_place_adds_no_name(tmp_path):
    "`model.compile()` leaves names and model as they are"
    learn = learner(Named, tmp_path)
    learn.model.compile(backend='eager')
    learn.fit(1)

    path = learn.save('m', with_opt=False)

    assert [*torch.load(path)] == named and equal(weights(learner(Named, tmp_path).load(path)), weights(learn))


# ---- N20 to N24: types, states and devices

def norm_net(): return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def test_n20_integer_buffers_stay_integers(tmp_path):
    "Counters are copied as they are, also beyond what float32 can hold, into a model of another type too"
    learn, half = learner(norm_net, tmp_path), learner(norm_net, tmp_path)
    half.model.bfloat16()
    learn.model[1].num_batches_tracked.fill_(2**24+1)
    learn.save('m', with_opt=False)
    state = learn.save_state('s')

    others = half.load('m'), learner(norm_net, tmp_path).load_state(state)
    counts = [one.model[1].num_batches_tracked for one in others]
    learn.lr_find(**find)

    assert [*map(int, counts), int(learn.model[1].num_batches_tracked)] == [2**24+1]*3
    assert {c.dtype for c in counts} == {torch.int64} and half.model[1].running_mean.dtype == torch.bfloat16

class Extra(nn.Linear):
    "Has a state that is no tensor"
    extra: object = None
    def __init__(self): super().__init__(1, 1)
    def get_extra_state(self): return self.extra
    def set_extra_state(self, state): self.extra = state

@pytest.mark.parametrize('extra', [{'words': ['a', 'b'], 'n': 3}, 'text', torch.arange(3), [1, (2., None)]], ids=str)
def test_n21_extra_state_is_kept(extra, tmp_path):
    "What `get_extra_state` gives is in the file under its key, which plain torch reads safely, and is given back"
    learn = learner(Extra, tmp_path)
    learn.model.extra = extra
    path, state = learn.save('m', with_opt=False), learn.save_state('s')

    found = torch.load(path, weights_only=True)
    others = learner(Extra, tmp_path).load(path), learner(Extra, tmp_path).load_state(state)

    assert [*found] == ['weight', 'bias', '_extra_state'] and equal(found['_extra_state'], extra)
    assert all(equal(one.model.extra, extra) for one in others)

class Versioned(nn.Linear):
    "Has, since version 2, another unit for its weight"
    _version = 2
    def __init__(self): super().__init__(1, 1)

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get('version') == 1: state[f'{prefix}weight'] = state[f'{prefix}weight']*10
        super()._load_from_state_dict(state, prefix, metadata, *args)

def test_n22_versions_are_kept(tmp_path):
    "A file says of which version each module was, so that one of an older version is converted, and one of now is not"
    learn, others = learner(Versioned, tmp_path), [learner(Versioned, tmp_path) for _ in range(2)]
    now = learn.save('now', with_opt=False)
    learn.model._version = 1
    old = learn.save('old', with_opt=False)

    for one, path in zip(others, (now, old)): one.load(path)

    assert torch.load(now)._metadata == {'': {'version': 2}} and torch.load(old)._metadata == {'': {'version': 1}}
    assert others[0].model.weight.equal(learn.model.weight) and others[1].model.weight.equal(10*learn.model.weight)
    assert torch.load(learner(norm_net, tmp_path).save('bn', with_opt=False))._metadata['1'] == {'version': 2}

def test_n23_files_are_read_without_any_class(tmp_path):
    "All of a run, with optimizer, record and random streams, is tensors and plain values: torch reads it safely"
    learn = learner(norm_net, tmp_path, metrics=F.l1_loss)
    learn.fit(1)

    files = [torch.load(path, weights_only=True) for path in (learn.save('m'), learn.save_state('s'))]

    assert [*files[0]] == ['model', 'opt'] and {'rng', 'callbacks', 'opt', 'model', 'loader'} <= {*files[1]}
    assert files[1]['opt']['state'] and files[1]['callbacks']['recorder']

@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_n24_the_state_of_the_optimizer_follows_its_parameter(dtype, tmp_path):
    "A state saved with a model of another type takes that of its parameters, so that training goes on"
    learn = learner(norm_net, tmp_path)
    learn.fit(1)
    learn.save('m')
    other = learner(norm_net, tmp_path)
    other.model.to(dtype)

    other.load('m')
    other.fit(1, cbs=Callback(before_batch=lambda cb: setattr(cb.learn, 'xb', (cb.x.to(dtype),)),
                              after_pred=lambda cb: setattr(cb.learn, 'pred', cb.pred.float())))

    assert {(p.dtype, s['exp_avg'].dtype) for p, s in other.opt.opt.state.items()} == {(dtype, dtype)}
