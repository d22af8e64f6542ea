"""The table of counterparts: each of its lines runs, and does what it is there for."""
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import all as everything
from learner.events import CancelFitException
from learner.integrations.mmengine import as_callback, counterparts
from learner.integrations.mmengine_table import not_planned, sections
from learner.learner import Learner
from tests.mmengine_helpers import All


lines = {what: line for rows in sections.values() for what, line in rows.items()}

def mean_abs(pred, y): return (pred-y).abs().mean()
mean_abs.greater_is_better = False

def stop(cb): raise CancelFitException


@pytest.fixture
def names(tmp_path, monkeypatch):
    "What the lines name"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    def loader(n): return DataLoader(TensorDataset(torch.randn(n, 2), torch.randn(n, 1)), 4)
    model, dls = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), (loader(20), loader(8))
    learn = Learner(dls, model, nn.functional.mse_loss, lr=.1, metrics=mean_abs, path=tmp_path)
    yield {**vars(everything), **dict(
        learn=learn, model=model, loss_func=nn.functional.mse_loss, train_dl=dls[0], valid_dl=dls[1], mean_abs=mean_abs,
        f=lambda cb: None, stop=stop, hook=All(), as_callback=as_callback)}
    torch.use_deterministic_algorithms(False)  # which one of the lines asks for


@pytest.fixture
def group(tmp_path):
    "A group of one process, for wrappers that ask for one"
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('what', lines)
def test_a_line_of_the_table(what, names, request):
    "Each line is valid, and runs"
    if 'Distributed' in lines[what]: request.getfixturevalue('group')

    exec(lines[what], names)


def test_no_thing_is_there_twice():
    "Each is in one section only, and of at most three there is no line"
    assert len(lines) == sum(map(len, sections.values())) and len(not_planned) <= 3


def test_the_table(capsys):
    "It shows each thing with its line, by section, or those that are asked for"
    counterparts()
    whole = capsys.readouterr().out
    counterparts('emahook')
    found = capsys.readouterr().out.splitlines()

    assert {k for k, v in {**lines, **not_planned}.items() if k not in whole or v not in whole} == set()
    assert all(title in whole for title in sections)
    assert [re.split(r'[( ]', line)[0] for line in found] == ['Other', 'MMEngine', *['EMAHook']*3]
    with pytest.raises(ValueError, match="no row has 'horse' in it"): counterparts('horse')
