"""How much of a fit is run: short epochs, time limits, later epochs."""
import pytest
import torch
from torch import nn

from learner import Callback, Checkpoint
from learner.callbacks import control
from learner.callbacks.control import ShortEpochCallback, SkipToEpoch, TimeLimit
from learner.callbacks.schedule import ParamScheduler
from learner.schedules import SchedLin
from tests.helpers import Reads, synth_learner, weights


def seen_by(learn, n_epoch=2, **kwargs):
    "(epoch, number, is it training?) of each batch of a fit"
    reads = Reads()
    learn.fit(n_epoch, cbs=reads, **kwargs)
    return [(epoch, i, training) for epoch, i, training, _, _ in reads.seen]


# ---- short epochs

@pytest.mark.parametrize('kwargs, n_train, n_valid', [
    (dict(pct=.5), 4, 2), (dict(pct=.01), 1, 1), (dict(n=3), 3, 3), (dict(n=3, short_valid=False), 3, 4),
    (dict(pct=1), 8, 4), (dict(n=100), 8, 4)])
def test_an_epoch_is_as_short_as_asked(kwargs, n_train, n_valid):
    "A share, of one batch at least, or a number; of validation too unless that is not wanted"
    learn = synth_learner(ShortEpochCallback(**kwargs), n=8, n_valid=4)

    seen = seen_by(learn)

    assert seen == [(e, i, t) for e in range(2) for t, n in ((True, n_train), (False, n_valid)) for i in range(n)]
    assert learn.n_step == 2*n_train and len(learn.recorder.values) == 2

def test_loss_and_rows_are_those_of_the_short_epochs():
    "It equals a fit on the first batches alone"
    short, whole = synth_learner(ShortEpochCallback(n=2), n=8, lr=.1), synth_learner(n=8, lr=.1)
    whole.dls.train, whole.dls.valid_sets[''].dl = list(whole.dls.train)[:2], list(whole.dls.valid)[:2]

    short.fit(2)
    whole.fit(2)

    assert short.recorder.values == whole.recorder.values
    assert all(map(torch.equal, weights(short), weights(whole)))

def test_schedules_end_with_the_short_epochs():
    "The last step has the last value"
    learn = synth_learner([ShortEpochCallback(n=2), ParamScheduler({'lr': SchedLin(1., 0.)})], n=8)

    learn.fit(2)

    assert learn.recorder.lrs == pytest.approx([1, 2/3, 1/3, 0])

def test_a_loader_without_length_needs_a_number():
    "A share of it is not known"
    class Stream:
        def __iter__(self): return ((torch.randn(8, 1), torch.randn(8, 1)) for _ in range(6))

    with pytest.raises(ValueError, match='loader without length: give `n`'):
        synth_learner(ShortEpochCallback(.5), dls=(Stream(), None)).fit(1)
    assert len(seen_by(synth_learner(ShortEpochCallback(n=2), dls=(Stream(), None)), 1)) == 2

@pytest.mark.parametrize('workers', [0, 2])
def test_the_next_epoch_has_a_loader_of_its_own(workers):
    "What is left of an epoch is ended, workers too; orders are those of whole epochs"
    def orders(cb):
        data = torch.utils.data.TensorDataset(torch.arange(40.)[:, None], torch.zeros(40, 1))
        torch.manual_seed(0)
        dl = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=workers)
        learn, seen = synth_learner(cb, dls=(dl, None)), []
        learn.add_cb(Callback(before_batch=lambda cb: cb.iter < 3 and seen.append(cb.x.flatten().tolist())))
        learn.fit(3)
        assert not learn.dls.train.in_use
        return seen

    assert orders(ShortEpochCallback(n=3)) == orders(None)

def test_it_goes_on_after_a_stop(tmp_path):
    "Resumed in the midst of a short epoch, it has as many batches as it had left"
    def learner(): return synth_learner([ShortEpochCallback(n=3), Checkpoint(every='1it')], n=8, shuffle=True,
                                        path=tmp_path, model=nn.Sequential(nn.Linear(1, 1)))
    torch.manual_seed(0)
    whole = synth_learner(ShortEpochCallback(n=3), n=8, shuffle=True, model=nn.Sequential(nn.Linear(1, 1)))
    start = whole.model.state_dict()
    start = {k: v.clone() for k, v in start.items()}
    whole.fit(2)
    for resume in (False, True):
        torch.manual_seed(0)
        learn = learner()
        learn.model.load_state_dict(start)
        stop = Callback(after_batch=lambda cb: cb.learn.n_step == 2 and cb.learn.request_stop())
        learn.fit(2, cbs=None if resume else stop, resume=resume)

    assert learn.n_step == 6 and all(map(torch.equal, weights(learn), weights(whole)))

@pytest.mark.parametrize('kwargs', [dict(pct=0), dict(pct=1.1), dict(n=0), dict(n=True), dict(n=1.5)])
def test_no_share_and_no_number(kwargs):
    "Refused when it is made"
    with pytest.raises((ValueError, TypeError), match='ShortEpochCallback: `(pct|n)`.* is '):
        ShortEpochCallback(**kwargs)


# ---- time

@pytest.fixture
def clock(monkeypatch):
    "A clock that each training batch puts on by a second"
    now = [0.]
    monkeypatch.setattr(control, 'perf_counter', lambda: now[0])
    return Callback(after_batch=lambda cb: now.__setitem__(0, now[0]+cb.training)), now

@pytest.mark.parametrize('limit, n_train, n_rows', [(5, 5, 2), ('5s', 5, 2), (4, 4, 1), (100, 12, 3), ('1min', 12, 3)])
def test_a_fit_ends_when_its_time_is_up(clock, limit, n_train, n_rows, capsys):
    "After the batch, and the validation of its epoch; the row is there"
    learn = synth_learner([clock[0], TimeLimit(limit)], n=4)

    learn.fit(3)

    assert (learn.n_step, len(learn.recorder.values)) == (n_train, n_rows)
    assert ('s are up in epoch' in capsys.readouterr().out) == (n_rows < 3)

def test_each_fit_has_its_time_and_a_resumed_one_what_was_left(clock, tmp_path):
    "The time before a stop counts"
    cb, now = clock
    learn = synth_learner([cb, limit := TimeLimit(6)], n=4)
    learn.fit(1)
    learn.fit(1)
    assert learn.n_step == 8

    state = limit.state_dict()
    now[0] += 1000
    limit.before_fit()
    limit.load_state_dict(state)

    assert state == dict(spent=4) and limit.spent == 4

@pytest.mark.parametrize('limit, error', [('5it', ValueError), ('5', ValueError), (0, ValueError), (None, ValueError)])
def test_no_time(limit, error):
    "Refused when it is made"
    with pytest.raises(error): TimeLimit(limit)


# ---- later epochs

def test_skipping_is_starting_later():
    "As by `start_epoch`, schedules included"
    def run(cbs, **kwargs):
        learn = synth_learner([*cbs, ParamScheduler({'lr': SchedLin(1., 0.)})], n=2)
        return seen_by(learn, 3, **kwargs), learn.recorder.lrs

    assert run([SkipToEpoch(2)]) == run([], start_epoch=2)

@pytest.mark.parametrize('epoch', [3, -1, 1.5, None])
def test_no_epoch_of_the_fit(epoch):
    "An error, at the latest at the start"
    with pytest.raises((ValueError, TypeError), match='SkipToEpoch: (there is no epoch|`epoch` is)'):
        synth_learner(SkipToEpoch(epoch)).fit(3)
