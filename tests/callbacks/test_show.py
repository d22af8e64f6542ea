"""The loop's table, and fits without bar or rows."""
import pytest

from learner.callback import Callback
from learner.callbacks.show import outline
from learner.display import set_display
from learner.events import event_names
from tests.helpers import Tracer, raises, synth_learner


@pytest.fixture(autouse=True)
def log():
    set_display('log')
    yield
    set_display('auto')


def test_outline_has_every_event_of_a_fit():
    "The outline names all events of a fit, in the order in which it fires them"
    learn = synth_learner(tracer := Tracer(), n=1)
    learn.fit(1)

    names = [name for _, name in outline()]

    assert set(names) == set(event_names) - {'after_create', 'before_save', 'before_load', 'after_load'}
    fired = [e for e in tracer.seen if e != 'after_create' and not e.startswith('cleanup')]
    assert [n for n in names if 'cancel' not in n and not n.startswith(('cleanup', 'save'))] == fired


def test_show_training_loop(capsys):
    "The table shows who acts at each event, in order, and leaves out cancels and cleanups where nobody acts"
    learn = synth_learner([Callback(after_cancel_epoch=print), Tracer], default_cbs=False)
    learn.remove_cb(Tracer)

    learn.show_training_loop()

    out = capsys.readouterr().out
    assert 'after_cancel_epoch' in out and 'after_cancel_fit' not in out and 'after_pred' in out
    assert 'TrainEvalCallback' in next(line for line in out.splitlines() if 'before_validate' in line)


@pytest.mark.parametrize('ex', [None, ValueError, KeyboardInterrupt])
def test_no_bar_and_no_logging(ex, capsys):
    "Within `no_bar` rows are plain lines, within `no_logging` there are none; then, and after errors, all is back"
    learn = synth_learner(default_cbs=True)
    def fit(context):
        with context:
            try: learn.fit(1, cbs=Callback(after_epoch=raises(ex)) if ex else None)
            except (ValueError, KeyboardInterrupt): pass
        return capsys.readouterr().out

    quiet, plain, again = fit(learn.no_logging()), fit(learn.no_bar()), fit(learn.no_mbar())

    assert 'train_loss' not in quiet and learn.create_mbar and learn.logger is None
    if ex is None: assert 'train_loss' in plain and 'train_loss' in again
    learn.fit(1)
    assert 'train_loss' in capsys.readouterr().out


def test_contexts_give_the_learner():
    "`with learn.no_bar() as l` gives the Learner"
    learn = synth_learner()

    with learn.no_bar() as a, learn.no_logging() as b: assert a is b is learn
