"""Several networks that are trained in turn, each against a loss of its own: TakeTurns, for GANs and the like."""
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..callback import Callback
from ..utils import check_number, warn

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
    group for each (`splitter`) is as many optimizers, since momenta and averages belong to parameters. The table has
    a column for the loss of each part, `train_generator`, beside `train_loss`, which is over all batches. Validation is
    done with the Learner's loss. `learn.take_turns.now` is the present Turn; the order goes on from epoch to epoch.
    Raises: ValueError or TypeError for an odd turn; at the start of a fit ValueError for a module without parameters,
    or one that is not there.
    Order: before all that look at what is frozen or what the loss is."""
    order = -30
    run_valid = False
    unique = True
    state = ('done', 'taken')
    done = 0                # training batches since the fit began
    taken: Any = ()         # the modules that have had a turn in it
    _parts: Any = {}        # the parameters of each part, by the module's name
    now: Any = None         # the Turn of this batch; None between batches
    before: Any = ()        # what this batch has changed, to be put back
    held: Any = ()          # the losses that validations within this batch have put aside

    def __init__(self,
        turns: list,  # Turns, or tuples of what they are made of, in their order
    ):
        if not isinstance(turns, (list, tuple)): raise TypeError(
            f"TakeTurns: turns={turns!r}; give a list of ('generator', loss_func)")
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
        if self.learn.run_kind in ('validate', 'predict'): return
        self.done, self.taken, known = 0, [], {name for name, _ in self.model.named_modules()}
        if odd := [turn.module for turn in self.turns if turn.module not in known]: raise ValueError(
            f"TakeTurns: the model has no part {odd[0]!r}, but "
            f"{', '.join(name for name, _ in self.model.named_children())}")
        self._parts = {turn.module: self._ps(turn) for turn in self.turns}
        if empty := [name for name, ps in self._parts.items() if not ps]:
            raise ValueError(f"TakeTurns: {empty[0]!r} has no parameters to train")
        if never := [names[0] for p, names in self.opt.names.items() if p.requires_grad and not self.parts_of(p)]: warn(
            f"TakeTurns: never trained, since no turn is theirs: {', '.join(never[:5])}{' …'*(len(never) > 5)}")

    def before_batch(self):
        order = [turn for turn in self.turns for _ in range(turn.n)]
        self.now = order[self.done % len(order)]
        mine = self._ps(self.now)
        frozen = [p for p in self.model.parameters() if p.requires_grad and p not in mine]
        self.before, self.held = (frozen, self.loss_func), []
        for p in frozen: p.requires_grad_(False)
        self.learn.loss_func = self.now.loss_func

    def after_loss(self):
        if self.learn.loss_parts is None and self.loss is not None: self.learn.loss_parts = {
            self.now.module or 'model': self.loss}

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
        if self.now.module not in self.taken: self.taken.append(self.now.module)
        self.before, self.held, self.now, self.done = (), (), None, self.done+1

    def after_fit(self):
        left = [name for name in self._parts if name not in self.taken]
        if left and self.learn.run_kind == 'fit' and not self.learn.rehearsing and not self.learn.paused: warn(
            f"TakeTurns: {', '.join(map(repr, left))} had no turn in the {self.done} batches of this fit; each fit "
            "begins with the first turn")
