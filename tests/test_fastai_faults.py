"""What fails in fastai 2.8.12 and must not fail here, where no other test is about it."""
import pytest
import torch
import torch.nn.functional as F

from learner.callback import Callback
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.progress import ProgressCallback
from learner.display import set_display
from learner.events import CancelBatchException
from tests.helpers import raises, synth_learner


@pytest.fixture
def log():
    set_display('log')
    yield
    set_display('auto')


def test_a_fit_after_an_interrupt_prints_again(log, capsys):
    "An interrupted fit leaves no logger behind: a later fit without bar prints its rows"
    learn = synth_learner(default_cbs=True)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(after_batch=raises(KeyboardInterrupt)))
    capsys.readouterr()

    with learn.no_bar(): learn.fit(1)

    assert len(capsys.readouterr().out.splitlines()) == 2


def test_csv_logger_without_bar_after_an_interrupt(tmp_path, log):
    "CSVLogger, no bar, an interrupt and a new fit work together"
    learn = synth_learner(CSVLogger(), path=tmp_path, default_cbs=True)
    with learn.no_bar():
        with pytest.raises(KeyboardInterrupt): learn.fit(2, cbs=Callback(before_train=raises(KeyboardInterrupt, nth=2)))

        learn.fit(1)

    assert len(learn.csv_logger.read_log()) == 2


def test_removed_progress_callback_is_back():
    "Dropping the bar for a block brings the same callback back"
    learn = synth_learner(default_cbs=True)
    bar = learn.progress

    with learn.removed_cbs(ProgressCallback): learn.fit(1)

    assert learn.progress is bar


def test_validate_within_validate():
    "`validate` called by a callback while `validate` runs ends, and both have their numbers"
    inner = []
    learn = synth_learner(metrics=F.l1_loss)
    def again(cb): inner.append(cb.learn.validate(0))

    outer = learn.validate(cbs=Callback(after_batch=again, after_validate=again))

    assert outer == learn.validate() and inner[0] == inner[1] == learn.validate(0) != outer


def test_validate_in_after_epoch_of_a_fit():
    "`validate` in after_epoch is a row of its own, and the fit's record is not wiped"
    rows = []
    learn = synth_learner(Callback(after_epoch=lambda cb: rows.append(cb.learn.validate())), n=3)

    learn.fit(2)

    assert len(learn.recorder.values) == len(rows) == 2 and learn.train_iter == 6 and learn.pct_train == 1
    assert rows[1]['valid_loss'] == learn.recorder.values[1]['valid_loss']


def test_the_loss_has_no_graph():
    "`learn.loss` is a detached copy: changing `loss_grad` in place does not change it"
    seen = []
    def double(cb): cb.loss_grad.data.mul_(2)
    def look(cb): seen.append((cb.loss.grad_fn, float(cb.loss), float(cb.loss_grad.detach())))
    learn = synth_learner([Callback(after_loss=double), Callback(before_backward=look)], n=1, n_valid=0)

    learn.fit(1)

    (fn, loss, doubled), = seen
    assert fn is None and doubled == pytest.approx(2*loss)


def test_cancelled_first_batch_logs_nothing():
    "The first batch cancelled before its loss leaves no number, neither 0 nor a stale one"
    learn = synth_learner(Callback(before_batch=raises(CancelBatchException, when=True)), n=2)

    learn.fit(1)

    assert len(learn.recorder.raw_losses) == len(learn.recorder.lrs) == 1 and learn.recorder.raw_losses[0] > 0


def test_cancelled_validation_batches_are_not_compared_with_training_predictions():
    "Metrics never see a prediction of another batch"
    sizes = []
    def size(pred, y): sizes.append((len(pred), len(y))); return torch.tensor(0.)
    learn = synth_learner(Callback(before_batch=raises(CancelBatchException, when=False)), n_valid=2, metrics=size)

    learn.fit(1)

    assert sizes == [(8, 8)]


def test_list_of_text_targets_weighs_by_items():
    "Targets that are a list of text count as many items as the list is long"
    batches = [(torch.ones(4, 1), ['a']*4), (torch.ones(1, 1), ['b'])]
    def loss(pred, y): return pred.mean()*(4 if y[0] == 'a' else 1)
    learn = synth_learner(dls=(batches, None), loss_func=loss, lr=0.)

    learn.fit(1)

    pred = learn.recorder.raw_losses[1]
    assert learn.recorder.values[0]['train_loss'] == pytest.approx((4*4*pred + pred)/5)


def test_a_callback_cut_short_before_its_first_event():
    "A callback that cancels before others have begun does not make their later events fail"
    learn = synth_learner(Callback(before_fit=raises(ValueError)), default_cbs=True)
    learn.callback.order = -100

    with pytest.raises(ValueError): learn.fit(1)

    learn.fit(1)
    assert len(learn.recorder.values) == 1
