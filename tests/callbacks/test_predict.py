"""`learn.predict` of an item, also from several threads, and `tta`."""
from collections import namedtuple
from threading import Thread

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from learner import DataLoaders, Learner, before_batch_cb
from learner.losses import BCEWithLogitsLossFlat
from tests.helpers import synth_learner

x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


def classifier(vocab=None, loss_func=None, cbs=None, n_out=3):
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors(x, y, bs=4)
    if vocab: dls.vocab = vocab
    return Learner(dls, nn.Sequential(nn.Linear(3, n_out), nn.Dropout(.5)), loss_func, cbs=cbs)

def probabilities(learn, x):
    with torch.no_grad(): return learn.model[0](x).softmax(-1)


# ---- an item

@pytest.mark.parametrize('item', [x[5], x[5].numpy(), x[5].double().numpy(), x[5].tolist(), pd.Series(x[5].numpy()),
                                  pd.Series([*x[5].tolist()], dtype=object)], ids=lambda o: type(o).__name__)
def test_an_item(item, capsys):
    "The class in words, the decision, the probabilities; silently"
    learn = classifier(['cat', 'dog', 'owl'])
    if isinstance(item, list): item = torch.tensor(item)

    word, index, probs = learn.predict(item)

    expected = probabilities(learn, x[5])
    assert torch.allclose(probs, expected, atol=1e-6) and int(index) == int(expected.argmax())
    assert word == ['cat', 'dog', 'owl'][int(index)] and capsys.readouterr() == ('', '')

def test_a_batch_and_a_frame():
    "All rows at once, with a word for each"
    learn = classifier('abc')
    frame = pd.DataFrame(x.numpy(), columns=['p', 'q', 'r'])
    expected = probabilities(learn, x)

    for found in learn.predict(frame), learn.predict(x, batch=True):
        words, index, probs = found
        assert torch.equal(probs, expected) and torch.equal(index, expected.argmax(1))
        assert words == ['abc'[i] for i in index]

def test_the_input_as_the_model_gets_it():
    "First, if it is wanted: callbacks have changed it"
    @before_batch_cb
    def halved(cb, xb, yb): return (xb[0]/2,), yb
    learn = classifier(cbs=halved)

    given, _, _, probs = learn.predict(x[0], with_input=True)

    assert torch.equal(given, x[0]/2) and torch.allclose(probs, probabilities(learn, x[0]/2), atol=1e-6)

def test_values_and_labels():
    "A number for a value, the labels that are on for several"
    learn = synth_learner()
    value, _, raw = learn.predict(torch.tensor([2.]))
    assert value == raw.item() and isinstance(value, float)

    learn = classifier('abc', BCEWithLogitsLossFlat())
    labels, on, probs = learn.predict(x[0])
    assert labels == ['abc'[i] for i in range(3) if probs[i] > .5] and on.dtype == torch.bool

def test_several_inputs_and_names():
    "A tuple holds all inputs, a dict goes in by name"
    class Two(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(2, 1)
        def forward(self, a, b): return self.layer(torch.stack([a, b], 1))
    dls = [(torch.ones(4), torch.ones(4), torch.ones(4, 1))], None
    learn = synth_learner(model=Two(), dls=dls)
    learn.n_inp = 2
    by_tuple = learn.predict((torch.tensor(1.), 2.))[2]

    assert torch.equal(by_tuple, learn.predict(dict(a=torch.tensor(1.), b=2.))[2]) and learn.n_inp == 2

def test_outputs_of_several_parts():
    "Of each the item's own"
    Out = namedtuple('Out', 'a b')
    class Parts(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(3, 2)
        def forward(self, x): return Out(self.layer(x), [x])
    learn = synth_learner(model=Parts(), loss_func=lambda p, y: 0)

    _, _, pred = learn.predict(x[3])

    assert isinstance(pred, Out) and pred.a.shape == (2,) and torch.equal(pred.b[0], x[3])

@pytest.mark.parametrize('item', ['a text', pd.Series(['a', 1]), np.array(['b'])])
def test_no_numbers(item):
    "Are refused; a text goes to the model as it is"
    if isinstance(item, str): pytest.raises(TypeError, classifier().predict, item)
    else:
        with pytest.raises(TypeError, match='holds no numbers'): classifier().predict(item)

def test_threads():
    "One after the other: each gets its own prediction, and nothing is left changed"
    learn, found = classifier(), {}
    before, expected = learn.state_hash(), probabilities(learn, x)
    def run(i):
        for _ in range(20): found[i] = learn.predict(x[i])[2]
    threads = [Thread(target=run, args=(i,)) for i in range(8)]

    for t in threads: t.start()
    for t in threads: t.join()

    assert all(torch.allclose(found[i], expected[i], atol=1e-6) for i in range(8))
    assert learn.state_hash() == before and learn.n_inp is None and learn.model.training


# ---- test-time augmentation

def flip(x): return -x
def noise(x): return x+torch.randn_like(x)

def test_merged_with_the_plain_ones():
    "By the mean and a share of a quarter, or as asked for"
    learn = classifier()
    plain, flipped = (probabilities(learn, s*learn.dls.valid_ds.tensors[0]) for s in (1, -1))

    preds, targs = learn.tta(augs=flip, n=1)
    most = learn.tta(augs=flip, n=2, merge='max', beta=0)[0]
    of_all = learn.tta(augs=[flip, lambda x: x], n=1, merge=lambda ps: ps.sum(0), beta=None)

    assert torch.allclose(preds, .75*flipped+.25*plain) and torch.equal(targs, learn.dls.valid_ds.tensors[1])
    assert torch.equal(most, flipped)
    assert torch.equal(of_all[0], plain) and torch.allclose(of_all[1], plain+flipped)

def test_each_round_has_other_random_numbers():
    "Which the random streams show nothing of afterwards"
    learn, before = classifier(), torch.get_rng_state()

    rounds = [learn.tta(augs=noise, n=n, beta=0)[0] for n in (1, 2, 2)]

    assert not torch.allclose(rounds[0], rounds[1]) and torch.equal(rounds[1], rounds[2])
    assert torch.equal(before, torch.get_rng_state())

@pytest.mark.parametrize('kwargs, error', [
    (dict(), TypeError), (dict(augs='flip'), TypeError), (dict(augs=flip, n=0), ValueError),
    (dict(augs=flip, beta=2), ValueError), (dict(augs=flip, merge='median'), ValueError)])
def test_what_means_nothing(kwargs, error):
    "Is refused"
    with pytest.raises(error, match='tta: '): classifier().tta(**kwargs)


# ---- what may be given

def test_a_batch_is_known_by_its_dimensions():
    "As many as training batches have; other ones are an error that shows both"
    learn = classifier('abc')

    assert learn.predict(x)[0] == learn.predict(x, batch=True)[0] and len(learn.predict(x.numpy()[:, ::-1])[0]) == 12
    with pytest.raises(ValueError, match=r'given as float32\[1, 2, 3\], and batches have float32\[1, 3\]'):
        learn.predict(x[None, :2][None][0][None][0].reshape(1, 2, 3))

@pytest.mark.parametrize('dtype', [torch.float64, torch.int64, torch.uint8, torch.float16])
def test_numbers_become_what_batches_have(dtype):
    "Whatever they were"
    learn = classifier()
    item = torch.tensor([1, 2, 3]).to(dtype)

    assert torch.allclose(learn.predict(item)[2], probabilities(learn, item.float()), atol=1e-6)

@pytest.mark.parametrize('vocab, words', [(['small', 'big'], ['small', 'big']), (['big'], [[], ['big']])])
def test_yes_or_no(vocab, words):
    "Is one of two words; of one word it is there or not"
    learn = classifier(vocab, BCEWithLogitsLossFlat(), n_out=1)
    with torch.no_grad(): learn.model[0].weight.zero_(), learn.model[0].bias.fill_(-1.)
    no = learn.predict(x[0])[0]
    with torch.no_grad(): learn.model[0].bias.fill_(1.)

    assert [no, learn.predict(x[0])[0]] == words

def test_a_loss_that_does_not_say_how_it_decides():
    "Is told of where there are classes"
    with pytest.warns(UserWarning, match='how the loss, `.*lambda.*`, decides is not known'):
        word, index, pred = classifier('abc', lambda p, y: nn.functional.cross_entropy(p, y)).predict(x[0])

    assert word is index is pred or torch.equal(index, pred)

def test_too_short_a_vocabulary():
    "Gives numbers where it has no words"
    learn = classifier(['only'])
    with torch.no_grad(): learn.model[0].weight.zero_(), learn.model[0].bias.copy_(torch.tensor([0., 0., 1.]))

    assert learn.predict(x[0])[0] == 2
