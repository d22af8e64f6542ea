"""What the learning-rate finder suggests: the functions, and what becomes of their answers."""
import math
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.lr_find import minimum, slide, steep, valley
from learner.events import CancelEpochException
from tests.callbacks.test_lr_find import find, inf, nan, scripted, suggest, two_groups
from tests.helpers import synth_learner

# ---- answers

falling = [3-.01*i for i in range(60)] + [2.4+.1*i for i in range(40)]

def told(warned): return [str(w.message).removeprefix('lr_find: ') for w in warned]

@pytest.mark.parametrize('losses,fails', [
    ([1.]*100, 'valley steep'), ([1+.001*i for i in range(100)], 'valley steep'), (falling, ''),
    ([v-10 for v in falling], ''), ([-1e-9]*100, 'valley steep'), ([1e30]*100, 'valley steep')])
def test_odd_curves(losses, fails, recwarn):
    "Of a loss that does not fall the valley and the steepest fall are None, and a warning for each says so"
    found = find(scripted(losses), suggest_funcs=suggest)

    assert [n for n, p in found._asdict().items() if p is None] == fails.split()
    assert told(recwarn) == [f"`{name}` suggests nothing: the loss does not fall" for name in fails.split()]

@pytest.mark.parametrize('num_it,point', [(2, None), (5, None), (7, None), (12, .1), (30, .1)])
def test_few_iterations(num_it, point, recwarn):
    "A sweep that is too short for a suggestion gives None, and says why"
    found = find(scripted(falling), num_it=num_it)

    assert (found.valley is None) == (point is None) == (len(recwarn) == 1)

@pytest.mark.parametrize('answer,point,why', [
    (None, None, 'gave None, which is no learning rate'), (nan, None, 'gave nan'), (-.1, None, 'gave -0.1'),
    (0, None, 'gave 0'), (inf, None, 'gave inf'), ((), None, 'IndexError'), ('x', None, "convert string to float: 'x'"),
    ((.1, (.1, 2.)), .1, ''), (np.float32(.5), .5, ''), (torch.tensor(.5), .5, ''), (1e-9, 1e-9, ''), (50, 50., '')])
def test_answers(answer, point, why, recwarn):
    "A function may return a number or fastai's tuple; what is no rate is None, and a warning has what it was"
    def func(lrs, losses, num_it): return answer

    found = find(scripted(falling), suggest_funcs=func)

    assert found.func == point and [why in m and '`func`' in m for m in told(recwarn)] == [True]*(point is None)

def test_failing_function(recwarn):
    "A function that fails costs its own suggestion only, and the warning has the error"
    def broken(lrs, losses, num_it): raise KeyError('lost')

    found = find(scripted(falling), suggest_funcs=[steep, broken, valley])

    assert found._fields == ('steep', 'broken', 'valley') and found.broken is None and found.steep and found.valley
    assert told(recwarn) == ["`broken` suggests nothing: KeyError('lost')"]

def test_what_functions_get():
    "Functions get rates and smoothed losses without the first tenth and the last 5 points, and the number asked for"
    got = []
    learn = scripted(falling)

    find(learn, 1e-5, 1, 50, suggest_funcs=lambda *args: got.extend(args) or .1)

    curve = learn.recorder.lr_curve
    assert [a.tolist() for a in got[:2]] == [curve['lrs'][5:45, 0].tolist(), curve['losses'][5:45]] and got[2] == 50

@pytest.mark.parametrize('funcs,names', [
    ([valley, valley], 'valley valley_2'), (partial(slide, lr_diff=5), 'slide'), ((minimum,), 'minimum'),
    ([lambda *a: .1, lambda *a: .2], 'suggestion suggestion_2'), ([], '')])
def test_names(funcs, names):
    "Suggestions are found by the names of their functions"
    assert list(find(scripted(falling), suggest_funcs=funcs)._fields) == names.split()

def test_no_functions(): assert find(synth_learner(), suggest_funcs=None) is None

def test_nothing_tried(recwarn):
    "A callback that cancels every epoch leaves nothing to suggest, and nothing to draw; also that is said"
    def cancel(cb): raise CancelEpochException
    learn = synth_learner(Callback(before_epoch=cancel))

    assert learn.lr_find().valley is None and plt.get_fignums() == []
    assert told(recwarn) == ["`valley` suggests nothing: of 100 iterations 0 gave a loss, which are too few: "
                             "the first tenth of them and the last 5 are left out"]

def test_a_rate_for_each_group():
    "Groups with sweeps of their own get a Row, which says whose the rates are, and which `fit` takes"
    learn = two_groups(n=4)

    row = find(learn, [1e-5, 1e-3], [1e-2, 1.], suggest_funcs=steep).steep
    learn.fit(1, lr=row)

    assert row.names == ('group 0', 'group 1') and row['group 1'] == pytest.approx(100*row[0])
    assert [h['lr'] for h in learn.opt.hypers] == list(row)
    assert isinstance(find(two_groups(n=4), suggest_funcs=steep).steep, float)


# ---- the functions

def longest_fall(losses):
    "Length and end of the longest run of ever lower losses, others left out, straight from the definition"
    lengths = []
    for i, v in enumerate(losses):
        lengths.append(1 + max((n for n, w in zip(lengths, losses[:i]) if w > v), default=0))
    return max(lengths), lengths.index(max(lengths))

@pytest.mark.parametrize('kind', ['noise', 'whole numbers', 'valley', 'random walk'])
@pytest.mark.parametrize('seed', range(50))
def test_valley(kind, seed):
    "The rate is half-way down the longest run of falling losses, as an exhaustive search has it"
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 90))
    losses = {'noise': rng.normal(size=n), 'whole numbers': rng.integers(-5, 5, n).astype(float),
              'valley': (np.arange(n)/n - rng.random())**2 + .05*rng.normal(size=n),
              'random walk': rng.normal(size=n).cumsum()}[kind]
    lrs, (length, end) = np.geomspace(1e-7, 10, n), longest_fall(losses.tolist())

    if length < 3:
        with pytest.raises(ValueError, match='does not fall'): valley(lrs, losses, n)
    else: assert valley(lrs, losses, n) == lrs[end-length + int(length/3) + int(length/6)]

class Counted(float):
    "A number that counts comparisons"
    n = 0
    def __neg__(self): return Counted(-float(self))
    def __lt__(self, other):
        Counted.n += 1
        return float(self) < float(other)

def comparisons(n):
    Counted.n = 0
    losses = [Counted(v) for v in np.random.default_rng(0).normal(size=n) - np.linspace(0, 9, n)]
    valley(np.geomspace(1e-7, 10, n), losses, n)
    return Counted.n

def test_valley_takes_no_time():
    "n points take about n log n comparisons; n squared would be 50 times as many"
    assert comparisons(1000) > 1000 and comparisons(1000) < 1000*math.log2(1000)
    assert comparisons(4000) < 4000*math.log2(4000)

def by_definition(name, lrs, losses):
    "What a function suggests, point by point as fastai defines it; slopes are numpy's"
    n, slopes = len(lrs), np.gradient(losses)
    if name == 'steep': return lrs[min(range(n-1), key=lambda i: (losses[i+1]-losses[i])/math.log(lrs[i+1]/lrs[i]))]
    if name == 'minimum': return min(zip(losses, lrs))[1]/10
    differ = [abs(slopes[i+15]-slopes[i]) > .005 for i in range(n-15)][::-1]
    return lrs[n-16 - max(0, (differ.index(False) if False in differ else len(differ)) - 1)]

@pytest.mark.parametrize('func', [steep, minimum, slide])
@pytest.mark.parametrize('seed', range(30))
def test_other_suggestions(func, seed):
    "The steepest fall, a tenth of the lowest loss's rate, and the sliding interval are those of their definitions"
    rng = np.random.default_rng(seed)
    n = int(rng.integers(17, 90))
    lrs, losses = np.geomspace(1e-7, 10, n), (np.arange(n)/n-.6)**2 + 10.**-rng.integers(1, 5)*rng.normal(size=n)

    assert func(lrs, losses, n) == pytest.approx(by_definition(func.__name__, lrs, losses))

def test_slide_options():
    "The interval's width, the threshold and the factor can be set; too few points for the width are an error"
    lrs, losses = np.geomspace(1e-7, 10, 20), np.arange(20.)**2

    assert slide(lrs, losses, 20, lr_diff=4, thresh=100.) == lrs[15]
    assert slide(lrs, losses, 20, lr_diff=4, thresh=1., adjust_value=.5) == lrs[0]/2
    with pytest.raises(ValueError, match='20 points are too few for an interval of 20'): slide(lrs, losses, 20, 20)
