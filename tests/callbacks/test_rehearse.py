"""`learn.dry_run`: all of a fit on a few batches, of which nothing is left."""
import pytest
import torch

from learner import (SWA, Callback, CancelFitException, Checkpoint, CSVLogger, EarlyStoppingCallback, FreezeUntil,
                     GradientAccumulation, SaveModelCallback, ShortEpochCallback, split_blocks)
from learner.metrics import mse
from tests.helpers import Counts, raises, synth_learner


def saving(path, **kwargs):
    "A Learner that writes all there is"
    return synth_learner([CSVLogger, SaveModelCallback, Checkpoint(every='1it'), Counts], n=6, n_valid=3, shuffle=True,
                         path=path, metrics=mse, **kwargs)

def state(learn, path):
    files = {p.relative_to(path): p.read_bytes() for p in path.rglob('*') if p.is_file()}
    return learn.state_hash(), files, torch.get_rng_state().tolist(), [*learn.cbs], learn.history.to_json(), learn.path


@pytest.mark.parametrize('fitted', [False, True])
def test_all_is_done_and_nothing_is_left(tmp_path, fitted, capsys):
    "Training, validation, metrics, rows and files, below a folder that is gone; weights, state and files are as before"
    learn, seen = saving(tmp_path), []
    if fitted: learn.fit(1)
    learn.add_cb(Callback(after_batch=lambda cb: seen.append(cb.training)))
    before = state(learn, tmp_path)

    learn.dry_run('fit_one_cycle', 1) if fitted else learn.dry_run()

    told = capsys.readouterr().out
    assert seen == [True, False] and state(learn, tmp_path) == before
    assert 'dry_run: 1 epoch of 1 batch went through, with 1 step; written and gone: history.csv, models/che' in told
    assert 'models/model.pth' in told

def test_nothing_is_written_elsewhere(tmp_path, capsys):
    "Whatever the names lead to: an absolute `model_dir`, or one above; what is there stays as it is"
    path, real = tmp_path/'a'/'b', tmp_path/'real'
    def make(n, **kwargs):
        return synth_learner([SaveModelCallback(fname='../../best'), SaveModelCallback(fname=tmp_path/'other'), Counts,
                              CSVLogger(fname='../rows.csv')], n=n, n_valid=3, path=path, metrics=mse, **kwargs)
    make(6, model_dir=real).fit(1)
    def files(): return {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    before = files()
    for model_dir in real, '../up':
        learn = make(9, model_dir=model_dir)

        learn.dry_run()

        assert files() == before and learn.model_dir == model_dir
        assert 'best.pth' in capsys.readouterr().out

def test_no_optimizer_is_made():
    "A method that asks for one gets one that is gone afterwards"
    learn = synth_learner()
    before = learn.state_hash()

    learn.dry_run('fit_one_cycle', 1, 1e-2)

    assert learn.opt is None and learn.state_hash() == before

def test_the_next_fit_is_like_one_without(tmp_path):
    "Bit for bit, also if the dry run made the optimizer"
    def fitted(name, dry):
        learn = saving(tmp_path/name)
        if dry: learn.dry_run()
        learn.fit(1)
        return learn.state_hash(), (tmp_path/name/'history.csv').read_text().split(',')[:4]

    assert fitted('a', True) == fitted('b', False)

def test_any_fit_method(tmp_path):
    "With its schedules, phases and callbacks, which are left as they were too"
    learn = saving(tmp_path, splitter=split_blocks() if False else lambda m: [[m.a], [m.b]])
    stop, seen = EarlyStoppingCallback(patience=5), []
    learn.add_cb(Callback(before_batch=lambda cb: cb.training and seen.append((cb.epoch, cb.model.a.requires_grad))))

    learn.dry_run('fine_tune', 2, n_batches=2, cbs=stop)

    assert seen == [(e, e > 0) for e in (0, 0, 1, 1, 2, 2)] and stop.learn is None and stop.best is None
    assert not any(isinstance(cb, FreezeUntil) for cb in learn.cbs) and learn.model.a.requires_grad

def test_absolute_paths_are_not_written_to(tmp_path):
    "What our callbacks would write elsewhere goes below the temporary folder as well"
    learn = synth_learner([CSVLogger(tmp_path/'a'/'rows.csv'), Checkpoint(path=tmp_path/'b')], path=tmp_path/'c')

    learn.dry_run()

    assert not [p for p in tmp_path.rglob('*') if p.is_file()]

@pytest.mark.parametrize('event', ['before_fit', 'after_loss', 'before_validate', 'after_epoch', 'cleanup_fit'])
@pytest.mark.parametrize('ex', [ValueError, KeyboardInterrupt, CancelFitException])
def test_whatever_ends_it(tmp_path, event, ex):
    "An error, an interrupt or a cancel: all is as before"
    learn = saving(tmp_path)
    learn.fit(1)
    cb = Callback(**{event: raises(ex)})
    learn.add_cb(cb)
    before = state(learn, tmp_path)

    try: learn.dry_run()
    except (ValueError, KeyboardInterrupt, RuntimeError): pass

    assert state(learn, tmp_path) == before

def test_what_is_no_fit_and_what_goes_on():
    "Errors that say so"
    learn = synth_learner()
    with pytest.raises(ValueError, match="dry_run: 'validate' is no fit method"): learn.dry_run('validate')
    with pytest.raises(ValueError, match='dry_run: leave out `resume`'): learn.dry_run('fit', 1, resume=True)

def test_a_schedule_that_begins_later_is_no_error(capsys):
    "It does not act in so few steps; in a fit of so few it is an error"
    learn = synth_learner(SWA('5it', '2it', swa_lr=.01), n=8)

    learn.dry_run()
    learn.fit(1)

    assert 'dry_run: 1 epoch of 1 batch went through, with 1 step; nothing' in capsys.readouterr().out
    with pytest.raises(ValueError, match='there is no step in this fit'): learn.fit(1, cbs=ShortEpochCallback(n=2))

def test_it_tells_how_many_steps_it_has_tried(capsys):
    "None, if no window of gradients is full"
    learn = synth_learner(GradientAccumulation(4, 'batches', drop_last=True), n=8)

    learn.dry_run()
    learn.dry_run(n_batches=8)

    told = capsys.readouterr().out
    assert '1 batch went through, with no steps;' in told and '8 batches went through, with 2 steps;' in told
