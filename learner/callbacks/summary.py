"""What a model is made of, layer by layer, as one batch meets it: `learn.summary()`, and its table alone, `layer_info`.

A batch passes through the callbacks as in an evaluation, then once through the model, every module of which is hooked;
all this within `no_trace`."""
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from numbers import Integral
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from fastcore.basics import patch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..callback import Callback
from ..calls import Calls, flop_counter, layer_by_layer, n_bytes, shapes_text
from ..display import html_table, show_result, text_table
from ..events import CancelBatchException
from ..frame import current_opt
from ..hooks import can_hook, is_compiled
from ..layers import is_leaf, own_params
from ..learner import Learner
from ..no_trace import no_trace
from ..tensors import describe, n_items
from ..utils import optional
from ..weights import named_layers

__all__ = ['layer_info', 'Summary']

n_timed = 5  # passes of which the median is taken, after one that warms up
MiB = 2**20


def _timed(names, device, forward) -> tuple[dict[nn.Module, float], float]:
    "Milliseconds of each module without those that it calls, and of the whole model, which has one hook then"
    def mark():
        if device.type != 'cpu': torch.accelerator.synchronize(device)
        return perf_counter()
    def costs(names):
        calls = Calls(names, mark)
        calls.run(forward)
        return calls.costs(lambda a, b: (b-a)*1000)
    passes = [costs(names) for _ in range(n_timed+1)][1:]
    model = next(iter(names))
    return ({m: float(np.median([ms[m] for ms in passes])) for m in passes[0]},
            float(np.median([costs({model: ''})[model] for _ in range(n_timed)])))


def _counted(names, forward) -> tuple[Calls, dict[nn.Module, int], int|None]:  # with multiply-adds
    with flop_counter() as counter:
        calls = Calls(names, counter.get_total_flops)
        try: calls.run(forward)
        except Exception: pass
        else: return calls, calls.costs(lambda a, b: (b-a)//2), counter.get_total_flops()//2
    calls = Calls(names, lambda: 0)  # perhaps it is the counter, as where a forward computes gradients
    try: calls.run(forward)
    except Exception as e:
        e.add_note(f'summary: {calls.where()}')
        raise
    return calls, {}, None


class SummaryLook(Callback):
    """Runs the model in an evaluation's place, and cancels the batch: there is no loss

    Order: last, so that the batch is as the others leave it."""
    run_in = {'validate'}
    toward_end = True
    order = math.inf
    found: Any = None

    def __init__(self, times): self.times = times

    def before_batch(self):
        inside = {o for _, m in named_layers(self.model) if is_parametrized(m)
                  for o in m.get_submodule('parametrizations').modules()}
        names = {m: name for name, m in named_layers(self.model) if m not in inside}
        lazy = {m for m in names if any(map(is_lazy, m.parameters(recurse=False)))}
        def forward(): self.learn._in_context(self.learn._forward)
        with layer_by_layer():
            calls, adds, total = _counted(names, forward)
            ms, whole = _timed(names, self.device, forward) if self.times else ({}, None)
        self.found = _Found(calls, lazy, adds, total, ms, whole, describe(self.xb), n_items(self.xb, self.yb))
        raise CancelBatchException


class _Found(NamedTuple):
    calls: Calls
    lazy: set[nn.Module]             # modules that were lazy
    adds: dict[nn.Module, int]       # multiply-adds of each module itself
    total_adds: int|None             # None: torch's counter cannot count in this model
    ms: dict[nn.Module, float]       # empty: not timed
    total_ms: float|None
    batch: str
    bs: int


# ---- the table

def _ordered(calls) -> list[nn.Module]:
    "As they were called; one that was not stands behind what was registered before it"
    order = list(called := dict.fromkeys(call.m for call in calls.all))
    for before, m in pairwise([None, *calls.names]):
        if m not in called: order.insert(0 if before is None else order.index(before)+1, m)
    return order


def _rows(found) -> Iterator[dict[str, Any]]:
    seen: dict[Tensor, str] = {}  # parameters of earlier rows, with their names
    calls = defaultdict(list)
    for call in found.calls.all: calls[call.m].append(call)
    for m in _ordered(found.calls):
        own, name, mine = own_params(m), found.calls.names[m], calls[m]
        if not (is_leaf(m) or own or found.adds.get(m)): continue
        tied = [f'{k} is {seen[p]}' for k, p in own.items() if p in seen]
        new = [p for p in own.values() if p not in seen]
        seen.update({p: f'{name}.{k}'.lstrip('.') for k, p in own.items() if p not in seen})
        unknown = any(map(is_lazy, new))
        row = dict(name=name, type=type(m).__name__, input=mine[0].inputs if mine else [],
                   output=mine[0].output if mine else [], params=None if unknown else sum(p.numel() for p in new),
                   trained=_trained(own.values()), multiply_adds=found.adds.get(m) or None,
                   mib=sum(map(n_bytes, [] if unknown else new))/MiB + sum(c.n_bytes for c in mine)/MiB)
        if found.ms: row['ms'] = found.ms.get(m, math.nan)
        unseen = 'not called' if can_hook(m) else 'TorchScript: not seen into'
        calls_note = [] if len(mine) == 1 else [f'called {len(mine)} times' if mine else unseen]
        yield row | {'note': ', '.join(calls_note + ['lazy']*(m in found.lazy) + tied)}


def _trained(ps):
    flags = {p.requires_grad for p in ps}
    return 'partly' if len(flags) > 1 else 'yes' if True in flags else 'no' if flags else ''


def _look(learn, xb, times, then=lambda found: None) -> tuple[Any, Any]:
    """The table, and what `then` makes of what was found while it lasts

    Raises: ValueError if that would use up the loader."""
    if not isinstance(times, bool): raise TypeError(
        f"summary: times={times!r}; give True or False: shapes are those of a training batch, and need no size")
    pd = optional('pandas', 'summary')
    if not xb and isinstance(learn.dls.train.dl, Iterator): raise ValueError(
        f"summary would use up the training loader, a `{type(learn.dls.train.dl).__name__}` that can be iterated only "
        "once: give a DataLoader or a list, or the inputs of a batch, to `layer_info(learn, *xb)`")
    with no_trace(learn):
        if xb: learn._split = partial(_put_inputs, learn)
        look = SummaryLook(times)
        learn.validate(dl=[xb or learn.dls.one_batch()], cbs=look)
        if look.found is None: raise RuntimeError("summary: a callback cancelled the batch before the model got it")
        table = pd.DataFrame([*_rows(look.found)]).astype({'params': 'Int64', 'multiply_adds': 'Int64'})
        return table, then(look.found)


def _put_inputs(learn, xb):  # in place of `learn._split`: all of it is input, and a dict goes in by keyword
    learn.xb, learn.yb, learn._had_targets = xb[0] if len(xb) == 1 and isinstance(xb[0], Mapping) else xb, (), False


def layer_info(
    learn: Learner,        # whose model is looked at
    *xb: Any,              # inputs of one batch, or a dict of them; none: the first batch of the training loader
    times: bool = False,   # also measure milliseconds: the median of 5 passes
) -> Any:                  # a pandas DataFrame
    """The layers of the model in the order in which they are called, for one batch in eval mode; nothing changes

    A row for each module without children, or with parameters or multiply-adds of its own, so that the rows add up.
    `input` and `output` are lists with the shapes of the first call, a tuple for each tensor. `params` counts each
    parameter once, in the first row that has it. `multiply_adds` of the batch are those of matrix products,
    convolutions, attention and recurrent layers; NA: none of these. `mib` is MiB of parameters and of new memory
    that holds outputs. `ms` is without the layers inside. `note` tells what was not called, called several times, lazy
    or tied; the parameters of a module that is not called may be used by the one around it.
    Raises: ValueError if that would use up the loader; RuntimeError if a callback cancels the batch. An error in the
    model has a note that says which layer it reached."""
    return _look(learn, xb, times)[0]


# ---- the summary

class Summary:
    "A model's layers and how they are trained: `table` is a DataFrame as of `layer_info`, `facts` the lines below it"
    def __init__(self,
        table: Any,              # a row a layer
        facts: dict[str, str],   # what is to be said of the whole
    ): self.table, self.facts = table, facts

    def _cells(self):
        t = self.table
        columns = {'layer': t['name'].where(t['name'] != '', '(the model)'), 'type': t['type'],
                   'input': t['input'].map(shapes_text), 'output': t['output'].map(shapes_text),
                   'params': _numbers(t['params'].where(t['trained'] != '')), 'trained': t['trained'],
                   'mult-adds': _numbers(t['multiply_adds']), 'MiB': t['mib'].map('{:.2f}'.format)}
        if 'ms' in t: columns['ms'] = t['ms'].map(lambda ms: '' if math.isnan(ms) else f'{ms:.3f}')
        if t['note'].any(): columns['note'] = t['note']
        left = {i for i, k in enumerate(columns) if k in ('layer', 'type', 'input', 'output', 'trained', 'note')}
        return list(columns), [*zip(*columns.values())], left

    def __repr__(self) -> str:
        width = max(map(len, self.facts))
        lines = [f'{k.ljust(width)}  {v}' for k, v in self.facts.items()]
        return '\n'.join([text_table(*self._cells()), '', *lines])

    def _repr_html_(self) -> str:
        return html_table(*self._cells()) + html_table(['', ''], [*self.facts.items()], {0, 1})


def _numbers(column): return [f'{n:,}' if isinstance(n, Integral) else '' for n in column]


@patch
def summary(self: Learner,
    times: bool = False,  # also measure how long each layer takes
) -> Summary:             # shows itself in a notebook; in a script it is printed
    """Show the model's layers with shapes, parameters and cost for a training batch, and how it is trained

    In a script it is printed, so that nothing more is needed.
    The batch passes through the callbacks and the model as in an evaluation; `layer_info` says what is in the table.
    The Learner is left as it was, also by an error in the model, which has a note that says which layer it reached.
    Raises: ValueError if that would use up the training loader; RuntimeError if a callback cancels the batch."""
    made = Summary(*_look(self, (), times, lambda found: _facts(self, found)))
    show_result(str(made))
    return made


def _facts(learn, found) -> dict[str, str]:
    ps = [p for p in learn.model.parameters() if not is_lazy(p)]
    n, n_trained = sum(p.numel() for p in ps), sum(p.numel() for p in ps if p.requires_grad)
    n_lazy = sum(1 for p in learn.model.parameters() if is_lazy(p))
    outputs = sum(c.n_bytes for c in found.calls.all)
    facts = {'parameters': f'{n:,}: {n_trained:,} trained, {n-n_trained:,} frozen' +
                           (f'; not counted: {n_lazy} lazy ones that this batch did not reach' if n_lazy else ''),
             'multiply-adds': "torch's counter cannot count them in this model" if found.total_adds is None else (
                 f'{found.total_adds:,} a batch, {found.total_adds/max(found.bs, 1):,.0f} an item'),
             'memory': f"parameters {sum(map(n_bytes, ps))/MiB:.2f} MiB, layers' outputs {outputs/MiB:.2f} MiB a batch"
                       "; above, MiB is both",
             'buffers': f'{sum(b.numel() for b in learn.model.buffers() if not is_lazy(b)):,}',
             'batch': f'of {found.bs}: {found.batch}'}
    if found.total_ms is not None: facts['time'] = (f'{found.total_ms:.2f} ms a batch on {learn.device}, in eval mode' +
                                                    (', not compiled' if is_compiled(learn.model) else ''))
    return facts | _training(learn)


def _training(learn) -> dict[str, str]:  # how the model is trained
    loss = learn.loss_func.func if isinstance(learn.loss_func, partial) else learn.loss_func
    names = {'loss': getattr(loss, '__name__', type(loss).__name__) if loss is not None else "the model's own",
             'callbacks': ', '.join(map(repr, learn.ordered))}
    made = learn.opt is not None
    try: opt = current_opt(learn)
    except Exception as e: return {'optimizer': f'none can be made: {e}', **names}
    trained = [_trained(ps) for ps in opt.param_lists]
    groups = [f'{len(trained)}']
    for flag, told in (('no', 'frozen'), ('partly', 'partly frozen')):
        found = [f'group {i}' for i, t in enumerate(trained) if t == flag]
        if found: groups.append(f"{told}: {', '.join(found)}")
    kind = f"{type(opt.opt).__name__}, lr {learn.lr}" + ('' if made else ', made by the first fit')
    return {'groups': '; '.join(groups), 'optimizer': kind, **names}
