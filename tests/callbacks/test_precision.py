"""Mixed precision: what is computed in half precision, that nothing of it stays behind, and what is refused."""
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.precision import MixedPrecision
from learner.events import CancelFitException
from learner.learner import Learner
from tests.helpers import raises, synth_learner, weights

halves = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])


class Looks(Callback):
    "Notes the types that the loop works with, and whether autocast is on at events"
    order = 20

    def __init__(self): self.types, self.on = [], set()
    def before_batch(self): self.on.add(torch.is_autocast_enabled('cpu'))

    def after_loss(self):
        self.on.add(torch.is_autocast_enabled('cpu'))
        self.types.append((self.training, self.pred.dtype, self.loss.dtype, self.xb[0].dtype))


class InForward(nn.Module):
    "Linear regression that notes the type in which it computes"
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.seen: list = []

    def forward(self, x):
        out = self.a(x)
        self.seen.append((self.training, out.dtype))
        return out


def half(dtype):
    "Mixed precision whose scale, if it has one, suits the tiny model from the start"
    return MixedPrecision(dtype, init_scale=64. if dtype is torch.float16 else None)


def computed(learn) -> Any: return learn.model.seen


def state(learn): return learn.forward_context, learn.model.training, torch.is_autocast_enabled('cpu')


# ---- forward

@halves
def test_forward_is_half_and_the_rest_is_not(dtype):
    "The model computes in the half type; predictions, loss, weights and gradients are float32; events see no autocast"
    looks = Looks()
    grads = []
    learn = synth_learner([half(dtype), looks, Callback(
        after_backward=lambda cb: grads.extend(p.grad.dtype for p in cb.model.parameters()))], model=InForward())

    learn.fit(1)

    assert set(computed(learn)) == {(True, dtype), (False, dtype)}
    assert {t for _, *ts in looks.types for t in ts} == {torch.float32} and looks.on == {False}
    assert {*grads, *(p.dtype for p in learn.model.parameters())} == {torch.float32}

@halves
def test_evaluation_is_the_same_within_a_fit_and_alone(dtype):
    "`validate()` gives the very numbers that the fit's own validation gave, and leaves no autocast behind"
    learn = synth_learner(half(dtype), model=InForward(), lr=.1)
    learn.fit(2)
    within = learn.recorder.final_record[-1]
    computed(learn).clear()

    alone = learn.validate()[0]

    assert alone == within and {t for _, t in computed(learn)} == {dtype}
    assert state(learn)[::2] == (None, False)

def test_nested_predictions():
    "Every half tensor of a nested prediction is made float32; other types and values stay"
    @dataclass
    class Out:
        a: torch.Tensor
        b: object
    kept = torch.tensor([1, 2]), torch.ones(2, dtype=torch.float64)
    class Nested(InForward):
        def forward(self, x): return {'out': Out(super().forward(x), [*kept, 'text']), 'more': (self.a(x), None)}
    preds = []
    learn = synth_learner([MixedPrecision('bf16'), Callback(after_loss=lambda cb: preds.append(cb.pred))],
                          model=Nested(), loss_func=lambda p, y: (p['out'].a-y).pow(2).mean())

    learn.fit(1)

    pred = preds[0]
    assert pred['out'].a.dtype == pred['more'][0].dtype == torch.float32 and pred['more'][1] is None
    assert pred['out'].b[0] is kept[0] and pred['out'].b[1] is kept[1] and pred['out'].b[2] == 'text'

def test_own_forward_context_is_nested():
    "A context of the user's own is entered within autocast, and is the Learner's again afterwards"
    learn = synth_learner(MixedPrecision('bf16'), model=InForward())
    entered = []
    def own():
        entered.append(torch.is_autocast_enabled('cpu'))
        return torch.autocast('cpu', enabled=False)
    learn.forward_context = own

    learn.fit(1)

    assert learn.forward_context is own and len(entered) == 2*3 and not any(entered[:1])
    assert {t for _, t in computed(learn)} == {torch.float32}  # the inner one decides

def test_loss_in_its_own_context():
    "The loss too is computed under autocast"
    on = []
    def loss(p, y):
        on.append(torch.is_autocast_enabled('cpu'))
        return nn.functional.mse_loss(p, y)

    synth_learner(MixedPrecision('bf16'), loss_func=loss).fit(1)

    assert on == [True]*3


# ---- nothing stays behind

@pytest.mark.parametrize('event', ['before_fit', 'before_epoch', 'before_batch', 'after_pred', 'after_loss',
                                   'before_backward', 'before_step', 'after_step', 'after_batch', 'before_validate',
                                   'after_epoch', 'after_fit'])
@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError, CancelFitException])
def test_whatever_happens_it_is_put_back(event, ex):
    "After an error, an interrupt or a cancel at any event, the context is as before, and the next fit is a whole one"
    learn = synth_learner(MixedPrecision('fp16'))
    before = state(learn)

    try: learn.fit(2, cbs=Callback(**{event: raises(ex('stop'))}))
    except (KeyboardInterrupt, ValueError): pass
    except RuntimeError as e: assert event == 'after_fit' and 'CancelFitException' in str(e)

    assert state(learn) == before
    learn.fit(1)
    assert state(learn) == before

def test_error_in_the_model():
    "An error within autocast leaves it"
    class Fails(InForward):
        def forward(self, x): raise ValueError('odd')
    learn = synth_learner(MixedPrecision('bf16'), model=Fails())
    before = state(learn)

    with pytest.raises(ValueError, match='odd'): learn.fit(1)

    assert state(learn) == before

@pytest.mark.parametrize('wrapped', [False, True])
def test_removed_in_the_midst_of_a_fit(wrapped):
    "From then on the fit is in full precision, also if another callback has put its own context around it"
    class Around(Callback):
        order = 30
        def before_fit(self):
            self.old = self.forward_context
            self.learn.forward_context = lambda: self.old()
        def cleanup_fit(self): self.learn.forward_context = self.old
    def remove(cb):
        if cb.epoch == 1: cb.learn.to_fp32()
    learn = synth_learner([MixedPrecision('bf16'), *[Around]*wrapped], model=InForward())

    learn.fit(2, cbs=Callback(before_epoch=remove))

    assert [t for _, t in computed(learn)] == [torch.bfloat16]*3+[torch.float32]*3
    computed(learn).clear()
    learn.validate()
    assert [t for _, t in computed(learn)] == [torch.float32]


# ---- methods of the Learner

def test_methods():
    "Each returns the Learner; twice is once; the other type takes the first one's place; `to_fp32` ends it"
    learn = synth_learner()

    first = learn.to_fp16(init_scale=8.).mixed_precision
    again = learn.to_fp16(init_scale=8.).mixed_precision
    other = learn.to_bf16().mixed_precision
    left = learn.to_fp32().to_fp32()

    assert first is again and first.options == dict(init_scale=8.) and other.dtype is torch.bfloat16
    assert isinstance(left, Learner) and not hasattr(left, 'mixed_precision')

def test_full_precision_again():
    "Without it a fit is, bit for bit, what it would have been"
    def fit(f):
        learn = synth_learner(lr=.1)
        f(learn)
        learn.fit(2)
        return weights(learn)

    assert fit(lambda learn: learn.to_fp16().to_bf16().to_fp32()) == fit(lambda learn: None)

def test_both_at_once_are_refused():
    "A second one is an error that says what to do"
    with pytest.raises(ValueError, match='there is a .MixedPrecision.* already'):
        synth_learner([MixedPrecision(), MixedPrecision('bf16')])


# ---- refused

@pytest.mark.parametrize('kwargs,message', [
    (dict(dtype='fp8'), "`dtype` is 'fp8'; give 'fp16', 'bf16'"),
    (dict(dtype=torch.float32), '`dtype` is torch.float32'),
    (dict(dtype='bf16', init_scale=2.), '`init_scale` is for .fp16.'),
    (dict(init_scale=0), '`init_scale` is 0; give a number above 0'),
    (dict(growth_factor=1.), '`growth_factor` is 1.0; give a number above 1'),
    (dict(backoff_factor=1.), '`backoff_factor` is 1.0; give a number above 0 and below 1'),
    (dict(growth_interval=0), '`growth_interval` is 0; give a whole number above 0')], ids=str)
def test_parameters(kwargs, message):
    "What means nothing is refused, with what to give"
    with pytest.raises(ValueError, match=message): MixedPrecision(**kwargs)

def test_device_that_cannot(monkeypatch):
    "Where torch does not compute in the type, there is an error before training, and nothing has changed"
    learn = synth_learner(MixedPrecision('fp16'))
    before, old = state(learn), weights(learn)
    # stands for a device on which torch only warns, and goes on in float32
    monkeypatch.setattr(MixedPrecision, '_autocast', lambda self: torch.autocast('cpu', torch.float64))

    with pytest.raises(RuntimeError, match="'fp16'.*: on cpu torch cannot compute in torch.float16; `learn.to_fp32"):
        learn.fit(1)

    assert state(learn) == before and weights(learn) == old

def test_half_weights_are_refused():
    "Weights that are float16 already cannot be trained with a scale; evaluations with them are fine"
    learn = synth_learner(MixedPrecision('fp16'), model=nn.Linear(1, 1).half())

    with pytest.raises(ValueError, match=r'`weight` is float16 already.*`learn.model.float\(\)`'): learn.fit(1)

    assert learn.validate()[0] > 0 and learn.forward_context is None
