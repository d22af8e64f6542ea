"""What else the finder puts back, and what it survives after its work: samplers, datasets, memory, plots, Ctrl-C."""
import pickle
import random
import signal
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.lr_find import minimum, valley
from learner.learner import Learner
from tests.helpers import raises, synth_learner

find = partial(Learner.lr_find, num_it=8, end_lr=1., stop_div=False, show_plot=False, suggest_funcs=None)


# ---- memory that cannot be written to, or has been freed

def test_read_only_memory(tmp_path):
    "A tensor over a file that is only read is left alone"
    np.save(tmp_path/'x.npy', np.arange(3., dtype=np.float32))
    with pytest.warns(UserWarning, match='not writable'):
        data = torch.from_numpy(np.load(tmp_path/'x.npy', mmap_mode='r'))
    cb = Callback()
    cb.data = data

    find(synth_learner(cb))

    assert data.tolist() == [0, 1, 2]

class Frees(nn.Module):
    "Frees a tensor's memory while it runs, as sharded modules do"
    def __init__(self):
        super().__init__()
        self.lin, self.extra = nn.Linear(1, 1), torch.arange(3.)
    def forward(self, x):
        self.extra.untyped_storage().resize_(0)
        return self.lin(x)

def test_freed_memory():
    "Memory that is freed meanwhile is there again, with what was in it; what was freed before stays so"
    model = Frees()

    find(learn := synth_learner(model=model))
    assert model.extra.tolist() == [0, 1, 2]
    learn.fit(1)
    find(learn)

    assert model.extra.untyped_storage().nbytes() == 0


def test_meta_tensor():
    "A tensor without memory is left alone"
    cb = Callback()
    cb.held = torch.zeros(3, device='meta')

    find(synth_learner(cb))

    assert cb.held.is_meta

def test_shared_tuples():
    "Tuples within tuples are looked into once"
    cb, o = Callback(), ()
    for _ in range(60): o = (o, o)
    cb.held = o

    find(synth_learner(cb))

    assert cb.held is o


# ---- objects that cannot be asked

class Odd:
    def __getattr__(self, name): raise KeyError(name)
class Asks:
    def state_dict(self, which): return {}
    def load_state_dict(self, state): raise AssertionError
class Overrides(nn.Linear):
    def parameters(self): return super().parameters()  # pyright: ignore

def nested(): return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

@pytest.mark.parametrize('make', [Odd, Asks, random.SystemRandom, nested])
@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
def test_held_objects(make):
    "A callback may hold what has no state that could be kept"
    cb = Callback()
    cb.held = held = make()

    find(synth_learner(cb))

    assert cb.held is held

def test_parameters_overridden():
    "A module may have a `parameters` of its own"
    find(learn := synth_learner(model=Overrides(1, 1)))

    assert learn.n_step == 0

class Refuses:
    def state_dict(self): return {}
    def load_state_dict(self, state): raise OSError('full')

def test_state_that_is_refused():
    "Who does not take its state back is named; all else is back"
    cb, learn = Callback(), synth_learner()
    cb.held = Refuses()
    learn.add_cb(cb)
    before = learn.model.a.item()

    with pytest.raises(OSError, match='full') as e: find(learn)

    assert '`Refuses` did not take back the state' in e.value.__notes__[0] and learn.model.a.item() == before


# ---- after the sweep

def test_plot_that_fails(monkeypatch):
    "A plot that cannot be shown costs no suggestion"
    monkeypatch.setattr('learner.callbacks.lr_find.show_figure', raises(OSError('no screen')))

    with pytest.warns(UserWarning, match='the plot cannot be shown: OSError: no screen'):
        assert synth_learner(n=4).lr_find().valley > 0

    plt.close()

def test_result_pickles():
    "What is returned can be pickled"
    found = synth_learner(n=4).lr_find(show_plot=False, suggest_funcs=[valley, minimum])

    again = pickle.loads(pickle.dumps(found))

    assert again == found and again.valley == found.valley and repr(again) == repr(found)

@pytest.mark.parametrize('name', ['class', None, 'a b', '_x'])
def test_names_of_functions(name):
    "A function of any name suggests"
    def func(lrs, losses, num_it): return .5
    if name is None: func = type('F', (), {'__call__': lambda self, *args: .5, '__name__': None})()
    else: func.__name__ = name

    assert synth_learner(n=4).lr_find(show_plot=False, suggest_funcs=func).suggestion == .5

@pytest.mark.parametrize('funcs', ['valley', [valley, 3]])
def test_functions_are_checked_first(funcs):
    "What is no function is refused before the sweep"
    seen = []

    with pytest.raises(TypeError, match='give functions, as `valley`, without quotes'):
        synth_learner(Callback(before_fit=seen.append)).lr_find(suggest_funcs=funcs)

    assert seen == []

def test_rates_that_do_not_rise():
    "Where something else sets the rate, no suggestion is made from rates that were not used"
    learn = synth_learner(n=4, param_opts={'*': dict(lr=1e-3)})

    with pytest.warns(UserWarning, match='the learning rate did not rise: something else sets it'):
        assert learn.lr_find(show_plot=False).valley is None

    assert set(learn.recorder.lr_curve['lrs'][:, 0]) == {1e-3}

def test_a_fit_takes_one_suggestion():
    "The result is a rate if it holds one suggestion; of several, one must be given"
    learn = synth_learner(n=4)
    one, two = (learn.lr_find(show_plot=False, suggest_funcs=f) for f in ([valley], [valley, minimum]))

    learn.fit(1, one)

    assert learn.recorder.lrs[0] == one.valley
    with pytest.raises(TypeError, match='give one of valley, minimum'): learn.fit(1, two)
    with pytest.warns(UserWarning, match='suggests nothing'): none = learn.lr_find(num_it=3, show_plot=False)
    with pytest.raises(TypeError, match='`lr_find` has suggested nothing'): learn.fit(1, none)

def test_curve_of_a_stopped_sweep():
    "After Ctrl-C the curve so far can be drawn"
    learn = synth_learner(Callback(after_batch=raises(KeyboardInterrupt, nth=5)), n=4)
    with pytest.raises(KeyboardInterrupt): find(learn)

    assert len(learn.recorder.lr_curve['losses']) == 4 and learn.recorder.lr_curve['suggestions'] == {}

class Held:
    "Gets Ctrl-C twice while it is put back"
    def state_dict(self): return {}
    def load_state_dict(self, state):
        for _ in range(2): signal.raise_signal(signal.SIGINT)

def test_ctrl_c_twice_while_all_is_put_back(capfd):
    "Nothing cuts the putting back short; the interrupt comes after it"
    learn = synth_learner()
    learn.add_cb(cb := Callback())
    cb.held, before = Held(), learn.model.a.item()

    with pytest.raises(KeyboardInterrupt, match='stopped after 8 of 8'): find(learn)

    assert learn.model.a.item() == before and not learn._stop.held
