"""EMA: the recursion, evaluations with the average, and what stays as it was."""
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.training import GradientAccumulation
from learner.events import CancelBatchException, CancelStepException, CancelValidException
from tests.bench.test_counts import waits
from tests.helpers import raises, synth_dls, synth_learner, weights
from tests.loader_helpers import equal


class Seen(Callback):
    "The weights after each step that was made"
    order = 20
    def __init__(self): self.seen = []
    def after_step(self):
        if self.learn.stepped: self.seen.append([p.detach().double().clone() for p in self.model.parameters()])

def recursion(seen, decay=.999, warmup=True):
    average = seen[0]
    for n, now in enumerate(seen[1:], 1):
        d = min(decay, (1+n)/(10+n)) if warmup else decay
        average = [d*a + (1-d)*w for a, w in zip(average, now)]
    return average

def learner(*cbs, **kwargs):
    return synth_learner([*cbs], **{'n': 4, 'lr': .1, **kwargs})

def mean_of(learn): return [a for k, a in learn.ema.average.items()]

def assert_close(a, b, tol=1e-6):
    assert max(float((x-y).abs().max()) for x, y in zip(a, b, strict=True)) <= tol


# ---- the average

@pytest.mark.parametrize('kwargs', [dict(), dict(warmup=False, decay=.9), dict(decay=.3), dict(decay=0.)], ids=str)
def test_is_the_recursion(kwargs):
    "In double precision it is the closed form, over two fits as over one, to 1e-12"
    model = nn.Linear(1, 1).double()
    dls = [(x.double(), y.double()) for x, y in synth_dls(4)[0]]
    learn = learner(EMA(**kwargs), seen := Seen(), model=model, dls=(dls, None))

    learn.fit(2)
    learn.fit(1)

    assert len(seen.seen) == learn.ema.n_averaged == 12
    assert_close(mean_of(learn), recursion(seen.seen, **kwargs), 1e-12)

@pytest.mark.parametrize('kwargs,which', [
    (dict(start='3it'), slice(2, None)), (dict(start='1ep'), slice(4, None)), (dict(start=.5), slice(6, None)),
    (dict(every=3), slice(0, None, 3)), (dict(start='1ep', every=4), slice(4, None, 4))], ids=str)
def test_when_it_averages(kwargs, which):
    "From `start` on, at one of `every` steps, of a fit of twelve in three epochs"
    learn = learner(EMA(**kwargs), seen := Seen())

    learn.fit(3)

    assert learn.ema.n_averaged == len(seen.seen[which])
    assert_close(mean_of(learn), recursion(seen.seen[which]), 1e-5)

def test_only_steps_count():
    "Batches and steps that are cancelled, and those of a window, leave it alone; a window's last step counts"
    skip = Callback(before_step=raises(CancelStepException), before_batch=raises(CancelBatchException, True, 6))
    learn = learner(EMA(.5), skip, seen := Seen(), n=8)
    learn.fit(1)
    other = learner(EMA(.5), GradientAccumulation(3, 'batches'), also := Seen(), n=8)
    other.fit(1)

    assert learn.ema.n_averaged == learn.n_step == 6 and other.ema.n_averaged == other.n_step == 3
    assert_close(mean_of(learn), recursion(seen.seen, .5))
    assert_close(mean_of(other), recursion(also.seen, .5))

def test_half_precision_is_averaged_in_single():
    "Steps too small for bfloat16 are not lost"
    def half(cb): cb.learn.xb = (cb.x.bfloat16(),)
    def whole(cb): cb.learn.pred = cb.pred.float()
    learn = learner(EMA(.99, warmup=False), Callback(before_batch=half, after_pred=whole), seen := Seen(),
                    model=nn.Linear(1, 1).bfloat16())

    learn.fit(3)

    assert {a.dtype for a in mean_of(learn)} == {torch.float32}
    assert_close(mean_of(learn), recursion(seen.seen, .99, warmup=False))

def test_training_is_as_without():
    "Weights, losses and random streams are bit for bit those of a fit without EMA"
    learn, plain = learner(EMA(.9), shuffle=True), None
    learn.fit(2)
    after = torch.rand(1)
    plain = learner(shuffle=True)
    plain.fit(2)

    assert equal(weights(learn), weights(plain)) and learn.recorder.raw_losses == plain.recorder.raw_losses
    assert after == torch.rand(1)


# ---- evaluations

def evaluated(learn, ps):
    "The validation loss with these weights"
    with torch.no_grad():
        x, y = learn.dls.valid.dl.dataset.tensors
        return nn.functional.mse_loss(x*ps[0].float()+ps[1].float(), y).item()

def test_evaluations_use_the_average():
    "In a fit, within batches, standing alone and in a block; the weights are the trained ones in between"
    inner, raw = [], []
    def look(cb):
        if cb.training and cb.iter == 1: inner.append((cb.learn.validate()[0], evaluated(cb.learn, mean_of(cb.learn))))
    learn = learner(EMA(.9), Callback(after_batch=look, after_epoch=lambda cb: raw.append(weights(cb.learn))), lr=.3)
    learn.fit(2)

    means = evaluated(learn, mean_of(learn))
    with learn.averaged() as model: block = [p.detach().clone() for p in model.parameters()]

    assert learn.recorder.values[1]['valid_loss'] == pytest.approx(means) == learn.validate()[0]
    assert [a for a, _ in inner] == pytest.approx([b for _, b in inner]) and len(inner) == 2
    assert_close(block, mean_of(learn), 0)
    assert equal(raw[-1], weights(learn)) and evaluated(learn, weights(learn)) != pytest.approx(means)

def test_nested_evaluations_swap_once():
    "A callback that validates within a validation sees the average too, and does not end the outer one's"
    seen = []
    def inner(cb):
        cb.learn.validate()
        seen.append([p.detach().clone() for p in cb.model.parameters()])
    look = Callback(before_validate=inner, after_validate=inner)
    look.order = 20
    learn = learner(EMA(.9), look)

    learn.fit(1)

    assert all(equal(s, [a.float() for a in mean_of(learn)]) for s in seen) and len(seen) >= 2
    assert not equal(weights(learn), mean_of(learn))

def test_backward_goes_on_after_an_evaluation():
    "A validation between forward and backward does not disturb the graph"
    inside = Callback(after_loss=lambda cb: cb.learn.validate() if cb.training else None)
    learn, plain = learner(EMA(.9), inside), None
    learn.fit(2)
    plain = learner()
    plain.fit(2)

    assert equal(weights(learn), weights(plain))

@pytest.mark.parametrize('event', ['before_validate', 'before_batch', 'after_loss', 'after_validate',
                                   'cleanup_validate'])
@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError, CancelValidException, RuntimeError])
@pytest.mark.parametrize('order', [0, 20])
def test_swaps_back_whatever_happens(event, ex, order):
    "An error, an interrupt or a cancel at any event of a validation leaves the trained weights, in the same tensors"
    trained = []
    stop = Callback(**{event: raises(ex, False if event in ('before_batch', 'after_loss') else None)},
                    after_train=lambda cb: trained.append(weights(cb.learn)))
    stop.order = order
    learn = learner(EMA(.9), stop)
    ps = [*learn.model.parameters()]

    try: learn.fit(1)
    except (KeyboardInterrupt, ValueError, RuntimeError): pass

    assert equal(weights(learn), trained[0]) and all(a is b for a, b in zip(ps, learn.model.parameters()))
    learn.fit(1)
    assert learn.ema.n_averaged == 8

class Interrupted(EMA):
    "Is interrupted in the midst of putting weights in, or back"
    nth, n_writes = 1, 0

    def _write(self, pairs):
        self.n_writes += 1
        super()._write(pairs[:1])
        if self.n_writes == self.nth: raise KeyboardInterrupt
        super()._write(pairs)

@pytest.mark.parametrize('nth', [1, 2])
def test_interrupted_swap(nth):
    "A second Ctrl-C, which strikes at once, in the midst of a swap leaves nothing of the average in the model"
    trained = []
    learn = learner(cb := Interrupted(.5), Callback(after_train=lambda cb: trained.append(weights(cb.learn))))
    cb.nth = nth

    with pytest.raises(KeyboardInterrupt): learn.fit(1)

    assert equal(weights(learn), trained[0]) and not cb._raw

def test_removed_in_an_evaluation():
    "It puts the weights back and goes; added again it still has its average"
    ema, trained = EMA(.9), []
    drop = Callback(after_validate=lambda cb: cb.learn.remove_cb(ema) if ema.learn else None,
                    after_train=lambda cb: trained.append(weights(cb.learn)))
    learn = learner(ema, drop)
    learn.fit(1)
    means = learn.final_record['valid_loss']

    raw = learn.validate()[0]

    assert equal(weights(learn), trained[0]) and raw != means
    learn.remove_cb(drop)
    assert learn.add_cb(ema).validate()[0] == means


# ---- refused

@pytest.mark.parametrize('kwargs,match', [
    (dict(decay=1), '`decay` is 1; give a number, 0 or more and below 1'), (dict(decay=-.1), '`decay` is -0.1'),
    (dict(every=0), '`every` is 0; give a whole number'), (dict(start='3'), "'3' is no place in a fit"),
    (dict(start=500), '500 is no place in a fit'), (dict(buffers='all'), "`buffers` is 'all'; give 'copy' or")])
def test_what_means_nothing(kwargs, match):
    "Is refused by name"
    with pytest.raises(ValueError, match=match): EMA(**kwargs)

def test_block():
    "`averaged()` without an average, and a fit within the block, say what is wrong; a block may be left by an error"
    learn = learner()
    with pytest.raises(ValueError, match='no EMA or SWA among the callbacks'), learn.averaged(): pass
    learn.add_cb(EMA)
    with pytest.raises(ValueError, match='`EMA` has no average yet'), learn.averaged(): pass
    learn.fit(1)
    before = weights(learn)

    with pytest.raises(RuntimeError, match='within `learn.averaged'), learn.averaged(): learn.fit(1)
    with pytest.raises(KeyError), learn.averaged(), learn.averaged(): raise KeyError

    assert equal(weights(learn), before) and learn.n_step == 4
    with pytest.raises(ValueError, match='would undo its work'): learn.add_cb(EMA())

def test_waits_for_nothing():
    "Averaging reads nothing from the device"
    def seen(cbs):
        learn = synth_learner(cbs, n=4)
        return [o for o in waits(lambda: learn.fit(1)) if o != 'to']  # nothing is moved

    assert seen(EMA(start=.5)) == seen(None)

def test_an_average_that_has_not_begun_is_told_of():
    "At the end of the fit"
    with pytest.warns(UserWarning, match="EMA: there is no average, since it begins at '500it', and the fit had 4 ste"):
        synth_learner(EMA(start='500it'), n=4).fit(1)

def test_an_average_that_goes_with_its_fit_is_told_of(capsys):
    "One of the Learner's own stays"
    learn = synth_learner(n=4)

    learn.fit(1, cbs=EMA())

    assert 'EMA: the average goes with this fit' in capsys.readouterr().out and not learn.passing
    synth_learner(EMA()).fit(1)
    assert 'goes with' not in capsys.readouterr().out
