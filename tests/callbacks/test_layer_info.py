"""layer_info: what it counts, derived by hand, for models and batches of all kinds."""
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from learner import Callback, CancelBatchException, Learner, accuracy, before_batch_cb
from learner.callbacks.summary import layer_info
from tests.helpers import synth_learner
from tests.summary_helpers import Fails, Vit, mk, net, of_net

pytestmark = pytest.mark.usefixtures('silent')


def row(table, name): return table.set_index('name').loc[name]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(7, 3), nn.Linear(3, 7)
        self.head.weight = self.emb.weight

    def forward(self, x): return self.head(self.emb(x))


class Named(nn.Module):
    "Takes inputs by name, and returns its loss if it gets labels"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)

    def forward(self, a, scale=1., labels=None):
        out = self.lin(a)*scale
        return out if labels is None else dict(out=out, loss=(out-labels).pow(2).mean())


# ---- what is counted

def test_linear_by_hand():
    "220 and 21 parameters; 5 items need 5*10*20 = 1000 and 5*20*1 = 100 multiply-adds; ReLU has neither"
    table = layer_info(of_net())

    assert [*table['name']] == ['0', '1', '2', '3'] and [*table['type']] == ['Linear', 'ReLU', 'Dropout', 'Linear']
    assert [*table['params']] == [220, 0, 0, 21] and [*table['trained']] == ['yes', '', '', 'yes']
    assert table['multiply_adds'].tolist() == [1000, pd.NA, pd.NA, 100]
    assert [*table['input']] == [[(5, 10)], [(5, 20)], [(5, 20)], [(5, 20)]] and table['output'][3] == [(5, 1)]
    assert [*table['note']] == ['']*4 and 'ms' not in table

def test_memory_by_hand():
    "MiB of parameters and new outputs, 4 bytes a number; Dropout in eval hands on what it gets"
    mib = layer_info(of_net())['mib']

    assert [*mib] == pytest.approx([n*4/2**20 for n in (220+100, 100, 0, 21+5)])

def test_convolution_by_hand():
    "Conv2d: 8*3*3*3+8 parameters, each weight used once for each of 2*6*6 outputs; BatchNorm2d has 16 parameters"
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 1))

    table = layer_info(mk(m, torch.randn(2, 3, 8, 8), bs=2))

    assert [*table['params']] == [224, 16, 0, 289]
    assert row(table, '0')['multiply_adds'] == 8*3*3*3*2*6*6 and row(table, '0')['output'] == [(2, 8, 6, 6)]

@pytest.mark.parametrize('make, gates', [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_by_hand(make, gates):
    "Each weight is used once for each place of each sequence; all outputs are told"
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = make(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        def forward(self, x): return self.rnn(x)[0][:, -1, :1]

    table = layer_info(mk(Last(), torch.randn(5, 6, 3)))

    assert row(table, 'rnn')['multiply_adds'] == 5*6*2*gates*4*((3+4)+(8+4))
    assert row(table, 'rnn')['output'] == [(5, 6, 8)] + [(4, 5, 4)]*(2 if make is nn.LSTM else 1)

def test_transformer_by_hand():
    "The layers of nn.TransformerEncoder are called one by one; attention counts its projections and its products"
    m = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    table = layer_info(mk(m, torch.randn(5, 3, 8), y=torch.zeros(5, 3, 8)))

    attention = row(table, 'layers.1.self_attn')
    assert attention['multiply_adds'] == 5*3*8*24 + 2*5*3*3*8 + 5*3*8*8 and attention['params'] == 24*8+24
    assert row(table, 'layers.0.linear1')['multiply_adds'] == 5*3*8*16
    assert row(table, 'layers.0.self_attn.out_proj')['note'] == 'not called'
    assert table['params'].sum() == sum(p.numel() for p in m.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


# ---- which rows

def test_rows_add_up():
    "Own parameters and own products of a module with children are a row; called twice, and never, is told"
    table = layer_info(mk(Vit(), torch.randn(5, 2, 4)))

    assert [*table['name']] == ['', 'qk', 'twice', 'unused'] and [*table['params']] == [4, 40, 20, 500]
    assert [*table['note']] == ['', '', 'called 2 times', 'not called']
    assert table['multiply_adds'].tolist() == [5*3*3*4*2, 5*3*4*8, 2*5*3*4*4, pd.NA]
    assert table['output'][3] == [] and table['input'][0] == [(5, 2, 4)]

def test_order_is_that_of_the_calls():
    "Layers are listed as they are called, whatever the order in which they were registered"
    m = Fails()
    m.forward = lambda x: m.body(x)[:, :1] + m.head(x[:, :5])
    assert [*layer_info(mk(m, torch.randn(5, 10)))['name']] == ['body.0', 'body.1', 'head']

    m.forward = lambda x: m.head(x[:, :5]) + m.body(x)[:, :1]
    assert [*layer_info(mk(m, torch.randn(5, 10)))['name']] == ['head', 'body.0', 'body.1']

def test_tied_parameters_count_once():
    "The first row has them, the next one says whose they are"
    table = layer_info(mk(Tied(), torch.zeros(5, dtype=torch.long), y=torch.zeros(5, 7)))

    assert [*table['params']] == [21, 7] and table['note'][1] == 'weight is emb.weight'

def test_parametrized_layer_is_one_row():
    "What computes a weight is no layer, and its parameters are those of the layer"
    m = nn.Sequential(spectral_norm(nn.Linear(10, 1)))

    table = layer_info(mk(m, torch.randn(5, 10)))

    assert [*table['name']] == ['0'] and [*table['params']] == [11] and table['multiply_adds'][0] >= 50

def test_trained_or_not():
    "Parameters are trained, frozen, or in part"
    m = nn.Sequential(nn.Linear(10, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1), nn.ReLU())
    m[2].bias.requires_grad_(False)

    assert [*layer_info(mk(m, torch.randn(5, 10)))['trained']] == ['yes', 'no', 'partly', '']


# ---- models and batches of all kinds

def test_lazy_model_is_lazy_again():
    "Parameters are counted with the shapes that they get, and afterwards they have none"
    learn = mk(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), torch.randn(5, 10))

    table, text = layer_info(learn), str(learn.summary())

    assert [*table['params']] == [44, 5] and table['note'][0] == 'lazy' and '49: 49 trained' in text
    assert isinstance(learn.model[0], nn.LazyLinear) and learn.model[0].has_uninitialized_params()

def test_lazy_layer_that_is_not_called():
    "Its parameters are not known, which is said"
    m = nn.Sequential(nn.Linear(10, 1))
    m.add_module('rest', nn.LazyLinear(3))
    m.forward = lambda x: m[0](x)
    learn = mk(m, torch.randn(5, 10))

    assert layer_info(learn)['params'].tolist() == [11, pd.NA]
    assert 'not counted: 2 lazy ones' in learn.summary().facts['parameters']

def test_model_without_parameters():
    "There is nothing to train, which the summary says where the optimizer would be"
    made = mk(nn.Flatten(), torch.randn(5, 2)).summary()

    assert made.facts['parameters'] == '0: 0 trained, 0 frozen' and 'no parameters' in made.facts['optimizer']
    assert [*made.table['params']] == [0]

def test_model_that_is_one_layer():
    "A model without children is one row without a name"
    assert [*layer_info(synth_learner())[['name', 'params']].loc[0]] == ['', 2]

@pytest.mark.parametrize('batch, inputs', [
    (dict(a=torch.ones(5, 3), y=torch.zeros(5, 1)), 1),
    (dict(a=torch.ones(5, 3), scale=torch.ones(5, 1), y=torch.zeros(5, 1)), 2),
    ((torch.ones(5, 3), torch.ones(5, 1), torch.zeros(5, 1)), 2)])
def test_batches_with_names_and_several_inputs(batch, inputs):
    "Dicts go in by keyword, several inputs by place; targets do not go in"
    table = layer_info(synth_learner(dls=([batch], None), model=Named()))

    assert row(table, 'lin')['multiply_adds'] == 15 and row(table, 'lin')['input'] == [(5, 3)]
    made = synth_learner(dls=([batch], None), model=Named()).summary()
    assert made.facts['batch'].startswith('of 5:') and made.facts['batch'].count('float32') == inputs

def test_model_with_its_loss():
    "A model that computes its own loss gets the whole batch"
    batch = dict(a=torch.ones(5, 3), labels=torch.zeros(5, 1))
    learn = synth_learner(dls=([batch], None), model=Named(), loss_func=None)

    made = learn.summary()

    assert made.facts['loss'] == "the model's own" and 'labels' in made.facts['batch']

@pytest.mark.parametrize('xb', [(torch.ones(4, 3),), (torch.ones(4, 3), 2.), (dict(a=torch.ones(4, 3), scale=2.),)])
def test_inputs_given(xb):
    "Given inputs take the loader's place: by position, or a dict by keyword"
    learn = synth_learner(dls=(iter([]), None), model=Named())

    assert row(layer_info(learn, *xb), 'lin')['input'] == [(4, 3)]

@pytest.mark.parametrize('show', [layer_info, Learner.summary])
def test_loader_that_can_be_read_once(show):
    "Nothing is taken out of an iterator: it is refused, with what to do"
    batches = iter([(torch.ones(5, 3), torch.zeros(5, 1))])
    learn = synth_learner(dls=(batches, None), model=Named())

    with pytest.raises(ValueError, match=r'would use up the training loader, a `list_iterator`.*layer_info\(learn, \*'):
        show(learn)

    assert len([*batches]) == 1

def test_compiled_model():
    "Names are those of the model inside, which runs as plain Python"
    learn = mk(torch.compile(net(), backend='eager'), torch.randn(5, 10))

    made = learn.summary(times=True)

    assert [*made.table['name']] == ['0', '1', '2', '3'] and made.table['multiply_adds'][0] == 1000
    assert made.facts['time'].endswith('in eval mode, not compiled')

def test_forward_context():
    "The model runs in the Learner's context: autocast halves what outputs take"
    learn = mk(nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 1)), torch.randn(5, 10))
    learn.forward_context = lambda: torch.autocast('cpu', torch.bfloat16)

    assert layer_info(learn)['mib'][0] == pytest.approx((200*4 + 100*2)/2**20)

def test_callbacks_change_the_batch_first():
    "The model gets the batch as callbacks leave it; neither loss nor metric is computed"
    @before_batch_cb
    def wider(cb, xb, yb): return (xb[0].repeat(1, 2),), yb
    calls = []
    def loss(pred, y): calls.append('loss')
    learn = mk(nn.Linear(20, 1), torch.randn(5, 10), cbs=wider, loss_func=loss, metrics=accuracy)

    assert layer_info(learn)['input'][0] == [(5, 20)] and calls == []
    assert [m.name for m in learn.metrics] == ['accuracy']

def test_callback_that_cancels_the_batch():
    "Without a batch there is nothing to tell"
    def cancel(cb): raise CancelBatchException
    learn = of_net(cbs=Callback(before_batch=cancel))

    with pytest.raises(RuntimeError, match='a callback cancelled the batch'): learn.summary()


# ---- what the counter and the hooks cannot see into

class Forces(nn.Module):
    "Computes a gradient in its forward"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.lin(x).sum(), x)[0][:, :1]

def test_a_gradient_within_the_forward():
    "torch's counter fails there; all else is told"
    learn = mk(Forces(), torch.randn(5, 10))

    table = layer_info(learn)

    assert row(table, 'lin').output == [(5, 1)] and table.multiply_adds.isna().all()
    assert learn.summary().facts['multiply-adds'] == "torch's counter cannot count them in this model"

class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 1)

    def forward(self, x): return torch.func.vmap(self.lin)(x)

def test_vmap():
    "What runs within `vmap` has no memory of its own"
    assert row(layer_info(mk(Mapped(), torch.randn(5, 10))), 'lin').params == 11

@pytest.mark.filterwarnings('ignore:.torch.jit.script')
def test_torchscript_is_listed_and_not_seen_into():
    "Its parameters count; the layers around it are as ever"
    table = layer_info(mk(nn.Sequential(nn.Linear(10, 3), torch.jit.script(nn.Linear(3, 1))), torch.randn(5, 10)))

    assert row(table, '1').params == 4 and row(table, '1').note == 'TorchScript: not seen into'
    assert row(table, '0').output == [(5, 3)]
