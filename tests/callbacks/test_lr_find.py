"""Promises of the learning-rate finder: the sweep, when it ends, what it suggests, and what it shows."""
import math
from functools import partial

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.lr_find import minimum, slide, steep, valley
from learner.callbacks.progress import ProgressCallback
from learner.callbacks.recorder import Recorder
from learner.callbacks.schedule import ParamScheduler
from learner.display import Live, set_display
from learner.events import CancelBatchException, CancelEpochException, CancelTrainException
from learner.learner import Learner
from learner.optim import SGD
from learner.schedules import SchedCos
from tests.helpers import synth_learner

matplotlib.use('Agg')
nan, inf = math.nan, math.inf
suggest = [valley, steep, minimum, slide]
two_groups = partial(synth_learner, splitter=lambda m: [[m.a], [m.b]])
find = partial(Learner.lr_find, show_plot=False)
no_warning = pytest.mark.filterwarnings('ignore:lr_find. .* suggests nothing')


def rates(learn, **args):
    "The rates of the groups in each batch of a finder"
    seen = []
    with learn.added_cbs(Callback(after_batch=lambda cb: seen.append([h['lr'] for h in cb.opt.hypers]))):
        find(learn, suggest_funcs=None, **args)
    return np.array(seen)

def scripted(losses, **kwargs):
    "A Learner whose losses are those given, one an iteration"
    todo = iter(losses)
    return synth_learner(n=3, loss_func=lambda pred, y: pred.sum()*0 + next(todo), lr=0., **kwargs)

def smoothed(losses, beta=.98):
    "fastai's smoothed losses, from their definition: weights that fall by `beta` a step into the past"
    weights = [np.array([beta**k for k in range(i, -1, -1)]) for i in range(len(losses))]
    return [float(w @ losses[:len(w)]/w.sum()) for w in weights]


# ---- the sweep

@pytest.mark.parametrize('start,end,num_it', [(1e-7, 10, 100), (1e-5, 1e-2, 10), (.1, .2, 2), (1e-6, 1e-3, 7)])
def test_rates(start, end, num_it):
    "The rate rises by equal factors over as many epochs as it takes, and the last iteration has exactly `end_lr`"
    learn = synth_learner(n=3)

    seen = rates(learn, start_lr=start, end_lr=end, num_it=num_it, stop_div=False)[:, 0]

    assert seen == pytest.approx(np.geomspace(start, end, num_it)) and seen[-1] == end
    assert learn.recorder.lr_curve['lrs'][:, 0].tolist() == seen.tolist()

def test_losses_are_of_real_training():
    "The losses are those of a loop written by hand, smoothed as fastai does"
    learn, hand = synth_learner(n=4, opt_func=SGD), synth_learner(n=4)
    ps, losses = list(hand.model.parameters()), []
    for i, lr in enumerate(np.geomspace(1e-4, .5, 12)):
        x, y = [*hand.dls.train][i % 4]
        losses.append(nn.functional.mse_loss(hand.model(x), y))
        for p, g in zip(ps, torch.autograd.grad(losses[-1], ps)): p.data -= float(lr)*g

    find(learn, 1e-4, .5, 12, suggest_funcs=None)

    assert learn.recorder.lr_curve['losses'] == pytest.approx(smoothed([v.item() for v in losses]), rel=1e-6)

@pytest.mark.parametrize('start,end,first,last', [
    ([1e-5, 1e-3], [1e-2, 1.], [1e-5, 1e-3], [1e-2, 1]), (1e-5, [1e-2, 1.], [1e-5, 1e-5], [1e-2, 1]),
    (slice(1e-5, 1e-3), np.array([.1, .5]), [1e-5, 1e-3], [.1, .5]), (slice(1e-3), slice(1.), [1e-4, 1e-3], [.1, 1]),
    ([1e-3, 1e-5], [1e-3, .1], [1e-3, 1e-5], [1e-3, .1])])
def test_groups(start, end, first, last):
    "Lists, arrays and slices give each group a sweep of its own; one of them may stand still"
    seen = rates(two_groups(), start_lr=start, end_lr=end, num_it=5, stop_div=False)

    assert seen == pytest.approx(np.geomspace(first, last, 5)) and seen[-1].tolist() == last

@pytest.mark.parametrize('event,cancel', [
    ('before_batch', CancelTrainException), ('after_step', CancelTrainException), ('after_step', CancelEpochException)])
def test_short_epochs(event, cancel):
    "A callback that cuts each epoch short, here before its third batch, does not make the sweep shorter"
    def cut(cb):
        if cb.iter == (2 if event == 'before_batch' else 1): raise cancel
    learn = synth_learner(Callback(**{event: cut}), n=5)

    assert len(rates(learn, end_lr=.1, num_it=25)) == 25

def test_cancelled_batches():
    "Batches that a callback cancels have a rate, but no point in the curve"
    def skip(cb):
        if cb.iter == 1: raise CancelBatchException
    learn = synth_learner(Callback(before_batch=skip), n=3)

    seen = rates(learn, start_lr=1e-4, end_lr=1e-2, num_it=9)

    curve = learn.recorder.lr_curve
    assert len(seen) == 9 and len(curve['losses']) == 6
    assert curve['lrs'][:, 0] == pytest.approx(np.geomspace(1e-4, 1e-2, 9)[[0, 2, 3, 5, 6, 8]])

def test_schedules_take_no_part():
    "A schedule among the Learner's callbacks leaves the sweep as it is"
    learn = synth_learner(ParamScheduler({'lr': SchedCos(.1, .01)}))

    assert rates(learn, end_lr=.1, num_it=9)[:, 0] == pytest.approx(np.geomspace(1e-7, .1, 9))

def test_no_validation():
    "There is no validation, and metrics are not computed"
    seen, never = [], lambda pred, y: pytest.fail('computed')

    find(synth_learner(Callback(before_validate=lambda cb: seen.append(1)), metrics=never))

    assert seen == []


# ---- when it ends

def n_points(learn, **args):
    find(learn, suggest_funcs=None, **args)
    return len(learn.recorder.lr_curve['losses'])

@pytest.mark.parametrize('losses,n', [
    ([1.]*3 + [1e6]*97, 12), ([1.]*50 + [1e6]*50, 51), ([-1.]*50 + [-.5]*50, 100),
    ([-1.]*30 + [1e3]*70, 31), ([5.]*100, 100)])
def test_divergence(losses, n):
    "A loss above its lowest value by more than three times that ends the sweep, but not in the first tenth of it"
    assert n_points(scripted(losses)) == n
    assert n_points(scripted(losses), stop_div=False) == 100

def test_divergence_is_of_the_smoothed_loss():
    "The sweep ends where the smoothed loss first is above four times its lowest value"
    losses = [1.]*20 + [float(i) for i in range(1, 81)]
    curve = smoothed(losses)

    assert n_points(scripted(losses)) == next(i for i, v in enumerate(curve) if v > 4*min(curve[:i+1])) + 1

@no_warning
@pytest.mark.parametrize('bad', [nan, inf, -inf])
@pytest.mark.parametrize('at', [0, 3, 12, 60, 99])
@pytest.mark.parametrize('stop_div', [True, False])
def test_no_number(bad, at, stop_div):
    "A loss that is no number ends the sweep at once, and is cut off"
    seen = []
    learn = scripted([1-.001*i for i in range(at)] + [bad]*99, cbs=Callback(after_loss=lambda cb: seen.append(1)))

    found = find(learn, stop_div=stop_div, suggest_funcs=suggest)

    assert len(seen) == at+1 and len(learn.recorder.lr_curve['losses']) == at
    assert [p is None for p in found] == [at < 20, at < 20, at < 20, at < 31]

def test_forced_to_stop():
    "The decision is the one that processes take together: one that is told to stop stops"
    learn, asked = synth_learner(n=3), []
    learn.agree = lambda flag: asked.append(flag) or len(asked) == 5

    assert n_points(learn) == 5 and asked == [False]*5

@pytest.mark.parametrize('losses,n', [([1.]*30 + [1e9]*70, 100), ([1.]*30 + [nan]*70, 30)])
def test_forbidden_to_stop(losses, n):
    "One that is not allowed to stop goes on until `num_it`, and bad losses stay cut off"
    learn, asked = scripted(losses), []
    learn.agree = lambda flag: asked.append(flag) or len(asked) == 100

    assert n_points(learn) == n and asked == [False]*30 + [True]*70

@no_warning
@pytest.mark.parametrize('seed', range(200))
def test_heavy_tails(seed):
    "With targets that have no variance, and a curve that may end early or go anywhere, there is an answer"
    torch.manual_seed(seed)
    x, y = torch.randn(48, 2), torch.distributions.StudentT(1 + seed % 2).sample((48, 1))
    dls = DataLoader(TensorDataset(x, y), 16, shuffle=True), None
    learn = synth_learner(dls=dls, model=nn.Linear(2, 1), opt_func=SGD)
    torch.manual_seed(seed)

    found = find(learn, num_it=40, suggest_funcs=suggest)

    assert [n for n, p in found._asdict().items() if p is not None and not 0 < p <= 10] == []
    assert all(map(math.isfinite, learn.recorder.lr_curve['losses']))


# ---- bad input

@pytest.mark.parametrize('args,error,message', [
    *[(dict(num_it=n), (ValueError, TypeError), f'`num_it` is {n!r}; give a whole number')
      for n in (0, 1, -3, 2.5, None, True)],
    *[(dict(start_lr=v), ValueError, 'must rise, from above 0') for v in (0, -1, nan, inf, 10, 11)],
    *[(dict(end_lr=v), ValueError, 'must rise, from above 0') for v in (1e-8, 0, nan, inf)],
    (dict(end_lr=[1, 2, 3]), ValueError, "2 values of `start_lr` and 3 of `end_lr` for 2 groups"),
    (dict(start_lr=[.1, 1e-3], end_lr=[.01, .1]), ValueError, 'must rise'),
    (dict(start_lr=[.1, .1], end_lr=[.1, .1]), ValueError, 'must rise'),
    (dict(start_lr=None), TypeError, 'from `start_lr` None to `end_lr` 10: give numbers, lists')])
def test_bad_arguments(args, error, message):
    "Arguments that do not fit are refused before anything is trained"
    def never(cb): pytest.fail('it trained')

    with pytest.raises(error, match=message): two_groups(Callback(before_epoch=never)).lr_find(**args)

@pytest.mark.parametrize('kwargs,error,message', [
    (dict(dls=(iter([1]), None)), ValueError, 'use up the training loader, a `list_iterator`'),
    (dict(dls=((b for b in [1]), None)), ValueError, 'use up the training loader, a `generator`'),
    (dict(model=nn.ReLU()), ValueError, '`ReLU` has no parameters'),
    (dict(dls=([], None)), ValueError, 'gives no batch'),
    (dict(cbs=Callback(after_step=lambda cb: cb.learn.lr_find())), RuntimeError, 'within a lr_find')])
def test_bad_learners(kwargs, error, message):
    "Data that can be had only once, models that cannot be trained, and a finder in a finder are refused"
    with pytest.raises(error, match=message): synth_learner(**kwargs).lr_find()

def test_within_a_fit():
    "A finder cannot run in the midst of a fit"
    with pytest.raises(RuntimeError, match='within a fit'):
        synth_learner(Callback(after_batch=lambda cb: cb.learn.lr_find())).fit(1)


# ---- what is shown

def shown_learner(show, **kwargs):
    return synth_learner([Recorder, ProgressCallback(show)], n=3, default_cbs=False, **kwargs)

class Shown(Live):
    "Keeps the bars it is given"
    interval, last = 0., None
    def __init__(self): self.calls, Shown.last = [], self
    def start(self, columns): self.calls.append(columns)
    def update(self, bar): self.calls.append((bar.phase, bar.i, bar.n, bar.loss))
    def close(self, note=''): self.calls.append(note)

class Broken(Live):
    "Cannot show anything"
    interval = 0.
    def start(self, columns): raise OSError('gone')
    def update(self, bar): raise OSError('gone')
    def close(self, note=''): raise OSError('gone')

class BrokenLater(Broken):
    "Cannot show a bar, nor be closed"
    def start(self, columns): pass

def test_bar():
    "There is a bar for the iterations, with the smoothed loss, and it is closed at the end"
    learn = shown_learner(Shown)

    find(learn, num_it=4, suggest_funcs=None)

    curve = learn.recorder.lr_curve['losses']
    assert Shown.last.calls == [[], *[('lr_find', i+1, 4, v) for i, v in enumerate(curve)], '']

def test_bar_is_closed_after_an_error():
    "Also after an error the bar is closed"
    learn = shown_learner(Shown, loss_func=lambda pred, y: 1/0)

    with pytest.raises(ZeroDivisionError): find(learn)

    assert Shown.last.calls == [[], '']

@pytest.mark.parametrize('live', [Broken, BrokenLater])
def test_display_that_fails(live, recwarn):
    "What cannot be shown costs the display, not the sweep"
    assert find(shown_learner(live)).valley > 0
    assert [str(w.message) for w in recwarn] == ['nothing more is shown of this fit: OSError: gone']

@pytest.fixture(params=['log', 'off'])
def quiet_display(request):
    set_display(request.param)
    yield
    set_display('auto')

def test_quiet(quiet_display, capsys):
    "In a log nothing is printed, and the figure that nobody can see is closed"
    found = synth_learner(n=3, default_cbs=True).lr_find()

    assert found.valley > 0 and capsys.readouterr() == ('', '') and plt.get_fignums() == []

def test_no_bar(capsys):
    "Without bars, or without the callback that shows them, nothing is shown"
    silent = shown_learner(Broken)
    silent.create_mbar = False

    assert find(silent).valley == find(synth_learner(n=3, default_cbs=False)).valley > 0
    assert capsys.readouterr() == ('', '')

def points(ax): return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines}

def test_points_drawn_are_those_returned():
    "The picture has the curve, and on it, at exactly the rates that were returned, the suggestions"
    learn = synth_learner(n=3)
    found = find(learn, end_lr=1., suggest_funcs=[valley, steep])

    drawn, curve = points(learn.recorder.plot_lr_find(plt.figure().subplots())), learn.recorder.lr_curve
    plt.close()

    rates = curve['lrs'][:, 0].tolist()
    (label, line), *marks = drawn.items()
    assert line == (rates, curve['losses'])
    assert [(label, xs) for label, (xs, _) in marks] == [(f'{n}: {p:.2e}', [p]) for n, p in found._asdict().items()]
    assert [ys for _, (_, ys) in marks] == [[curve['losses'][rates.index(p)]] for p in found]

def test_points_of_groups():
    "Groups with sweeps of their own have a curve and a point each"
    learn = two_groups(n=4)
    row = find(learn, [1e-5, 1e-3], [1e-2, 1.], suggest_funcs=steep).steep

    drawn = points(learn.recorder.plot_lr_find(plt.figure().subplots()))
    plt.close()

    assert [drawn[f'steep, group {i}: {row[i]:.2e}'][0] for i in range(2)] == [[row[0]], [row[1]]]
    assert [drawn[f'group {i}'][0][0] for i in range(2)] == [1e-5, 1e-3]
