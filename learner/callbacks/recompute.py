"""Less memory for more time: what some modules compute in training is computed again when gradients need it."""
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..callback import Callback
from ..hooks import can_hook, find_modules, is_compiled

__all__ = ['ActivationCheckpointing']


class _Recomputed:
    "Stands in place of a module's `forward`; in a copy of the module, or in a file, it is that `forward`"
    def __init__(self, m: nn.Module): self.m, self.forward = m, m.forward

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled(): return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self):  # for the forward, and for what is computed again
        return nullcontext(), self._with_buffers([b.detach().clone() for b in self.m.buffers()])

    @contextmanager
    def _with_buffers(self, then):
        # as they were at the forward, and afterwards as now: else BatchNorm would count each batch twice. By `data`,
        # since autograd takes a tensor that was written to for another one
        now = [(b, b.detach().clone()) for b in self.m.buffers()]
        try:
            for (b, _), old in zip(now, then): b.data.copy_(old)
            yield
        finally:
            for b, value in now: b.data.copy_(value)

    def __reduce__(self): return getattr, (self.m, 'forward')  # there the copy of the module has none of its own yet


class ActivationCheckpointing(Callback):
    """Keeps nothing of what modules compute in training but their inputs, and computes it again for the gradients

    That takes about a third more time, and of the memory for activations what their insides have; it suits the blocks
    of a deep model: `ActivationCheckpointing('layers.*')`. Results are the same bit for bit, with dropout and BatchNorm
    too. Hooks on what is inside of such a module are called twice, as is all else that its `forward` does.
    Raises: ValueError if `modules` finds nothing or the model is compiled, TypeError if it finds TorchScript.
    Order: any place will do, but for a look at whether the model is compiled."""
    run_after = ('Compiled',)
    run_in = {'fit', 'lr_find'}
    run_valid = False
    unique = True

    def __init__(self,
        modules: Any,  # what `find_modules` takes: a module, a class, a name or pattern, `f(module)`, a list of these
    ):
        if modules is None: raise TypeError(
            "ActivationCheckpointing: `modules` is None; say which, as 'layers.*'; '' is the whole model")
        self.modules = modules
        self._stands: list[_Recomputed] = []
        self._own: list = []  # what modules that had a `forward` of their own had, in the batch that is under way

    def before_fit(self):
        if is_compiled(self.model): raise ValueError(
            "ActivationCheckpointing: the model is compiled, and would be compiled anew in each batch: "
            "`learn.uncompile()`, or train without this callback")
        found = find_modules(self.model, self.modules)
        outer = {name: m for name, m in found.items()
                 if not any(o != name and (not o or name.startswith(f'{o}.')) for o in found)}
        if bad := [name for name, m in outer.items() if not can_hook(m)]: raise TypeError(
            f"ActivationCheckpointing: `{bad[0]}` is TorchScript, whose insides cannot be computed again: give what it "
            "was made from")
        self._stands = [_Recomputed(m) for m in outer.values()]

    def before_batch(self):
        self._own = [(vars(s.m), vars(s.m).get('forward')) for s in self._stands]
        for s in self._stands: vars(s.m)['forward'] = s

    def cleanup_batch(self):
        for attrs, own in self._own:
            if own is None: attrs.pop('forward', None)
            else: attrs['forward'] = own
        self._own = []

    def cleanup_fit(self): self._stands = []
