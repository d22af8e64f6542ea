"""SwitchAt: the last epochs are trained another way, once, wherever a fit begins, stops or goes on."""
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from learner.callback import Callback
from learner.callbacks.control import SkipToEpoch
from learner.callbacks.switch import SwitchAt
from learner.callbacks.tracker import SaveModelCallback
from learner.events import CancelEpochException, CancelFitException
from tests.helpers import raises, synth_dls, synth_learner, weights
from tests.resume_helpers import AskAt


class Log:
    "`do` and `undo` that note where they are called"
    def __init__(self): self.seen = []
    def do(self, learn): self.seen.append(('do', learn.epoch, learn.n_epoch))
    def undo(self, learn): self.seen.append(('undo', learn.epoch, learn.n_epoch))
    @property
    def calls(self): return [what for what, *_ in self.seen]


def logged(epoch=1, **kwargs):
    log = Log()
    return log, SwitchAt(epoch, log.do, log.undo, **kwargs)


# ---- when

@pytest.mark.parametrize('epoch,n_epoch,start,at', [(0, 3, 0, 0), (2, 4, 0, 2), (-1, 3, 0, 2), (-15, 3, 0, 0),
                                                    (1, 4, 2, 2), (-1, 4, 2, 3)])
def test_once_before_its_epoch(epoch, n_epoch, start, at):
    "`do` is called once, before the first epoch from its own on, counted in this fit; `undo` when the fit is over"
    log, cb = logged(epoch)

    synth_learner(cb).fit(n_epoch, start_epoch=start)

    assert log.seen == [('do', at, n_epoch), ('undo', n_epoch-1, n_epoch)]

def test_each_fit_anew():
    "With `undo` a next fit switches again; evaluations, sweeps and fits of no epochs do not switch"
    log, cb = logged(-1)
    learn = synth_learner(cb)

    for _ in range(2): learn.fit(2)
    learn.validate()
    learn.get_preds()
    learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)
    learn.fit(0)

    assert log.calls == ['do', 'undo']*2

def test_several():
    "Several switches act at their own epochs"
    (log, a), (late, b) = logged(1), logged(-1)

    synth_learner([b, a]).fit(4)

    assert [seen[0] for seen in (log.seen, late.seen)] == [('do', 1, 4), ('do', 3, 4)]

def test_skipped_epochs():
    "A fit that a callback lets begin later switches at its first epoch"
    log, cb = logged(1)

    synth_learner([cb, SkipToEpoch(2)]).fit(3)

    assert log.seen[0] == ('do', 2, 3)

@pytest.mark.parametrize('at', ['before_epoch', 'before_train', 'before_batch'])
def test_cancelled_epoch(at):
    "An epoch that is cancelled after the switch switches all the same, and once"
    log, cb = logged(1)

    synth_learner([cb, Callback(**{at: raises(CancelEpochException, nth=2 if at != 'before_batch' else 3)})]).fit(3)

    assert log.seen == [('do', 1, 3), ('undo', 2, 3)]

def test_what_it_changes_counts_in_that_epoch():
    "A loader that `do` exchanges is the one of that epoch, parameters that it adds are trained, modes it sets stay"
    learn = synth_learner(model=nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    other, seen = synth_dls(n=5)[0], []
    def do(learn):
        learn.dls.train = other
        learn.model.append(nn.Linear(1, 1))
        learn.create_opt()
        learn.model[1].eval()
    look = Callback(after_batch=lambda cb: seen.append((cb.epoch, cb.n_iter, cb.model[1].training)))
    look.run_valid = False

    learn.fit(2, .1, cbs=[SwitchAt(1, do), look, Callback(before_train=lambda cb: seen.append(weights(cb)[-1]))])

    batches = [o for o in seen if isinstance(o, tuple)]
    assert batches == [(0, 2, True)]*2 + [(1, 5, False)]*5
    assert len(weights(learn)) == 6 and not torch.equal(seen[3], weights(learn)[-1])

def test_others_see_it():
    "Who looks at model or data when an epoch begins sees them switched, wherever it was added"
    seen, log = [], Log()
    first = Callback(before_epoch=lambda cb: seen.append(log.calls))

    synth_learner([first, SwitchAt(1, log.do, log.undo)]).fit(2)

    assert seen == [[], ['do']]

def test_forgotten_parameters_are_told():
    "Parameters that `do` adds and no optimizer has are named before the epoch that would train them"
    def do(learn): learn.model.late = nn.Parameter(torch.ones(1))

    with pytest.warns(UserWarning, match='not trained, since the optimizer was made without them: late'):
        synth_learner(SwitchAt(1, do)).fit(2)


# ---- the end of a fit

@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize('nth,calls', [(1, []), (3, ['do', 'undo'])])
def test_undone_after_an_error(error, nth, calls):
    "An error, or an interrupt in the midst of a batch, ends the fit: what was switched is put back, nothing else is"
    log, cb = logged(1)

    with pytest.raises(error):
        synth_learner([cb, Callback(after_loss=raises(error, when=True, nth=nth))]).fit(2)

    assert log.calls == calls

@pytest.mark.parametrize('event', ['before_epoch', 'after_epoch', 'after_batch'])
def test_undone_after_a_cancel(event):
    "A fit that a callback ends is over"
    log, cb = logged(0)

    synth_learner([cb, Callback(**{event: raises(CancelFitException)})]).fit(2)

    assert log.calls == ['do', 'undo']

def test_failing_do():
    "What has failed has not switched: nothing is undone, and the next fit begins as ever"
    learn = synth_learner(cb := SwitchAt(0, raises(ValueError('no such data')), log := Log().undo))

    with pytest.raises(ValueError, match='no such data'): learn.fit(1)
    learn.fit(1)

    assert log.__self__.calls == ['undo'] and not cb.switched

def test_the_best_model_is_loaded_before(tmp_path):
    "`undo` comes after what others do at the end of a fit, so that it finds the model as it was trained"
    def do(learn): learn.model.late = nn.Parameter(torch.ones(1))
    def undo(learn): del learn.model.late
    learn = synth_learner(path=tmp_path)

    with pytest.warns(UserWarning, match='not trained'):
        learn.fit(2, cbs=[SwitchAt(0, do, undo), SaveModelCallback()])

    assert 'late' in torch.load(tmp_path/'models'/'model.pth') and not hasattr(learn.model, 'late')


# ---- stopped and gone on with

@pytest.mark.parametrize('at,first', [(2, []), (3, []), (4, ['do']), (6, ['do'])])  # training 2, validation 1 an epoch
def test_stopped_and_resumed_here(at, first):
    "A fit that was stopped stays switched, and is gone on with: `do` is called once, `undo` at its end"
    log, cb = logged(1)
    learn = synth_learner()

    with pytest.raises(KeyboardInterrupt, match='stopped'): learn.fit(3, cbs=[cb, AskAt(at)])
    between = log.calls
    learn.resume()

    assert between == first
    assert log.calls == ['do', 'undo']

def test_stopped_twice_and_stepped():
    "So it is if it is stopped again, and if it goes on in single steps"
    log, cb = logged(-1)
    learn = synth_learner(cb)

    while learn.step(1, n_epoch=3) == 1 and learn.paused: pass

    assert log.seen == [('do', 2, 3), ('undo', 2, 3)]

def test_stopped_and_given_up(silent):
    "A new fit after one that was stopped begins as that one began"
    log, cb = logged(1)
    learn = synth_learner(cb)

    learn.fit(3, cbs=AskAt(5, 'stop'))
    learn.fit(2)

    assert log.seen == [('do', 1, 3), ('undo', 0, 2), ('do', 1, 2), ('undo', 1, 2)]


# ---- without `undo`

@pytest.mark.parametrize('again', [True, False])
def test_it_stays_switched(again):
    "A second fit that begins with things switched says so, once, and the same callback does not switch again"
    log, learn = Log(), synth_learner()
    def new(): return SwitchAt(1, log.do)
    cb = new()
    learn.fit(2, cbs=cb)

    with pytest.warns(UserWarning, match='SwitchAt: this fit begins with what an earlier one has switched.*`undo=…`'):
        learn.fit(2, cbs=cb if again else (cb := new()))
    learn.fit(2, cbs=cb)

    assert log.calls == ['do']*(1 if again else 2)

def test_a_rehearsal_leaves_nothing():
    "After a dry run a fit begins as ever"
    log = Log()
    learn = synth_learner(SwitchAt(1, log.do))

    learn.dry_run('fit', 2)
    learn.fit(2)

    assert log.calls == ['do']*2


# ---- what workers see

class Flag(Dataset):
    "Items tell how the data set is when they are loaded"
    flag = 0.
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((1,), float(i)), torch.full((1,), self.flag)


class Sees(Callback):
    "Notes what batches hold"
    def __init__(self): self.flags, self.items = [], []

    def after_batch(self):
        self.flags.append((self.epoch, self.training, self.yb[0].unique().tolist()))
        self.items += self.xb[0].flatten().tolist()*self.training


def flag_learner(workers, persistent, n_valid=1, **kwargs):
    data = Flag()
    dls = [DataLoader(data, 4, num_workers=workers, persistent_workers=persistent, shuffle=True) for _ in range(2)]
    learn = synth_learner(dls=dls if n_valid else (dls[0], None))
    return data, learn

@pytest.mark.parametrize('workers,persistent', [(0, False), (1, False), (1, True)])
def test_workers_see_it(workers, persistent):
    "Items are those of the data set as `do` leaves it, in training and validation, and later as `undo` does"
    data, learn = flag_learner(workers, persistent)
    def do(learn): data.flag = 1.
    def undo(learn): data.flag = 2.

    learn.fit(3, cbs=[SwitchAt(1, do, undo), first := Sees()])
    learn.fit(1, cbs=(later := Sees()))

    assert {(epoch, *flags) for epoch, _, flags in first.flags} == {(0, 0.), (1, 1.), (2, 1.)}
    assert {tuple(flags) for *_, flags in later.flags} == {(2.,)} and len(first.flags) == 12

@pytest.mark.parametrize('workers,persistent', [(0, False), (1, False), (1, True)])
def test_by_iterations(workers, persistent):
    "Fits by iterations count passes; what was loaded ahead for the next fit is loaded again, and none is left out"
    data, learn = flag_learner(workers, persistent, n_valid=0)
    def do(learn): data.flag = 1.
    def undo(learn): data.flag = 2.

    learn.fit_iters(3, cbs=[SwitchAt(1, do, undo), seen := Sees()])
    learn.fit_iters(1, cbs=seen)

    assert [flags for *_, flags in seen.flags] == [[0.], [0.], [1.], [2.]]
    assert sorted(seen.items[:8]) == sorted(seen.items[8:]) == [*range(8)]


# ---- what is refused

@pytest.mark.parametrize('args,error,message', [
    ((1.5, print), TypeError, '`epoch` is 1.5; give a whole number of epochs'),
    (('last', print), TypeError, "`epoch` is 'last'"), ((True, print), TypeError, '`epoch` is True'),
    ((1, 'close'), TypeError, '`do` is a `str`, not a function of the Learner'), ((1, None), TypeError, '`do` is a'),
    ((1, print, 2), TypeError, '`undo` is a `int`')])
def test_bad_arguments(args, error, message):
    "Arguments that mean nothing are refused when it is made"
    with pytest.raises(error, match=f'SwitchAt: {message}'): SwitchAt(*args)

@pytest.mark.parametrize('fit', [lambda learn: learn.fit_iters(3), lambda learn: learn.step(1)], ids=['iters', 'step'])
def test_no_last_epochs(fit):
    "A fit whose last epochs nobody knows has no last ones to switch at"
    log, cb = logged(-1)
    learn = synth_learner(cb)

    with pytest.raises(ValueError, match='SwitchAt: epoch=-1 counts from the end.*give 0 or more'): fit(learn)

    assert learn.n_step == 0 and log.seen == []

def test_an_epoch_that_never_comes():
    "An epoch after the last one is told"
    log, cb = logged(2)

    with pytest.warns(UserWarning, match='this fit has no epoch 2, but 2, counted from 0'): synth_learner(cb).fit(2)

    assert log.seen == []
