"""`load_exported`: what an exported model says of itself, how it decides by that, and that it keeps nothing."""
import json
import sys
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import learner
from learner.exported import load_exported
from learner.files import write_file
from learner.learner import Learner
from learner.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, FocalLossFlat, L1LossFlat
from learner.plain import digest
from learner.tensors import tensors_in
from tests.export_helpers import close, given, images, learner_of, rows
from tests.helpers import synth_learner


def test_decisions(tmp_path):
    "Classes by name, their numbers, and the softmax that the loss has within"
    learn = images(tmp_path)
    x, = rows((3, 6, 6), n=4)

    names, index, probs = load_exported(learn.export()).predict(x)

    close(probs, given(learn, x).softmax(1))
    assert names == [learn.dls.vocab[i] for i in index] and torch.equal(index, probs.argmax(1))


nothing = dict(name='none', args=[])

@pytest.mark.parametrize('loss_func, act, decodes', [
    (nn.CrossEntropyLoss(), dict(name='softmax', args=[1]), dict(name='argmax', args=[1])),
    (partial(F.cross_entropy, label_smoothing=.1), dict(name='softmax', args=[1]), dict(name='argmax', args=[1])),
    (nn.NLLLoss(), dict(name='exp', args=[]), dict(name='argmax', args=[1])),
    (CrossEntropyLossFlat(axis=2), dict(name='softmax', args=[2]), dict(name='argmax', args=[2])),
    (FocalLossFlat(), dict(name='softmax', args=[-1]), dict(name='argmax', args=[-1])),
    (DiceLoss(), dict(name='softmax', args=[1]), dict(name='argmax', args=[1])),
    (F.binary_cross_entropy_with_logits, dict(name='sigmoid', args=[]), dict(name='over', args=[.5])),
    (BCEWithLogitsLossFlat(thresh=.3), dict(name='sigmoid', args=[]), dict(name='over', args=[.3])),
    (nn.BCELoss(), nothing, dict(name='over', args=[.5])),
    (L1LossFlat(), nothing, nothing), (F.mse_loss, nothing, nothing), (None, nothing, nothing)],
    ids=lambda o: getattr(o, '__name__', type(o).__name__))
def test_meaning_of_outputs(loss_func, act, decodes, tmp_path):
    "The activation and the decision of each loss are told"
    learn = synth_learner(loss_func=loss_func, path=tmp_path)

    info = load_exported(learn.export()).info

    assert (info['activation'], info['decodes']) == (act, decodes)


class OwnLoss(nn.MSELoss):
    def activation(self, pred): return pred.tanh()

def test_unknown_meaning(tmp_path):
    "A loss with an activation of its own is refused, and the old file stays"
    learn = synth_learner(loss_func=OwnLoss(), path=tmp_path)
    write_file(tmp_path/'model.pt2', lambda f: f.write(b'old'))

    with pytest.raises(ValueError, match='what `activation` of the loss `OwnLoss` does cannot be told in a file'):
        learn.export()
    assert (tmp_path/'model.pt2').read_bytes() == b'old'


def test_several_labels(tmp_path):
    "Of labels that are each there or not, those that are"
    x, y = rows(4, 3)
    learn = learner_of(lambda: nn.Linear(4, 3), x, y.gt(0).float(), path=tmp_path, loss_func=nn.BCEWithLogitsLoss())
    learn.dls.vocab = ['a', 'b', 'c']

    names, index, _ = load_exported(learn.export()).predict(x)

    assert names == [[c for c, there in zip('abc', row) if there] for row in index.tolist()]


@pytest.mark.parametrize('shape', [(12,), (12, 1)], ids=str)
@pytest.mark.parametrize('vocab, named', [(['no', 'yes'], ['no', 'yes']), (['there'], [[], ['there']])], ids=len)
def test_yes_or_no(shape, vocab, named, tmp_path):
    "One decision an item is one of two words; of a single label it is told whether it is there"
    x, = rows(12, n=1)
    x = x.view(shape)
    learn = learner_of(nn.Identity, x, x.gt(0).float(), path=tmp_path, loss_func=nn.BCEWithLogitsLoss())
    learn.dls.vocab = vocab

    names, index, probs = load_exported(learn.export()).predict(x)

    assert names == [named[there] for there in x.flatten().gt(0).tolist()]
    assert torch.equal(index, probs > .5) and index.shape == shape


def test_yes_or_no_of_each_pixel(tmp_path):
    "A picture of decisions is one of words"
    x, = rows((1, 2, 3), n=2)
    learn = learner_of(nn.Identity, x, x.gt(0).float(), path=tmp_path, loss_func=nn.BCEWithLogitsLoss())
    learn.dls.vocab = ['no', 'yes']

    names, index, _ = load_exported(learn.export()).predict(x)

    assert [w == 'yes' for rows in names for row in rows for w in row] == index.flatten().tolist()


@pytest.mark.parametrize('vocab', [
    {2: 'newt', 0: 'cat', 1: 'dog'}, pd.Series(['newt', 'cat', 'dog'], [2, 0, 1]), np.array(['cat', 'dog', 'newt']),
    ('cat', 'dog', 'newt')], ids=lambda o: type(o).__name__)
def test_words_by_number(vocab, tmp_path):
    "Whatever the words are kept in, and in whatever order, each belongs to its number"
    learn = images(tmp_path)
    learn.dls.vocab = vocab

    words = load_exported(learn.export()).info['vocab']

    assert words == ['cat', 'dog', 'newt'] and {*map(type, words)} == {str}


@pytest.mark.parametrize('vocab, found', [(None, None), (range(3), [0, 1, 2]), (np.arange(3.), [0., 1., 2.]),
                                          (torch.arange(3), [0, 1, 2])], ids=lambda o: type(o).__name__)
def test_words_that_are_none(vocab, found, tmp_path):
    "Numbers are plain ones, and None is no vocabulary"
    learn = images(tmp_path)
    learn.dls.vocab = vocab

    info = load_exported(learn.export()).info

    assert info['vocab'] == found


@pytest.mark.parametrize('vocab, why', [
    (dict(cat=0, dog=1, newt=2), 'does not give a word by each number from 0'), ({0: 'cat', 2: 'newt'}, 'each number'),
    ({'cat', 'dog', 'newt'}, 'a `set`, does not'), (['cat', 'dog'], r'2 words, and .* float32\[4, 3\], which takes 3'),
    (list('abcd'), '4 words, .* takes 3: set `dls.vocab` to as many')], ids=['numbers', 'gap', 'set', 'two', 'four'])
def test_words_that_do_not_fit(vocab, why, tmp_path):
    "A vocabulary has a word for each output, or nothing is written"
    learn = images(tmp_path)
    learn.dls.vocab = vocab

    with pytest.raises(ValueError, match=why): learn.export()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('n_out, vocab, why', [(3, 'ab', 'takes 3:'), (1, 'abc', 'takes 1 or 2:'),
                                               (2, 'abc', 'takes 2:')])
def test_labels_that_do_not_fit(n_out, vocab, why, tmp_path):
    "Labels likewise; two words are enough for one decision only"
    x, y = rows(4, n_out)
    learn = learner_of(lambda: nn.Linear(4, n_out), x, y, path=tmp_path, loss_func=nn.BCEWithLogitsLoss())
    learn.dls.vocab = list(vocab)

    with pytest.raises(ValueError, match=why): learn.export()


def plain_loss(pred, y): return F.mse_loss(pred, y)

def with_words(loss_func, path):
    "A Learner with a vocabulary"
    x, y = rows(4, 3)
    learn = learner_of(lambda: nn.Linear(4, 3), x, y, path=path, loss_func=loss_func)
    learn.dls.vocab = list('abc')
    return learn


@pytest.mark.parametrize('loss_func', [plain_loss, partial(plain_loss)], ids=['function', 'partial'])
def test_words_without_use(loss_func, tmp_path):
    "If a loss does not tell what outputs mean, it is warned that words are of no use"
    learn = with_words(loss_func, tmp_path)

    with pytest.warns(UserWarning, match='not known of the loss, `plain_loss`.* `nn.CrossEntropyLoss'): learn.export()


@pytest.mark.parametrize('loss_func', [nn.HuberLoss(), L1LossFlat()], ids=['torch', 'flat'])
def test_values_need_no_words(loss_func, tmp_path):
    "Of a loss of values that is known"
    x, = rows(4)

    names, index, probs = load_exported(with_words(loss_func, tmp_path).export()).predict(x)

    assert names is index is probs


@pytest.mark.parametrize('as_given', [torch.Tensor.clone, torch.Tensor.numpy], ids=['tensor', 'array'])
def test_what_is_given_stays(as_given, tmp_path):
    "A model that begins by writing into its input leaves the caller's own alone, and the loader's"
    x, y = rows(4, 2)
    learn = Learner([(x, y)], nn.Sequential(nn.Flatten(0, 0), nn.ReLU(inplace=True), nn.Linear(4, 2)), F.mse_loss,
                    default_cbs=False, path=tmp_path)
    before, given_x = x.clone(), as_given(x.clone())

    out = load_exported(learn.export())(given_x)

    close(torch.as_tensor(given_x), before)
    close(x, before)
    close(out, given(learn, before.clone()))


@pytest.mark.parametrize('size, dim', [((3, 6, 6), 1), (3, 1), ((5, 3), 2)], ids=str)
def test_preprocessing(size, dim, tmp_path):
    "Constants are applied along the channels of images and the last dimension of tables and series"
    x, = rows(size)
    learn = learner_of(nn.Identity, x, x, path=tmp_path)
    mean, std = torch.tensor([1., 2, 3]), torch.tensor([.5, 1, 2])
    shape = [3 if i == dim else 1 for i in range(x.ndim)]

    exported = load_exported(learn.export(preprocess=dict(mean=mean, std=std.tolist())))

    close(exported(x.double().numpy()), (x-mean.view(shape))/std.view(shape))
    close(exported(x.to(torch.uint8)), (x.to(torch.uint8)-mean.view(shape))/std.view(shape))


@pytest.mark.parametrize('preprocess, why', [
    (dict(mean=[0.]*3), 'give dict'), (dict(mean=[0.]*3, std=[1., 0, 1]), 'above 0'),
    (dict(mean=[0.]*2, std=[1.]*2), r'does not fit `input`.* place of its dimension 1'), ({}, 'give dict')],
    ids=['std', 'zero', 'two', 'none'])
def test_preprocessing_that_does_not_fit(preprocess, why, tmp_path):
    "It is refused"
    with pytest.raises(ValueError, match=why): images(tmp_path).export(preprocess=preprocess)


@pytest.mark.parametrize('preprocess', [(.5, .5), .5, dict(mean='a', std='b'), dict(mean=None, std=[1.])], ids=str)
def test_preprocessing_of_another_type(preprocess, tmp_path):
    "The error says what to give"
    with pytest.raises(TypeError, match=r'preprocess=.*; give dict\(mean=\[…\], std=\[…\]\) of numbers'):
        images(tmp_path).export(preprocess=preprocess)


def test_info(tmp_path):
    "What is beside the program is plain JSON"
    info = load_exported(images(tmp_path).export()).info

    assert info == json.loads(json.dumps(info)) and info['model'] == 'Sequential'
    assert info['inputs'] == [dict(name='input', dtype='float32', shape=[None, 3, 6, 6])]
    assert info['versions'] == dict(python=sys.version.split()[0], torch=torch.__version__, learner=learner.__version__)


# ---- what a model keeps

class Keeps(nn.Module):
    "Adds something of the last batch to the next one: `how` it is kept"
    last: Any

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 2), how
        if how == 'buffer': self.register_buffer('last', torch.zeros(2))
        else: self.last = [torch.zeros(2)] if how == 'list' else torch.zeros(2)

    def forward(self, x):
        out = self.layer(x)
        new, out = out.mean(0).detach(), out + (self.last[0] if self.how == 'list' else self.last)
        if self.how == 'list': self.last = [new]
        elif self.how == 'attribute': self.last = new
        else: self.last.copy_(new)
        return out


class Forgets(Keeps):
    def reset(self): self.last = [torch.zeros(2)] if self.how == 'list' else torch.zeros(2)


class Restarts(nn.Linear):
    def reset(self): nn.init.zeros_(self.bias)


@pytest.mark.parametrize('how', ['list', 'attribute', 'in place', 'buffer'])
def test_model_that_keeps_something(how, tmp_path):
    "What a model keeps from one batch would be in the file for ever: it is refused, also if that was its only batch"
    x, y = rows(4, 2)
    learn = Learner([(x, y)], Keeps(how), F.mse_loss, default_cbs=False, path=tmp_path)
    learn.validate(dl=[(x, y)])

    with pytest.raises(ValueError, match='or keep something from call to call'): learn.export()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('how', ['list', 'attribute'])
def test_model_that_forgets(how, tmp_path):
    "With a `reset()` it is exported as that leaves it, and goes on with what it has kept"
    x, y = rows(4, 2)
    learn = Learner([(x, y)], Forgets(how), F.mse_loss, default_cbs=False, path=tmp_path)
    learn.validate(dl=[(x, y)])
    model: Any = learn.model
    kept = [*tensors_in(model.last)][0].clone()

    exported = load_exported(learn.export())

    close([*tensors_in(model.last)], [kept])
    close([exported(x), exported(x[:3])], [model.layer(x).detach(), model.layer(x[:3]).detach()])
    assert kept.abs().sum() > 0


def test_reset_that_is_another(tmp_path):
    "One that changes weights is not what is meant, and they are put back"
    x, y = rows(4, 2)
    learn = learner_of(lambda: Restarts(4, 2), x, y, path=tmp_path)
    before = digest(learn.model.state_dict())

    with pytest.raises(ValueError, match=r'`Restarts.reset\(\)` is called to .* changes parameters'): learn.export()

    assert digest(learn.model.state_dict()) == before
