"""Scalars: means over the last values, each by its items, and nothing read from a device before it is asked for."""
import math

import numpy as np
import pytest
import torch

from learner import scalars
from learner.scalars import Scalars
from tests.bench.test_counts import waits


def test_means_weigh_by_items():
    "Means are of all values or of the last so many, each counting as its items"
    s = Scalars([1, 2, 4], [1, 1, 2])

    assert s.mean() == 11/4 and s.mean(2) == 10/3 and s.mean(1) == s.current() == 4 and s.mean(99) == s.mean()
    assert (s.min(), s.max(), s.max(1), s.min(2)) == (1, 4, 4, 2) and len(s) == 3

def test_nothing_there():
    "Without a value all is NaN"
    s = Scalars()

    assert all(map(math.isnan, (s.mean(), s.mean(3), s.current(), s.min(), s.max()))) and len(s) == 0
    assert s.values == [] and 'nan' in repr(s)

def test_numbers_and_tensors_keep_their_order():
    "Whatever they are, of whatever type, values stand in the order they came, with all their digits"
    s = Scalars()

    for v in (1, torch.tensor(2.), np.float32(3), torch.tensor([4]), torch.tensor(.1, dtype=torch.float64),
              torch.tensor(2**53-1), True, torch.tensor(False), torch.tensor([[.5]], dtype=torch.bfloat16),
              np.array([6]), np.array(.7), np.bool_(True)): s.add(v)

    assert s.values == [1, 2, 3, 4, .1, 2**53-1, 1, 0, .5, 6, .7, 1] and all(type(v) is float for v in s.values)

def test_many_tensors(monkeypatch):
    "So do those that wait in stacks, also with others among them"
    monkeypatch.setattr(scalars, 'stack_at', 3)
    s = Scalars()

    for i in range(20): s.add(torch.tensor(float(i)) if i % 5 else i)
    first = list(s.values)
    for i in range(20, 31): s.add(torch.tensor(i))

    assert first == [*range(20)] and s.values == [*range(31)]

def test_a_value_is_a_copy():
    "A tensor that is written into later, or is part of a graph, is noted as it was"
    s, t = Scalars(), torch.ones(1, requires_grad=True)
    s.add(t)
    with torch.no_grad(): t += 1
    s.add(t)

    assert s.values == [1, 2] and t.grad is None

def test_no_wait_before_it_is_read(monkeypatch):
    "Adding, also of many, and of numbers among them, waits for no device; reading does once"
    monkeypatch.setattr(scalars, 'stack_at', 4)
    s, values = Scalars(), [torch.tensor(float(i)) for i in range(20)]
    def add():
        for v in values:
            s.add(v)
            s.add(1.)

    assert waits(add) == []
    assert waits(s.mean) == ['tolist'] and waits(s.mean) == []

@pytest.mark.parametrize('values, mean, low, high', [
    ([1, math.nan, 3], math.nan, 1, 3), ([math.nan], math.nan, math.nan, math.nan),
    ([1, math.inf], math.inf, 1, math.inf), ([math.inf, -math.inf], math.nan, -math.inf, math.inf),
    ([1e308, 1e308], math.inf, 1e308, 1e308)])
def test_what_is_not_finite(values, mean, low, high):
    "A mean is what the sum gives; NaN is neither lowest nor highest, wherever it stands"
    for order in (values, values[::-1]):
        s = Scalars(order)

        assert (s.mean(), s.min(), s.max()) == pytest.approx((mean, low, high), nan_ok=True)

def test_no_items_count_for_nothing():
    "The mean over an empty batch, NaN of 0 items, leaves the others alone"
    assert Scalars([1, math.nan, 3], [1, 0, 1]).mean() == 2 and math.isnan(Scalars([1], [0]).mean())

@pytest.mark.parametrize('value, n, error, what', [
    (torch.ones(2), 1, ValueError, r'shape \(2,\)'), (torch.ones(0), 1, ValueError, 'shape'),
    (torch.ones((), dtype=torch.complex64), 1, ValueError, 'complex64'), ('1', 1, TypeError, "'1', a `str`"),
    pytest.param(10**400, 1, ValueError, 'value is too large', id='10**400'),
    (None, 1, TypeError, 'None'), (1j, 1, TypeError, '1j'), (1, -1, ValueError, '`n` is -1'),
    (1, math.nan, ValueError, '`n`'), (1, torch.tensor(2), TypeError, '`n`')])
def test_what_is_no_number(value, n, error, what):
    "It is refused, and nothing is added"
    s = Scalars([1])

    with pytest.raises(error, match=what): s.add(value, n)

    assert s.values == [1] and len(s) == 1

@pytest.mark.parametrize('window, error', [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_what_is_no_window(window, error):
    "A window is a whole number of values, 1 or more"
    for f in (Scalars([1]).mean, Scalars([1]).min, Scalars([1]).max):
        with pytest.raises(error, match='`window`'): f(window)

def test_as_many_counts_as_values():
    "Each value has its count"
    with pytest.raises(ValueError, match='2 values have 1 counts'): Scalars([1, 2], [1])

def test_packed_and_unpacked():
    "What was packed, also in parts, comes back whole, and is packed alike; a pack does not change later"
    s = Scalars([.1])
    s.add(torch.tensor(.2), 3)
    first = s.pack()
    s.add(.3, 2)

    again = Scalars.unpack(s.pack())
    again.add(4)

    assert first['values'].tolist() == s.values[:2] and again.values == [*s.values, 4] and again.counts == [1, 3, 2, 1]
    assert Scalars.unpack(again.pack()).values == again.values and len(Scalars.unpack(Scalars().pack())) == 0
