"""GradientAccumulation: a step for several batches is that of one big batch, whatever their sizes (S31, S33)."""
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.events import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
                            CancelStepException, CancelTrainException)
from tests.helpers import raises, synth_learner, weights

sgd = torch.optim.SGD


def data(n=20):
    g = torch.Generator().manual_seed(2)
    return torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randn(n, 1, generator=g, dtype=torch.float64)

def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

def batches(sizes, *tensors): return list(zip(*(t.split(sizes) for t in tensors or data(sum(sizes)))))

def learner(cbs, sizes, lr=.1, **kwargs):
    "On a list of batches of these sizes, whose length is known"
    kwargs.setdefault('dls', (batches(sizes), None))
    return synth_learner(cbs, model=net(), opt_func=sgd, lr=lr, **kwargs)

def fitted(cbs, sizes, n_epoch=1, **kwargs):
    learn = learner(cbs, sizes, **kwargs)
    learn.fit(n_epoch)
    return learn

def by_hand(*windows, clip=None, lr=.1):
    "The weights after a step for each of `windows`, lists of batches, with the gradient of all their items at once"
    model = net()
    opt = sgd(model.parameters(), lr)
    for window in windows:
        x, y = (torch.cat(ts) for ts in zip(*window))
        nn.functional.mse_loss(model(x), y).backward()
        if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]

def assert_close(a, b, tol=1e-12): assert max(float((x-y).abs().max()) for x, y in zip(a, b, strict=True)) <= tol

def is_clean(learn): return not learn.keep_grads and all(p.grad is None for p in learn.model.parameters())


# ---- the same step

@pytest.mark.parametrize('sizes', [[20], [4]*5, [8, 8, 4], [1]*20, [13, 7]], ids=str)
@pytest.mark.parametrize('acc', [dict(), dict(unit='tokens', weight=lambda learn: len(learn.x)),
                                 dict(weight=lambda learn: torch.tensor(len(learn.x)))], ids=['', 'tokens', 'tensor'])
def test_same_as_a_big_batch(sizes, acc):
    "S31: 20 items in any batches give the step that one batch of 20 gives, and the true loss of each is recorded"
    learn = fitted(GradientAccumulation(20, **acc), sizes)

    x, y = data()
    losses = [nn.functional.mse_loss(net()(a), b).item() for a, b in zip(x.split(sizes), y.split(sizes))]
    assert learn.n_step == 1 and is_clean(learn)
    assert_close(weights(learn), by_hand(batches([20])))
    assert learn.recorder.raw_losses == pytest.approx(losses, abs=1e-12)
    assert learn.recorder.values[0]['train_loss'] == pytest.approx(nn.functional.mse_loss(net()(x), y).item())

@pytest.mark.parametrize('lengths', [(10, 100), (100, 10), (0, 30), (30, 0, 80)], ids=str)
def test_masked_tokens(lengths):
    "S31 d: batches of which other numbers of tokens count give the mean over all tokens; one without any is left out"
    g = torch.Generator().manual_seed(4)
    x = torch.randn(len(lengths), 120, 3, generator=g, dtype=torch.float64)
    y = torch.randint(4, x.shape[:2], generator=g)
    for row, n in zip(y, lengths): row[n:] = -100
    def loss(pred, y):  # the mean over those that count; 0 if there are none
        return cross_entropy(pred.flatten(0, 1), y.flatten(), reduction='sum')/(y != -100).sum().clamp(min=1)
    def count(learn): return (learn.y != -100).sum()
    def model():
        torch.manual_seed(0)
        return nn.Linear(3, 4).double()
    def step(n, cbs=None):
        learn = synth_learner(cbs, model=model(), dls=(batches([n]*(len(x)//n), x, y), None), loss_func=loss, lr=.1,
                              opt_func=sgd)
        learn.fit(1)
        return learn
    acc = GradientAccumulation(sum(lengths), 'tokens', count)

    learn = step(1, acc)

    assert learn.n_step == 1 and is_clean(learn)
    assert_close(weights(learn), weights(step(len(lengths))))
    assert_close(weights(step(1, GradientAccumulation(99, 'batches', count))), weights(learn))

@pytest.mark.parametrize('n_acc,unit,ends', [
    (32, 'items', [7, 14]), (6, 'items', [2, 4, 6, 7, 9, 11, 13, 14]), (1, 'batches', [*range(1, 15)]),
    (5, 'batches', [5, 7, 12, 14])])
def test_when_it_steps(n_acc, unit, ends):
    "With the batch that fills the window, and with the last one of an epoch, here of 7 batches of 4"
    seen = []
    look = Callback(after_batch=lambda cb: seen.append(cb.learn.train_iter+1) if cb.learn.stepped else None)
    look.order = -20

    fitted([GradientAccumulation(n_acc, unit), look], [4]*7, n_epoch=2)

    assert seen == ends

@pytest.mark.parametrize('drop_last,n', [(False, 6), (True, 4)])
@pytest.mark.parametrize('sizes', [[4]*7, [4]*6+[2]], ids=str)
def test_last_window(drop_last, n, sizes):
    "S33: the last window is stepped by what it holds, or dropped; nothing of it is in the next epoch, or the next fit"
    b = batches(sizes)
    windows = [b[:3], b[3:6], *([] if drop_last else [b[6:]])]

    learn = fitted(GradientAccumulation(3, 'batches', drop_last=drop_last), sizes, n_epoch=2)

    assert learn.n_step == n and is_clean(learn)
    assert_close(weights(learn), by_hand(*windows*2))
    learn.fit(1)
    assert learn.n_step == n*3//2
    assert_close(weights(learn), by_hand(*windows*3))

def test_without_need_it_changes_nothing():
    "Windows of one batch train bit for bit as without accumulation"
    learn = fitted(GradientAccumulation(4), [4]*5, n_epoch=2)

    assert all(map(torch.equal, weights(learn), weights(fitted(None, [4]*5, n_epoch=2))))


# ---- what does not go backward

@pytest.mark.parametrize('event,ex', [
    ('before_batch', CancelBatchException), ('after_pred', CancelBatchException), ('after_loss', CancelBatchException),
    ('before_backward', CancelBatchException), ('before_backward', CancelBackwardException)])
@pytest.mark.parametrize('order', [0, 20])
@pytest.mark.parametrize('i', [0, 1, 2, 5])
def test_cancelled_before_backward(event, ex, order, i):
    "A batch that is cancelled, wherever in its window, counts nothing: the window ends with a later batch"
    cancel = Callback(**{event: raises(ex, nth=i+1)})
    cancel.order = order
    b = batches([4, 2, 3, 4, 5, 2])
    left = b[:i]+b[i+1:]

    learn = fitted([GradientAccumulation(3, 'batches'), cancel], [4, 2, 3, 4, 5, 2])

    assert learn.n_step == 2 and is_clean(learn)
    assert_close(weights(learn), by_hand(left[:3], left[3:]))

@pytest.mark.parametrize('order', [0, 20])
@pytest.mark.parametrize('i', [0, 1])
def test_cancelled_after_backward(order, i):
    "Gradients that are there already are dropped with a first batch, and counted with a later one; all means are true"
    cancel = Callback(after_backward=raises(CancelBatchException, nth=i+1))
    cancel.order = order
    b = batches([4, 2, 3, 4])

    learn = fitted([GradientAccumulation(2, 'batches'), cancel], [4, 2, 3, 4])

    assert is_clean(learn)
    assert_close(weights(learn), by_hand(b[1:3], b[3:]) if i == 0 else by_hand(b[:3], b[3:]))

def test_cancelled_step():
    "A step that is skipped, as for an overflow, takes its whole window with it"
    cancel = Callback(before_step=raises(CancelStepException))
    cancel.order = 10
    b = batches([4]*4)

    learn = fitted([GradientAccumulation(2, 'batches'), cancel], [4]*4)

    assert learn.n_step == 1 and is_clean(learn)
    assert_close(weights(learn), by_hand(b[2:]))

@pytest.mark.parametrize('drop_last', [False, True])
def test_training_ends_early(drop_last):
    "What is in the window when the training of an epoch is cancelled is stepped, or dropped"
    cancel = Callback(after_batch=raises(CancelTrainException, nth=3))
    b = batches([4]*7)

    learn = fitted([GradientAccumulation(2, 'batches', drop_last=drop_last), cancel], [4]*7)

    assert learn.n_step == 1+(not drop_last) and is_clean(learn)
    assert_close(weights(learn), by_hand(b[:2], *([] if drop_last else [b[2:3]])))

@pytest.mark.parametrize('ex', [CancelEpochException, CancelFitException, KeyboardInterrupt, ValueError])
def test_no_window_stays_open(ex):
    "After an error, an interrupt or a cancel there are no gradients, and the next fit is as if nothing had been"
    learn = learner([GradientAccumulation(2, 'batches'), stop := Callback(after_batch=raises(ex, nth=3))], [4]*4)
    b = batches([4]*4)

    try: learn.fit(1)
    except (KeyboardInterrupt, ValueError): pass
    clean = is_clean(learn)
    learn.remove_cb(stop)
    learn.fit(1)

    assert clean and is_clean(learn)
    assert_close(weights(learn), by_hand(b[:2], b[:2], b[2:]))

def test_length_unknown():
    "Where nobody knows which batch is the last, the window is stepped when there is no more"
    class Endless(list):
        def __len__(self): raise TypeError
    b, seen = batches([4]*5), []
    look = Callback(after_step=lambda cb: seen.append(cb.learn.stepped))

    learn = fitted([GradientAccumulation(2, 'batches'), look], [], dls=(Endless(b), None))

    assert learn.n_step == 3 and is_clean(learn) and seen == [False, True, False, True, False, True]
    assert_close(weights(learn), by_hand(b[:2], b[2:4], b[4:]))


# ---- with others

@pytest.mark.parametrize('turn', [1, -1])
def test_clips_and_unscales_whole_windows(turn):
    "In any order of `cbs`, what scales losses, unscales gradients and clips them sees each window once, complete"
    def scale(cb): cb.learn.loss_grad = cb.learn.loss_grad*1024
    def unscale(cb):
        for p in cb.opt.all_params(): p.grad /= 1024
    scaler = Callback(before_backward=scale, before_step=unscale)
    scaler.order = 10
    b = batches([4, 2, 3, 4, 3])
    cbs = [clip := GradientClip(.05), scaler, GradientAccumulation(2, 'batches')]

    learn = fitted(cbs[::turn], [4, 2, 3, 4, 3])

    assert len(clip.grad_norms) == learn.n_step == 3 and min(clip.grad_norms) > .05
    assert_close(weights(learn), by_hand(b[:2], b[2:4], b[4:], clip=.05))

def test_all_that_is_added_to_the_loss_is_weighted():
    "A penalty that a callback adds to `loss_grad` counts as the loss does, whichever comes first"
    def add(cb): cb.learn.loss_grad = cb.learn.loss_grad + .1*sum((p**2).sum() for p in cb.model.parameters())
    def run(order, sizes):
        penalty = Callback(after_loss=add)
        penalty.order = order
        return weights(fitted([penalty, GradientAccumulation(20)], sizes))

    for order in (0, 20): assert_close(run(order, [8, 8, 4]), run(order, [20]))

def test_another_loss_to_go_backward_from():
    "One that a callback puts in place of the weighted one counts too, with equal weights if sizes are equal"
    def other(cb): cb.learn.loss_grad = nn.functional.mse_loss(cb.learn.model(cb.x), cb.y)
    replace = Callback(before_backward=other)
    replace.order = 20

    learn = fitted([GradientAccumulation(8), replace], [4]*4)

    assert learn.n_step == 2 and is_clean(learn)
    assert_close(weights(learn), by_hand(batches([8]*2)[:1], batches([8]*2)[1:]))

def test_sparse_gradients_and_groups():
    "An embedding with sparse gradients, and groups with other rates, step as with one batch of all"
    words, y = torch.randint(5, (12, 2), generator=torch.Generator().manual_seed(0)), torch.arange(12.)[:, None]
    def run(sizes, cbs=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1)).double()
        learn = synth_learner(cbs, model=model, dls=(batches(sizes, words, y.double()), None), opt_func=sgd,
                              splitter=lambda m: [[*m[0].parameters()], [*m[2].parameters()]], lr=[.1, .01])
        learn.fit(2)
        return weights(learn)

    assert_close(run([5, 4, 3], GradientAccumulation(12)), run([12]))

def test_batches_without_a_loss():
    "A batch without a loss is no part of a window"
    drop = Callback(before_batch=lambda cb: setattr(cb.learn, 'yb', ()) if cb.iter == 1 else None)
    b = batches([4]*4)

    learn = fitted([GradientAccumulation(2, 'batches'), drop], [4]*4)

    assert_close(weights(learn), by_hand([b[0], b[2]], b[3:]))

def test_evaluations_do_not_count():
    "Validation, also one in the midst of a window, leaves it alone"
    look = Callback(after_batch=lambda cb: cb.learn.validate() if cb.training else None)
    b = batches([4]*4)

    learn = fitted([GradientAccumulation(3, 'batches'), look], [], dls=(b, b))

    assert_close(weights(learn), by_hand(b[:3], b[3:]))


@pytest.mark.parametrize('kwargs,match', [
    (dict(n_acc=0), '`n_acc` is 0; give a whole number, 1 or more'), (dict(n_acc=2.), '`n_acc` is 2.0'),
    (dict(n_acc=True), '`n_acc` is True'), (dict(unit='steps'), "`unit` is 'steps'; give 'items', 'batches' or"),
    (dict(unit='tokens'), "unit='tokens' needs `weight`")])
def test_what_means_nothing(kwargs, match):
    "Is refused by name"
    with pytest.raises((ValueError, TypeError), match=match): GradientAccumulation(**kwargs)

@pytest.mark.parametrize('bad', [-1, math.nan, math.inf])
def test_weights_below_0(bad):
    "A weight that cannot be is an error, and leaves nothing behind"
    learn = learner(GradientAccumulation(9, weight=lambda learn: 1 if learn.iter == 0 else bad), [4]*4)

    with pytest.raises(ValueError, match=f'`weight` gave {bad} for a batch; it must be 0 or more'): learn.fit(1)

    assert is_clean(learn) and learn.n_step == 0
    with pytest.raises(TypeError, match='`weight` is a `int`, not a function'):
        GradientAccumulation(weight=3)

def test_loaders_of_torch_too():
    "S31 c with a DataLoader, whose last batch is smaller"
    learn = fitted(GradientAccumulation(20), [], dls=(DataLoader(TensorDataset(*data()), 8), None))

    assert_close(weights(learn), by_hand(batches([20])))

def test_a_sum_is_refused():
    "Which would be divided as if it were a mean"
    with pytest.raises(ValueError, match="the loss is a sum"):
        learner(GradientAccumulation(4), [4, 4], loss_func=nn.MSELoss(reduction='sum')).fit(1)

def test_where_nothing_adds_up():
    "A batch that fills a window by itself is told of: batches may have been meant"
    dl = DataLoader(TensorDataset(*data(8)), 4)

    with pytest.warns(UserWarning, match="a batch of 4 items fills a window of 2; unit='batches' counts batches"):
        synth_learner(GradientAccumulation(2), dls=(dl, None), model=net()).fit(1)
