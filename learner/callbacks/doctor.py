"""`learn.doctor()`: a short look at a fit that changes nothing, and a table of what may be wrong with it.

Two trials without a trace: a few batches, in which look.py measures gradients, updates, outputs, inputs and times; and
one batch again and again, on which the loss should fall. findings.py has the limits, and judges."""
from pathlib import Path
from typing import Any

from fastcore.basics import patch

from ..display import say, show_result, text_table
from ..findings import Seen, findings, limits
from ..layers import is_frozen
from ..learner import Learner
from ..modes import restore_modes, snapshot_modes, train_mode
from ..no_trace import no_trace, trial
from ..plot import plot_look, show_figure
from ..resampled import Repeated
from ..utils import check_number, optional
from .look import Clock, Look, Quiet, Repeat

__all__ = []  # a method of the Learner only

n_repeats = 30  # of one batch
columns = 'finding', 'where', 'measured', 'usual', 'try'


@patch
def doctor(self: Learner,
    n_batches: int = 10,                # training batches to look at
    lr: float|slice|list|None = None,   # learning rate, as for `fit`; None: `self.lr`
    plot: bool|str|Path = False,        # also draw gradients, updates and the loss on one batch; or a file for that
) -> Any:  # a pandas DataFrame: `finding`, `where`, `measured`, `usual`, `try`; empty if nothing was found
    """Train a few batches without a trace, and tell what may be wrong

    Parameters that never get a gradient or that the optimizer lacks, dead units, vanishing and exploding gradients,
    updates out of proportion to the weights, batch normalisation of single items, a loss that is not finite or does not
    fall on one batch that is repeated, outputs that cannot match the loss, inputs that are not normalised, modules left
    in eval, slow data. `learner.findings.limits` has the limits with their sources.
    Raises: what a fit would raise, unless it is a finding; ValueError or TypeError if `n_batches` is not 2 or more."""
    check_number('doctor: `n_batches`', n_batches, 2, whole=True, of='batches')
    seen = _examine(self, n_batches, lr)
    found = findings(seen)
    rate = self.lr if lr is None else lr
    count = f"{len(found) or 'nothing'}{' thing'*(len(found) == 1)}{' things'*(len(found) > 1)}"
    kinds = f" ({', '.join(dict.fromkeys(f.finding for f in found))})" if found else ''
    say(f"learn.doctor: {count} found in {seen.n_batches} batches with a learning rate of {rate}{kinds}")
    if found: show_result(text_table(columns, found, range(len(columns))))
    if plot:
        ax = plot_look(seen.gradients, seen.ratios, limits['update_ratio'].value, seen.repeated)[0]
        if plot is not True: ax.figure.savefig(plot)
        show_figure(ax)
    return optional('pandas', 'learn.doctor').DataFrame(found, columns=columns)


def _examine(learn, n, lr) -> Seen:
    clock, in_eval = Clock(), _left_in_eval(learn)
    look, again = Look(n, clock), Repeat()
    try: trial(learn, [Quiet, clock, look], n, 'doctor', lambda: f'{look.done} of {n} batches', lr)
    except Exception as e:
        in_model = any(n.startswith('raised by the model') for n in getattr(e, '__notes__', ()))
        if in_model: e.add_note("`learn.summary()` tells in which layer")
        failed = in_model and look.single and 'more than 1 value per channel' in str(e)  # a finding
        if not failed: raise
    else: failed = False
    if not look.done and not failed: raise RuntimeError("doctor: a callback ended the fit before its first batch")
    seen = look.seen()
    seen.in_eval, seen.last_of_one = in_eval, _last_of_one(learn.dls.train)
    if seen.bad_loss is None and not failed:
        batches = Repeated([_first_batch(learn)], n_repeats)
        trial(learn, [Quiet, again], 1, 'doctor', lambda: f'{len(again.losses)} of {n_repeats} repeats', lr, batches)
        if again.made_steps: seen.repeated = [float(loss) for loss in again.losses if loss is not None]
    return seen


def _first_batch(learn):
    with no_trace(learn): return learn.dls.one_batch()


def _left_in_eval(learn):  # unless they are frozen, and so on purpose
    model, modes = learn.model, snapshot_modes(learn.model)
    try: names = train_mode(model) if model.training else []  # a model wholly in eval is trained wholly
    finally: restore_modes(modes)
    return [name for name in names if not is_frozen(model, name)]


def _last_of_one(train):  # will an epoch's last batch have one item?
    try: return train.bs > 1 and len(train.sampler) == (len(train)-1)*train.bs + 1
    except (AttributeError, TypeError): return False  # nobody knows
