"""Weights under the names of the model's author, and the files they are in; see also callbacks/test_save_wrapped.py."""
import pytest
import torch
from torch import nn

from learner.weights import clean, loose_buffers, misfits, model_path, named_params, put_weights, unwrapped, weights_of
from tests.helpers import synth_learner


def net(n=2):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, n))
    model.register_buffer('seen', torch.zeros(2), persistent=False)
    return model


def compiled(model): return torch.compile(model, backend='eager')


@pytest.mark.parametrize('wrap', [nn.DataParallel, compiled, lambda m: nn.DataParallel(compiled(m))])
def test_wrappers_are_no_part_of_names(wrap):
    "Names are those of the model inside, for weights, parameters and buffers, and weights go in under them"
    model, other = net(), net()
    wrapped = wrap(model)

    put_weights(wrapped, weights_of(other))

    assert unwrapped(wrapped) is model and weights_of(wrapped).keys() == model.state_dict().keys()
    assert [k for k, _ in named_params(wrapped)] == [k for k, _ in model.named_parameters()]
    assert list(loose_buffers(wrapped)) == ['seen'] and torch.equal(model[0].weight, other[0].weight)


@pytest.mark.parametrize(('name', 'cleaned'), [('0.weight', '0.weight'), ('body._orig_mod.0.bias', 'body.0.bias'),
                                               ('0._orig_mod', '0'), ('my_orig_mod.w', 'my_orig_mod.w')])
def test_clean(name, cleaned):
    "Only whole parts of a name are taken out"
    assert clean(name) == cleaned


def test_misfits():
    "What is lacking, what is too much, and what has another shape, each by name"
    state = weights_of(net(3))
    del state['0.bias']

    assert misfits(net(), {**state, 'more': torch.ones(1)}) == (['0.bias'], ['more'], ['1.weight', '1.bias'])


@pytest.mark.parametrize(('file', 'name'), [('a', 'a.pth'), ('a.ckpt', 'a.ckpt'), ('stage-1.5', 'stage-1.5.pth'),
                                            ('sub/a', 'sub/a.pth')])
def test_where_files_are(tmp_path, file, name):
    "Below the Learner's folder of models, with a suffix unless there is one that such files have"
    assert model_path(synth_learner(path=tmp_path), file, '.pth') == tmp_path/'models'/name


def test_a_path_as_it_is_printed(tmp_path, monkeypatch):
    "What is to be read may be given as a path from the working folder; one below the folder of models comes first"
    monkeypatch.chdir(tmp_path)
    (tmp_path/'run/models').mkdir(parents=True)
    (tmp_path/'run/models/a.pth').touch()
    learn = synth_learner(path='run')
    def found(file): return model_path(learn, file, '.pth', there=True).resolve()

    assert found('a') == found('run/models/a.pth') == tmp_path/'run/models/a.pth'
    assert found('none') == tmp_path/'run/models/none.pth'
