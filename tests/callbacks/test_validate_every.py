"""ValidateEvery: validation at intervals, a row each, nothing else touched; what acts on rows; stops and resumes."""
import random

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchPlateau
from torch.utils.data import DataLoader

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.control import TimeLimit
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.plateau import ReduceLROnPlateau
from learner.callbacks.recorder import Recorder
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback, TrackerCallback
from learner.callbacks.training import GradientAccumulation
from learner.callbacks.validate_every import ValidateEvery
from learner.every import Every
from tests.helpers import synth_learner
from tests.resume_helpers import AskAt, Noisy, noisy_learner, noisy_loaders, record


def steps(learn): return learn.history.step.tolist()

def params(learn): return [*learn.model.state_dict().values()]


class Losses(Callback):
    "Gives the validation losses of a list, one after the other"
    run_in = {'validate'}
    def __init__(self, *values): self.values = [*values]
    def before_validate(self): self.value = self.values.pop(0)
    def after_loss(self): self.learn.loss = torch.tensor(float(self.value))


# ---- when

@pytest.mark.parametrize('args, expected', [
    (dict(every='4it'), [0, 4, 8, 12, 15]),
    (dict(every='5it'), [0, 5, 10, 15]),
    (dict(every='4it', first=False, last=False), [4, 8, 12]),
    (dict(every='1ep'), [0, 5, 10, 15]),
    (dict(every='2ep', first=False), [10, 15]),
    (dict(every='100it'), [0, 15]),
    (dict(every='1h', first=False), [15]),
    (dict(every=Every('4it', begin=6, last=False)), [0, 6, 10, 14]),
    (dict(every='5it', schedule=[(6, 2), (12, 1)]), [0, 5, 6, 8, 10, 12, 13, 14, 15]),
    (dict(every='9it', schedule=[(6, 4)], last=False), [0, 6, 10, 14]),
    (dict(every='3ep', schedule=[(2, 1)]), [0, 10, 15])])
def test_when(tmp_path, args, expected):
    "It validates before the first step, at each interval, and after the last step, each once, and nowhere else"
    learn = noisy_learner(tmp_path)

    learn.fit(3, cbs=ValidateEvery(**args))

    assert steps(learn) == expected and len(learn.recorder.values) == len(expected)
    assert learn.history.valid_loss.notna().all()


def test_by_time(tmp_path):
    "A time that has passed is seen after a batch"
    learn = noisy_learner(tmp_path)

    learn.fit(1, cbs=ValidateEvery('0.000001s', first=False))

    assert steps(learn) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize('n', [7, 10, 12])
def test_in_fit_iters(tmp_path, n):
    "Also where the fit ends in the midst of an epoch"
    learn = noisy_learner(tmp_path)

    learn.fit_iters(n, cbs=ValidateEvery('4it'))

    assert steps(learn) == sorted({0, *range(4, n+1, 4), n})


def test_in_steps(tmp_path):
    "Also in `learn.step`, which has no validation of its own"
    learn = noisy_learner(tmp_path)

    learn.step(3, cbs=ValidateEvery('2it'))
    while learn.n_step < 9: learn.step(2)

    assert steps(learn) == [0, 2, 4, 6, 8]
    assert '_do_epoch_validate' not in vars(learn)


def test_with_accumulation(tmp_path):
    "Steps are counted, not batches"
    learn = noisy_learner(tmp_path)

    learn.fit(2, cbs=[GradientAccumulation(2, 'batches'), ValidateEvery('2it', first=False)])

    assert steps(learn) == [2, 4, 6]


def test_a_fit_that_is_ended_before(tmp_path):
    "After a fit that a callback ends, what it has come to is validated"
    learn = noisy_learner(tmp_path)

    learn.fit(3, cbs=[ValidateEvery('2ep'), TimeLimit(1e-9)])

    assert steps(learn) == [0, 1] and learn.n_step == 1


@pytest.mark.parametrize('kwargs, error', [
    (dict(every='often'), ValueError), (dict(every=5), TypeError),
    (dict(every='5it', schedule=[(6, 2), (6, 1)]), ValueError), (dict(every='5it', schedule=[(0, 2)]), ValueError),
    (dict(every=Every('5it'), schedule=[(6, 2)]), TypeError), (dict(every='5it', dls=[1]), TypeError),
    (dict(every='5it', dls={'a': iter([1])}), ValueError), (dict(every='5it', dls={'a': ([1], 0)}), ValueError),
    (dict(every='5it', dls={'a': ([1], 2)}), ValueError)])
def test_refused(kwargs, error):
    "What is no interval, no set, or more batches than there are"
    with pytest.raises(error): ValidateEvery(**kwargs)


def test_refused_in_a_fit(tmp_path):
    "A fit without validation set or Recorder is refused before training"
    with pytest.raises(ValueError, match='no validation set'): synth_learner(n_valid=0).fit(1, cbs=ValidateEvery('1it'))
    learn = synth_learner(default_cbs=False)
    with pytest.raises(RuntimeError, match='Recorder'): learn.fit(1, cbs=ValidateEvery('1it'))


# ---- on what

def test_values(tmp_path):
    "Each row has what `validate` gives, and the mean training loss since the row before, over epochs too"
    seen = []
    learn = noisy_learner(tmp_path)

    learn.fit(2, 1e-2, cbs=[ValidateEvery('4it'), Callback(after_row=lambda cb: seen.append(cb.learn.validate()))])

    rows, raw = learn.recorder.values, learn.recorder.raw_losses
    assert [(r['valid_loss'], r['accuracy']) for r in rows] == [(*v,) for v in seen]
    assert [r['train_loss'] for r in rows[1:]] == pytest.approx(
        [np.mean(raw[:4]), np.mean(raw[4:8]), np.mean(raw[8:])])
    assert np.isnan(rows[0]['train_loss']) and learn.recorder.iters == [0, 4, 8, 10]


def test_several_sets(tmp_path):
    "Sets of its own, some of which are evaluated in part, always from their start"
    data = Noisy(16)
    a, b = DataLoader(data, 4), DataLoader(data, 4)
    learn = noisy_learner(tmp_path)
    data.asked.clear()

    learn.fit(1, 1e-2, cbs=ValidateEvery('3it', dls={'a': a, 'b': (b, 2)}))

    assert data.asked == [*range(16), *range(8)]*3
    assert learn.recorder.metric_names == ['epoch', 'step', 'train_loss', 'a_valid_loss', 'a_accuracy', 'b_valid_loss',
                                           'b_accuracy', 'time']
    assert learn.history.iloc[1:].notna().all(axis=None)
    assert [*learn.dls.valid_sets] == ['']


def test_sets_of_the_learner(tmp_path):
    "Several validation sets of the Learner, each as a whole; the training loader may be one of its own"
    train, valid = noisy_loaders()
    learn = noisy_learner(tmp_path, dls=(train, {'x': valid, 'y': valid}))
    learn.fit(1, cbs=ValidateEvery('3it'))
    assert {'x_valid_loss', 'y_accuracy'} <= {*learn.history.columns}

    learn.fit(1, cbs=ValidateEvery('3it', dls={'train': (learn.dls.train, 1), 'valid': valid}))
    assert {'train_valid_loss', 'valid_accuracy'} <= {*learn.history.columns}


@pytest.mark.parametrize('every', ['1it', '2it', '1ep'])
@pytest.mark.parametrize('workers', [0, 1])
def test_training_is_undisturbed(tmp_path, every, workers):
    "Weights, random streams and modes are those of a fit that never validates"
    def dls(): return noisy_loaders(num_workers=workers)[0], DataLoader(Noisy(16), 8, shuffle=True)
    learn = noisy_learner(tmp_path, dls())
    learn.fit(2, 1e-2, cbs=ValidateEvery(every))
    found = params(learn), torch.rand(1), random.random(), np.random.rand()

    plain = noisy_learner(tmp_path, (dls()[0], None))
    plain.fit(2, 1e-2)

    assert all(map(torch.equal, found[0], params(plain)))
    assert found[1:] == (torch.rand(1), random.random(), np.random.rand())


def test_modes(tmp_path):
    "The model evaluates in eval mode, and trains in train mode with gradients"
    seen = {}
    def note(cb): seen.setdefault(cb.learn.stage, set()).add((cb.model.training, torch.is_grad_enabled()))

    noisy_learner(tmp_path).fit(1, cbs=[ValidateEvery('1it'), Callback(before_batch=note)])

    assert seen == {'train': {(True, True)}, 'valid': {(False, False)}}


@pytest.mark.parametrize('n', [1, 4, 5])
def test_metrics_of_training_batches(tmp_path, n):
    "They begin anew with each row"
    learn = noisy_learner(tmp_path, default_cbs=dict(recorder=Recorder(train_metrics=True), progress=None))
    seen = []
    def note(cb): seen.append(float((cb.pred.argmax(1) == cb.y).float().mean()))

    learn.fit(1, cbs=[ValidateEvery(f'{n}it'), Callback(after_pred=lambda cb: note(cb) if cb.training else None)])

    groups = [seen[i:i+n] for i in range(0, 5, n)]
    assert learn.history.train_accuracy.tolist()[1:] == pytest.approx([np.mean(g) for g in groups])
    assert learn.history.valid_accuracy.notna().all()


def test_it_shows_its_rows(tmp_path, capsys, monkeypatch):
    "Each row is in the table that is shown, and in a CSVLogger's file"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    learn = noisy_learner(tmp_path, default_cbs=True)
    csv = CSVLogger()
    learn.add_cb(csv)

    learn.fit(2, cbs=ValidateEvery('4it'))

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ['epoch', 'step', 'train_loss', 'valid_loss', 'accuracy', 'time']
    assert [line.split()[:2] for line in lines[1:]] == [['0', '0'], ['0', '4'], ['1', '8'], ['1', '10']]
    assert csv.read_log().step.tolist() == [0, 4, 8, 10]


# ---- what acts on rows

def test_trackers(tmp_path):
    "A tracker looks at each row, an early stop ends the fit after one, and the best weights come back"
    learn = noisy_learner(tmp_path)
    learn.add_cb(Losses(5, 3, 4, 4, 9))
    tracker, stop, seen = TrackerCallback(), EarlyStoppingCallback(patience=2), []
    def note(cb): seen.append((cb.learn.n_step, tracker.new_best, tracker.best))
    saved = Callback(before_step=lambda cb: best.append(params(learn)) if cb.learn.n_step == 2 and not best else None)
    best: list = []
    notes = [Callback(cleanup_row=note), saved]

    learn.fit(3, 1e-2, cbs=[tracker, SaveModelCallback(), stop, ValidateEvery('2it'), *notes])

    assert seen == [(0, True, 5.), (2, True, 3.), (4, False, 3.), (6, False, 3.)]
    assert stop.wait == 2 and learn.n_step == 6
    assert torch.equal(learn.model[0].weight, best[0][0])


def test_checkpoints_of_the_best(tmp_path):
    "A Checkpoint keeps the best row's, also if the fit is ended at the next one"
    learn = noisy_learner(tmp_path)
    learn.add_cb(Losses(5, 3, 4))

    learn.fit(3, 1e-2, cbs=[EarlyStoppingCallback(), Checkpoint(monitor='valid_loss'), ValidateEvery('2it')])
    learn.load('checkpoints/run1_best_valid_loss.ckpt')

    again = noisy_learner(tmp_path/'again')
    again.fit_iters(2, 1e-2)
    assert torch.equal(learn.model[0].weight, again.model[0].weight)


@pytest.mark.parametrize('make', [
    lambda: ReduceLROnPlateau(), lambda: TorchScheduler(lambda opt: TorchPlateau(opt, patience=0))])
def test_plateaus(tmp_path, make):
    "Both kinds of plateau act on rows"
    learn = noisy_learner(tmp_path)
    learn.add_cb(Losses(5, 6, 4, 3))

    learn.fit_iters(6, 1e-2, cbs=[make(), ValidateEvery('2it')])

    assert learn.recorder.lrs == pytest.approx([1e-2]*2 + [1e-3]*4)


def test_a_loss_that_is_not_finite(tmp_path):
    "A NaN in a row is seen by what looks for it"
    learn = noisy_learner(tmp_path)
    learn.add_cb(Losses(5, float('nan')))

    learn.fit(3, cbs=[EarlyStoppingCallback(patience=9, check_finite=True), ValidateEvery('2it', first=True)])

    assert learn.n_step == 2


# ---- stops

@pytest.mark.parametrize('k', range(1, 21))
def test_interrupted_and_resumed(tmp_path, k):
    "A stop at any batch, of training or of a validation, loses no row and changes no bit"
    def cbs(): return [ValidateEvery('3it'), SaveModelCallback(), Checkpoint()]
    learn = noisy_learner(tmp_path/'a')
    stops = AskAt(k)
    learn.add_cb(stops)
    with pytest.raises(KeyboardInterrupt): learn.fit(2, 1e-2, cbs=cbs())

    other = noisy_learner(tmp_path/'a')
    other.fit(2, 1e-2, cbs=cbs(), resume=True)
    found = other.state_hash(), record(other)

    whole = noisy_learner(tmp_path/'b')
    whole.fit(2, 1e-2, cbs=cbs())
    assert found == (whole.state_hash(), record(whole))
    learn.remove_cb(stops)
    if learn.paused: learn.resume()
    assert record(learn) == record(whole)


def test_a_stop_in_a_validation_is_soon(tmp_path):
    "The validation is given up at the next batch, without a row, and no further batch is trained"
    learn = noisy_learner(tmp_path, (noisy_loaders()[0], DataLoader(Noisy(80), 8)))
    stop = AskAt(8)

    with pytest.raises(KeyboardInterrupt): learn.fit(2, cbs=[ValidateEvery('3it', first=False), stop])

    assert stop.seen == 8 and learn.n_step == 3 and len(learn.recorder.values) == 0
