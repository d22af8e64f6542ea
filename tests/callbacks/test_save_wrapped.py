"""Names in files are the model's own, whatever wraps it or a part of it when it is saved and when it is loaded."""
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from learner.plain import digest
from learner.weights import named_params, weights_of
from tests.helpers import synth_learner
from tests.resume_helpers import network, noisy_learner


def compiled(model): return torch.compile(model, backend='eager')


def within(wrap, *places):
    "Wraps submodules"
    def wrapping(model):
        for i in places: model[i] = wrap(model[i])
        return model
    return wrapping


@pytest.fixture(scope='module', autouse=True)
def process_group(tmp_path_factory):
    "A group of one process"
    where = tmp_path_factory.mktemp('group')/'store'
    torch.distributed.init_process_group('gloo', init_method=f'file://{where}', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


wraps = dict(compile=compiled, parallel=nn.DataParallel, distributed=DistributedDataParallel,
             both=lambda m: compiled(nn.DataParallel(m)), compiled_parts=within(compiled, 1, 4),
             parallel_part=within(nn.DataParallel, 0), twice=lambda m: compiled(within(compiled, 1)(m)),
             mixed_part=within(lambda m: nn.DataParallel(compiled(m)), 0))
every_wrap = pytest.mark.parametrize('wrap', wraps.values(), ids=wraps)
names = list(network().state_dict())


def trained(path):
    learn = noisy_learner(path)
    learn.fit(1, 1e-2)
    return learn


def wrapped(path, wrap):
    learn = noisy_learner(path)
    learn.model = wrap(network())
    return learn


def equal(*learners):
    return all(torch.equal(a, b) for a, b in zip(*(weights_of(learn.model).values() for learn in learners)))


@every_wrap
@pytest.mark.parametrize('with_opt', [True, False])
def test_saved_wrapped(wrap, with_opt, tmp_path):
    "What is saved of a wrapped model has its own names, also for its versions, and is loaded into it without wrapper"
    learn = trained(tmp_path)
    learn.model = wrap(learn.model)
    path = learn.save('m', with_opt=with_opt)

    other = noisy_learner(tmp_path).load('m')

    found = torch.load(path)['model'] if with_opt else torch.load(path)
    assert list(found) == names and found._metadata == network().state_dict()._metadata
    assert equal(other, learn) and (not with_opt or digest(other.opt.state_dict()['state']) ==
                                    digest(learn.opt.state_dict()['state']))


@every_wrap
@pytest.mark.parametrize('of', ['save', 'torch'])
def test_loaded_wrapped(wrap, of, tmp_path):
    "A wrapped model takes files of one without wrapper, and those that plain torch wrote of one that is wrapped alike"
    learn, other = trained(tmp_path), wrapped(tmp_path, wrap)
    learn.save('m')
    learn.model = wrap(learn.model)
    torch.save(learn.model.state_dict(), tmp_path/'models'/'torch.pth')

    if of == 'save': other.load('m')
    else:
        with pytest.warns(UserWarning, match='unverified'): other.load('torch')
        with pytest.warns(UserWarning, match='unverified'): assert equal(noisy_learner(tmp_path).load('torch'), learn)

    assert equal(other, learn)


@every_wrap
def test_whole_states(wrap, tmp_path):
    "So it is with whole states: weights, what is frozen and the optimizer, with and without wrapper"
    learn, other = trained(tmp_path), wrapped(tmp_path, wrap)
    learn.model[4].weight.requires_grad_(False)
    plain = learn.save_state('plain')
    other.load_state(plain)
    again = other.save_state('again')

    third = noisy_learner(tmp_path).load_state(again)

    assert equal(other, learn) and list(torch.load(again)['model']) == list(torch.load(plain)['model']) == names
    for one in (other, third):
        assert [k for k, p in named_params(one.model) if not p.requires_grad] == ['4.weight']
        assert digest(one.opt.state_dict()['state']) == digest(learn.opt.state_dict()['state'])


@pytest.mark.parametrize('name', ['compile', 'compiled_parts', 'twice'])
def test_modes_in_whole_states(name, tmp_path):
    "A submodule that was in eval is so afterwards, with and without `torch.compile`"
    learn, other = trained(tmp_path), wrapped(tmp_path, wraps[name])
    learn.model[1].eval()
    other.load_state(learn.save_state('plain'))

    third = noisy_learner(tmp_path).load_state(other.save_state('wrapped'))

    for one in (other, third):
        modes = {type(m): m.training for m in one.model.modules()}
        assert not modes[nn.BatchNorm1d] and modes[nn.Linear] and modes[nn.Dropout]


def test_names_that_only_look_alike(tmp_path):
    "A submodule that the model's author called `module` keeps its name, also where plain torch saved the wrapped model"
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Sequential(nn.Linear(1, 1))
        def forward(self, x): return self.module(x)
    learn, other = synth_learner(model=nn.DataParallel(Own()), path=tmp_path), synth_learner(model=Own(), path=tmp_path)
    nn.init.ones_(learn.model.module.module[0].weight)

    path = learn.save('m', with_opt=False)
    other.load(path)
    ours = other.model.module[0].weight.item()
    torch.save({k: 2*v for k, v in learn.model.state_dict().items()}, tmp_path/'torch.pth')
    with pytest.warns(UserWarning, match='unverified'): other.load(tmp_path/'torch.pth')

    assert list(torch.load(path)) == ['module.0.weight', 'module.0.bias']
    assert (ours, other.model.module[0].weight.item()) == (1, 2)


def test_part_in_two_places(tmp_path):
    "A wrapped submodule that is used twice has clean names in both places"
    part = compiled(nn.Linear(1, 1))
    learn = synth_learner(model=nn.Sequential(part, nn.Tanh(), part), path=tmp_path)

    assert list(torch.load(learn.save('m', with_opt=False))) == ['0.weight', '0.bias', '2.weight', '2.bias']


def test_loss_that_is_wrapped(tmp_path):
    "The names of a loss's state have no parts of wrappers either"
    weight = torch.tensor([1., 3.])
    learn, other = noisy_learner(tmp_path), noisy_learner(tmp_path)
    learn.loss_func = compiled(nn.CrossEntropyLoss(weight))
    other.loss_func = nn.CrossEntropyLoss(torch.ones(2))

    other.load(learn.save('m'))

    assert torch.equal(other.loss_func.weight, weight)
