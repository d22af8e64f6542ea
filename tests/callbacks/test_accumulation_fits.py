"""GradientAccumulation in fits: schedules count its steps, and a fit that was stopped within a window goes on."""
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.control import ShortEpochCallback
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.callbacks.turns import TakeTurns
from learner.schedules import SchedLin
from learner.splitters import split_blocks
from tests.bench.test_counts import waits
from tests.helpers import synth_learner, weights
from tests.loader_helpers import equal
from tests.resume_helpers import AskAt, network, noisy_learner, noisy_loaders, record
from tests.schedule_helpers import unsized


def learner(cbs, n=26, bs=4, **kwargs):
    "On 26 items in batches of 4, so that the seventh has 2"
    x = torch.arange(float(n))[:, None]/n
    drop = kwargs.pop('drop', False)
    return synth_learner(cbs, dls=(DataLoader(TensorDataset(x, 2*x), bs, drop_last=drop), None), lr=.1, **kwargs)


# ---- schedules

@pytest.mark.parametrize('kwargs,n', [
    (dict(n_acc=8), 4), (dict(n_acc=9), 3), (dict(n_acc=3), 7), (dict(n_acc=1000), 1), (dict(n_acc=26), 1),
    (dict(n_acc=12, drop_last=True), 2), (dict(n_acc=4, drop_last=True), 6), (dict(n_acc=28, unit='items'), 1),
    (dict(n_acc=3, unit='batches'), 3), (dict(n_acc=7, unit='batches', drop_last=True), 1),
    (dict(n_acc=3, unit='batches', drop_last=True), 2)], ids=str)
@pytest.mark.parametrize('drop', [False, True])
def test_steps_of_an_epoch_are_known(kwargs, n, drop):
    "`n_steps` of the fit is set to the steps there will be, with whole batches only and with a smaller last one"
    learn = learner([GradientAccumulation(**kwargs), ParamScheduler({'lr': SchedLin(1., 0.)})], drop=drop)
    if drop and kwargs['n_acc'] == 7:  # of six batches no seven can be had
        with pytest.raises(ValueError, match='no window of 7 batches fills.*drop_last=True'): learn.fit(1)
        return

    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*nothing adds up')
        if kwargs.get('drop_last'): warnings.filterwarnings('ignore', message='.*and the fit goes on')  # for batches
        learn.fit(2)

    assert learn.n_steps and learn.n_step == 2*learn.n_steps and (drop or learn.n_steps == n)

def test_schedule_goes_by_steps():
    "S33: a schedule takes one step with each of the optimizer's, and comes to its end with the last one"
    rates = []
    look = Callback(after_step=lambda cb: rates.append(cb.opt.hypers[0]['lr']) if cb.learn.stepped else None)
    learn = learner([GradientAccumulation(8), look])

    learn.fit(2, cbs=ParamScheduler({'lr': SchedLin(.7, 0.)}))

    assert rates == pytest.approx([.1*k for k in range(7, -1, -1)])

def test_phases_of_fine_tune():
    "What is frozen until some epoch thaws with it, though that is asked before most callbacks begin"
    seen = []
    look = Callback(after_epoch=lambda cb: seen.append([p.requires_grad for p in cb.opt.all_params()]))
    learn = learner([GradientAccumulation(8), look], model=network_of_blocks(), splitter=split_blocks())

    learn.fine_tune(2, freeze_epochs=1)

    assert seen == [[False]*2+[True]*2] + [[True]*4]*2 and learn.n_step == 12

def network_of_blocks(): return torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))

def test_what_the_fit_was_given_stays():
    "`n_steps` of the user's is not replaced"
    learn = learner(GradientAccumulation(8))

    learn.fit(1, n_steps=9)

    assert learn.n_steps == 9 and learn.n_step == 4

@pytest.mark.parametrize('make', [
    lambda cbs: learner([*cbs, GradientAccumulation(8, 'tokens', lambda learn: 4)]),
    lambda cbs: synth_learner([*cbs, GradientAccumulation(8)], dls=([(torch.ones(4, 1), torch.ones(4, 1))]*7, None))])
def test_steps_that_cannot_be_known(make):
    "With a schedule there is a warning that asks for `n_steps`; with `n_steps`, or without a schedule, there is none"
    sched = ParamScheduler({'lr': SchedLin(.7, 0.)})

    with pytest.warns(UserWarning, match=r'cannot be known here, so ParamScheduler\(lr\) takes it.*`n_steps='):
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='.*was made for 7 steps, but the fit took')
            make([sched]).fit(1)
    make([ParamScheduler({'lr': SchedLin(.7, 0.)})]).fit(1, n_steps=4)
    make([]).fit(1)

def test_unsized_loader():
    "Without a length steps are not known, but taken"
    learn = unsized(GradientAccumulation(12))

    learn.fit(2)

    assert learn.n_step == 4 and learn.n_steps is None

def test_lr_find_accumulates_without_a_trace():
    "The sweep trains as a fit would, and leaves the Learner, its callbacks and the next fit as they were"
    cbs = [GradientAccumulation(8), clip := GradientClip(.5)]
    learn, other = learner(cbs), learner([GradientAccumulation(8), GradientClip(.5)])
    learn.fit(1)
    other.fit(1)
    norms, steps = clip.grad_norms, []
    learn.add_cb(Callback(after_step=lambda cb: steps.append(cb.learn.stepped)))

    learn.lr_find(num_it=9, stop_div=False, show_plot=False, suggest_funcs=None)
    learn.fit(1)
    other.fit(1)

    assert equal(weights(learn), weights(other)) and clip.grad_norms == other.gradient_clip.grad_norms != norms
    assert steps[:9] == [False, True]*3+[True, False, True]


# ---- going on

def accumulating(path, **kwargs):
    cbs = [GradientAccumulation(3, 'batches', weight=lambda learn: learn.iter+1.5), GradientClip(.5)]
    return noisy_learner(path, cbs=[*cbs, Checkpoint('1000it')], **kwargs)

@pytest.mark.parametrize('n', [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize('here', [True, False])
def test_goes_on_within_a_window(n, here, tmp_path, capsys):
    "A fit that is stopped after any batch, within a window or not, ends bit for bit as one that was not"
    whole = accumulating(tmp_path/'whole')
    whole.fit(2, 1e-2)
    learn = accumulating(tmp_path/'x')

    with pytest.raises(KeyboardInterrupt): learn.fit(2, 1e-2, cbs=AskAt(n))
    assert all(p.grad is None for p in learn.model.parameters()) and not learn.keep_grads
    if here: learn.resume()
    else:
        learn = accumulating(tmp_path/'x')
        learn.fit(2, 1e-2, resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert learn.gradient_clip.grad_norms == whole.gradient_clip.grad_norms and len(whole.gradient_clip.grad_norms) == 4

def test_goes_on_step_by_step(tmp_path):
    "`learn.step()` stops after each window, and all of them are those of a fit in one go"
    whole = accumulating(tmp_path/'whole')
    whole.fit(2, 1e-2)
    learn = accumulating(tmp_path/'x')

    for _ in range(4): learn.step(1, 1e-2, n_epoch=2, validate=True)

    assert equal(weights(learn), weights(whole)) and learn.n_step == 4


# ---- cost

@pytest.mark.parametrize('weight', [None, lambda learn: learn.x.sum()])
def test_waits_for_nothing(weight):
    "Accumulating reads nothing from the device, also if weights are there"
    def seen(cbs):
        learn = learner(cbs, n=24)
        return [o for o in waits(lambda: learn.fit(1)) if o != 'to']  # nothing is moved

    assert seen(GradientAccumulation(8, weight=weight)) == seen(None)

def test_with_workers():
    "Items that worker processes fetch are accumulated as others are"
    dls = noisy_loaders(num_workers=1)
    learn = synth_learner(GradientAccumulation(16), dls=dls, model=network(), loss_func=torch.nn.CrossEntropyLoss())

    learn.fit(1)

    assert learn.n_step == learn.n_steps == 3


@pytest.mark.parametrize('n, acc, n_steps', [
    (4, dict(n_acc=2, unit='batches'), 2), (4, dict(n_acc=16), 2), (3, dict(n_acc=2, unit='batches'), 2),
    (3, dict(n_acc=2, unit='batches', drop_last=True), 1), (7, dict(n_acc=2, unit='batches'), 4),
    (99, dict(n_acc=16), 4)])
@pytest.mark.parametrize('turned', [False, True])
def test_short_epochs_have_fewer_windows(n, acc, n_steps, turned):
    "A schedule comes to its end, whatever the order of the callbacks"
    cbs = [GradientAccumulation(**acc), ShortEpochCallback(n=n)]
    learn = synth_learner(cbs[::-1] if turned else cbs, n=7, bs=8)

    learn.fit_one_cycle(2, 1.)

    assert learn.n_step == 2*n_steps and learn.opt.hypers[0]['lr'] == 1. and learn.recorder.lrs[-1] < 1e-4

def test_no_window_fills_in_a_short_epoch():
    "If what is not full is left out: an error before training"
    learn = synth_learner([GradientAccumulation(4, 'batches', drop_last=True), ShortEpochCallback(n=3)], n=8)

    with pytest.raises(ValueError, match='no window of 4 batches fills'): learn.fit(1)

@pytest.mark.parametrize('n_acc', [1, 2, 3, 4, 6])
@pytest.mark.parametrize('turns', [(1, 1), (2, 1), (1, 3)])
def test_each_part_has_the_mean_over_its_own_batches(n_acc, turns):
    "Networks that take turns within a window get what each would by itself; one without a turn stays as it is"
    def loss(pred, y): return nn.functional.mse_loss(pred, y)
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
    x, y = torch.randn(24, 1, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
    data = list(zip(x.split([5, 3]*3), y.split([5, 3]*3)))
    learn = synth_learner([GradientAccumulation(n_acc, 'batches'), TakeTurns([*zip('01', (loss, loss), turns)])],
                          dls=(data, None), model=net(), opt_func=torch.optim.SGD, lr=.1)
    model, order = net(), ['0']*turns[0] + ['1']*turns[1]
    for i in range(0, 6, n_acc):
        window, grads = [(order[j % len(order)], *data[j]) for j in range(i, min(i+n_acc, 6))], {}
        for part in '01':
            mine = [(x, y) for whose, x, y in window if whose == part]
            if not mine: continue
            ps = [*model.get_submodule(part).parameters()]
            whole = [torch.cat(ts) for ts in zip(*mine)]
            grads.update(zip(ps, torch.autograd.grad(loss(model(whole[0]), whole[1]), ps)))
        with torch.no_grad():
            for p, g in grads.items(): p -= .1*g

    learn.fit(1)

    assert max(float((a.detach()-b).abs().max()) for a, b in zip(model.parameters(), weights(learn))) < 1e-12
