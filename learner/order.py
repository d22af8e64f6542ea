"""In which order callbacks run: by number first, then moved by what `run_after` and `run_before` demand."""
from collections.abc import Iterable
from typing import Any

__all__ = ['CallbackOrderError', 'order_names', 'order_number', 'sort_by_run']

# MMEngine's priorities, with its 50 (NORMAL) as 0: lower runs earlier
order_names = dict(HIGHEST=-100, VERY_HIGH=-50, HIGH=-20, ABOVE_NORMAL=-5, NORMAL=0, BELOW_NORMAL=20, LOW=55,
                   VERY_LOW=90, LOWEST=100)


class CallbackOrderError(ValueError): "What `run_before` and `run_after` demand cannot be had: they form a cycle"


def order_number(
    order: Any,      # a number, or one of `order_names`
    owner: str = '',  # whose order it is, for the message
) -> float:
    """`order` as a number

    Raises: ValueError if it is neither a number nor a name in `order_names`.
    Example:
    >>> order_number('LOW')
    55
    """
    if isinstance(order, str) and order.upper() in order_names: return order_names[order.upper()]
    if isinstance(order, (int, float)) and order == order: return order
    raise ValueError(f"`order` of `{owner}` is {order!r}: give a number, or one of {', '.join(order_names)}")


def sort_by_run(
    cbs: Iterable,  # callbacks, or anything with `order`, and maybe `toward_end`, `run_before` and `run_after`
) -> list:
    """Callbacks in the order they run: by (`toward_end`, `order`, position), then constraints, each moved least

    The callback that declares a constraint moves, to the nearest place that satisfies it; the others keep theirs.
    Raises: CallbackOrderError, printing the cycle, if the constraints contradict each other.
    Example:
    >>> class Early: order = -1
    >>> class Late: order = 0
    >>> class Last: order, run_after = -5, 'Late'
    >>> [type(cb).__name__ for cb in sort_by_run([Late(), Last(), Early()])]
    ['Early', 'Late', 'Last']
    """
    cbs = list(cbs)
    def key(i): return bool(getattr(cbs[i], 'toward_end', False)), order_number(cbs[i].order, type(cbs[i]).__name__), i
    ranked = [cbs[i] for i in sorted(range(len(cbs)), key=key)]
    first = {id(c): [] for c in ranked}   # who must have run before c
    for c in ranked:
        for o in ranked:
            if o is not c and _matches(o, c, 'run_after'): first[id(c)].append(o)
            if o is not c and _matches(o, c, 'run_before'): first[id(o)].append(c)
    _refuse_cycle(ranked, first)
    movers = [c for c in ranked if getattr(c, 'run_after', ()) or getattr(c, 'run_before', ())]
    for _ in movers:   # one callback's move may be undone by the next one's: again until nothing moves
        old = list(ranked)
        for c in movers: _place(c, ranked, first)
        if all(a is b for a, b in zip(old, ranked)): break
    return ranked if all(_early(c, ranked, first) <= i for i, c in enumerate(ranked)) else _topological(ranked, first)


def _matches(cb, owner, name):  # is `cb` an instance of what `owner.run_after` or `owner.run_before` lists?
    wanted = getattr(owner, name, ())
    return any(isinstance(cb, w) if isinstance(w, type) else any(w == c.__name__ for c in type(cb).__mro__)
               for w in (wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,)))

def _early(cb, ranked, first):  # the first place where all that must run before `cb` has run
    return max((i+1 for i, o in enumerate(ranked) if any(o is f for f in first[id(cb)])), default=0)

def _place(cb, ranked, first):  # move `cb` to the nearest place that its constraints allow
    at = next(i for i, c in enumerate(ranked) if c is cb)
    ranked.pop(at)
    late = next((i for i, o in enumerate(ranked) if any(f is cb for f in first[id(o)])), len(ranked))
    ranked.insert(max(_early(cb, ranked, first), min(at, late)), cb)

def _topological(ranked, first):  # where callbacks without constraints stand in the way, they must move too
    done = []
    while len(done) < len(ranked):
        done.append(next(c for c in ranked if all(c is not d for d in done)
                         and all(any(o is d for d in done) for o in first[id(c)])))
    return done

def _refuse_cycle(ranked, first):
    def visit(c, path):
        if any(c is p for p in path):
            names = [type(p).__name__ for p in [*path[next(i for i, p in enumerate(path) if p is c):], c]]
            raise CallbackOrderError(f"callbacks cannot be ordered: {' runs after '.join(names)}; "
                                     "change `run_after` or `run_before` of one of them")
        if id(c) in clear: return
        for o in first[id(c)]: visit(o, [*path, c])
        clear.add(id(c))
    clear = set()
    for c in ranked: visit(c, [])
