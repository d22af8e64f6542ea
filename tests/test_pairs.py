"""Every pair of training techniques in one fit: it runs clean, or is refused; here is the table of those that are."""
import math
from itertools import combinations
from functools import partial

import pytest
import torch
from torch import nn, optim

from learner import (EMA, SWA, ActivationStats, BnFreeze, Checkpoint, CollectDataCallback, CSVLogger, CutMix,
                     DataLoaders, EarlyStoppingCallback, FetchPredsCallback, GradientAccumulation, GradientClip,
                     GradientStats, HookCallback, Learner, MCDropout, MixUp, ParamScheduler, ProgressiveResize,
                     ReduceLROnPlateau, SaveModelCallback, SchedCos, ShortEpochCallback, SkipToEpoch, TakeTurns,
                     TerminateOnNaNCallback, TimeLimit, Timer)
from learner.callbacks.channels import ChannelsLast
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.recompute import ActivationCheckpointing

loss = nn.CrossEntropyLoss()
callbacks = dict(
    accumulation=lambda: GradientAccumulation(12), clip=lambda: GradientClip(.5), ema=lambda: EMA(.9),
    swa=lambda: SWA(.5), mixup=MixUp, cutmix=CutMix, resize=lambda: ProgressiveResize({0: 6, 1: None}),
    mc_dropout=MCDropout, bf16=lambda: MixedPrecision('bf16'), fp16=lambda: MixedPrecision('fp16'),
    channels_last=ChannelsLast, checkpointing=lambda: ActivationCheckpointing('0.*'),
    early=lambda: EarlyStoppingCallback(patience=3), save=SaveModelCallback, plateau=ReduceLROnPlateau,
    nan=TerminateOnNaNCallback, one_cycle=lambda: ParamScheduler({'lr': SchedCos(1e-2, 1e-3)}),
    torch_sched=lambda: partial(optim.lr_scheduler.StepLR, step_size=1), short=lambda: ShortEpochCallback(n=2),
    skip=lambda: SkipToEpoch(0), time=lambda: TimeLimit('1h'), timer=Timer, freeze=BnFreeze,
    checkpoint=lambda: Checkpoint(every='2it'), csv=CSVLogger, stats=ActivationStats, grads=GradientStats,
    hook=lambda: HookCallback(hook=lambda m, i, o: o.shape), collect=CollectDataCallback, fetch=FetchPredsCallback,
    turns=lambda: TakeTurns([('0', loss), ('1', loss)]))

# Two that undo each other's work, and what the error says
refused = {
    ('ema', 'swa'): 'there is a `EMA` already', ('mixup', 'cutmix'): 'there is a `MixUp` already',
    ('bf16', 'fp16'): 'there is a `MixedPrecision` already',
    ('plateau', 'one_cycle'): 'ReduceLROnPlateau', ('plateau', 'torch_sched'): 'ReduceLROnPlateau',
    ('one_cycle', 'torch_sched'): '`lr`'}


@pytest.fixture(scope='module')
def data():
    g = torch.Generator().manual_seed(0)
    return torch.randn(40, 1, 8, 8, generator=g), torch.randint(3, (40,), generator=g)

def learner(data, path, cbs):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    model = nn.Sequential(body, nn.Sequential(nn.Flatten(), nn.Dropout(.2), nn.Linear(16, 3)))
    x, y = data
    dls = DataLoaders.from_tensors(x, y, valid=(x[:12], y[:12]), bs=8)
    return Learner(dls, model, loss, lr=1e-2, cbs=cbs, path=path, default_cbs=dict(progress=None))


@pytest.mark.parametrize('pair', [p for p in combinations(callbacks, 2) if p not in refused], ids='-'.join)
def test_a_pair_runs_clean(data, tmp_path, pair, capsys):
    "Two epochs without a warning, with finite weights and a finite loss"
    learn = learner(data, tmp_path, [callbacks[name]() for name in pair])

    learn.fit(2)

    assert len(learn.recorder.values) == 2 and math.isfinite(learn.final_record['valid_loss'])
    assert all(p.isfinite().all() for p in learn.model.parameters()) and learn.loss_func is loss

@pytest.mark.parametrize('pair', refused, ids='-'.join)
@pytest.mark.parametrize('turned', [False, True])
def test_a_pair_is_refused(data, tmp_path, pair, turned):
    "Before any training, in either order, by an error that names one of them"
    names = pair[::-1] if turned else pair
    before = None

    with pytest.raises(ValueError) as e:
        learn = learner(data, tmp_path, [callbacks[name]() for name in names])
        before = [p.clone() for p in learn.model.parameters()]
        learn.fit(2)

    assert any(part in str(e.value) for part in (refused[pair], 'already'))
    assert before is None or all(map(torch.equal, before, learn.model.parameters()))
