"""learn.summary(): what it says, where the model fails, and that it leaves no trace."""
import math

import pytest
import torch
from torch import nn

from learner import Callback, accuracy, set_display, split_blocks
from learner.callbacks.summary import Summary, layer_info
from learner.utils import rng_state
from tests.helpers import RegModel, synth_learner
from tests.summary_helpers import Fails, Vit, mk, net, of_net

pytestmark = pytest.mark.usefixtures('silent')


def n_hooks(model): return sum(len(m._forward_hooks)+len(m._forward_pre_hooks) for m in model.modules())


class Interrupts(nn.Module):
    "Draws, changes its weights, and is interrupted"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 1)

    def forward(self, x):
        with torch.no_grad(): self.lin.weight += torch.rand(())
        self.lin(x)
        raise KeyboardInterrupt


# ---- errors in the model

def test_failing_layer_is_named():
    "The error keeps its type; its note names the layer, what it got, and what came before"
    learn = mk(Fails(), torch.randn(5, 10))

    with pytest.raises(RuntimeError, match='shapes') as e: learn.summary()

    note = next(n for n in e.value.__notes__ if n.startswith('summary'))
    assert note.split('\n') == ['summary: the forward failed in `head` (Linear), which got (5, 4)',
                                'the layers before:', '  `body.0` (Linear): (5, 10) to (5, 4)',
                                '  `body.1` (ReLU): (5, 4) to (5, 4)']

def test_failing_forward_is_named():
    "What fails between two layers is the module's that has them"
    m = Fails()
    m.forward = lambda x: m.body(x)[9]

    with pytest.raises(IndexError) as e: layer_info(mk(m, torch.randn(5, 10)))

    assert any(n.startswith('summary: the forward failed in `Fails`, which got (5, 10)') for n in e.value.__notes__)


# ---- no trace

@pytest.mark.parametrize('model, error', [(net, None), (Fails, RuntimeError), (Interrupts, KeyboardInterrupt)])
@pytest.mark.parametrize('fits', [0, 1])
def test_no_trace(model, error, fits):
    "Weights, optimizer, modes, random streams, history and hooks are as before, also after an error"
    learn = mk(net(), torch.randn(5, 10), metrics=accuracy)
    for _ in range(fits): learn.fit(1)
    if error: learn.model = model()
    before, modes = learn.state_hash(), [m.training for m in learn.model.modules()]
    rng, rows = rng_state()['torch'], len(learn.recorder.values)
    attrs = dict(vars(learn))

    if error:
        with pytest.raises(error): learn.summary(times=True)
    else: learn.summary(times=True)

    assert learn.state_hash() == before and torch.equal(rng, rng_state()['torch'])
    assert [m.training for m in learn.model.modules()] == modes and len(learn.recorder.values) == rows
    assert vars(learn) == attrs and n_hooks(learn.model) == 0

def test_next_fit_is_the_same():
    "A shuffled fit after a summary goes as one without"
    fits = [synth_learner(n=4, shuffle=True) for _ in range(2)]
    losses = []
    for learn, shown in zip(fits, (False, True)):
        torch.manual_seed(1)
        if shown: learn.summary()
        learn.fit(1)
        losses.append(learn.recorder.losses)

    assert losses[0] == losses[1]

def test_within_a_fit():
    "A callback may ask for it, and the fit goes on as without"
    tables = []
    class Asks(Callback):
        def before_batch(self):
            if self.training: tables.append(layer_info(self.learn))
    fits = [synth_learner(cbs=cbs) for cbs in (None, Asks)]
    for learn in fits: learn.fit(1)

    assert len(tables) == 2 and fits[0].recorder.losses == fits[1].recorder.losses


# ---- the summary

def test_times():
    "Each layer that was called has its milliseconds, and the model too"
    made = mk(Vit(), torch.randn(5, 2, 4)).summary(times=True)

    assert (made.table['ms'][:3] > 0).all() and math.isnan(made.table['ms'][3])
    assert ' ms a batch on cpu, in eval mode' in made.facts['time']

def test_summary_as_text():
    "An aligned table, and what is to be said of the whole, a line each"
    learn = mk(nn.Sequential(nn.Linear(10, 1000), nn.Linear(1000, 1)), torch.randn(5, 10), splitter=split_blocks())
    learn.freeze()

    lines = str(learn.summary()).split('\n')

    assert lines[:4] == ['layer  type    input      output     params  trained  mult-adds   MiB',
                         '0      Linear  (5, 10)    (5, 1000)  11,000  no          50,000  0.06',
                         '1      Linear  (5, 1000)  (5, 1)      1,001  yes          5,000  0.00', '']
    assert lines[4:-1] == ['parameters     12,001: 1,001 trained, 11,000 frozen',
                           'multiply-adds  55,000 a batch, 11,000 an item',
                           "memory         parameters 0.05 MiB, layers' outputs 0.02 MiB a batch; above, MiB is both",
                           'buffers        0', 'batch          of 5: (float32[5, 10],)',
                           'groups         2; frozen: group 0', 'optimizer      AdamW, lr 0.001',
                           'loss           mse_loss']
    assert lines[-1] == 'callbacks      TrainEvalCallback, Recorder'

def test_groups_are_told_before_the_first_fit():
    "The optimizer is the one that a fit would make; none is made by this"
    learn = mk(nn.Sequential(nn.Linear(10, 2), nn.Linear(2, 1)), torch.randn(5, 10), splitter=split_blocks())
    learn.model[0].bias.requires_grad_(False)

    facts = learn.summary().facts

    assert facts['groups'] == '2; partly frozen: group 0'
    assert facts['optimizer'] == 'AdamW, lr 0.001, made by the first fit'
    assert learn.opt is None

def test_splitter_that_fails_is_told():
    "The table is there though no optimizer can be made"
    made = of_net(splitter=split_blocks('nothing')).summary()

    assert made.facts['optimizer'].startswith('none can be made: `split_blocks`') and len(made.table) == 4

@pytest.mark.parametrize('mode, n', [('log', 1), ('terminal', 1), ('notebook', 0), ('off', 0)])
def test_summary_is_shown_once(mode, n, capsys):
    "A script prints it; a notebook shows the value that is returned"
    set_display(mode)

    made = of_net().summary()

    assert isinstance(made, Summary) and capsys.readouterr().out == f'{made}\n'*n

def test_summary_as_html():
    "A notebook gets two tables, escaped"
    class Odd(RegModel): "A model"
    Odd.__name__ = 'Odd<b>'

    html = synth_learner(model=Odd()).summary()._repr_html_()

    assert html.count('<table>') == 2 and 'Odd&lt;b&gt;' in html and '(the model)' in html
