"""The order of callbacks: numbers and names first, then the least move that satisfies run_after and run_before."""
import pytest

from learner.order import CallbackOrderError, order_names, order_number, sort_by_run


def make(name, order=0, bases=(), **attrs): return type(name, bases or (object,), dict(order=order, **attrs))()

def names(cbs): return ''.join(type(c).__name__ for c in sort_by_run(cbs))


def test_order_then_position():
    "Lower `order` runs earlier; equal ones keep the order in which they were added"
    assert names([make('A', 5), make('B', -5), make('C', 5), make('D')]) == 'BDAC'

def test_toward_end_comes_last():
    "`toward_end` puts a callback behind all others, whatever its number"
    assert names([make('A', -100, toward_end=True), make('B', 100)]) == 'BA'

def test_mmengine_names_are_numbers():
    "MMEngine's priorities can be mixed with numbers"
    cbs = make('A', 'LOWEST'), make('B', 99), make('C', 'VERY_HIGH'), make('D', -49), make('E', 'normal')

    assert names(cbs) == 'CDEBA'
    assert [order_number(n) for n in order_names] == sorted(order_names.values())

@pytest.mark.parametrize('order', ['SOON', None, float('nan')])
def test_bad_order_is_refused(order):
    "An order that is neither number nor name is an error that names the callback and the value"
    with pytest.raises(ValueError, match='`A`'): sort_by_run([make('A', order)])


def test_the_callback_with_the_constraint_moves_least():
    "The callback that declares a constraint moves to the nearest place that satisfies it; the others keep theirs"
    assert names([make('A', 1), make('B', 2), make('C', 3), make('D', 4, run_before='B')]) == 'ADBC'
    assert names([make('A', 1, run_after='C'), make('B', 2), make('C', 3), make('D', 4)]) == 'BCAD'

def test_satisfied_constraint_moves_nothing():
    "A constraint that holds already changes nothing"
    assert names([make('A', 1), make('B', 2, run_after='A', run_before=['C']), make('C', 3)]) == 'ABC'

def test_absent_classes_are_ignored():
    "A constraint on a class that is not there is no constraint"
    assert names([make('A', 2, run_before='Nobody'), make('B', 1)]) == 'BA'

def test_classes_match_subclasses():
    "A class, or its name, stands for its subclasses too"
    Base = type('Base', (), {})

    assert names([make('A', 1, run_after=Base), make('B', 2, bases=(Base,))]) == 'BA'
    assert names([make('A', 1, run_after='Base'), make('B', 2, bases=(Base,))]) == 'BA'

def test_chain_of_constraints():
    "Constraints that build on each other are all satisfied"
    assert names([make('A', 1, run_after='B'), make('B', 2, run_after='C'), make('C', 3)]) == 'CBA'

def test_those_in_the_way_move_if_there_is_no_other_way():
    "Callbacks without constraints move only where no place satisfies all constraints"
    assert names([make('C', 5, run_after='A', run_before='B'), make('A', 10), make('B', 0)]) == 'ACB'

def test_cycle_is_named():
    "Contradicting constraints are an error that prints the cycle"
    cbs = [make('A', run_after='B'), make('B', run_after='C'), make('C', run_after='A')]

    with pytest.raises(CallbackOrderError, match='A runs after B runs after C runs after A'): sort_by_run(cbs)
