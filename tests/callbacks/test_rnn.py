"""ModelResetter, RNNCallback and RNNRegularizer: when the hidden state is forgotten, what is kept, what is added."""
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.rnn import ModelResetter, RNNCallback, RNNRegularizer, rnn_cbs
from learner.events import CancelBatchException, CancelFitException
from tests.helpers import raises, synth_learner, trace, weights
from tests.resume_helpers import AskAt


class Stateful(nn.Module):
    "An LSTM that goes on with its hidden state from batch to batch, and gives its outputs too"
    def __init__(self, lists=True):
        super().__init__()
        self.rnn, self.head, self.lists = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1), lists
        self.hidden, self.n_resets = None, 0

    def reset(self): self.hidden, self.n_resets = None, self.n_resets+1

    def forward(self, x):
        raw, hidden = self.rnn(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        out = .5*raw
        return [self.head(out)[:, -1], [x, raw] if self.lists else raw, (x, out) if self.lists else out]


def data(n=4):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 5, 2, generator=g), torch.randn(4, 1, generator=g)) for _ in range(n)]

def stateful(cbs, lists=True, path='.', valid=2):
    torch.manual_seed(1)
    return synth_learner(cbs, dls=(data(), data(valid)), model=Stateful(lists), path=path, lr=.1)

def released(learn): return learn.rnn.raw_out is learn.rnn.out is None


# ---- the hidden state

def test_forgets_at_each_phase():
    "`reset()` is called before training and validation of each epoch, and when the fit is over"
    learn, seen = stateful(rnn_cbs()), []
    early = Callback(before_train=lambda o: seen.append(learn.model.n_resets),
                     before_validate=lambda o: seen.append(learn.model.n_resets))
    early.order = -5

    learn.fit(2, cbs=early)

    assert seen == [0, 1, 2, 3] and learn.model.n_resets == 5 and learn.model.hidden is None

@pytest.mark.parametrize('ex', [ValueError, KeyboardInterrupt, CancelFitException])
def test_forgets_after_an_error(ex):
    "Whatever ends the fit, no hidden state is left, and no output"
    learn = stateful(rnn_cbs())

    try: learn.fit(1, cbs=Callback(after_loss=raises(ex)))
    except (ValueError, KeyboardInterrupt): pass

    assert learn.model.hidden is None and released(learn)

@pytest.mark.parametrize('name', ['before_batch', 'after_pred', 'after_loss', 'before_step', 'after_batch'])
@pytest.mark.parametrize('order', [-5, 5])
def test_validation_within_a_batch_changes_nothing(name, order):
    "Training goes on with the hidden state, and the outputs, that it had"
    cb = Callback(**{name: lambda o: o.training and o.learn.validate()})
    cb.order = order
    alone, looked = stateful(rnn_cbs()), stateful(rnn_cbs())

    alone.fit(1)
    looked.fit(1, cbs=cb)

    assert all(map(torch.equal, weights(alone), weights(looked)))

class InPlace(nn.Module):
    "A recurrent model that writes its hidden state into the tensor it has"
    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.hidden = nn.RNN(2, 3, batch_first=True), nn.Linear(3, 1), torch.zeros(1, 4, 3)
    def reset(self): self.hidden.zero_()
    def forward(self, x):
        out, h = self.rnn(x, self.hidden.clone())
        self.hidden.copy_(h.detach())
        return self.head(out)[:, -1]

@pytest.mark.parametrize('name', ['before_batch', 'after_pred', 'before_step'])
def test_validation_leaves_a_hidden_state_that_is_written_in_place(name):
    "Values and tensors are those it had, also where `reset` writes into them"
    def fitted(*cbs):
        torch.manual_seed(1)
        learn = synth_learner([ModelResetter, *cbs], dls=(data(), data(2)), model=InPlace(), lr=.1)
        learn.fit(1)
        return weights(learn)

    looked = fitted(Callback(**{name: lambda o: o.training and o.learn.validate()}))

    assert all(map(torch.equal, fitted(), looked))

@pytest.mark.parametrize('at', [2, 5, 8])
def test_hidden_state_is_resumed(tmp_path, at):
    "A fit that was stopped in mid-epoch goes on with the hidden state it had, in a process of its own too"
    whole = stateful(rnn_cbs(), path=tmp_path/'whole')
    whole.fit(2)
    first = stateful(rnn_cbs(), path=tmp_path/'cut')
    with pytest.raises(KeyboardInterrupt): first.fit(2, cbs=[Checkpoint(), AskAt(at)])
    second = stateful(rnn_cbs(), path=tmp_path/'cut')

    second.fit(2, cbs=Checkpoint(), resume=True)
    first.resume()

    for learn in first, second: assert all(map(torch.equal, weights(learn), weights(whole)))

def test_model_without_reset():
    "Such a model is refused at the start"
    with pytest.raises(TypeError, match=r'`RegModel` has no `reset\(\)`'): synth_learner(ModelResetter).fit(1)


# ---- the outputs

@pytest.mark.parametrize('lists', [True, False])
def test_prediction_is_the_first(lists):
    "The loss and the metrics get the prediction; of lists of outputs the last layer's is kept, in the batch only"
    learn, seen = stateful([RNNCallback, ModelResetter], lists), []
    look = Callback(after_loss=lambda o: seen.append((o.pred.shape, o.rnn.raw_out.shape, o.rnn.out.shape)))

    learn.fit(1, cbs=look)

    assert seen == [((4, 1), (4, 5, 3), (4, 5, 3))]*6 and released(learn)

def test_released_with_a_cancelled_batch():
    "A batch that is cancelled leaves no output"
    learn, seen = stateful(rnn_cbs()), []

    learn.fit(1, cbs=[Callback(after_loss=raises(CancelBatchException)),
                      Callback(before_batch=lambda o: seen.append(released(learn)))])

    assert all(seen) and len(seen) == 6

def test_other_outputs():
    "A model that returns something else is an error that shows it"
    with pytest.raises(TypeError, match=r'has to return `\(pred, raw_out, out\)`, and returned float32\[8, 1\]'):
        synth_learner(RNNCallback).fit(1)

def test_evaluation_on_its_own():
    "Evaluations have plain predictions and the plain loss"
    learn = stateful(rnn_cbs(100., 100.))
    model = stateful(None).model
    model.load_state_dict(learn.model.state_dict())
    model.eval()

    losses = [mse_loss(model(x)[0], y).detach() for x, y in data(2)]

    assert learn.validate()[0] == pytest.approx(float(sum(losses))/2)


# ---- what is added

@pytest.mark.parametrize('alpha, beta', [(2., 0.), (0., 1.), (2., 1.)])
def test_regularization(alpha, beta):
    "AR and TAR are added to the loss that is trained with; the one that is recorded is without"
    def expected(learn):
        h, out = learn.rnn.raw_out, learn.rnn.out
        return learn.loss + alpha*(out**2).mean() + beta*((h[:, 1:]-h[:, :-1])**2).mean()
    learn, seen = stateful(rnn_cbs(alpha, beta)), []
    late = Callback(after_loss=lambda o: o.training and seen.append(
        ((o.loss_grad-expected(o.learn)).detach(), mse_loss(o.pred, o.y).detach()-o.loss)))
    late.order = 5

    learn.fit(1, cbs=late)

    assert len(seen) == 4
    for differences in seen: torch.testing.assert_close(torch.stack(differences), torch.zeros(2))

def test_one_time_step_has_no_difference():
    "With one step in time there is nothing that could change: no NaN"
    learn = stateful(rnn_cbs(0., 1.))
    learn.dls = ([(x[:, :1], y) for x, y in data()], None)

    learn.fit(1)

    assert all(w.isfinite().all() for w in weights(learn))

def test_rnn_cbs():
    "Three callbacks, or two where nothing is added, which change no event"
    assert [type(cb) for cb in rnn_cbs()] == [ModelResetter, RNNCallback, RNNRegularizer]
    assert [type(cb) for cb in rnn_cbs(0., 0.)] == [ModelResetter, RNNCallback]
    assert (rnn_cbs()[2].alpha, rnn_cbs()[2].beta) == (2., 1.)
    assert trace(stateful(rnn_cbs())) == trace(stateful([RNNCallback]))

@pytest.mark.parametrize('kwargs', [dict(alpha=-1.), dict(beta=-.1), dict(alpha=float('nan'))])
def test_odd_weights(kwargs):
    "A weight below 0 would make activations large"
    with pytest.raises(ValueError, match='give a number, 0 or more'): RNNRegularizer(**kwargs)

def test_regularizer_alone():
    "Without the callback that keeps the outputs it is refused at the start"
    with pytest.raises(RuntimeError, match='works with RNNCallback'): synth_learner(RNNRegularizer(1.)).fit(1)
