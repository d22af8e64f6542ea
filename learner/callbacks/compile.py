"""`learn.compile`: the model, and if wanted the optimizer's step, as code that `torch.compile` makes; what was made."""
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from itertools import count
from typing import Any

import torch
from fastcore.basics import patch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as global_post, _global_optimizer_pre_hooks as global_pre

from ..callback import Callback
from ..learner import Learner
from ..tensors import describe

__all__ = ['Compiled']

numbers = count()  # for names that differ


class _Counting:
    "A backend that notes what it is given to compile"
    def __init__(self, backend: Any, what: str):
        self.backend, self.what = backend, what
        self.graphs: list[str] = []

    def __call__(self, gm, inputs, **kwargs):
        self.graphs.append(self.what if self.what == 'step' else _told(gm))
        return self.backend(gm, inputs, **kwargs)


def _told(gm):  # the model's inputs, with sizes that may change as torch names them
    nodes = [n for n in gm.graph.nodes if n.op == 'placeholder' and '_buffers_' not in n.name]
    values = [n.meta.get('example_value') for n in nodes]
    data = [t for t in values if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
    mode = 'with gradients' if torch.is_grad_enabled() else 'without gradients'
    return f"model, {mode}, for {', '.join(map(describe, data[:4]))}{' …'*(len(data) > 4)}"


def _compiled(f, name, backend, dynamic, **options) -> Any:
    # Code of its own for each: torch compiles a function so many times at most, remembers by its name which sizes have
    # changed, and does not compile what is defined in torch.nn, such as the `forward` of a Sequential.
    def call(*args, **kwargs): return f(*args, **kwargs)
    call.__code__ = call.__code__.replace(co_name=f'{name}_{next(numbers)}')
    return torch.compile(call, backend=backend, dynamic=dynamic, **options)


def _tensors(v):  # of what changes with the steps: a number would be compiled in, and each value compiled anew
    if isinstance(v, tuple): return tuple(map(_tensors, v))
    return v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64)


def _step(opt, run):  # what torch does around a step
    for hook in (*global_pre.values(), *opt._optimizer_step_pre_hooks.values()): hook(opt, (), {})
    old = [(g, k, g[k]) for g in opt.param_groups for k in ('lr', 'betas') if k in g]
    try:
        for g, k, v in old: g[k] = _tensors(v)
        run()
    finally:
        for g, k, v in old: g[k] = v
    for hook in (*opt._optimizer_step_post_hooks.values(), *global_post.values()): hook(opt, (), {})
    opt._opt_called = True  # torch's schedulers look for it


class Compiled(Callback):
    """Has torch compile the model in place, so that names and weights are as before; `learn.compile()` adds it

    `graphs` tells what has been compiled so far: further sizes and types of inputs need graphs of their own, until
    torch takes a size for one that changes. While hooks are open, nothing runs compiled. Errors in compiled code are
    torch's own, as is what it logs where it gives up.
    Raises: torch's error for a backend that it does not know; TypeError before training if the optimizer's step cannot
    be compiled.
    Order: late, when torch's schedulers have attached themselves to the optimizer."""
    order = 90
    unique = True
    _model: Any = None  # what has been compiled
    _made: Any = None   # the compiled step of torch's optimizer
    _opt: Any = None    # the Optimizer that has it, in this fit

    def __init__(self,
        backend: str|Callable = 'inductor',  # one of `torch.compiler.list_backends()`, or a function as torch takes it
        mode: str|None = None,      # 'reduce-overhead', 'max-autotune', …; None: 'default'
        dynamic: bool|None = None,  # sizes may change: True, False (a graph for each), None: those seen to change
        step: bool = False,         # compile the optimizer's step too, if torch does not fuse it itself
        **options: Any,             # of torch.compile: `fullgraph`, and `options`, a dict for the backend
    ):
        inner = dict(mode=mode, options=options.pop('options', None), dynamic=dynamic)
        make: Any = (torch._TorchCompileInductorWrapper if backend == 'inductor' else  # as torch.compile itself does
                     partial(torch._TorchCompileWrapper, backend))
        self._counts = {what: _Counting(make(**inner), what) for what in ('model', 'step')}
        self.dynamic, self.step, self.options = dynamic, step, options

    @property
    def graphs(self) -> list[str]: "What has been compiled, one text for each graph"; return [
        g for counting in self._counts.values() for g in counting.graphs]

    def __repr__(self) -> str: return f"Compiled({len(self.graphs)} graphs)"

    def compile_model(self,
        model: nn.Module,  # instead of the one that was compiled before
    ) -> None:
        "Compile a model, and no other any more; the work itself is done when it is called"
        call = _compiled(model._call_impl, type(model).__name__, self._counts['model'], self.dynamic, **self.options)
        self.undo()
        self._model, model._compiled_call_impl = model, call

    def undo(self) -> None:
        "Run the model as plain Python again"
        if self._model is not None: self._model._compiled_call_impl = None
        self._model = None

    def before_fit(self):
        if self.learn.model is not self._model: self.compile_model(self.learn.model)  # it has been replaced
        if self.step and self.run_kind in ('fit', 'lr_find'): self._compile_step()

    def _compile_step(self):
        wrapper, opt = self.learn.opt, self.learn.opt.opt
        own = vars(wrapper).get('step') or vars(opt).get('step')
        why = ("its groups are stepped by one kernel each, `fused=True`, which is as fast" if
               any(g.get('fused') for g in opt.param_groups) else
               "torch does not compile sparse ones" if isinstance(opt, torch.optim.SparseAdam) else
               "its `step` has been replaced, which would be undone" if own and not hasattr(own, '_wrapped_by_lr_sched')
               else '')
        if why: raise TypeError(f"learn.compile: step=True means nothing for this `{type(opt).__name__}`: {why}; leave "
                                "it out, or give another optimizer, such as `opt_func=torch.optim.AdamW`")
        if not self._made or self._made.args[0] is not opt:
            raw = unwrap(type(opt).step)  # what torch puts around it would be compiled apart, for all Learners together
            def run():
                with torch.no_grad(): raw(opt)
            # None: other hyper-parameters may change too, whatever is said of the model's sizes
            self._made = partial(_step, opt, _compiled(run, f'{type(opt).__name__}_step', self._counts['step'], None))
        self._opt, vars(wrapper)['step'] = wrapper, self._made

    def cleanup_fit(self):
        if self._opt is not None: vars(self._opt).pop('step', None)
        self._opt = None


@patch
def compile(self: Learner,
    backend: str|Callable = 'inductor',  # one of `torch.compiler.list_backends()`, or a function as torch takes it
    mode: str|None = None,      # 'reduce-overhead', 'max-autotune', …; None: 'default'
    dynamic: bool|None = None,  # sizes may change: True, False (a graph for each), None: those seen to change
    step: bool = False,         # compile the optimizer's step too, if torch does not fuse it itself
    **options: Any,             # of torch.compile: `fullgraph`, and `options`, a dict for the backend
) -> Learner:
    """Have torch compile the model, in place, when it is next called; `learn.compiled.graphs` tells what was compiled

    Raises: torch's errors for a backend that it does not know, or options that mean nothing."""
    cb = Compiled(backend, mode, dynamic, step, **options)
    self.uncompile()
    cb.compile_model(self.model)
    return self.add_cb(cb)


@patch
def uncompile(self: Learner) -> Learner:
    "Run everything as plain Python again"
    for cb in self.cbs.filter(lambda cb: isinstance(cb, Compiled)):
        cb.undo()
        self.remove_cb(cb)
    return self
