"""Any nn.Module: lazy modules, which get their shapes from the first batch (requirement N8)."""
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.keep import kept
from tests.helpers import raises, synth_learner, weights
from tests.loader_helpers import equal
from tests.resume_helpers import AskAt
from tests.test_any_module_state import copied, find, interrupted_and_resumed, learner, round_trip, then_fit


def image(layer): return nn.Sequential(nn.Unflatten(1, (1, 1, 1)), layer, nn.Flatten(), nn.LazyLinear(1))

lazy_models = dict(
    linear=lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)), alone=lambda: nn.LazyLinear(1),
    norm=lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1)),
    plain_norm=lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(1)),
    conv=lambda: image(nn.LazyConv2d(2, 1)), norm2=lambda: image(nn.LazyBatchNorm2d()),
    both=lambda: nn.Sequential(nn.Linear(1, 4), nn.Dropout(.2), nn.LazyBatchNorm1d(), nn.LazyLinear(1)))
every_lazy = pytest.mark.parametrize('make', lazy_models.values(), ids=lazy_models)

def kinds(model):
    "The class and the attributes of each module, and the class of each tensor"
    return ([(type(m), {*vars(m)}) for m in model.modules()],
            [type(t) for t in [*model.parameters(), *model.buffers()]])

@every_lazy
@pytest.mark.parametrize('opt_made', [False, True])
@pytest.mark.parametrize('ex', [None, KeyboardInterrupt, ValueError])
def test_n08_lr_find_leaves_a_lazy_model_lazy(make, opt_made, ex):
    "However lr_find ended, model and optimizer hold the same lazy tensors, and a fit is as if it had not been"
    learn, fresh = synth_learner(model=make(), n=2), synth_learner(model=make(), n=2)
    fresh.model.load_state_dict(learn.model.state_dict())
    if opt_made: learn.create_opt()
    before, ps = kinds(learn.model), [*learn.model.parameters()]

    if ex:
        learn.add_cb(stop := Callback(after_loss=raises(ex, nth=2)))
        with pytest.raises(ex): learn.lr_find(**find)
        learn.remove_cb(stop)
    else: learn.lr_find(**find)

    assert kinds(learn.model) == before and all(p is q for p, q in zip(ps, learn.model.parameters()))
    assert (learn.opt is not None) == opt_made and equal(then_fit(learn), then_fit(fresh))

@every_lazy
def test_n08_a_lazy_model_is_trained(make):
    "Validated, fitted, and its optimizer shown and made before its first batch, it trains the tensors it was made with"
    learn = synth_learner(model=make(), n=2)
    learn.create_opt()
    ps, text = learn.opt.all_params(), repr(learn.opt)

    learn.validate()
    before = weights(learn)
    learn.fit(1)

    assert '?' in text and all(p is q for p, q in zip(ps, learn.model.parameters(), strict=True))
    assert not any(map(torch.equal, weights(learn), before))

def test_n08_no_dry_run_changes_statistics():
    "What a lazy BatchNorm has seen after a fit are the training batches, no more"
    learn = synth_learner(model=lazy_models['norm'](), n=3)

    learn.validate()
    learn.fit(2)

    assert learn.model[1].num_batches_tracked == 6

def test_n08_a_lazy_model_is_converted_and_put_back():
    "After a block in which it became another type and got gradients, it is lazy, without gradient, and of its own type"
    model = lazy_models['norm']()

    with kept(model): model.double()(torch.ones(2, 1, dtype=torch.float64)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    learn = synth_learner(model=model)
    learn.fit(1)

    assert grads == [None]*6 and {t.dtype for t in model.parameters()} == {torch.float32} and learn.n_step == 2

@every_lazy
def test_n08_a_file_gives_a_lazy_model_its_shapes(make, tmp_path):
    "Weights and whole states are loaded into a model that has not seen a batch, also to go on with a fit"
    learn, other = round_trip(make, tmp_path)
    whole, resumed = interrupted_and_resumed(make, tmp_path)

    assert equal(copied(learn.model), copied(other.model)) and equal(whole, resumed)

def test_an_interrupted_fit_of_a_lazy_model_goes_on(tmp_path):
    "N8 and N33: a fit of a lazy model that was stopped, in this process, ends as one that was not"
    def run(stop):
        learn = learner(lazy_models['both'], tmp_path)
        torch.manual_seed(0)
        if stop:
            with pytest.raises(KeyboardInterrupt): learn.fit(2, cbs=AskAt(2))
            learn.resume()
        else: learn.fit(2)
        return copied(learn.model)

    assert equal(run(True), run(False))
