"""What is shown: the loop with who acts where, and fits without bar or without rows."""
from contextlib import AbstractContextManager

from fastcore.basics import noop, patch

from ..display import show_table
from ..events import events_of
from ..learner import Learner
from ..utils import replacing

__all__ = ['outline']


def outline() -> list[tuple[int, str]]:  # (depth, event), in the order in which a fit fires them
    "The training loop as an indented list of its events"
    def scope(name, depth, *inside):
        before, cancelled, after, cleanup = events_of[name]
        return [(depth, before), *(line for lines in inside for line in lines),
                (depth, cancelled), (depth, after), (depth, cleanup)]
    def batch(*inside): return scope('batch', 3, [(4, 'after_pred'), (4, 'after_loss')], *inside)
    train = scope('train', 2, batch(scope('backward', 4), scope('step', 4)))
    rest = [(1, 'save_point')]
    return scope('fit', 0, scope('epoch', 1, train, [(2, 'save_point')], scope('validate', 2, batch())), rest)


@patch
def show_training_loop(self: Learner) -> None:
    "Show the loop: its events, and who acts at each, in order; cancels and cleanups where nobody acts are left out"
    rows = [('\u2003'*depth + name, ', '.join(map(repr, self.ordered_cbs(name)))) for depth, name in outline()]
    show_table(['event', 'callbacks'], [r for r in rows if r[1] or 'cancel' not in r[0] and 'cleanup' not in r[0]])


@patch
def no_bar(self: Learner) -> AbstractContextManager:  # with the Learner as its value
    "No progress bar within the block: a plain line an epoch"
    return replacing(self, create_mbar=False)

@patch
def no_mbar(self: Learner) -> AbstractContextManager:  # with the Learner as its value
    "`no_bar` under fastai's other name: there is only one bar here"
    return self.no_bar()

@patch
def no_logging(self: Learner) -> AbstractContextManager:  # with the Learner as its value
    "No rows within the block"
    return replacing(self, logger=noop)
