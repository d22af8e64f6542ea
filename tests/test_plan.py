"""The index batches of an epoch; that they are torch's, in order and draws, is tested in test_loader.py."""
import pytest
import torch
from torch.utils.data import DataLoader

from learner.plan import Plan


def plan(n=10, bs=4, base=(7, 0), **kwargs):
    torch.manual_seed(3)
    return Plan(DataLoader(range(n), bs, **kwargs), base)


@pytest.mark.parametrize('kwargs', [{}, dict(shuffle=True), dict(shuffle=True, drop_last=True), dict(bs=None)])
@pytest.mark.parametrize('k', [0, 1, 2, 5])
def test_from_any_batch_on(kwargs, k):
    "The batches from number `k` on are the last ones of all, whatever they are made of"
    assert list(plan(**kwargs).batches(k)) == list(plan(**kwargs).batches(0))[k:]


def test_seeds_go_by_the_batch_and_the_epoch():
    "A batch has the same seed wherever one begins, and another one in another epoch"
    whole, later = list(plan().seeded(0)), list(plan(base=(7, 1)).seeded(0))

    assert list(plan().seeded(2)) == whole[2:]
    assert len({seed for seed, _ in whole+later}) == 6 and [ids for _, ids in whole] == [ids for _, ids in later]
