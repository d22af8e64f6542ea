"""What a fit method, such as `learn.fit_one_cycle`, would call `fit` with: for previews and rehearsals."""
from collections.abc import Callable
from typing import Any, NamedTuple

from fastcore.foundation import L

from ..checks import check_fit
from ..learner import Learner
from ..utils import replacing

__all__ = ['FitCall', 'fit_calls']


class FitCall(NamedTuple):
    "What `fit` was called with"
    n_epoch: int
    lr: Any = None
    wd: Any = None
    cbs: Any = None
    reset_opt: bool = False
    start_epoch: int = 0
    n_steps: int|None = None
    resume: Any = None
    allow: Any = ()


def fit_calls(
    learn: Learner,
    what: str,             # what they are for, for messages
    fit: str|Callable,     # a fit method: `learn.fine_tune`, or its name
    args: tuple,           # what it is called with
    kwargs: dict,          # likewise
) -> list[FitCall]:        # one, unless the method fits several times
    """What a fit method calls `fit` with, while nothing is trained

    Raises: what the fit would raise before training; ValueError if `fit` is no fit method."""
    name = fit if isinstance(fit, str) else getattr(fit, '__name__', '')
    if not (name == 'fine_tune' or name.startswith('fit')) or not hasattr(learn, name): raise ValueError(
        f"{what}: {fit!r} is no fit method; give one, as `learn.fit_one_cycle`, or its name")
    found: list[FitCall] = []
    def caught(*args, **kwargs):
        call = FitCall(*args, **kwargs)
        check_fit(learn, call.n_epoch, call.start_epoch, call.n_steps)
        found.append(call._replace(cbs=L(call.cbs)))
    own = {k: vars(learn)[k] for k in ('fit',) if k in vars(learn)}
    with replacing(learn, opt=learn.opt):  # which the method may have made
        vars(learn)['fit'] = caught
        try: getattr(learn, name)(*args, **kwargs)
        finally:
            del vars(learn)['fit']
            vars(learn).update(own)
    return found
