"""What stands for MMEngine's message hub, its optimizer wrapper and its loaders, as hooks find them on a runner."""
from collections.abc import Callable, Iterator
from typing import Any

from ..passing import Passing
from ..plain import to_plain
from ..scalars import Scalars

__all__ = ['HistoryBuffer', 'MessageHub', 'OptimWrapper', 'LoaderView', 'Watched', 'holds']


class HistoryBuffer(Scalars):
    "`Scalars` under the names that MMEngine's buffer has"
    @property
    def data(self) -> tuple[list[float], list[float]]: "Values, and the items of each"; return self.values, self.counts

    def update(self,
        log_val: Any,     # a number, or a tensor of one
        count: float = 1,  # items that it stands for
    ) -> None:
        "Add a value"
        self.add(log_val, count)

    def statistics(self,
        method_name: str,   # 'mean', 'min', 'max' or 'current'
        *arg, **kwargs,     # what that takes
    ) -> float:
        """One of the numbers above, by name

        Raises: KeyError if there is none of that name."""
        own = dict(mean=self.mean, min=self.min, max=self.max, current=self.current)
        if method_name not in own: raise KeyError(f"statistics: {method_name!r} is none of {', '.join(own)}")
        return own[method_name](*arg, **kwargs)


class MessageHub:
    "Numbers and other things by name, which hooks share; checkpoints hold them, but for those with `resumed=False`"
    def __init__(self,
        note: Callable,  # `note(key, value, count)` is told of each number
    ):
        self.note = note
        self.log_scalars: dict[str, HistoryBuffer] = {}
        self.runtime_info: dict[str, Any] = {}
        self.not_kept: set[str] = set()

    def update_scalar(self,
        key: str,              # its name, such as 'train/loss'
        value: Any,            # a number, or a tensor of one, which is read when somebody asks for it
        count: float = 1,      # items that it stands for
        resumed: bool = True,  # do checkpoints hold it?
    ) -> None:
        "Add a value to those of `key`"
        self._keep(key, resumed)
        self.log_scalars.setdefault(key, HistoryBuffer()).add(value, count)
        self.note(key, value, count)

    def update_scalars(self,
        log_dict: dict,        # values by name, or `dict(value=…, count=…)`
        resumed: bool = True,  # do checkpoints hold them?
    ) -> None:
        "Add several values"
        for k, v in log_dict.items():
            value, count = (v['value'], v.get('count', 1)) if isinstance(v, dict) else (v, 1)
            self.update_scalar(k, value, count, resumed)

    def update_info(self,
        key: str,              # its name
        value: Any,            # anything; checkpoints hold what is a plain value or a tensor
        resumed: bool = True,  # do they hold it?
    ) -> None:
        "Set `key`"
        self._keep(key, resumed)
        self.runtime_info[key] = value

    def update_info_dict(self,
        info_dict: dict,       # values by name
        resumed: bool = True,  # do checkpoints hold them?
    ) -> None:
        "Set several"
        for k, v in info_dict.items(): self.update_info(k, v, resumed)

    def _keep(self, key, resumed): (self.not_kept.discard if resumed else self.not_kept.add)(key)

    def pop_info(self,
        key: str,             # its name
        default: Any = None,  # what comes if there is none
    ) -> Any:
        "Take `key` out"
        return self.runtime_info.pop(key, default)

    def get_info(self,
        key: str,             # its name
        default: Any = None,  # what comes if there is none
    ) -> Any:
        "What was set"
        return self.runtime_info.get(key, default)

    def get_scalar(self,
        key: str,  # its name
    ) -> HistoryBuffer:
        """The values of `key`

        Raises: KeyError if there are none."""
        if key not in self.log_scalars: raise KeyError(
            f"message hub: no scalar {key!r}; there are {', '.join(self.log_scalars) or 'none yet'}")
        return self.log_scalars[key]

    def shorten(self,
        numbers: dict[str, int],  # how many there are to be, by key
        info: dict[str, Any],     # and all that is set
    ) -> None:
        "Forget what has come since it was so"
        self.log_scalars = {k: v if (n := numbers[k]) == len(v) else HistoryBuffer(v.values[:n], v.counts[:n])
                            for k, v in self.log_scalars.items() if k in numbers}
        self.runtime_info = dict(info)

    def state_dict(self) -> dict[str, Any]:  # plain values and tensors
        "What checkpoints hold: the numbers, and of the rest what a file can hold"
        return dict(log_scalars={k: v.pack() for k, v in self.log_scalars.items() if k not in self.not_kept},
                    runtime_info={k: v for k, v in self.runtime_info.items() if k not in self.not_kept and holds(v)})

    def load_state_dict(self,
        state: dict[str, Any],  # what `state_dict` gave
    ) -> None:
        "Go on from there"
        self.log_scalars = {k: HistoryBuffer.unpack(v) for k, v in state['log_scalars'].items()}
        self.runtime_info = dict(state['runtime_info'])


def holds(
    value: Any,   # anything
) -> bool:
    "Can a file hold it?"
    try: to_plain(value)
    except (TypeError, ValueError): return False
    return True


class OptimWrapper:
    "The optimizer as hooks see it: `param_groups` are torch's own, which may be written to; stepping is the Learner's"
    def __init__(self,
        learn: Any,  # the Learner
    ): self._learn = learn

    @property
    def optimizer(self) -> Any: "torch's optimizer, as it is now"; return self._learn.opt.opt
    @property
    def param_groups(self) -> list[dict]: "torch's groups"; return self.optimizer.param_groups
    @property
    def defaults(self) -> dict: "torch's defaults"; return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:  # one of each group
        "The learning rates"
        return dict(lr=[g['lr'] for g in self.param_groups])

    def get_momentum(self) -> dict[str, list[float]]:  # one of each group; 0 where there is none
        "Momentum, or the first of Adam's betas"
        return dict(momentum=[g['momentum'] if 'momentum' in g else g.get('betas', (0,))[0] for g in self.param_groups])

    def state_dict(self) -> dict[str, Any]: "That of the Learner's optimizer"; return self._learn.opt.state_dict()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"optim_wrapper.{name}: the Learner makes the backward pass and the step itself, and has "
                             "only `optimizer`, `param_groups`, `get_lr`, `get_momentum` and `state_dict` here; what "
                             "acts on gradients is a Callback with `before_step`", name=name, obj=self)


class LoaderView:
    """A loader as hooks see it: all that the user's own has, as long as the phase is

    Writing its private `_iterator` or `_DataLoader__initialized`, by which hooks make torch start workers anew, does
    that: those of the next iteration see the dataset as it is then."""
    def __init__(self,
        dl: Any,              # the Loader
        n: int|None = None,   # batches of the phase; None: as the loader says
    ): vars(self).update(_dl=dl, _n=n)

    def __getattr__(self, name: str) -> Any:
        if name == '_dl': raise AttributeError(name)  # asked for while copying
        return getattr(self._dl, name)

    def __len__(self) -> int: return len(self._dl) if self._n is None else self._n
    def __iter__(self) -> Iterator: return iter(self._dl.fork())
    def __repr__(self) -> str: return f"LoaderView({self._dl!r})"

    def __setattr__(self, name, value):
        if name not in ('_iterator', '_DataLoader__initialized'): setattr(self._dl, name, value)
        elif not value: self._dl.restart_workers()


class Watched(Passing):
    "A loader that remembers its last batch"
    own = frozenset({'inner', 'last'})
    last: Any = None

    def through(self, batches):
        for self.last in batches: yield self.last
