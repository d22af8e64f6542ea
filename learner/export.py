"""`learn.export`: a trained model as a program that needs neither its class nor this package (exported.py); or as ONNX.

`learn.save('….safetensors')` writes weights alone, `learn.publish` with their hash in the name (publish.py),
`learn.export_pickle` the Learner without its data.
"""
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from fastcore.basics import noop, patch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .archive import Refused
from .callbacks.averaging import WeightAverage
from .data import DataLoaders
from .exported import Exported, n_words, prediction, scale_dim, scale_fits
from .files import write_file
from .frame import evaluation_frame
from .keep import kept
from .learner import Learner
from .losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, loss_activation, loss_decodes
from .meta import versions
from .modes import devices
from .outputs import is_regression
from .plain import digest
from .tensors import describe, find_bs, forward_keys, map_tensors, split_batch, tensors_in, to_device
from .utils import optional, rng_state, set_rng_state, warn
from .weights import unwrapped

__all__ = ['export_path', 'warn_unaveraged']

# what the `activation` and `decodes` of losses do, under the names that exported.py knows
meanings = {noop: 'none', torch.exp: 'exp', torch.sigmoid: 'sigmoid', torch.softmax: 'softmax',
            torch.argmax: 'argmax', loss_decodes(nn.BCELoss()): 'over',
            CrossEntropyLossFlat.activation: 'softmax', CrossEntropyLossFlat.decodes: 'argmax',
            DiceLoss.activation: 'softmax', DiceLoss.decodes: 'argmax',
            BCEWithLogitsLossFlat.activation: 'sigmoid', BCEWithLogitsLossFlat.decodes: 'over'}
writers = {'.pt2': 'export', '.onnx': 'export_onnx', '.pkl': 'export_pickle', '.ckpt': 'save_state', **dict.fromkeys(
    ('.pth', '.pt', '.bin', '.safetensors'), 'save')}  # what writes files of that name


@patch
def export(self: Learner,
    file: str|Path = 'model.pt2',  # below `learn.path` unless absolute; '.pt2' is added if need be
    preprocess: dict|None = None,  # `dict(mean=[…], std=[…])` of channels or columns; None: inputs stay as they are
) -> Path:                         # of the file
    """Write the model, in eval mode and for the CPU, as a program that `load_exported` and torch alone can run

    Batches may be of any size, else inputs are as the validation (or training) loader gives them, in shape and type.
    With it goes how to use it: the constants of `preprocess`, which maps the first input to `(x-mean)/std` along
    dimension 1 of images and volumes and the last one of other inputs; `dls.vocab`; and what the loss's `activation`
    and `decodes` are. No data goes with it. What callbacks do to the prediction does not either, as RNNCallback, which
    takes it out of several outputs: `Exported.predict` needs a model that gives one, or a dict with 'logits'.
    A model with a `reset()` is exported as that leaves it. The program has to give what the model gives, also what the
    model gives after other batches, before the file is put in place.
    Raises: ValueError with torch's reason if the model cannot be exported, gives other values then, or has a loss whose
    activation has no name, for a vocabulary of more or fewer words than there are outputs, and for a name that is not
    such a file's; TypeError for inputs that are no tensors. All is then as it was, also an old file."""
    path = export_path(self, file, '.pt2', 'export')
    with _ready(self, 'export') as (model, xb):
        info = _info(self)
        program = _program(model, xb, 'export')
        info['inputs'] = _inputs(program)
        info['preprocess'] = _constants(preprocess, info['inputs'])
        data = BytesIO()
        _check_words(_compare(_written(program, info, data), model, xb, 'export'), info)
    write_file(path, lambda f: f.write(data.getbuffer()))
    return path


def _written(program, info, f) -> Exported:
    "The program, as it is read back from where it has been written"
    try:
        torch.export.save(program, f, extra_files={'learner.json': json.dumps(info)})
        return Exported(f)
    except Exception as e: raise ValueError(
        f"export: the program that torch makes of `{info['model']}` has what cannot be written, or not be read safely: "
        f"{_reason(e.__cause__ if isinstance(e, Refused) and e.__cause__ else e)}\nLet the model do without; "
        "`learn.export_pickle` and `learn.save` take any model") from e


@patch
def export_onnx(self: Learner,
    file: str|Path = 'model.onnx',  # below `learn.path` unless absolute; '.onnx' is added if need be
) -> Path:                          # of the file
    """Write the model as ONNX, in eval mode and for batches of any size; compared with it if onnxruntime is installed

    Raises: ImportError without onnx and onnxscript; ValueError as `export` does."""
    path = export_path(self, file, '.onnx', 'export_onnx')
    for name in ('onnx', 'onnxscript'): optional(name, 'learn.export_onnx')
    with _ready(self, 'export_onnx') as (model, xb):
        program = _program(model, xb, 'export_onnx')
        try: made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception as e: raise ValueError(
            f"export_onnx: ONNX cannot hold `{type(model).__name__}`: {_reason(e)}\n`learn.export` can") from e
        data = made.model_proto.SerializeToString()
        if find_spec('onnxruntime'): _compare(partial(_run_onnx, data), model, xb, 'export_onnx')
        else: warn(f"{path} has not been compared with the model: that needs `onnxruntime`")
    write_file(path, lambda f: f.write(data))
    return path


def _run_onnx(data, *inputs, **named):
    session = optional('onnxruntime', 'learn.export_onnx').InferenceSession(data, providers=['CPUExecutionProvider'])
    ts = tensors_in([inputs, named])
    given = {i.name: t.numpy() for i, t in zip(session.get_inputs(), ts)}
    return [torch.from_numpy(o) for o in session.run(None, given)]


def export_path(
    learn: Any,      # the Learner
    file: str|Path,  # below its `path`, unless absolute
    suffix: str,     # added unless it is there
    who: str,        # writes it
) -> Path:
    """The file to be written

    Raises: ValueError for what names a folder, or files of another method."""
    name = Path(file).name
    if not name.removesuffix(suffix).strip('.') or str(file).endswith(('/', os.sep)): raise ValueError(
        f"{who}: {str(file)!r} names no file; give one, such as 'model{suffix}'")
    if other := next((k for k in writers if k != suffix and name.endswith(k)), ''): raise ValueError(
        f"{who}: {str(file)!r} names a file of `learn.{writers[other]}`; what `{who}` writes ends in '{suffix}'")
    return Path(learn.path)/(file if str(file).endswith(suffix) else f'{file}{suffix}')


def warn_unaveraged(
    learn: Any,  # the Learner
    who: str,    # writes its weights
) -> None:
    "Warn if these are not the ones that evaluations use"
    for cb in learn.cbs:
        if isinstance(cb, WeightAverage) and cb.n_averaged and not cb._raw: warn(
            f"{who}: the weights are written as they were trained, and evaluations use the average of {cb}; "
            f"`with learn.averaged(): learn.{who}(…)` writes that")


# ---- the model and what it is given

@contextmanager
def _ready(learn, who) -> Iterator[tuple[nn.Module, Any]]:
    "The model in eval mode, with outputs in plain containers, and inputs on its device; all is afterwards as it was"
    model = unwrapped(learn.model)
    if lazy := [k for k, p in model.named_parameters() if is_lazy(p)]: raise ValueError(
        f"{who}: the model has lazy parameters (`{lazy[0]}` …), which get their values from the first batch: call "
        "`learn.validate()`, or the model with a batch, before")
    warn_unaveraged(learn, who)
    with evaluation_frame(learn), kept(model):
        model.eval()
        _forget(model, who)
        for m in model.modules(): m._compiled_call_impl = None
        xb = to_device(_example(learn, model, who), (devices(model) or ['cpu'])[0])
        model.forward = _plainly(model.forward)
        yield model, xb


def _reset(model):  # makes it forget earlier batches, which no file should have
    return reset if callable(reset := getattr(model, 'reset', None)) else noop


def _forget(model, who):
    if (reset := _reset(model)) is noop: return
    before = digest(dict(model.named_parameters()))
    reset()
    if digest(dict(model.named_parameters())) != before: raise ValueError(
        f"{who}: `{type(model).__name__}.reset()` is called to make the model forget earlier batches, and it changes "
        "parameters: give it another name")


def _example(learn, model, who) -> Any:  # two items at least: of a size of 1 torch takes it that it is always 1
    b = DataLoaders((learn.dls.valid or learn.dls.train).fork()).one_batch()
    xb, _ = split_batch(b, learn.n_inp, forward_keys(model))
    if odd := [o for o in tree_leaves(xb) if not isinstance(o, Tensor)]: raise TypeError(
        f"{who}: the model is given a {describe(odd[0])} in {describe(xb)}, which would be the same for ever: leave it "
        "out of the batch, or give a tensor")
    if find_bs(xb) > 1: return xb
    return map_tensors(lambda t: torch.cat([t, t]) if t.ndim and len(t) == 1 else t, xb)


def _plainly(forward):  # dataclasses and subclasses of containers would be needed where the program is run
    def plain(o):
        if isinstance(o, Mapping): return {k: plain(v) for k, v in o.items()}
        if is_dataclass(o): return {f.name: plain(getattr(o, f.name)) for f in fields(o)}
        return (list if isinstance(o, list) else tuple)(map(plain, o)) if isinstance(o, (list, tuple)) else o
    @wraps(forward)
    def call(*args, **kwargs): return plain(forward(*args, **kwargs))
    return call


def _call(f, xb):
    xb = map_tensors(Tensor.clone, xb)  # the batch may be the loader's own, and a model write into what it is given
    return f(**xb) if isinstance(xb, dict) else f(*xb)


# ---- the program

def _program(model, xb, who) -> Any:
    "What torch makes of the model, on the CPU"
    n, batch = find_bs(xb), torch.export.Dim('batch')
    dims = map_tensors(lambda t: {0: batch} if t.ndim and len(t) == n else None, xb)
    args, kwargs = ((), xb) if isinstance(xb, dict) else (xb, None)
    try:
        with catch_warnings():
            filterwarnings('ignore', r'(?s).*assigned during export')  # what comes of it is compared, as below
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dims)
        if devices(model) not in ([], [torch.device('cpu')]):
            program = optional('torch.export.passes', 'learn.export').move_to_device_pass(program, 'cpu')
    except Exception as e: raise ValueError(
        f"{who}: torch cannot make a program of `{type(model).__name__}`: {_reason(e)}\nWhat depends on values has to "
        "be written in tensors (`torch.where`), what depends on the size of a batch by `x.shape`, not by `len(x)` or a "
        "number; `learn.export_pickle` and `learn.save` take any model") from e
    for node in program.graph.nodes:  # these tell where the code lies
        for k in ('stack_trace', 'source_fn_stack', 'from_node', 'custom'): node.meta.pop(k, None)
    program.example_inputs = None  # they are data, and in a file pickled
    return program


def _reason(e) -> str:  # torch's first line, and where it lists what is wrong the first of that
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {' '.join(lines[:1] + [line for line in lines[1:] if line.startswith('- ')][:1])}"


def _inputs(program):
    "Name, type and shape of each input, with None for the number of items"
    values: dict = {n.name: n.meta['val'] for n in program.graph.nodes if n.op == 'placeholder'}
    ts: dict[str, Tensor] = {name: values[name] for name in program.graph_signature.user_inputs}
    return [dict(name=name, dtype=str(t.dtype).removeprefix('torch.'),
                 shape=[n if type(n) is int else None for n in t.shape]) for name, t in ts.items()]


def _compare(f, model, xb, who) -> Any:
    """What a program gives, which has to be what the model gives, a random one from the same random numbers

    Each is called as it is, after the same batch, and after one of other values: what is kept from these would show."""
    n, state = find_bs(xb), rng_state()
    other = map_tensors(lambda t: t[:1].expand_as(t) if t.ndim and len(t) == n else t, xb)
    def outputs(f, reset, *batches):
        for before in (None, *batches):
            if before is not None: _call(f, before)
            reset()
            set_rng_state(state)
            yield map_tensors(lambda t: t.to('cpu', copy=True), _call(f, batches[0]))  # it may be what is kept
    outs = [*outputs(model, _reset(model), xb, other)]
    if isinstance(f, Exported): f.info = {**f.info, 'preprocess': None}  # the model takes what has been through it
    outs += outputs(f, noop, *to_device((xb, other), 'cpu'))
    known, *rest = [[*tensors_in(o)] for o in outs]
    if odd := next((got for got in rest if not _alike(got, known)), None): raise ValueError(
        f"{who}: the program gives {describe(odd)} that differ from the model's {describe(known)}: does the model draw "
        "random numbers, or keep something from call to call, in eval mode? A `reset()` that it has is called before")
    return outs[-1]


def _alike(got, known) -> bool:
    return len(got) == len(known) and all(a.shape == b.shape and torch.allclose(
        a.to(torch.complex128), b.to(torch.complex128), 1e-3, 1e-4, equal_nan=True) for a, b in zip(got, known))


# ---- what is to be known beside it

def _info(learn) -> dict[str, Any]:
    info = dict(format=1, model=type(unwrapped(learn.model)).__name__, vocab=_vocab(learn.dls),
                activation=_meaning(loss_activation(learn.loss_func), 'activation', learn.loss_func),
                decodes=_meaning(loss_decodes(learn.loss_func), 'decodes', learn.loss_func), versions=versions())
    _warn_unused(learn, info)
    return info


def _meaning(f, what, loss_func):
    function = f.func if isinstance(f, partial) else getattr(f, '__func__', f)
    name, loss = meanings.get(function), getattr(f, '__self__', None)
    if name is None: raise ValueError(
        f"export: what `{what}` of the loss `{type(loss or loss_func).__name__}` does cannot be told in a file: it is "
        "none of the losses' of torch or this package; let the model do it, and set `learn.loss_func` to such a loss, "
        "as `nn.MSELoss()` is one that takes outputs as they are")
    if name in ('softmax', 'argmax'): return dict(name=name, args=[f.keywords['dim'] if loss is None else loss.axis])
    return dict(name=name, args=[float(getattr(loss, 'thresh', .5))] if name == 'over' else [])


def _vocab(dls):
    vocab = getattr(dls, 'vocab', None)
    if vocab is None: return None
    try: words = [vocab[i] for i in range(len(vocab))]  # by number, as a dict or a Series may have them in any order
    except (LookupError, TypeError) as e: raise ValueError(
        f"export: `dls.vocab`, a `{type(vocab).__name__}`, does not give a word by each number from 0 on "
        f"({type(e).__name__}: {e}): set it to a list of words") from e
    plain = [v.item() if hasattr(v, 'item') else v for v in words]
    if odd := [v for v in plain if not isinstance(v, (str, int, float))]: raise TypeError(
        f"export: `dls.vocab` has {describe(odd[0])}, and a file holds texts and numbers: set `dls.vocab` to such")
    return plain


def _warn_unused(learn, info):
    loss = learn.loss_func.func if isinstance(learn.loss_func, partial) else learn.loss_func
    if info['vocab'] is None or info['decodes']['name'] != 'none' or hasattr(loss, 'decodes') or is_regression(loss):
        return
    warn(f"export: what outputs mean is not known of the loss, `{getattr(loss, '__name__', type(loss).__name__)}`, so "
         "that they are given as they are, without the words of `dls.vocab`: set `learn.loss_func` before to one that "
         "tells, such as `nn.CrossEntropyLoss()`")


def _check_words(out, info):
    vocab, decode, t = info['vocab'], info['decodes'], prediction(out)
    if vocab is None or decode['name'] == 'none' or t is None: return
    if len(vocab) not in (n := n_words(t.shape, decode)): raise ValueError(
        f"export: `dls.vocab` has {len(vocab)} words, and the model gives {describe(t)}, which takes "
        f"{' or '.join(map(str, sorted(n)))}: set `dls.vocab` to as many, or to None")


def _constants(preprocess, inputs):
    if preprocess is None: return None
    i, how = inputs[0], "give dict(mean=[…], std=[…]) of numbers, where `std` is above 0"
    try: new = {k: torch.as_tensor(v).double().flatten().tolist() for k, v in preprocess.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as e: raise TypeError(
        f"export: preprocess={preprocess!r}; {how}") from e
    if new.keys() != {'mean', 'std'} or not all(0 < v < float('inf') for v in new['std']): raise ValueError(
        f"export: preprocess={preprocess!r}; {how}")
    if not scale_fits(new, i): raise ValueError(
        f"export: preprocess={preprocess!r} does not fit `{i['name']}`, {i['dtype']}{i['shape']}: give a number for "
        f"each place of its dimension {scale_dim(i['shape'])}")
    return new
