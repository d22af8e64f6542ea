"""Several networks that are trained in turn, each against a loss of its own: TakeTurns, for GANs and the like."""
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..callback import Callback
from ..utils import check_number

__all__ = ['TakeTurns', 'Turn']


class Turn(NamedTuple):
    "Whose turn it is, against which loss, and for how many batches"
    module: str                # a name within the model, such as 'generator', or '' for all of it
    loss_func: Callable        # `loss_func(pred, *yb)`, where `pred` is what the whole model returns
    n: int = 1                 # training batches in a row


def _turn(given):
    if isinstance(given, Turn): return given
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3) or not isinstance(given[0], str):
        raise TypeError(f"TakeTurns: {given!r} is no turn; give ('generator', loss_func), or a number of batches too")
    return Turn(*given)


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
    _parts: Any = {}        # the parameters of each part, by the module's name
    now: Any = None         # the Turn of this batch; None between batches
    before: Any = ()        # what this batch has changed, to be put back
    held: Any = ()          # the losses that validations within this batch have put aside

    def __init__(self,
        turns: list,  # Turns, or tuples of what they are made of, in their order
    ):
        self.turns = [_turn(given) for given in turns]
        if not self.turns: raise ValueError("TakeTurns: there is no turn to take")
        for turn in self.turns:
            check_number(f'TakeTurns: `n` of {turn.module!r}', turn.n, 1, whole=True, of='batches')
            if not callable(turn.loss_func): raise TypeError(
                f"TakeTurns: the loss of {turn.module!r} is {turn.loss_func!r}; give a function `f(pred, *yb)`")

    def _ps(self, turn): return {*self.model.get_submodule(turn.module).parameters()}

    def parts_of(self,
        p: Tensor,         # a parameter of the model
    ) -> tuple[str, ...]:  # names of modules
        "In whose turns it is trained"
        return tuple(name for name, ps in self._parts.items() if p in ps)

    def before_fit(self):
        if self.learn.run_kind == 'validate': return
        self.done, self._parts = 0, {turn.module: self._ps(turn) for turn in self.turns}
        if empty := [name for name, ps in self._parts.items() if not ps]:
            raise ValueError(f"TakeTurns: {empty[0]!r} has no parameters to train")

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
