"""Fine-tuning: freezing by groups, `fine_tune`, BnFreeze and the table of groups."""
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.finetune import BnFreeze
from learner.callbacks.schedule import ParamScheduler
from learner.events import CancelFitException
from learner.splitters import default_split, split_blocks
from tests.helpers import Counts, raises, synth_learner, weights
from tests.schedule_helpers import single

recorded = json.loads((Path(__file__).parents[1]/'data'/'fastai_schedules.json').read_text(encoding='utf-8'))


def net():
    "Three layers, two of them with BatchNorm; `split_blocks()` makes a group of each child"
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)),
                         nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))


def tuned(cbs=None, **kwargs): return synth_learner(cbs, n=4, model=net(), splitter=split_blocks(), **kwargs)

def frozen(learn): return [[not p.requires_grad for p in ps] for ps in learn.opt.param_lists]

def moved(learn, before): return [not torch.equal(a, b) for a, b in zip(before, weights(learn))]


# ---- freezing

def test_freeze_trains_the_last_group_only():
    "After `freeze` a fit changes the last group and, since they go on training, the normalisation layers"
    learn = tuned()
    before = weights(learn)

    assert learn.freeze() is learn
    learn.fit(1)

    assert frozen(learn) == [[True, True, False, False], [True, True, False, False], [False, False]]
    assert moved(learn, before) == [False, False, True, True, False, False, True, True, True, True]

@pytest.mark.parametrize('n, groups', [(0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 1, 0]), (-1, [1, 1, 0]), (-2, [1, 0, 0]),
                                       (-3, [0, 0, 0])])
def test_freeze_to(n, groups):
    "`freeze_to(n)` freezes the groups before number `n`, and makes the others trainable"
    learn = tuned(train_bn=False)

    learn.freeze().freeze_to(n)

    assert [all(flags) for flags in frozen(learn)] == list(map(bool, groups))
    assert [any(flags) for flags in frozen(learn)] == list(map(bool, groups))

@pytest.mark.parametrize('act', [lambda learn: learn.freeze(), lambda learn: learn.freeze_to(1),
                                 lambda learn: learn.fine_tune(1), lambda learn: learn.simulate_sched('fine_tune', 1)])
def test_one_group_cannot_be_frozen(act):
    "Freezing a model of one group is an error that shows the groups and says what makes several; nothing is trained"
    counts = Counts()
    learn = synth_learner(counts)

    with pytest.raises(ValueError, match=r'(?s)needs more than 1 group.*`splitter`.*group  tensors'): act(learn)

    assert counts.n == 0 and all(p.requires_grad for p in learn.model.parameters())

@pytest.mark.parametrize('n', [3, 4, -4])
def test_too_many_groups(n):
    "Freezing all groups, or more than there are, is an error, and changes nothing"
    learn = tuned()

    with pytest.raises(ValueError, match='needs more than 3 groups'): learn.freeze_to(n)

    assert not any(f for flags in frozen(learn) for f in flags)

def test_optimizer_state_outlives_freezing():
    "The momenta of all groups are kept by freeze and unfreeze"
    learn = tuned()
    learn.fit(1)
    state = {p: s['exp_avg'].clone() for p, s in learn.opt.opt.state.items()}

    learn.freeze()
    learn.unfreeze()

    assert all(torch.equal(learn.opt.opt.state[p]['exp_avg'], v) for p, v in state.items())
    assert len(state) == len(learn.opt.all_params())

def test_frozen_by_hand_at_first():
    "A parameter frozen before the Learner was made is trained after `unfreeze`"
    model = net()
    model[0][0].weight.requires_grad_(False)
    learn = synth_learner(n=2, model=model, splitter=split_blocks())
    learn.fit(1)
    before = weights(learn)

    learn.unfreeze().fit(1)

    assert all(moved(learn, before))

def test_freeze_is_of_the_present_model():
    "After the model was replaced, `freeze` freezes the new one, with a new optimizer, and says so"
    learn = tuned(train_bn=False)
    learn.fit(1)
    learn.model = net()

    with pytest.warns(UserWarning, match='made anew, since `model` changed'): learn.freeze()

    assert not any(p.requires_grad for p in learn.model[:2].parameters())

def test_freeze_outlives_a_new_optimizer():
    "`reset_opt=True` leaves frozen what is frozen"
    learn = tuned(train_bn=False)
    before = weights(learn)

    learn.freeze().fit(1, reset_opt=True)

    assert moved(learn, before) == [False]*8 + [True]*2


# ---- fine_tune

def test_fine_tune_is_that_of_fastai():
    "Rates and momenta of 3 groups as functions of position, and what is frozen, are those recorded from fastai"
    run = next(r for r in recorded['runs'] if r['call'] == 'fine_tune')
    learn, seen = tuned(train_bn=False), []
    def note(cb): seen.append([not ps[0].requires_grad for ps in cb.opt.param_lists])
    learn.fine_tune(2, cbs=Callback(before_backward=note))
    heads, cbs = [], []
    learn.fit = lambda n, lr, wd, cbs_, *rest: cbs.extend(c for c in cbs_ if isinstance(c, ParamScheduler))
    learn.fine_tune(run['args']['epochs'], run['args']['base_lr'], run['args']['freeze_epochs'])
    n = [8, 16]  # batches of the two parts

    for cb, k, pct in zip(cbs, n, [.99, .3]):
        at = [single(i/k, [pct, 1-pct]) for i in range(k)]  # in fastai's single precision
        heads += [{name: np.broadcast_to(f(pos), 3) for name, f in cb.scheds.items()} for pos in at]

    assert list(seen[::4]) == run['frozen'][::8]
    assert np.array([h['lr'] for h in heads]) == pytest.approx(np.array(run['lr']), rel=1e-9)
    assert np.array([h['mom'] for h in heads]) == pytest.approx(np.array(run['mom']), rel=1e-9)

def test_fine_tune_is_one_fit():
    "Recorder, table and callbacks see both parts as one fit, whose epochs count on"
    fits = Counts()
    learn = tuned(Callback(before_fit=lambda cb: setattr(fits, 'n', fits.n+1)))

    learn.fine_tune(2, freeze_epochs=1)

    assert fits.n == 1 and learn.history.epoch.tolist() == [0, 1, 2] and learn.history.fit.nunique() == 1
    assert len(learn.recorder.losses) == 12

def test_fine_tune_reaches_its_ends():
    "Each part begins at its highest rate over `div` and ends, at its last step, at its highest over `div_final`"
    learn = tuned()

    learn.fine_tune(2, 1e-2, freeze_epochs=1, lr_mult=100, div=4, div_final=1e3)

    lr = learn.recorder.hps['lr']
    assert lr[0] == pytest.approx(np.array([1e-3, 1e-3, 1e-2])/25)
    assert lr[3] == pytest.approx(np.array([1e-3, 1e-3, 1e-2])/1e3)
    assert lr[4] == pytest.approx(np.array([5e-5, 5e-4, 5e-3])/4)
    assert lr[-1] == pytest.approx(np.array([5e-5, 5e-4, 5e-3])/1e3)

@pytest.mark.parametrize('start', [1, 2])
def test_fine_tune_start_epoch(start):
    "With `start_epoch` the schedule and the freezing go on where the epochs before would have left them"
    whole, rest, flags = tuned(train_bn=False), tuned(train_bn=False), []
    whole.fine_tune(2, freeze_epochs=2)

    rest.fine_tune(2, freeze_epochs=2, start_epoch=start,
                   cbs=Callback(before_epoch=lambda cb: flags.append(frozen(cb.learn)[0][0])))

    assert np.array_equal(rest.recorder.hps['lr'], whole.recorder.hps['lr'][4*start:])
    assert rest.history.epoch.tolist() == list(range(start, 4))
    assert flags == [epoch < 2 for epoch in range(start, 4)]

def test_fine_tune_without_a_frozen_part():
    "With `freeze_epochs=0` all groups are trained from the start"
    learn = tuned()

    learn.fine_tune(1, freeze_epochs=0)

    assert len(learn.history) == 1 and not any(f for flags in frozen(learn) for f in flags)

def test_fine_tune_without_momentum():
    "An optimizer without momentum gets none; a momentum that is asked for is an error before training"
    learn = tuned(opt_func=partial(torch.optim.SGD, momentum=0))
    learn.fine_tune(1)
    counts = Counts()

    with pytest.raises(ValueError, match='no `mom` to schedule'): learn.fine_tune(1, moms=(.9, .8, .9), cbs=counts)

    assert learn.opt.opt.param_groups[0]['momentum'] == 0 and counts.n == 0

def test_fine_tune_stopped_early():
    "A fit that ends in the frozen part leaves the groups frozen, and the next one can go on"
    learn = tuned(train_bn=False)
    with pytest.warns(UserWarning, match='ended while only the last group was trained: `learn.unfreeze'):
        learn.fine_tune(2, cbs=Callback(after_batch=raises(CancelFitException)))
    assert frozen(learn)[0][0]

    learn.fine_tune(2, start_epoch=1)

    assert not frozen(learn)[0][0]

def test_fine_tune_on_unsized_data():
    "Over data without a length `n_steps` says how many steps an epoch has"
    data = synth_learner(n=4).dls
    class Stream:
        def __iter__(self): return iter(list(data.train))
    learn = synth_learner(model=net(), splitter=split_blocks(), dls=(Stream(), None))

    with pytest.raises(ValueError, match='`n_steps=…`'): learn.fine_tune(1)
    learn.fine_tune(1, n_steps=4)

    assert learn.recorder.hps['lr'][[3, 7], -1] == pytest.approx([2e-8, 1e-8])


# ---- normalisation layers

def stats(learn): return [m.running_mean.clone() for m in learn.model.modules() if isinstance(m, nn.BatchNorm1d)]

def test_bn_freeze_keeps_frozen_statistics():
    "The statistics of frozen layers stay while the head is trained, and move once all is trained"
    learn = tuned(BnFreeze, train_bn=False)
    before, kept = stats(learn), []

    learn.fine_tune(1, cbs=Callback(after_train=lambda cb: kept.append(stats(cb.learn))))

    assert all(map(torch.equal, before, kept[0])) and not any(map(torch.equal, before, kept[1]))

def test_without_it_statistics_move():
    "Frozen layers without BnFreeze go on averaging, which is what it is for"
    learn = tuned(train_bn=False)
    before = stats(learn)

    learn.freeze().fit(1)

    assert not any(map(torch.equal, before, stats(learn)))

def test_bn_freeze_leaves_modes():
    "All modes are as before after a fit, also after one that an error ended, and nothing is said of layers in eval"
    learn = tuned(BnFreeze, train_bn=False)
    learn.freeze().fit(2)

    with pytest.raises(KeyError): learn.fit(1, cbs=Callback(after_loss=raises(KeyError)))

    assert all(m.training for m in learn.model.modules())

def test_bn_freeze_of_layers_without_parameters():
    "A layer without parameters is frozen if the module around it is"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4, affine=False)),
                          nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)))
    learn = synth_learner(BnFreeze, model=model, splitter=default_split)
    first, second = stats(learn)

    learn.freeze().fit(1)

    assert torch.equal(first, model[0][1].running_mean) and not torch.equal(second, model[1][1].running_mean)

def test_bn_freeze_that_keeps_nothing():
    "With `train_bn=True` no layer of a frozen group is frozen: BnFreeze says what to do"
    learn = tuned(BnFreeze)

    with pytest.warns(UserWarning, match='BnFreeze keeps nothing.*train_bn=False'): learn.freeze().fit(1)


# ---- the table

def test_summary_groups():
    "A row a parameter: its group, name, shape, count, the rates it is trained with, and whether it is frozen"
    learn = tuned(lr=[1e-4, 1e-3, 1e-2], wd=.1, param_opts={'2.bias': dict(lr_mult=10)})

    df = learn.freeze().summary_groups()

    assert list(df) == ['group', 'name', 'shape', 'count', 'lr', 'wd', 'frozen']
    assert df.group.tolist() == [0]*4 + [1]*4 + [2]*2 and df.name.tolist()[-2:] == ['2.weight', '2.bias']
    assert df['shape'].tolist()[4] == [4, 4] and df['count'].sum() == sum(p.numel() for p in learn.model.parameters())
    assert df.lr.tolist() == pytest.approx([1e-4]*4 + [1e-3]*4 + [1e-2, 1e-1])
    assert df.wd.tolist() == pytest.approx([.1, 0, 0, 0, .1, 0, 0, 0, .1, 0])
    assert df.frozen.tolist() == [True, True, False, False]*2 + [False]*2

def test_summary_groups_without_decay():
    "What an optimizer does not have is NaN"
    learn = tuned(opt_func=lambda groups, lr: torch.optim.Rprop(groups, lr=lr))

    assert all(map(math.isnan, learn.summary_groups().wd))
