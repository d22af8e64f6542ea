"""`learn.publish`: weights that torch.hub verifies by their name, and a card that says what is known."""
import hashlib
import re
import sys
from typing import cast

import pytest
import torch
from torch import nn

import learner.publish as publish
from learner.callbacks.averaging import EMA
from tests.helpers import RegModel, synth_learner

assert publish


def fitted(path, **kwargs):
    learn = synth_learner(path=path, **kwargs)
    learn.fit(2)
    return learn


def test_torch_hub_takes_it(tmp_path):
    "torch.hub finds the hash in the name and it is the file's; the weights are the model's, whatever wraps it"
    learn = fitted(tmp_path/'a')
    known = learn.model.state_dict()
    learn.model = cast(nn.Module, torch.compile(learn.model, backend='eager'))

    path = learn.publish('reg')

    assert re.fullmatch(r'reg-[0-9a-f]{8}\.pth', path.name)
    found = torch.hub.HASH_REGEX.search(path.name)
    assert found and found[1] == hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    state = torch.hub.load_state_dict_from_url(path.as_uri(), tmp_path/'hub', check_hash=True, weights_only=True,
                                               progress=False)
    assert state.keys() == known.keys() and all(torch.equal(v, known[k]) for k, v in state.items())
    RegModel().load_state_dict(state)


def test_same_weights_same_name(tmp_path):
    "The name depends on the weights alone"
    learn = fitted(tmp_path)

    first, again = learn.publish('m.pth'), learn.publish('m.pth')
    learn.fit(1)

    assert first == again != learn.publish('m.pth')


def test_card(tmp_path):
    "The card has what the Learner knows, and the curve of the loss lies beside it"
    learn = fitted(tmp_path)

    path = learn.publish('reg', licence='CC0-1.0')

    card = path.with_suffix('.md').read_text()
    for text in ('# reg-', '`tests.helpers.RegModel`', '**parameters**: 2', 'float32[8, 1], float32[8, 1]',
                 f'valid_loss {learn.recorder.values[-1]["valid_loss"]:.4g}', f'torch {torch.__version__}', 'CC0-1.0',
                 f"torch.load('{path.name}', weights_only=True)", f'![loss]({path.stem}.png)'):
        assert text in card
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    assert sys.modules['matplotlib.pyplot'].get_fignums() == []


def test_card_of_what_is_not_known(tmp_path):
    "Without fit, licence and data to look at, it says so"
    learn = synth_learner(dls=(iter([]), None), path=tmp_path)

    card = learn.publish('reg').with_suffix('.md').read_text()

    for text in ('**licence**: not stated', '**a batch**: not known', '**after training**: not known',
                 'There is no curve of the loss: no fit was recorded'): assert text in card
    assert not [*tmp_path.glob('*.png')]


def test_without_matplotlib(tmp_path, monkeypatch):
    "Without matplotlib there is no curve, and the card says so"
    learn = fitted(tmp_path)
    monkeypatch.setitem(sys.modules, 'matplotlib.pyplot', None)

    card = learn.publish('reg').with_suffix('.md').read_text()

    assert 'There is no curve of the loss: `plot_loss` needs `matplotlib.pyplot`: pip install matplotlib' in card
    assert not [*tmp_path.glob('*.png')]


def test_no_card(tmp_path):
    "If none is wanted, the weights are alone"
    path = fitted(tmp_path).publish('reg', card=False)

    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize('name', ['resnet-1.5', 'a-bc.x'])
def test_name_with_other_digits(name, tmp_path):
    "A name in which torch.hub would find another hash is refused, and nothing written"
    with pytest.raises(ValueError, match='torch.hub would take'): fitted(tmp_path).publish(name)

    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize('name, why', [('.', 'no file'), ('', 'no file'), ('x/', 'no file'),
                                       ('m.pt2', '`learn.export`')])
def test_name_of_another_file(name, why, tmp_path):
    "So is a name that is a folder's, or another method's"
    with pytest.raises(ValueError, match=f'publish: .*{why}'): fitted(tmp_path).publish(name)

    assert [*tmp_path.iterdir()] == []


def test_average_is_asked_for(tmp_path):
    "If evaluations use an average, and the trained weights are written, it is said how the average is"
    learn = fitted(tmp_path, cbs=EMA())

    with pytest.warns(UserWarning, match=r'publish: .* `with learn.averaged\(\): learn.publish\(…\)` writes that'):
        raw = learn.publish('m')
    with learn.averaged(): average = learn.publish('m')

    assert raw != average


def test_lazy_weights(tmp_path):
    "They have no values yet"
    with pytest.raises(ValueError, match='lazy parameters'):
        synth_learner(model=nn.LazyLinear(1), path=tmp_path).publish('m')


def test_learner_loads_it(tmp_path):
    "What was published can be loaded as what was saved"
    learn = fitted(tmp_path)
    other = synth_learner(path=tmp_path)

    with pytest.warns(UserWarning, match='unverified'): other.load(learn.publish('m').absolute())

    assert all(map(torch.equal, other.model.parameters(), learn.model.parameters()))


# ---- what goes with the weights

@pytest.mark.parametrize('keys, parts', [('opt', ['opt']), (['meta', 'model', 'opt'], ['meta', 'opt']), ((), [])])
def test_what_goes_with_the_weights(keys, parts, tmp_path):
    "A dict of plain values, weights first, whose hash is in its name as ever"
    learn = fitted(tmp_path)
    learn.meta['dataset'] = 'v3'

    path = learn.publish('reg', keys=keys)
    state = torch.load(path, weights_only=True)

    assert [*state] == ['model', *parts] and all(torch.equal(v, state['model'][k]) for k, v in
                                                 learn.model.state_dict().items())
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:8] in path.name
    if 'meta' in parts: assert state['meta']['user'] == dict(dataset='v3') and state['meta']['versions']


def test_what_goes_with_them_is_loaded(tmp_path):
    "`learn.load` takes weights, optimizer and the state of the loss, as from `learn.save`, and trains on alike"
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('by', torch.ones(()))
        def forward(self, p, y):
            self.by += .1
            return ((p-y)*self.by).square().mean()
    learn, other = fitted(tmp_path, loss_func=Growing()), synth_learner(loss_func=Growing(), path=tmp_path)
    path = learn.publish('reg', keys=('opt', 'loss'))

    with pytest.warns(UserWarning, match='unverified'): other.load(path.absolute(), with_opt=True)
    for o in (learn, other): o.fit(1)

    assert all(map(torch.equal, other.model.parameters(), learn.model.parameters()))
    assert learn.loss_func.by == other.loss_func.by > 1.5


def test_the_card_tells_how_they_are_read(tmp_path):
    "It names the parts, and its code runs as it stands"
    learn = fitted(tmp_path)
    path = learn.publish('reg', keys='opt')

    card = path.with_suffix('.md').read_text()
    line = next(line for line in card.splitlines() if line.startswith('model.load_state_dict'))
    exec(line.replace(path.name, str(path)), dict(torch=torch, model=(model := RegModel())))

    assert '**holds**: `model`, `opt`' in card and "weights_only=True)['model']" in card
    assert all(map(torch.equal, model.parameters(), learn.model.parameters()))


@pytest.mark.parametrize('keys, there', [('optimizer', 'model, opt, meta;'), (['opt', 'rng'], 'model, opt, meta;'),
                                         ('loss', 'model, opt, meta;'), (3, 'model, opt, meta;')])
def test_parts_that_are_not_there(keys, there, tmp_path):
    "They are an error that names those there are, and nothing is written"
    with pytest.raises(ValueError, match=f'publish: keys=.* names nothing .*there are {there}'):
        fitted(tmp_path).publish('reg', keys=keys)

    assert [*tmp_path.iterdir()] == []


def test_an_optimizer_that_is_not_there_yet(tmp_path):
    "Before the first fit it is none of them"
    with pytest.raises(ValueError, match="keys='opt' .*there are model, meta"):
        synth_learner(path=tmp_path).publish('reg', keys='opt')
