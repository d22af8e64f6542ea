"""Series of losses, and what metrics have accumulated: packed as few tensors, and put back as they were."""
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.callbacks.recorder import Recorder
from learner.callbacks.series import Losses, contents, gathered, put_back
from learner.hypers import Reading
from learner.measure import AccumMetric, ActivationType, AvgMetric, Metric, TorchMetric
from learner.metrics import Dice, mae
from learner.optim import Adam
from learner.plain import digest
from tests.helpers import synth_learner
from tests.saved_helpers import Saver, Stream, batches, go_on


# ---- losses

def test_packing_looks_at_new_batches_only():
    "What has been packed is not looked at again, and what comes back is the same object where it was equal"
    losses, layout = Losses(), (('lr', 'mom'), [1., 1.])
    same, other = Reading([.1, .9], layout), Reading([.2, .9], layout)
    for i, r in enumerate([same, same, other]): losses.add(torch.tensor(i/3), 8, i, 0, r)
    losses.pack()
    losses.marks[:3] = [(None,)]*3  # would fail

    losses.add(torch.tensor(1.), 2, 3, 0, other)
    losses.add(torch.tensor(2.), 2, 4, 0, Reading([.2], (('lr',), [2.])))
    state = losses.pack()
    back = Losses.unpack(state)

    assert state['marks'].tolist() == [[8, 0, 0, 0], [8, 1, 0, 0], [8, 2, 0, 1], [2, 3, 0, 1], [2, 4, 0, 2]]
    assert back.values == losses.values == [0, torch.tensor(1/3).item(), torch.tensor(2/3).item(), 1, 2]
    assert back.marks[0][3] is back.marks[1][3] and back.marks[2][3] is back.marks[3][3] != back.marks[1][3]
    assert back.marks[4][3] == Reading([.2], (('lr',), [2.])) and digest(back.pack()) == digest(state)

def test_series_without_readings():
    "Losses that only weigh by items come back too, and so does an empty series"
    losses = Losses()
    for i in range(3): losses.add(torch.tensor(1/(i+1)), i+1)

    back, empty = Losses.unpack(losses.pack()), Losses.unpack(Losses().pack())
    back.add(torch.tensor(5.), 2)
    empty.add(torch.tensor(5.), 2)

    assert back.marks == [(1,), (2,), (3,), (2,)] and back.mean() == pytest.approx((1 + 1 + 1 + 10)/8)
    assert empty.mean() == 5 and empty.pack()['marks'].tolist() == [[2]]


# ---- metrics

class Module(nn.Module):
    "Streams as a torchmetrics object that is a module does"
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.reset()

    def reset(self): self.inner.total = torch.zeros(1)
    def update(self, pred, y): self.inner.total += (pred-y).abs().sum()
    def compute(self): return self.inner.total

made = dict(mean=lambda: AvgMetric(mae), several=lambda: AvgMetric(lambda p, y: {'a': mae(p, y), 'b': y.mean()}),
            all_items=lambda: AccumMetric(mae, activation=ActivationType.Sigmoid), stream=lambda: TorchMetric(Stream()),
            module=lambda: TorchMetric(Module()), sums=lambda: Dice())

def seen(metric, *ns, device='cpu'):
    "The metric after some batches"
    for n in ns:
        g = torch.Generator().manual_seed(n)
        pred, y = torch.randn(n, 2, generator=g).to(device), torch.randint(2, (n,), generator=g).to(device)
        if not isinstance(metric, Dice): pred, y = pred[:, 0], y.float()
        metric.accumulate(SimpleNamespace(pred=pred, xb=(), yb=(y,)))
    return metric

@pytest.mark.parametrize('name', made)
def test_a_metric_goes_on(name):
    "A metric that is taken in the midst of a phase and put back into a new one has the value of the uninterrupted one"
    whole, old, new = seen(made[name](), 5, 8, 3), made[name](), made[name]()
    empty = contents(old)

    state = gathered(seen(old, 5, 8), empty)
    seen(old, 7)  # changes nothing of what was taken
    put_back(new, state, 'cpu')

    assert repr(seen(new, 3).value) == repr(whole.value)

@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_metric_goes_on_on_its_device():
    "What was on an accelerator is there again, though the file was opened on the CPU"
    old, new = Dice(), Dice()
    empty = contents(old)
    torch.save(gathered(seen(old, 5, 8, device='cuda'), empty), f := io.BytesIO())
    f.seek(0)

    put_back(new, torch.load(f, map_location='cpu', weights_only=True), 'cuda')

    assert seen(new, 3, device='cuda').value == seen(Dice(), 5, 8, 3).value

class Counter(Metric):
    "Counts batches in what no file can hold"
    greater_is_better = None
    def reset(self): self.count = SimpleNamespace(n=0)
    def accumulate(self, learn): self.count.n += 1
    @property
    def value(self): return self.count.n

@pytest.mark.parametrize('old, new, what', [(Counter(), Counter(), r'`counter` .*\(count\)'),
                                            (mae, AvgMetric(F.l1_loss), r'`l1_loss` .*\(all of it\)')])
def test_a_metric_that_is_not_there(old, new, what):
    "A training metric without what it had accumulated says so when its epoch goes on"
    def learner(metric, *cbs): return synth_learner([Recorder(train_metrics=True), *cbs], dls=(batches(), None),
                                                    metrics=metric, opt_func=Adam)
    learner(old, saver := Saver('batch', 0, 1)).fit(1)

    with pytest.warns(UserWarning, match=f'metric {what}: this epoch'): go_on(learner(new), saver.saved, 1)

def test_a_metric_of_another_make():
    "What another metric had accumulated is not put into one of its name"
    old, new = TorchMetric(Stream()), AvgMetric(mae)
    empty = contents(old)

    with pytest.warns(UserWarning, match='all of it'): put_back(new, gathered(seen(old, 5), empty), 'cpu')

    assert not hasattr(new, 'updated')

def test_settings_of_a_metric_are_its_own():
    "Only what a metric has accumulated is kept: not what it is made with"
    metric = AccumMetric(mae, thresh=.5, flatten=False)
    empty = contents(metric)

    metric.accumulate(SimpleNamespace(pred=torch.ones(2), yb=(torch.ones(2),)))

    assert [*gathered(metric, empty)[0]] == ['preds', 'targs'] and len(gathered(metric, empty)) == 1
