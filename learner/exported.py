"""A model in a file of `learn.export`, read and applied with torch alone: neither its class nor its Learner is needed.

The file is an archive of `torch.export.save`, so this uses it without the package, where its origin is known:

    extra = {'learner.json': ''}
    program = torch.export.load('model.pt2', extra_files=extra).module()
    info = json.loads(extra['learner.json'])  # of which `Exported` tells

That call unpickles what an archive may hold, imports modules that it names, and runs texts in it as Python.
`load_exported` does none of this (archive.py).
"""
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .archive import Archive, Program, dtypes, flat, typed

__all__ = ['Exported', 'load_exported', 'prediction', 'n_words', 'scale_dim', 'scale_fits']

info_name, graph_name = 'extra/learner.json', 'models/model.json'
by_name = {str(d).removeprefix('torch.'): d for d in dtypes.values()}
activations = {'none': lambda t: t, 'softmax': torch.softmax, 'sigmoid': torch.sigmoid, 'exp': torch.exp}
decodings = {'none': lambda t: t, 'argmax': torch.argmax, 'over': torch.gt}
more_args = {'softmax': [(int,)], 'argmax': [(int,)], 'over': [(float, int)]}  # of what type; others have none


class Exported:
    """A model that was exported, and what its outputs mean: called with a batch, it gives what the model gives

    Inputs are as they were before the `preprocess` of `learn.export`, which the first of them goes through; those that
    went to the model by keyword are given so. Arrays and lists will do. It is in eval mode, without gradients.
    `info` is a dict: 'inputs' (of each 'name', 'dtype' and 'shape', in which None is the number of items),
    'preprocess', 'vocab', 'activation' and 'decodes' (each a 'name' with 'args'), 'model' (its class), 'versions'.

    Raises: ValueError naming the record that is not as `learn.export` writes it."""
    info: dict[str, Any]

    def __init__(self,
        file: str|Path|IO[bytes],              # what `learn.export` wrote, or that open for reading
        device: torch.device|str|int = 'cpu',  # where it runs
    ):
        self.device = torch.empty(0, device=device).device
        archive = Archive(file)
        with archive.zip:
            self.info = archive.json(info_name)
            with archive.reading(info_name): _check(**self.info)
            tensors = archive.tensors('constants') | archive.tensors('weights')
            with archive.reading(graph_name):
                self._program = Program(archive.json(graph_name), tensors, self.device)
                if len(self._program.inputs) != len(self.info['inputs']): raise ValueError("other inputs than its info")

    def __repr__(self) -> str:
        return f"Exported({self.info['model']}, {', '.join(map(_shown, self.info['inputs']))})"

    def __call__(self,
        *inputs: Any,  # a batch of what the model takes
        **named: Any,  # what it takes by keyword
    ) -> Any:          # what it gives, in tuples, lists and dicts
        """Run the model

        Raises: TypeError or ValueError showing what it takes, and what it got."""
        try: leaves = flat(self._program.in_spec, (inputs, named))
        except TypeError:
            names = ', '.join([f'{len(inputs)} inputs by position', *(f'`{k}`' for k in named)])
            raise TypeError(f"{self!r} takes other inputs than {names}") from None
        ts = [torch.as_tensor(o, device=self.device) for o in leaves]
        if (scale := self.info['preprocess']) and ts: ts[0] = _scaled(ts[0], **scale)
        with torch.no_grad(): return self._program([_fitting(t, i) for t, i in zip(ts, self.info['inputs'])])

    def predict(self,
        *inputs: Any,  # as in a call
        **named: Any,  # as in a call
    ) -> tuple[Any, Tensor, Tensor]:  # decisions, by `vocab` if there is one; as indices; what they are made of
        """What the model decides for each item of a batch; of a dict of outputs 'logits' counts

        Yes or no, an output `(n,)` or `(n, 1)`, is the second or the first of two words; of several labels those that
        are there are listed.
        Raises: TypeError if there is no single output; ValueError if `vocab` has more or fewer words than that."""
        out = prediction(self(*inputs, **named))
        if out is None: raise TypeError("predict: the model has several outputs: call it, and decide by what it gives")
        act, decode, vocab = self.info['activation'], self.info['decodes'], self.info['vocab']
        probs = activations[act['name']](out, *act['args'])
        index = decodings[decode['name']](probs, *decode['args'])
        if vocab is None or decode['name'] == 'none': return index, index, probs
        if len(vocab) not in n_words(out.shape, decode): raise ValueError(
            f"predict: outputs {[*out.shape]} are of other classes than the {len(vocab)} of `vocab`")
        return _words(index, vocab), index, probs


def load_exported(
    path: str|Path,                        # a file of `learn.export`
    device: torch.device|str|int = 'cpu',  # where it runs
) -> Exported:
    """Read an exported model without its class, and without running anything that the file holds

    `torch.export.load` opens the file too, but unpickles and evaluates: that is for files of known origin.
    Raises: ValueError naming the record that is not as `learn.export` writes it; OSError."""
    return Exported(path, device)


def prediction(
    out: Any,        # of a model
) -> Tensor|None:    # None: it is not known which of several
    "What is decided by: the only tensor, or of a dict 'logits'"
    if isinstance(out, dict): out = out.get('logits', next(iter(out.values())) if len(out) == 1 else None)
    return out if isinstance(out, Tensor) else None


def n_words(
    shape: Any,    # of what is decided by
    decode: dict,  # 'name' and 'args' of 'decodes'
) -> set[int]:
    "Of how many words a vocabulary may be: one for each class or label, or two for yes and no"
    if decode['name'] == 'argmax': return {*shape[decode['args'][0]:][:1]}
    return {shape[-1] if len(shape) > 1 else 1} | ({2} if _is_single(shape) else set())


def _is_single(shape): return len(shape) < 2 or shape[1] == 1  # is it one decision an item, or place of a picture?


def _check(format, inputs, preprocess, vocab, activation, decodes, model, **rest):
    if format != 1: raise ValueError(f"its format is {format!r}, and 1 can be read here: export the model again")
    for i in inputs:
        typed(i['name'], str)
        if i['dtype'] not in by_name or not all(n is None or type(n) is int for n in i['shape']): raise ValueError(
            f"an input {str(i)[:80]}")
    for o, known in (activation, activations), (decodes, decodings):
        if o['name'] not in known: raise ValueError(str(o)[:80])
        for v, kinds in zip(typed(o['args'], list), more_args.get(o['name'], []), strict=True): typed(v, *kinds)
    if preprocess is not None and (preprocess.keys() != {'mean', 'std'} or not scale_fits(preprocess, inputs[0])
            or not all(type(v) is float for vs in preprocess.values() for v in vs)): raise ValueError(
        f"{str(preprocess)[:80]}, of the input {str(inputs[0])[:80]}")
    if vocab is not None: typed(vocab, list)
    typed(model, str)


def _shown(i): return f"{i['name']} {i['dtype']}[{', '.join('n' if n is None else str(n) for n in i['shape'])}]"


def _fitting(t, i) -> Tensor:
    dtype, shape = by_name[i['dtype']], i['shape']
    if t.is_floating_point() and dtype.is_floating_point: t = t.to(dtype)
    if t.dtype == dtype and t.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, t.shape)): return t
    raise ValueError(f"the model takes {_shown(i)}, and got {str(t.dtype).removeprefix('torch.')}{[*t.shape]}")


def scale_dim(
    shape: Any,  # of a batch
) -> int:
    "Where the numbers of `preprocess` belong: channels of images and volumes are dimension 1, else the last one counts"
    return 1 if len(shape) > 3 else len(shape)-1


def scale_fits(
    scale: Any,  # `dict(mean=[…], std=[…])`
    i: dict,     # what 'inputs' tells of the first one
) -> bool:
    "Are these numbers for an input of floats, one for all of it or for each place of that dimension?"
    shape, sizes = i['shape'], {len(v) for v in scale.values()}
    return by_name[i['dtype']].is_floating_point and bool(shape) and sizes in ({1}, {shape[scale_dim(shape)]})


def _scaled(t, mean, std) -> Tensor:
    if not t.is_floating_point(): t = t.float()
    m, s = (torch.tensor(v, dtype=t.dtype, device=t.device).view(-1, *[1]*(t.ndim-1-scale_dim(t.shape)))
            for v in (mean, std))
    return (t-m)/s


def _words(index, vocab) -> list:
    if index.dtype == torch.bool:
        if index.ndim < 2: index = index.view(-1, 1)
        if len(vocab) == 2 and _is_single(index.shape): index = index.squeeze(1).int()
    return _named(index.tolist(), vocab)


def _named(o, vocab) -> Any:  # the name of each class; of labels that are each there or not, of the ones that are
    if isinstance(o, list) and o and isinstance(o[0], bool): return [vocab[i] for i, there in enumerate(o) if there]
    return [_named(v, vocab) for v in o] if isinstance(o, list) else vocab[o]
