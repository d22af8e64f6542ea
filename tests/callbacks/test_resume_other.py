"""What differs from a checkpoint: longer fits, other data, rates and callbacks, and what is refused by name."""
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.tracker import EarlyStoppingCallback
from learner.files import save_file
from learner.optim import SGD
from tests.callbacks.test_resume import fit, one_cycle, started_and_stopped, with_cb
from tests.helpers import Counts
from tests.resume_helpers import halves, noisy_learner, noisy_loaders


def test_s10_a_longer_fit(tmp_path):
    "Asked for more epochs, a schedule goes on as that of the longer fit if that is allowed; else it is refused"
    longer = noisy_learner(tmp_path/'whole')
    longer.fit_one_cycle(6, 1e-2)
    started_and_stopped(tmp_path, 8, one_cycle)
    learn = noisy_learner(tmp_path)

    with pytest.raises(ValueError, match='n_epoch: it is of a fit of 3 epochs'):
        learn.fit_one_cycle(6, 1e-2, cbs=[Checkpoint()], resume=True)
    assert learn.n_step == 0
    learn.fit_one_cycle(6, 1e-2, cbs=[Checkpoint()], resume=True, allow={'n_epoch'})

    assert learn.n_step == 30 and len(learn.recorder.values) == 6
    assert learn.recorder.lrs[6:] == longer.recorder.lrs[6:] and learn.recorder.lrs[:6] != longer.recorder.lrs[:6]


def test_s10_a_longer_fit_of_a_torch_scheduler(tmp_path):
    "torch's OneCycleLR goes on with the steps of the longer fit too"
    run = with_cb(lambda: OneCycleLR)
    started_and_stopped(tmp_path, 8, run)
    whole, learn = noisy_learner(tmp_path/'whole'), noisy_learner(tmp_path)
    whole.fit(6, 1e-2, cbs=OneCycleLR)

    learn.fit(6, 1e-2, cbs=[Checkpoint(), OneCycleLR], resume=True, allow='n_epoch')

    assert learn.recorder.lrs[7:] == pytest.approx(whole.recorder.lrs[7:]) and learn.n_step == 30


def test_more_epochs_after_the_end(tmp_path):
    "A fit that was over goes on if more epochs are asked for; with as many it is over"
    learn = noisy_learner(tmp_path)
    fit(learn, cbs=[Checkpoint()])
    again, more, whole = noisy_learner(tmp_path), noisy_learner(tmp_path), noisy_learner(tmp_path/'whole')
    whole.fit(5, 1e-2)

    fit(again, cbs=[Checkpoint()], resume=True)
    more.fit(5, 1e-2, cbs=[Checkpoint()], resume=True)

    assert again.final_hash == learn.final_hash
    assert more.final_hash == whole.final_hash


def test_fewer_epochs_than_done(tmp_path):
    "A fit that has done more epochs than are asked for is refused"
    started_and_stopped(tmp_path, 16, fit)

    with pytest.raises(ValueError, match='has done 2 epochs; this one has 1 in all'):
        noisy_learner(tmp_path).fit(1, 1e-2, cbs=[Checkpoint()], resume=True)


# ---- what must not differ

@pytest.mark.parametrize(('kwargs', 'kind'), [
    (lambda: dict(model=nn.Sequential(nn.Linear(4, 2))), 'model'),
    (lambda: dict(model=nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(.3), nn.Linear(9, 2))),
     'model'),
    (lambda: dict(opt_func=SGD), 'optimizer'), (lambda: dict(splitter=halves), 'optimizer'),
    (lambda: dict(dls=noisy_loaders(n=48)), 'dataset'), (lambda: dict(dls=noisy_loaders(bs=4)), 'batch_size'),
    (lambda: dict(dls=noisy_loaders(num_workers=1)), 'workers')])
def test_r17_what_differs_is_refused_by_name(tmp_path, kwargs, kind):
    "Another model, optimizer, data length, batch size, or workers where there were none: an error that names it"
    started_and_stopped(tmp_path, 8, fit)
    learn = noisy_learner(tmp_path, **kwargs())
    before = [p.clone() for p in learn.model.parameters()]

    with pytest.raises(ValueError, match=f'(?s)run1_step6.*does not fit this Learner:\n  {kind}: .*allow={{.*{kind}'):
        fit(learn, cbs=[Checkpoint()], resume=True)
    assert all(map(torch.equal, before, learn.model.parameters())) and learn.n_step == 0


def test_other_batches_are_allowed(tmp_path):
    "With another batch size the epoch goes on with the items that are left; with other data it is begun again"
    started_and_stopped(tmp_path, 10, fit)  # three batches of 8 into the second epoch
    whole = noisy_learner(tmp_path/'whole')
    whole.fit(2, 1e-2)
    small, more = noisy_learner(tmp_path, dls=noisy_loaders(bs=4)), None

    fit(small, cbs=[Checkpoint(path='a')], resume=tmp_path/'models/checkpoints/run1_step8.ckpt', allow={'batch_size'})
    more = noisy_learner(tmp_path, dls=noisy_loaders(n=48))
    fit(more, cbs=[Checkpoint(path='b')], resume=tmp_path/'models/checkpoints/run1_step8.ckpt', allow='dataset')

    assert small.dls.train_ds.asked[:16] == whole.dls.train_ds.asked[64:] and small.n_step == 8+4+10
    assert sorted(more.dls.train_ds.asked[:48]) == [*range(48)] and more.n_step == 8+6+6


@pytest.mark.parametrize(('kwargs', 'match'), [
    (dict(resume='models/all.ckpt'), 'no state of a fit under way'), (dict(resume='models/w.pth'), 'no state of a fit'),
    (dict(resume=True, reset_opt=True), 'reset_opt'), (dict(resume=True, start_epoch=1), 'start_epoch'),
    (dict(allow={'workers'}), 'needs `resume`'), (dict(resume=True, allow={'everything'}), 'everything')])
def test_what_cannot_be_gone_on_with(tmp_path, monkeypatch, kwargs, match):
    "Files that hold no fit, and arguments that make no sense together, are errors before training"
    monkeypatch.chdir(tmp_path)
    started_and_stopped(tmp_path, 5, fit)
    learn = noisy_learner(tmp_path)
    learn.save_state('all')
    save_file(dict(a=1), tmp_path/'models/w.pth')

    with pytest.raises((ValueError, TypeError), match=match): fit(learn, cbs=[Checkpoint()], **kwargs)
    assert learn.n_step == 0


@pytest.mark.parametrize('kwargs', [dict(lr=2e-2), dict(wd=.1)])
def test_other_rates(tmp_path, kwargs):
    "Another rate or decay is refused by name; if it is allowed, it holds from there on"
    started_and_stopped(tmp_path, 10, fit)
    learn, args = noisy_learner(tmp_path), dict(lr=1e-2) | kwargs
    name = next(iter(kwargs))

    with pytest.raises(ValueError, match=f'{name}: it trained with the .* 0.01|{name}: it trained with the .* None'):
        learn.fit(3, cbs=[Checkpoint()], resume=True, **args)
    learn.fit(3, cbs=[Checkpoint()], resume=True, allow=name, **args)

    last = learn.recorder.hps[name][-1].tolist()
    assert last == [kwargs[name]] and learn.recorder.hps[name][0].tolist() != last


def test_other_callbacks(tmp_path):
    "A callback whose state would be lost, or a new schedule, is refused by name; others are begun anew"
    fit_with = with_cb(Counts)
    started_and_stopped(tmp_path, 10, fit_with)

    with pytest.raises(ValueError, match='callbacks: `counts` is missing'):
        fit(noisy_learner(tmp_path), cbs=[Checkpoint()], resume=True)
    with pytest.raises(ValueError, match='callbacks: it holds no state of `param_scheduler`'):
        one_cycle(noisy_learner(tmp_path), cbs=[Checkpoint(), Counts()], resume=True)
    learn = noisy_learner(tmp_path)
    with pytest.warns(UserWarning, match='holds no state of `early_stopping`: begun anew'):
        fit_with(learn, cbs=[Checkpoint(), EarlyStoppingCallback(patience=9)], resume=True)

    assert learn.n_step == 15
