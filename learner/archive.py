"""The archives that `torch.export.save` writes, read as data: nothing in one is unpickled, evaluated or imported.

A program is a list of torch's operators with what they are given, so that a few lines can run it. What they compute,
and how much memory that takes, is the file's choice; their kernels were not made to withstand arguments that mean harm.
"""
import json
import math
import operator
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

__all__ = ['Archive', 'Program', 'Refused', 'flat', 'typed']

schema = 8  # the major version of what torch writes
records = re.compile(r'''archive_format | archive_version | byteorder | \.data/version | \.data/serialization_id
                         | data/weights/(weight_\d+ | model_weights_config\.json) | data/sample_inputs/model\.pt
                         | data/constants/(tensor_\d+ | model_constants_config\.json)
                         | models/model\.json | extra/learner\.json''', re.VERBOSE)
samples = 'data/sample_inputs/model.pt'

# torch's numbers for what a graph may be given
dtypes = dict(enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
                         torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.bfloat16),
                        1)) | {28: torch.uint16, 34: torch.uint32, 35: torch.uint64}
formats = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
layouts = {7: torch.strided}

# What computes with sizes. Of torch's own operators on tensors those are refused that open files, print, or take
# indices without looking whether there is such a place in memory.
on_sizes = {f'_operator.{k}': getattr(operator, k) for k in '''add sub mul floordiv truediv mod pow neg pos eq ne lt le
            gt ge and_ or_ lshift rshift'''.split()} | {'math.trunc': math.trunc} | {
            f'torch.{k}': getattr(torch, k) for k in 'sym_int sym_float sym_max sym_min sym_not sym_ite'.split()}
unsafe = re.compile(r'from_file|_print|_sparse_\w+_unsafe|_unsafe_(masked_)?index\w*')

# Of the texts that torch would evaluate: these words, names in quotes, numbers and signs
words = {*'''Symbol Integer Float Rational Half Add Mul Pow Mod Max Min Abs And Or Not Equality Unequality LessThan
    StrictLessThan GreaterThan StrictGreaterThan Piecewise ExprCondPair Tuple BooleanTrue BooleanFalse true false True
    False positive negative nonnegative nonzero integer real precision FloorDiv ModularIndexing Where PythonMod CleanDiv
    CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt
    IsNonOverlappingAndDenseIndicator RoundToInt RoundDecimal ToFloat Identity L size and or not'''.split()}

# of values that are no text, number or list where one should be, and the like
wrong = KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError, RecursionError


class Refused(ValueError):
    "An archive holds something that is not read"


def typed(v, *kinds) -> Any:
    "`v`, which has to be of one of these types"
    if type(v) not in kinds: raise TypeError(f"{str(v)[:50]!r} stands for a {kinds[0].__name__}")
    return v


# ---- the archive

class Archive:
    """The records of an archive: those of one model and its `learner.json`, none of them compressed

    Raises: Refused naming the record that is not so."""
    def __init__(self,
        file: str|Path|IO[bytes],  # open for reading, or where it is
    ):
        self.name = str(file) if isinstance(file, (str, Path)) else 'the archive'
        try: self.zip = ZipFile(file)
        except (BadZipFile, struct.error, *wrong) as e: raise Refused(
            f"{self.name} is refused: it is no archive, or was cut short") from e
        entries = self.zip.infolist()
        top = entries[0].filename.partition('/')[0] + '/' if entries else ''
        self.entries = {e.filename.removeprefix(top): e for e in entries}
        for k, e in self.entries.items():
            if not e.filename.startswith(top) or not records.fullmatch(k): raise self.refused(
                k, "an exported model has no such record")
            if e.compress_type != ZIP_STORED or e.flag_bits & 1: raise self.refused(k, "it is compressed or encrypted")
        if len(self.entries) < len(entries) or sum(e.file_size for e in entries) > self.zip.start_dir: raise Refused(
            f"{self.name} is refused: its records are larger than itself, or two have one name")
        if self.read(samples): raise self.refused(samples, "it is not empty, and torch would unpickle it")
        for k, expected in (('archive_format', 'pt2'), ('archive_version', '0'), ('byteorder', sys.byteorder)):
            if (found := self.read(k)) != expected.encode(): raise self.refused(
                k, f"it says {bytes(found[:20])!r}; what can be read here is {expected!r}")

    def refused(self, record: str, why: Any) -> Refused:
        "The error that says so"
        if isinstance(why, Exception): why = f"{type(why).__name__}: {str(why).partition(chr(10))[0]}"
        return Refused(f"{self.name} is refused: record `{record}`: {why}; nothing in it was run")

    @contextmanager
    def reading(self, record: str):
        "What is wrong with its content is an error that names the record"
        try: yield
        except Refused: raise
        except wrong as e: raise self.refused(record, e) from e

    def read(self, record: str) -> bytearray:
        "The bytes of a record, whose checksum fits"
        if record not in self.entries: raise self.refused(record, "it is missing")
        data = bytearray(self.entries[record].file_size)
        try:
            with self.zip.open(self.entries[record]) as f:
                n = f.readinto(data)  # pyright: ignore[reportAttributeAccessIssue]
                f.read(1)  # at its end the checksum is verified
        except (BadZipFile, EOFError, struct.error, *wrong) as e:
            raise self.refused(record, f"it is damaged: {e}") from e
        if n < len(data): raise self.refused(record, f"it is damaged: {n} bytes of {len(data)} are there")
        return data

    def json(self, record: str) -> dict[str, Any]:
        "What a record says, in which the texts that torch would evaluate are mere arithmetic"
        with self.reading(record):
            found = typed(json.loads(self.read(record).decode()), dict)
            todo: list = [found]
            while todo:
                o = todo.pop()
                if isinstance(o, dict):
                    for text in (o.get('expr_str', ''), *o.get('guards_code', ())): _check_text(text)
                todo += o.values() if isinstance(o, dict) else o if isinstance(o, list) else ()
        return found

    def tensors(self, folder: str) -> dict[str, Tensor]:  # of 'weights' or 'constants'
        "The tensors that a folder holds, by name; they may share memory"
        record, memory, found = f'data/{folder}/model_{folder}_config.json', {}, {}
        with self.reading(record):
            for name, entry in self.json(record)['config'].items():
                path, size, stride, start, dtype = _place(entry)
                if path not in memory: memory[path] = torch.frombuffer(data, dtype=torch.uint8) if (
                    data := self.read(f'data/{folder}/{path}')) else torch.empty(0, dtype=torch.uint8)
                whole = memory[path][:len(memory[path])//dtype.itemsize*dtype.itemsize].view(dtype)
                last = start + sum((n-1)*step for n, step in zip(size, stride)) if 0 not in size else -1
                if last >= len(whole): raise ValueError(f"`{name}` is larger than `{path}`, which holds it")
                found[name] = whole.as_strided(size, stride, start)
        return found


def _check_text(text):
    bare = re.sub(r"'\w*'", '', typed(text, str))
    if not re.fullmatch(r'[\w\s+\-*/%(),.=<>!\[\]]*', bare) or not {*re.findall(r'\b[A-Za-z_]\w*', bare)} <= words:
        raise ValueError(f"{text[:80]!r}, which torch would evaluate, is more than arithmetic")


def _place(entry):  # where a tensor lies, and its type
    if entry['use_pickle'] is not False: raise TypeError("a tensor is pickled, which torch would run")
    meta = entry['tensor_meta']
    path, dtype = typed(entry['path_name'], str), dtypes[meta['dtype']]
    size, stride = ([typed(d['as_int'], int) for d in meta[k]] for k in ('sizes', 'strides'))
    start = typed(meta['storage_offset']['as_int'], int)
    if len(size) != len(stride) or min([*size, *stride, start]) < 0 or meta['layout'] not in layouts: raise ValueError(
        f"a tensor of size {size}, strides {stride}, offset {start}, layout {meta['layout']}")
    return path, size, stride, start, dtype


# ---- the program

class _Name(str): "Stands for the value of that name"


class Program:
    """Operators with what they are given, one after the other

    Raises: one of `wrong` if there is something that is not known here."""
    def __init__(self,
        program: dict[str, Any],     # as torch describes it
        tensors: dict[str, Tensor],  # its parameters, buffers and constants
        device: torch.device,        # where it runs; it was made for the CPU
    ):
        if (version := program['schema_version']['major']) != schema: raise ValueError(
            f"its version is {version!r}, and {schema} can be read here: export the model again")
        module = program['graph_module']
        signature, call = module['signature'], module['module_call_graph'][0]['signature']
        self.given, self.inputs, self.device = {}, [], device
        for spec in signature['input_specs']: self._input(spec, tensors)
        self.in_spec, self.out_spec = _spec(call['in_spec']), _spec(call['out_spec'])
        self.steps = [self._step(node) for node in module['graph']['nodes']]
        self.outputs = [self._value(spec['user_output']['arg']) for spec in signature['output_specs']]
        self._check_names()
        self.writes = any(op._schema.is_mutable for op, *_ in self.steps if hasattr(op, '_schema'))
        needed, self.done = {*_names(self.outputs)}, []
        for step in reversed(self.steps):  # after which step a value is of no more use
            self.done.insert(0, {*_names(step[1:])} - needed)
            needed |= self.done[0]

    def _check_names(self):  # a value is there before it is used, and each place of a container has one
        known = {*self.given, *self.inputs}
        for _, args, kwargs, outs in [*self.steps, (None, self.outputs, {}, None)]:
            if odd := {*_names([args, kwargs])} - known: raise ValueError(f"`{min(odd)}` is used, and has no value yet")
            known |= {*_names(outs)}
        for spec, values in (self.in_spec, self.inputs), (self.out_spec, self.outputs):
            if (n := _n_places(spec)) != len(values): raise ValueError(f"{len(values)} values in {n} places")

    def _input(self, spec, tensors):
        (kind, v), = spec.items()
        names = dict(parameter='parameter_name', buffer='buffer_name', tensor_constant='tensor_constant_name')
        if kind == 'user_input': self.inputs.append(_Name(v['arg']['as_tensor']['name']))
        elif kind in names: self.given[_Name(v['arg']['name'])] = tensors[v[names[kind]]].to(self.device)
        else: raise ValueError(f"an input of kind {kind!r}")

    def _step(self, node):
        op, args, kwargs = _operator(typed(node['target'], str)), [], {}
        for i in node['inputs']:
            if i['kind'] == 1: args.append(self._value(i['arg']))
            else: kwargs[typed(i['name'], str)] = self._value(i['arg'])
        outs = [self._value(o) for o in node['outputs']]
        return op, args, kwargs, outs[0] if len(outs) == 1 else outs or None

    def _value(self, arg) -> Any:
        (kind, v), = arg.items()
        match kind:
            case 'as_none': return None
            case 'as_tensor': return _Name(v['name'])
            case 'as_tensors': return [_Name(t['name']) for t in v]
            case 'as_name': return _Name(v)
            case 'as_sym_int' | 'as_sym_float' | 'as_sym_bool': return self._value(v)
            case 'as_sym_ints' | 'as_sym_floats' | 'as_sym_bools' | 'as_optional_tensors': return [*map(self._value, v)]
            case 'as_int' | 'as_bool' | 'as_string': return typed(v, int, bool, str)
            case 'as_ints' | 'as_bools': return [typed(o, int, bool) for o in v]
            case 'as_float': return float(typed(v, float, int, str))  # infinity is a text
            case 'as_floats': return [float(typed(o, float, int, str)) for o in v]
            case 'as_complex': return complex(v['real'], v['imag'])
            case 'as_scalar_type': return dtypes[v]
            case 'as_memory_format': return formats[v]
            case 'as_layout': return layouts[v]
            case 'as_device' if v['type'] == 'cpu': return self.device
        raise ValueError(f"an argument of kind {kind!r}")

    def __call__(self,
        inputs: list[Tensor],  # as `flat` gives them
    ) -> Any:                  # in tuples, lists and dicts as the model has them
        "Run it"
        if self.writes: inputs = [t.clone() for t in inputs]  # they may be the caller's
        values: dict = {**self.given, **dict(zip(self.inputs, inputs, strict=True))}
        for (op, args, kwargs, outs), done in zip(self.steps, self.done):
            _bind(outs, op(*_filled(args, values), **_filled(kwargs, values)), values)
            for name in done: del values[name]
        return _built(self.out_spec, iter(_filled(self.outputs, values)))


def _operator(target) -> Any:
    if target in on_sizes: return on_sizes[target]
    found = re.fullmatch(r'torch\.ops\.aten\.(\w+)\.(\w+)', target)
    name, overload = found.groups() if found else ('', '')
    full = f'aten::{name}' + f'.{overload}'*(overload != 'default')
    if not found or unsafe.fullmatch(name) or not torch._C._dispatch_has_kernel(full): raise ValueError(
        f"{target[:80]!r} is not among the operators that may be called")
    return getattr(getattr(torch.ops.aten, name), overload)


def _names(o) -> Iterator[_Name]:
    if isinstance(o, _Name): yield o
    elif isinstance(o, (list, tuple, dict)):
        for v in o.values() if isinstance(o, dict) else o: yield from _names(v)


def _filled(o, values) -> Any:
    if isinstance(o, _Name): return values[o]
    if type(o) is list: return [_filled(v, values) for v in o]
    return {k: _filled(v, values) for k, v in o.items()} if type(o) is dict else o


def _bind(names, value, values):
    if isinstance(names, _Name): values[names] = value
    elif isinstance(names, list):
        for n, v in zip(names, value, strict=True): _bind(n, v, values)


# ---- containers of inputs and outputs

def _spec(text):  # as torch writes it: a kind, the keys of a dict, and what is within
    version, spec = json.loads(typed(text, str))
    if version != 1: raise ValueError(f"version {version!r} of a container")
    return _inner_spec(spec)


def _inner_spec(spec):
    kind, inner = spec['type'], [_inner_spec(s) for s in spec['children_spec']]
    if kind not in (None, 'builtins.tuple', 'builtins.list', 'builtins.dict'): raise ValueError(f"a container {kind!r}")
    keys = json.loads(typed(spec['context'], str)) if kind == 'builtins.dict' else None
    if keys is not None and [type(k) for k in keys] != [str]*len(inner): raise ValueError(f"keys {str(keys)[:80]}")
    return kind, keys, inner


def _n_places(spec) -> int: return 1 if spec[0] is None else sum(map(_n_places, spec[2]))


def _built(spec, leaves) -> Any:
    kind, keys, inner = spec
    if kind is None: return next(leaves)
    made = [_built(s, leaves) for s in inner]
    return dict(zip(keys, made)) if keys is not None else made if kind == 'builtins.list' else tuple(made)


def flat(
    spec: Any,  # of containers
    o: Any,     # what has these
) -> list:
    """What is in the containers, in a row

    Raises: TypeError if `o` has others."""
    kind, keys, inner = spec
    if kind is None: return [o]
    if keys is not None: o = [o[k] for k in keys] if isinstance(o, dict) and o.keys() == {*keys} else None
    if not isinstance(o, (list, tuple)) or len(o) != len(inner): raise TypeError(f"{type(o).__name__} is no {kind}")
    return [leaf for s, v in zip(inner, o) for leaf in flat(s, v)]
