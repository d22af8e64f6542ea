"""`learn.export_pickle` and `load_learner`: the Learner without its data, and nothing run without trust."""
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import learner.pickled as pickled
from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.compile import Compiled
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.hook import HookCallback
from learner.callbacks.mixup import MixUp
from learner.callbacks.plateau import ReduceLROnPlateau
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.profile import Timer
from learner.callbacks.recompute import ActivationCheckpointing
from learner.callbacks.recorder import Recorder
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.stats import ActivationStats, GradientStats
from learner.callbacks.swa import SWA
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.callbacks.turns import TakeTurns
from learner.data import DataLoaders
from learner.files import DamagedFile, save_file
from learner.learner import Learner
from learner.metrics import accuracy
from learner.plain import digest
from learner.pickled import load_learner
from learner.schedules import SchedCos
from learner.skmetrics import F1Score
from tests.helpers import synth_learner

assert pickled
secret = 1234.5678


def classes(path, **kwargs):
    "A Learner of three classes with callbacks and metrics, trained a little"
    g = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=g)
    x[0] = secret
    dls = DataLoaders.from_tensors(x, torch.arange(24) % 3, bs=4)
    torch.manual_seed(0)
    kwargs.setdefault('cbs', [EMA(), EarlyStoppingCallback()])
    learn = Learner(dls, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), path=path, default_cbs=dict(progress=None),
                    metrics=[accuracy, F1Score(average='macro')], **kwargs)
    learn.fit(2, 1e-2)
    return learn


def test_all_but_the_data_comes_back(tmp_path):
    "Model, callbacks with what they know, metrics, classes; an evaluation gives what it gave"
    learn = classes(tmp_path)
    known, dl = learn.validate(), learn.dls.valid.dl

    new = load_learner(learn.export_pickle('mine'), trust=True)

    assert digest(new.model.state_dict()) == digest(learn.model.state_dict())
    assert [type(cb) for cb in new.cbs] == [type(cb) for cb in learn.cbs] and all(cb.learn is new for cb in new.cbs)
    assert new.recorder.values == learn.recorder.values and new.ema.n_averaged == learn.ema.n_averaged
    assert (new.dls.vocab, new.dls.c, new.dls.n_inp) == (learn.dls.vocab, 3, None)
    assert new.loss_func is new.dls.loss_func
    assert new.opt is None and not new.training and new.device == torch.device('cpu')
    assert [*new.validate(dl=dl)] == [*known]


def test_the_learner_stays(tmp_path):
    "Data, optimizer and all else of the live Learner are as before, and it goes on training"
    learn = classes(tmp_path)
    before = {k: id(v) for k, v in vars(learn).items()}, digest(learn.opt.state_dict()), digest(torch.get_rng_state())

    learn.export_pickle()

    assert ({k: id(v) for k, v in vars(learn).items()}, digest(learn.opt.state_dict()),
            digest(torch.get_rng_state())) == before
    learn.fit(1)


def test_no_data_in_the_file(tmp_path):
    "Neither items nor the optimizer's state are written, also where a callback holds loaders and optimizer"
    learn = classes(tmp_path)
    learn.recorder.seen = learn.dls, learn.dls.train, learn.dls.train.dl, learn.opt, learn.opt.opt

    new = load_learner(path := learn.export_pickle(), trust=True)

    assert torch.tensor(secret).numpy().tobytes() not in path.read_bytes()
    assert new.recorder.seen[3:] == (None, None) and [*new.recorder.seen[1]] == []


@pytest.mark.parametrize('call', [lambda learn: learn.fit(1), lambda learn: learn.dls.one_batch(),
                                  lambda learn: learn.validate(0)], ids=['fit', 'one_batch', 'validate'])
def test_without_data_it_cannot_train(call, tmp_path):
    "What needs data says that there is none, and what to do"
    new = load_learner(classes(tmp_path).export_pickle(), trust=True)

    with pytest.raises(ValueError, match='no batch: the Learner was loaded from a file, which holds no data: set'):
        call(new)


def test_with_new_data_it_trains(tmp_path):
    "Once it has data it goes on, with a new optimizer"
    learn = classes(tmp_path)
    new = load_learner(learn.export_pickle(), trust=True)
    before = digest(new.model.state_dict())

    new.dls = learn.dls
    new.fit(1)

    assert digest(new.model.state_dict()) != before


def test_before_any_fit_and_without_classes(tmp_path):
    "A Learner that has not been trained, and knows no classes, comes back too"
    learn = synth_learner(path=tmp_path)

    new = load_learner(learn.export_pickle(), trust=True)

    with pytest.raises(AttributeError, match='knows the classes'): new.dls.vocab  # noqa: B018
    assert new.validate(dl=learn.dls.valid.dl) == learn.validate()


class Sees(HookCallback):
    def hook(self, module, args, out): self.seen = out


@pytest.mark.parametrize('make', [
    EMA, partial(SWA, .1), MixUp, Timer, Sees, partial(MixedPrecision, 'bf16'), SaveModelCallback, ReduceLROnPlateau,
    partial(ParamScheduler, dict(lr=SchedCos(.1, .01))), partial(GradientAccumulation, 8), GradientClip, Checkpoint,
    partial(TorchScheduler, partial(torch.optim.lr_scheduler.StepLR, step_size=1)), ActivationStats, GradientStats,
    partial(TakeTurns, [('0', F.cross_entropy), ('1', F.cross_entropy)]), CSVLogger, partial(Compiled, backend='eager'),
    partial(ActivationCheckpointing, '1')], ids=lambda make: getattr(make, 'func', make).__name__)
def test_what_callbacks_keep(make, tmp_path):
    "With what each keeps from a fit a Learner can be pickled, and trains on once it has data, and can be again"
    learn = classes(tmp_path, cbs=[make()])

    new = load_learner(learn.export_pickle(), trust=True)

    assert digest(new.model.state_dict()) == digest(learn.model.state_dict())
    new.dls = learn.dls
    new.fit(1, 1e-2)
    new.export_pickle()


@pytest.mark.parametrize('fit', [
    lambda learn: learn.fit_one_cycle(1), lambda learn: learn.lr_find(num_it=4, show_plot=False, suggest_funcs=None),
    lambda learn: learn.validate()], ids=['one cycle', 'lr_find', 'validate'])
def test_what_runs_leave(fit, tmp_path):
    "Nor does any run leave what cannot be pickled"
    learn = classes(tmp_path)
    fit(learn)

    new = load_learner(learn.export_pickle(), trust=True)

    assert digest(new.model.state_dict()) == digest(learn.model.state_dict())


# ---- what cannot be pickled

class Holds(Callback):
    def __init__(self, what): self.what = what


def local():
    class Local(nn.Linear): pass
    return Local(1, 1)


@pytest.mark.parametrize('put, name', [
    (lambda learn: learn.add_cb(Holds(lambda: 1)), 'learn.holds.what'),
    (lambda learn: learn.add_cb(Callback(after_fit=lambda cb: None)), 'learn.callback.after_fit'),
    (lambda learn: setattr(learn, 'model', local()), 'learn.model'),
    (lambda learn: setattr(learn, 'loss_func', lambda p, y: F.mse_loss(p, y)), 'learn.loss_func'),
    (lambda learn: setattr(learn, 'metrics', [lambda p, y: p.mean()]), 'learn.metrics'),
    (lambda learn: setattr(learn.dls, 'vocab', [lambda: 1]), 'learn.dls.vocab'),
    (lambda learn: setattr(learn, 'opt_func', lambda ps, **k: None), 'learn.opt_func')],
    ids=['attribute', 'handler', 'model', 'loss', 'metric', 'vocab', 'opt_func'])
def test_what_cannot_be_pickled_is_named(put, name, tmp_path):
    "The error says where it is; the old file and the Learner stay"
    learn = synth_learner(path=tmp_path)
    old = learn.export_pickle().read_bytes()
    put(learn)
    dls, before = learn.dls, sorted(vars(learn))

    with pytest.raises(TypeError, match=f'`{name}` cannot be pickled: .*'): learn.export_pickle()

    assert (tmp_path/'learner.pkl').read_bytes() == old and len([*tmp_path.iterdir()]) == 1
    assert learn.dls is dls and sorted(vars(learn)) == before


@pytest.mark.parametrize('name, why', [('.', 'no file'), ('', 'no file'), ('m.pt2', '`learn.export`')])
def test_name_of_another_file(name, why, tmp_path):
    "A name that is a folder's, or another method's, is refused before anything is written"
    with pytest.raises(ValueError, match=f'export_pickle: .*{why}'): synth_learner(path=tmp_path).export_pickle(name)

    assert [*tmp_path.iterdir()] == []


def test_within_a_fit(tmp_path):
    "There is a loop under way that a file cannot hold"
    learn = synth_learner(Callback(after_epoch=lambda cb: cb.learn.export_pickle()), path=tmp_path)

    with pytest.raises(RuntimeError, match='within a fit that is still running'): learn.fit(1)


# ---- what is loaded

class Runs:
    "Makes a folder when it is unpickled"
    def __init__(self, folder): self.folder = folder
    def __reduce__(self): return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize('trust', [False, None, 'no'])
def test_nothing_is_run_without_trust(trust, tmp_path):
    "Without `trust=True` the pickle is not opened"
    learn = synth_learner(path=tmp_path)
    harm = learn.recorder.harm = Runs(tmp_path/'harm')
    path = learn.export_pickle()

    with pytest.raises(ValueError, match='whoever made it decides which code runs .* `trust=True`'):
        load_learner(path, trust=trust)

    assert not harm.folder.exists()
    load_learner(path, trust=True)
    assert harm.folder.exists()


def test_damaged_file(tmp_path):
    "Damage is found before the pickle is opened"
    path = synth_learner(path=tmp_path).export_pickle()
    data = bytearray(path.read_bytes())
    data[len(data)//2] ^= 1
    path.write_bytes(data)

    with pytest.raises(DamagedFile): load_learner(path, trust=True)


@pytest.mark.parametrize('o', [dict(kind='state'), [1], torch.zeros(2)], ids=['dict', 'list', 'tensor'])
def test_another_file(o, tmp_path):
    "Another file of this package is none of a Learner"
    save_file(o, tmp_path/'x.pkl')

    with pytest.raises(ValueError, match='was not written by `learn.export_pickle`'):
        load_learner(tmp_path/'x.pkl', trust=True)


def program(learn): return learn.export()
def weights(learn): return learn.save('w', with_opt=False)
def published(learn): return learn.publish('w', card=False)


@pytest.mark.parametrize('trust', [False, True])
@pytest.mark.parametrize('write', [program, weights, published])
def test_files_of_other_methods(write, trust, tmp_path):
    "What else a Learner writes is told from a damaged file, before trust is asked for, and what reads it is named"
    path = write(synth_learner(path=tmp_path))

    with pytest.raises(ValueError, match='not written by `learn.export_pickle`.*`learn.load`.*`load_exported`') as e:
        load_learner(path, trust=trust)
    assert e.type is ValueError


def test_safetensors(tmp_path):
    "Also one of safetensors, which is known by its name"
    (tmp_path/'w.safetensors').write_bytes(bytes(100))

    with pytest.raises(ValueError, match='weights are for `learn.load`'): load_learner(tmp_path/'w.safetensors')


def test_no_file(tmp_path):
    "What is not there is not asked trust for"
    with pytest.raises(FileNotFoundError, match='no such file'): load_learner(tmp_path/'no.pkl')


def test_partials_and_several_sets(tmp_path):
    "A loss made with `partial` and several validation sets are no obstacle"
    ts = TensorDataset(torch.randn(8, 1), torch.randn(8, 1))
    dls = DataLoaders(DataLoader(ts, 4), dict(a=DataLoader(ts, 4), b=DataLoader(ts, 8)))
    learn = synth_learner(Recorder(train_metrics=True), dls=dls, path=tmp_path,
                          loss_func=partial(F.huber_loss, delta=.5))
    learn.fit(1)

    new = load_learner(learn.export_pickle(), trust=True)

    assert new.loss_func.keywords == dict(delta=.5) and new.recorder.train_metrics and new.dls.valid_sets == {}
