"""`load_exported`: what an exported model says of itself, and how it decides by that."""
import json
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import learner
from learner.exported import load_exported
from learner.files import write_file
from learner.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, FocalLossFlat, L1LossFlat
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
    (dict(mean=[0.]*2, std=[1.]*2), r'does not fit `input`.* place of its dimension 1')], ids=['std', 'zero', 'two'])
def test_preprocessing_that_does_not_fit(preprocess, why, tmp_path):
    "It is refused"
    with pytest.raises(ValueError, match=why): images(tmp_path).export(preprocess=preprocess)


def test_info(tmp_path):
    "What is beside the program is plain JSON"
    info = load_exported(images(tmp_path).export()).info

    assert info == json.loads(json.dumps(info)) and info['model'] == 'Sequential'
    assert info['inputs'] == [dict(name='input', dtype='float32', shape=[None, 3, 6, 6])]
    assert info['versions'] == dict(python=sys.version.split()[0], torch=torch.__version__, learner=learner.__version__)
