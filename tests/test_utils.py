"""Small tools: random states, seeds, warnings that point at the user's line, edit distance."""
import random
import warnings

import numpy as np
import pytest
import torch

from learner.utils import edit_distance, is_near, rng_state, set_rng_state, set_seed, warn


def draws(): return random.random(), np.random.rand(), torch.rand(2).tolist()


def test_rng_state_round_trip():
    "All global generators go on from where the state was taken"
    state = rng_state()
    first = draws()

    set_rng_state(state)

    assert draws() == first


@pytest.mark.parametrize('seed', [0, 42, 2**32+1])
def test_set_seed(seed):
    "The same seed gives the same draws of python, numpy and torch, any other one others"
    set_seed(seed)
    first = draws()
    set_seed(seed)

    assert draws() == first
    set_seed(seed+1)
    assert all(a != b for a, b in zip(draws(), first))


def test_set_seed_reproducible():
    "`reproducible=True` asks torch for deterministic algorithms"
    try:
        set_seed(1, reproducible=True)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    finally: torch.use_deterministic_algorithms(False)


def test_set_seed_makes_fits_repeat():
    "Two fits from the same seed end with the same weights, shuffled loader and all"
    from tests.helpers import synth_learner
    ends = []
    for _ in range(2):
        learn = synth_learner(shuffle=True, n=5, lr=.1)
        set_seed(3)
        learn.fit(2)
        ends.append(learn.model.a.item())

    assert ends[0] == ends[1]


def test_warnings_point_at_the_users_line():
    "A warning from within the package is shown at the line outside it that led there"
    from tests.helpers import synth_learner
    learn = synth_learner()
    learn.fit(1)
    learn.opt_func = torch.optim.SGD

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.fit(1)
        warn('direct')

    assert [w.filename for w in caught] == [__file__]*2


@pytest.mark.parametrize('a, b, n', [('', '', 0), ('abc', 'abc', 0), ('abc', '', 3), ('kitten', 'sitting', 3), ('ab',
                                                                                                                'ba',
                                                                                                                2)])
def test_edit_distance(a, b, n):
    "Insertions, deletions and replacements are counted, from either side"
    assert edit_distance(a, b) == edit_distance(b, a) == n

@pytest.mark.parametrize('most', [0, 1, 2, 3])
def test_what_is_near_is_within_so_many_edits(most):
    "The quick look at lengths and letters leaves nothing out"
    words = ['before_fit', 'befor_fitt', 'before_batch', 'after_fit', 'fit', '', 'tif_erofeb', 'before_fot', 'bfeore_']

    assert all(is_near(a, b, most) == (edit_distance(a, b) <= most) for a in words for b in words)
