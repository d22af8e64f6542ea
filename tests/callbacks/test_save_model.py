"""SaveModelCallback: which model is in the file, which is loaded, and what a failing disk costs."""
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from learner.callback import Callback
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback
from learner.events import CancelFitException, CancelTrainException
from learner.learner import Learner
from tests.callbacks.test_tracker import early, inf, nan, scripted
from tests.helpers import raises, synth_learner, weights


@pytest.fixture(autouse=True)
def saving(monkeypatch):
    "Stand-ins, as long as the Learner cannot save: the same names and results"
    if hasattr(Learner, 'save'): return
    def at(self, file): return Path(self.path)/self.model_dir/f'{file}.pth'
    def save(self, file, with_opt=True):
        at(self, file).parent.mkdir(parents=True, exist_ok=True)
        torch.save([self.model.state_dict(), self.opt.opt.state_dict() if with_opt else None], at(self, file))
        return at(self, file)
    def load(self, file, with_opt=None):
        model, opt = torch.load(at(self, file))
        self.model.load_state_dict(model)
        if with_opt: self.opt.opt.load_state_dict(opt)
    monkeypatch.setattr(Learner, 'save', save, raising=False)
    monkeypatch.setattr(Learner, 'load', load, raising=False)


class Weights(Callback):
    "Keeps the weights after each epoch, as they were validated"
    order = -10
    def before_fit(self): self.seen = []
    def after_epoch(self): self.seen.append(weights(self.learn))


def learner(path, values, *cbs, **kwargs):
    return scripted(values, Weights, *cbs, path=path, lr=.1, **kwargs)

def saver(**kwargs): return SaveModelCallback('score', 'min', **kwargs)

def at_epoch(learn):
    "The epoch after which the weights were those of now"
    return [i for i, ws in enumerate(learn.weights.seen) if all(map(torch.equal, ws, weights(learn)))]

def files(path): return sorted(p.stem for p in (path/'models').iterdir())


# ---- the best one

@pytest.mark.parametrize('kwargs, best', [({}, 3), (dict(min_delta=1.), 1), (dict(comp='max'), 0)])
def test_loads_the_best(kwargs, best, tmp_path):
    "After the fit the weights are those of the best epoch"
    learn = learner(tmp_path, [5., 3., 4., 2.5, 3.], SaveModelCallback('score', **dict(comp='min') | kwargs))

    learn.fit(5)

    assert at_epoch(learn) == [best] and learn.save_model.best == learn.recorder.values[best]['score']
    assert files(tmp_path) == ['model'] and learn.save_model.last_saved_path == tmp_path/'models'/'model.pth'

def test_fname(tmp_path):
    "The file has the name that is given, and an old one of another name stays"
    learn = learner(tmp_path, [5., 3., 4.], saver(fname='best_one'))
    learn.create_opt()
    old = learn.save('model').read_bytes()

    learn.fit(3)

    assert files(tmp_path) == ['best_one', 'model'] and (tmp_path/'models'/'model.pth').read_bytes() == old

@pytest.mark.parametrize('with_opt, steps', [(False, 3), (True, 2)])
def test_with_opt(with_opt, steps, tmp_path):
    "The optimizer's state is saved and loaded with the weights, or left as it is"
    learn = learner(tmp_path, [5., 3., 4.], saver(with_opt=with_opt))

    learn.fit(3)
    files = learn.save_model.last_saved_path, learn.save('other', with_opt=with_opt)

    assert len({path.stat().st_size for path in files}) == 1
    assert {s['step'].item() for s in learn.opt.opt.state.values()} == {steps} and at_epoch(learn) == [1]

def test_cancelled_fit_loads_the_best(tmp_path):
    "So it is where early stopping ends the fit"
    learn = learner(tmp_path, [5., 3., 4., 4., 1.], saver(), EarlyStoppingCallback('score', 'min', patience=2))

    learn.fit(5)

    assert at_epoch(learn) == [1] and len(learn.recorder.values) == 4

def test_best_is_saved_where_another_ends_the_fit(tmp_path):
    "The best epoch is in the file although an earlier callback ends the fit in its `after_epoch`"
    cb = early(Callback(after_epoch=raises(CancelFitException, nth=2)))
    learn = learner(tmp_path, [5., 3., 1.], saver(), cb)

    learn.fit(3)

    assert at_epoch(learn) == [1] and learn.save_model.best == 3.

@pytest.mark.parametrize('ex', [ValueError, KeyboardInterrupt])
def test_error_loads_nothing(ex, tmp_path):
    "After an error or an interrupt the weights are the present ones, to go on with; the best ones are in the file"
    learn = learner(tmp_path, [5., 6., 4.], saver(), Callback(before_train=raises(ex, nth=3)))

    with pytest.raises(ex): learn.fit(3)
    present = at_epoch(learn)
    learn.load('model')

    assert present == [1] and at_epoch(learn) == [0]

@pytest.mark.parametrize('values', [[nan, inf], []])
def test_file_of_an_older_run_is_not_loaded(values, tmp_path):
    "A fit in which nothing was saved loads nothing, and says so if there was an epoch"
    learner(tmp_path, [5.], saver()).fit(1)
    learn = learner(tmp_path, values, saver())
    start = weights(learn)

    if values:
        with pytest.warns(UserWarning, match='`score` gave no new best.*weights are those of the last epoch'):
            learn.fit(len(values))
    else: learn.fit(0)

    assert at_epoch(learn) == ([1] if values else []) and files(tmp_path) == ['model']
    assert values or all(map(torch.equal, start, weights(learn)))

def test_file_of_an_earlier_fit_is_not_loaded(tmp_path):
    "Nor is what the same callback saved in an earlier fit, if `best` was forgotten since"
    learn = learner(tmp_path, [5.], saver())
    learn.fit(1)
    learn.metrics[0].values = [nan]

    with pytest.warns(UserWarning, match='none is loaded'): learn.fit(1)

    assert at_epoch(learn) == [0]

@pytest.mark.parametrize('reset, best, n_seen', [(True, 7., [1]), (False, 3., [])])
def test_best_of_several_fits(reset, best, n_seen, tmp_path):
    "A second fit loads its own best, or with `reset_on_fit=False` that of both"
    learn = learner(tmp_path, [5., 3.], saver(reset_on_fit=reset))
    learn.fit(2)
    first, learn.metrics[0].values = weights(learn), [8., 7.]

    learn.fit(2)

    assert (learn.save_model.best, at_epoch(learn)) == (best, n_seen)
    assert all(map(torch.equal, first, weights(learn))) != reset

def test_s13_best_is_remembered(tmp_path):
    "A fit that goes on with the state after epoch 3 leaves the best file as it is, and loads it at its end"
    first = learner(tmp_path, [.5, .7, .9, .6], SaveModelCallback('score', 'max'))
    first.fit(4)
    state, file = deepcopy(first.save_model.state_dict()), first.save_model.last_saved_path
    old, best = file.read_bytes(), weights(first)
    second = learner(tmp_path, [0]*4+[.5, .5], SaveModelCallback('score', 'max'))
    resumed = Callback(before_train=lambda cb: second.epoch == 4 and second.save_model.load_state_dict(state))

    second.fit(6, start_epoch=4, cbs=resumed)

    assert file.read_bytes() == old and second.save_model.best == .9 and second.save_model.last_saved_path == file
    assert all(map(torch.equal, best, weights(second)))

def test_evaluation_saves_nothing(tmp_path):
    "`validate` does not touch the file"
    learn = learner(tmp_path, [5., 3.], saver())
    learn.fit(1)
    old, learn.epoch = learn.save_model.last_saved_path.read_bytes(), 1

    learn.validate()

    assert learn.save_model.last_saved_path.read_bytes() == old and learn.save_model.best == 5.


# ---- each epoch, and at the end

@pytest.mark.parametrize('every, expected', [(True, '01234'), (1, '01234'), (2, '024'), (3, '03')])
def test_every_epoch(every, expected, tmp_path):
    "Each n-th epoch, from 0 on, has a file with its weights; nothing is watched and nothing loaded"
    learn = synth_learner([Weights, cb := SaveModelCallback(every_epoch=every, fname='m')], n_valid=0, path=tmp_path)

    learn.fit(5)

    assert files(tmp_path) == [f'm_{i}' for i in expected] and at_epoch(learn) == [4] and cb.best is None
    assert cb.last_saved_path == tmp_path/'models'/f'm_{expected[-1]}.pth'
    learn.load(f'm_{expected[-1]}')
    assert at_epoch(learn) == [int(expected[-1])]

def test_numbers_of_files_go_on(tmp_path):
    "A fit that begins at a later epoch overwrites no earlier file"
    synth_learner(SaveModelCallback(every_epoch=True), path=tmp_path).fit(2)
    old = (tmp_path/'models'/'model_1.pth').read_bytes()

    synth_learner(SaveModelCallback(every_epoch=True), path=tmp_path).fit(4, start_epoch=2)

    assert files(tmp_path) == [f'model_{i}' for i in range(4)]
    assert (tmp_path/'models'/'model_1.pth').read_bytes() == old

@pytest.mark.parametrize('event, ex, n', [('before_train', ValueError, 1), ('after_epoch', CancelFitException, 2),
                                          ('before_train', CancelTrainException, 3)])
def test_every_epoch_that_came_to_its_end(event, ex, n, tmp_path):
    "Half an epoch is not saved; one in whose `after_epoch` the fit is ended is, and one with a cancelled phase"
    learn = synth_learner([SaveModelCallback(every_epoch=True), early(Callback(**{event: raises(ex, nth=2)}))],
                          path=tmp_path)

    if ex is ValueError:
        with pytest.raises(ex): learn.fit(3)
    else: learn.fit(3)

    assert files(tmp_path) == [f'model_{i}' for i in range(n)]

def test_every_epoch_without_recorder(tmp_path):
    "Where nothing is watched, no Recorder is needed"
    synth_learner(SaveModelCallback(every_epoch=True), default_cbs=False, path=tmp_path).fit(2)

    assert files(tmp_path) == ['model_0', 'model_1']

@pytest.mark.parametrize('cancel', [False, True])
def test_at_end(cancel, tmp_path):
    "The model is saved once, when the fit is over or was cancelled"
    seen, ends = [], [Callback(after_epoch=raises(CancelFitException, nth=2))] if cancel else []
    look = Callback(cleanup_epoch=lambda cb: seen.append((tmp_path/'models').exists()))
    learn = learner(tmp_path, [3., 4., 5.], saver(at_end=True), early(look), *ends)

    learn.fit(3)
    last = at_epoch(learn)
    learn.load('model')

    assert last == at_epoch(learn) == [1 if cancel else 2] and seen == [False]*(2 if cancel else 3)

def test_two_of_one_file(tmp_path):
    "Two that write the same file are refused before training; a best one and one for each epoch write others"
    learn = learner(tmp_path, [3., 4.], saver())

    with pytest.raises(ValueError, match='2 of SaveModelCallback write to `model`: give each its own `fname`'):
        learn.fit(1, cbs=SaveModelCallback())
    learn.fit(2, cbs=[SaveModelCallback(fname='other'), SaveModelCallback(every_epoch=True)])

    assert files(tmp_path) == ['model', 'model_0', 'model_1', 'other']

def test_two_ways_at_once():
    "`every_epoch` and `at_end` are two callbacks"
    with pytest.raises(ValueError, match='`every_epoch` or `at_end`, or two callbacks'):
        SaveModelCallback(every_epoch=True, at_end=True)


# ---- a failing disk

class Failing(Callback):
    "In some epochs there is a file where the folder of the models should be"
    order = -10
    def __init__(self, path, epochs): self.folder, self.aside, self.epochs = path/'models', path/'aside', epochs
    def before_epoch(self):
        if self.epoch not in self.epochs: return
        if self.folder.exists(): self.folder.rename(self.aside)
        self.folder.touch()
    def cleanup_epoch(self):
        if self.epoch not in self.epochs: return
        self.folder.unlink()
        if self.aside.exists(): self.aside.rename(self.folder)


@pytest.mark.parametrize('values, failing, best', [
    ([5., 4., 3., 6.], {1}, 2), ([5., 3., 4., 6.], {1}, 2), ([5., 3., 6., 6.], {1}, 0), ([5., 3., 6., 6.], {0}, 1)])
def test_model_that_cannot_be_saved(values, failing, best, tmp_path):
    "It is a warning, training goes on, and the best one of those that could be saved is in the file, and loaded"
    learn = learner(tmp_path, values, saver(), Failing(tmp_path, failing))

    with pytest.warns(UserWarning, match=f'model of epoch {min(failing)} was not saved as `model`: .*Error: .*models'):
        learn.fit(4)

    assert at_epoch(learn) == [best] and learn.save_model.best == values[best]

def test_no_model_could_be_saved(tmp_path):
    "Then nothing is loaded, and it is said"
    learn = learner(tmp_path, [5.], saver(), Failing(tmp_path, {0}))

    with pytest.warns(UserWarning) as said: learn.fit(1)

    assert [text for w in said for text in ('not saved as', 'none is loaded') if text in str(w.message)] == [
        'not saved as', 'none is loaded'] and learn.save_model.best is None

def test_file_is_gone_at_the_end(tmp_path):
    "A best model that cannot be loaded is a warning; the weights are the last ones"
    learn = learner(tmp_path, [5., 6.], saver(), Callback(
        after_epoch=lambda cb: cb.epoch and cb.learn.save_model.last_saved_path.unlink()))

    with pytest.warns(UserWarning, match='best model cannot be loaded.*FileNotFoundError'): learn.fit(2)

    assert at_epoch(learn) == [1]


# ---- the n best ones

@pytest.mark.parametrize('values, kwargs, kept, best', [
    ([5., 3., 4., 2.5, 9.], {}, ['model_1', 'model_3'], 3), ([5., 3., 3., 3.], {}, ['model_1', 'model_2'], 1),
    ([5., nan, inf, 6.], {}, ['model_0', 'model_3'], 0),
    ([5., 3., 4., 7.], dict(comp='max'), ['model_0', 'model_3'], 3), ([5., 3., 4.], dict(n_best=1), ['model_1'], 1),
    ([5., 3.], dict(n_best=9, fname='a'), ['a_0', 'a_1'], 1)])
def test_n_best(values, kwargs, kept, best, tmp_path):
    "The files of the best epochs are kept, and no others that it wrote; the best one is loaded"
    learn = learner(tmp_path, values, cb := SaveModelCallback('score', **dict(comp='min', n_best=2) | kwargs))
    learn.create_opt()
    learn.save('mine')

    learn.fit(len(values))

    assert files(tmp_path) == sorted([*kept, 'mine']) and at_epoch(learn) == [best]
    assert cb.kept == sorted(cb.kept, reverse=kwargs.get('comp') == 'max') and {name for _, name in cb.kept} == {*kept}

def test_n_best_of_two_fits(tmp_path):
    "Where the best is not forgotten, what an earlier fit has kept is neither overwritten nor lost"
    learn = learner(tmp_path, [2., 4.], cb := saver(n_best=2, reset_on_fit=False))
    learn.fit(2)
    learn.metrics[0].values = [3., 5.]

    learn.fit(2)

    assert cb.kept == [[2., 'model_0'], [3., 'model_0_2']] and files(tmp_path) == ['model_0', 'model_0_2']

def test_n_best_goes_on(tmp_path):
    "With its state in another Learner it goes on with the files there are"
    first = learner(tmp_path, [5., 3., 4., 1.], cb := saver(n_best=2))
    first.fit(3)
    state = deepcopy(cb.state_dict())
    second = learner(tmp_path, [0., 0., 0., 1.], cb := saver(n_best=2))

    second.fit(4, start_epoch=3, cbs=Callback(before_train=lambda o: cb.load_state_dict(state)))

    assert files(tmp_path) == ['model_1', 'model_3'] and cb.kept == [[1., 'model_3'], [3., 'model_1']]

def test_n_best_that_cannot_be_saved(tmp_path):
    "What cannot be saved is none of them, and no file goes for it"
    learn = learner(tmp_path, [5., 4., 3.], cb := saver(n_best=1), Failing(tmp_path, {2}))

    with pytest.warns(UserWarning, match='was not saved as `model_2`'): learn.fit(3)

    assert cb.kept == [[4., 'model_1']] and at_epoch(learn) == [1]

@pytest.mark.parametrize('kwargs, error', [
    (dict(n_best=0), 'number of files'), (dict(n_best=2.), 'number of files'), (dict(n_best=2, at_end=True), 'two'),
    (dict(n_best=2, every_epoch=True), 'two')])
def test_odd_n_best(kwargs, error):
    "It is a number of files, and what it keeps is chosen by the column alone"
    with pytest.raises((ValueError, TypeError), match=error): SaveModelCallback(**kwargs)
