"""What is assigned to a module between two fits: what torch refuses, and what of the rest the next fit trains."""
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import nn

from tests.helpers import synth_learner

# For each kind of attribute, what comes of assigning a parameter, a module, a buffer (by `register_buffer`), None and a
# plain tensor to its name: the error by which torch refuses it, or letters: t(rained, in the optimizer), s(aved),
# m(oved and converted), f(ound as a module). '' is none of them.
table = {
    'parameter': ('tsm', TypeError, KeyError, '', TypeError),
    'no parameter': ('tsm', TypeError, KeyError, '', TypeError),  # registered as None
    'module': ('tsm', 'tsmf', KeyError, '', TypeError),
    'buffer': ('tsm', 'tsmf', 'sm', '', 'sm'),
    'loose buffer': ('tsm', 'tsmf', 'sm', '', 'm'),               # not persistent
    'plain': ('tsm', 'tsmf', KeyError, '', ''),
    'absent': ('tsm', 'tsmf', 'sm', '', ''),
}
new_kinds = 'parameter', 'module', 'buffer', 'None', 'tensor'
rows = [(old, new, expected) for old, row in table.items() for new, expected in zip(new_kinds, row, strict=True)]


class Part(nn.Module):
    "Adds what its attribute `it` gives, be it a module or a tensor"
    def forward(self, x):
        it = getattr(self, 'it', None)
        return it(x) if isinstance(it, nn.Module) else x if it is None else x+it

def make(kind):
    model = nn.Sequential(Part(), nn.Linear(1, 1))
    put(model[0], kind)
    return model

def put(part, kind):
    if kind == 'no parameter': part.register_parameter('it', None)
    elif 'buffer' in kind: part.register_buffer('it', torch.ones(1), persistent=kind == 'buffer')
    elif kind != 'absent': part.it = dict(parameter=nn.Parameter(torch.ones(1)), module=nn.Linear(1, 1),
                                          plain=torch.ones(1), tensor=torch.ones(1)).get(kind)

def tensors_of(part):
    it = getattr(part, 'it', None)
    return [*it.parameters()] if isinstance(it, nn.Module) else [] if it is None else [it]

@pytest.mark.parametrize('old,new,expected', [r for r in rows if not isinstance(r[2], str)])
def test_what_torch_refuses(old, new, expected):
    "What torch refuses leaves the model, its optimizer and its training as they were"
    learn = synth_learner(model=make(old), lr=.1)
    learn.fit(1)
    opt, before = learn.opt, learn.model.state_dict()

    with pytest.raises(expected, match='it'): put(learn.model[0], new)
    learn.fit(1)

    assert learn.opt is opt and learn.model.state_dict().keys() == before.keys()

@pytest.mark.parametrize('old,new,expected', [r for r in rows if isinstance(r[2], str)])
def test_what_the_next_fit_does(old, new, expected, tmp_path):
    "Parameters and modules are trained by a new optimizer, which is told; saved, moved and found is what torch knows"
    learn = synth_learner(model=make(old), lr=.1, path=tmp_path)
    learn.fit(1)
    put(part := learn.model[0], new)
    tensors = tensors_of(part)
    before = [t.detach().clone() for t in tensors]

    with catch_warnings(record=True) as told:
        simplefilter('always')
        learn.fit(1)
    trained = [not t.equal(b) for t, b in zip(tensors, before, strict=True)]
    held = [any(t is p for p in learn.opt.all_params()) for t in tensors]
    saved = {k.partition('.it')[0] for k in torch.load(learn.save('m', with_opt=False)) if '.it' in k}
    learn.model.double()

    assert {*trained} == {*held} == ({'t' in expected} if tensors else set())
    assert saved == ({'0'} if 's' in expected else set())
    assert {t.dtype == torch.float64 for t in tensors_of(part)} == ({'m' in expected} if tensors else set())
    assert ('0.it' in dict(learn.model.named_modules())) == ('f' in expected)
    assert {*learn.opt.all_params()} == {*learn.model.parameters()}
    changed = 't' in expected or old in ('parameter', 'module')
    assert [str(w.message) for w in told] == ['the optimizer is made anew, since `model` changed']*changed
