"""Several networks that are trained in turn, each against a loss of its own: TakeTurns, for GANs and the like."""
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

from ..callback import Callback

__all__ = ['TakeTurns', 'Turn']


class Turn(NamedTuple):
    "Whose turn it is, against which loss, and for how many batches"
    module: str                # a name within the model, such as 'generator', or '' for all of it
    loss_func: Callable        # `loss_func(pred, *yb)`, where `pred` is what the whole model returns
    n: int = 1                 # training batches in a row


class TakeTurns(Callback):
    """Trains parts of a model in turn: one part's parameters each batch, against its own loss

    The other parts are frozen for that batch, so that gradients pass through them and stop there; one optimizer with a
    group for each (`splitter`) is as many optimizers, since momenta and averages belong to parameters. Validation is
    done with the Learner's loss. `learn.take_turns.now` is the present Turn; the order goes on from epoch to epoch.
    Raises: ValueError or TypeError for an odd turn; at the start of a fit ValueError for a module without parameters,
    AttributeError for one that is not there.
    Order: before all that look at what is frozen or what the loss is."""
    order = -30
    run_valid = False
    unique = True
    state = ('done',)
    done = 0                # training batches since the fit began
    now: Any = None         # the Turn of this batch; None between batches
    before: Any = ()        # what this batch has changed, to be put back
    held: Any = ()          # the losses that validations within this batch have put aside

    def __init__(self,
        turns: list,  # Turns, or tuples of what they are made of, in their order
    ):
        self.turns = [turn if isinstance(turn, Turn) else Turn(*turn) for turn in turns]
        if not self.turns: raise ValueError("TakeTurns: there is no turn to take")
        for turn in self.turns:
            if not isinstance(turn.n, Integral) or isinstance(turn.n, bool) or turn.n < 1: raise ValueError(
                f"TakeTurns: n={turn.n!r} for {turn.module!r}; give a number of batches, 1 or more")
            if not callable(turn.loss_func): raise TypeError(
                f"TakeTurns: the loss of {turn.module!r} is {turn.loss_func!r}; give a function `f(pred, *yb)`")

    def _ps(self, turn): return {*self.model.get_submodule(turn.module).parameters()}

    def before_fit(self):
        if self.learn.run_kind == 'validate': return
        self.done = 0
        for turn in self.turns:
            if not self._ps(turn): raise ValueError(f"TakeTurns: {turn.module!r} has no parameters to train")

    def before_batch(self):
        order = [turn for turn in self.turns for _ in range(turn.n)]
        self.now = order[self.done % len(order)]
        mine = self._ps(self.now)
        frozen = [p for p in self.model.parameters() if p.requires_grad and p not in mine]
        self.before, self.held = (frozen, self.loss_func), []
        for p in frozen: p.requires_grad_(False)
        self.learn.loss_func = self.now.loss_func

    def before_validate(self):  # also within a batch
        if not self.before: return
        self.held.append(self.loss_func)  # the turn's, or what another callback made of it
        self.learn.loss_func = self.before[1]

    def cleanup_validate(self):
        if self.held: self.learn.loss_func = self.held.pop()

    def cleanup_batch(self):
        if not self.before: return
        frozen, self.learn.loss_func = self.before
        for p in frozen: p.requires_grad_(True)
        self.before, self.held, self.now, self.done = (), (), None, self.done+1
