"""Exported models that are made to do harm: `load_exported` refuses them, naming the record, and runs nothing.

Where torch's own `torch.export.load` does run what is planted, a test shows that too: the harm is real."""
import json
import os
import pickle
import zipfile
from contextlib import suppress
from io import BytesIO

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import learner.export as export
from learner.data import DataLoaders
from learner.exported import load_exported
from learner.learner import Learner

assert export

graph, info = 'models/model.json', 'extra/learner.json'
weights, constants = 'data/weights/model_weights_config.json', 'data/constants/model_constants_config.json'


class Model(nn.Module):
    "Has weights, a constant, sizes and a list"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x): return self.layer(x.view(x.shape[0]*2//2, -1)) + torch.tensor([1., 2.]) + x.chunk(2, 1)[0]


class Runs:
    "Makes a folder when it is unpickled"
    def __init__(self, folder): self.folder = folder
    def __reduce__(self): return os.mkdir, (str(self.folder),)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    "The records of a good file"
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    dls = DataLoaders([(x, x[:, :2])])
    torch.manual_seed(0)
    learn = Learner(dls, Model(), F.mse_loss, default_cbs=False, path=tmp_path_factory.mktemp('good'))
    with zipfile.ZipFile(learn.export()) as z: return {n: z.read(n) for n in z.namelist()}


def written(path, records, how=zipfile.ZIP_STORED):
    "An archive of `records`, as torch opens it"
    with zipfile.ZipFile(path, 'w', how) as z:
        for name, data in records.items(): z.writestr(name, data)
    return path


def changed(records, name, change):
    "With the JSON of one record changed"
    o = json.loads(records[f'archive/{name}'])
    change(o)
    return records | {f'archive/{name}': json.dumps(o).encode()}


def refused(path, record):
    with pytest.raises(ValueError, match='is refused') as e: load_exported(path)
    assert str(path) in str(e.value) and f'record `{record}`' in str(e.value), e.value
    return str(e.value)


@pytest.mark.filterwarnings('ignore')
def torch_loads(path):
    "What torch makes of it, which may fail after the harm is done"
    with suppress(Exception): torch.export.load(path).module()(torch.ones(2, 4))


def test_written_anew_it_is_read(good, tmp_path):
    "An archive that is taken apart and written anew is as good as before: what follows is refused for what is in it"
    assert load_exported(written(tmp_path/'m.pt2', good))(torch.ones(3, 4)).shape == (3, 2)


# ---- pickles

def saved(o):
    f = BytesIO()
    torch.save(o, f)
    return f.getvalue()


def as_pickled(record, name):
    def change(records, harm):
        def flag(o): next(iter(o['config'].values())).update(use_pickle=True, path_name=name)
        return changed(records, record, flag) | {f'archive/{record.rpartition("/")[0]}/{name}': harm}
    return change


def beside(name):
    return lambda records, harm: records | {f'archive/{name}': harm}


@pytest.mark.parametrize('plant, dump, record', [
    (beside('data/sample_inputs/model.pt'), saved, 'data/sample_inputs/model.pt'),
    (as_pickled(weights, 'weight_0'), saved, weights), (as_pickled(constants, 'tensor_0'), saved, constants),
    (as_pickled(constants, 'opaque_obj_0'), pickle.dumps, 'data/constants/opaque_obj_0'),
    (beside('data/weights/model.pt'), saved, 'data/weights/model.pt'),
    (beside('data/constants/model.pt'), saved, 'data/constants/model.pt')],
    ids=['samples', 'weight', 'constant', 'opaque', 'old weights', 'old constants'])
@pytest.mark.filterwarnings('ignore')
def test_pickle_that_runs_a_function(plant, dump, record, good, tmp_path):
    "In whatever record it lies, it is refused and not run; torch's own call runs it"
    harm = Runs(tmp_path/'harm')
    path = written(tmp_path/'m.pt2', plant(good, dump(harm)))

    refused(path, record)

    assert not harm.folder.exists()
    torch_loads(path)
    assert harm.folder.exists()


@pytest.mark.parametrize('name', ['data/constants/custom_obj_0', 'data/aotinductor/model/model.so', 'models/other.json',
                                  'data/weights/../../x', 'data/weights/weight_0/x', 'extra/more.txt', 'data.pkl',
                                  'executorch/model.pte', 'xl_model_weights/w'])
def test_other_records(name, good, tmp_path):
    "Records that an exported model does not have are refused by name"
    refused(written(tmp_path/'m.pt2', good | {f'archive/{name}': b'x'}), name)


def test_two_folders(good, tmp_path):
    "All records are in one folder"
    refused(written(tmp_path/'m.pt2', good | {'elsewhere/models/model.json': b'{}'}), 'elsewhere/models/model.json')


# ---- texts that would be evaluated

hostile = "__import__('os').mkdir('{}')"

def first_size(o): return next(v for v in o['graph_module']['graph']['tensor_values'].values()
                               if any('as_expr' in s for s in v['sizes']))['sizes']


def set_size(o, text):
    for s in first_size(o):
        if 'as_expr' in s: s['as_expr']['expr_str'] = text


def set_guard(o, text): o['guards_code'] = [text]


@pytest.mark.parametrize('put', [set_size, set_guard], ids=['size', 'guard'])
@pytest.mark.filterwarnings('ignore')
def test_text_that_runs_a_function(put, good, tmp_path):
    "Texts that torch would evaluate are arithmetic, or refused; torch runs it"
    folder = tmp_path/'harm'
    records = changed(good, graph, lambda o: put(o, hostile.format(folder)))

    assert 'is more than arithmetic' in refused(written(tmp_path/'m.pt2', records), graph)

    assert not folder.exists()
    samples = {'archive/data/sample_inputs/model.pt': saved(((torch.ones(2, 4),), {}))}  # with which torch makes guards
    torch_loads(written(tmp_path/'n.pt2', records | samples))
    assert folder.exists()


@pytest.mark.parametrize('text', ['Symbol.mro()', 's.__class__', 'open(1)', 'lambda: 1', "L['x'].numpy()", '`1`', 'a;b',
                                  5, 'Integer(1) if exit else 2', '{1}', 'Symbol("s1")', '@x', 'x\\y', None])
def test_texts_that_are_no_arithmetic(text, good, tmp_path):
    "They are refused"
    refused(written(tmp_path/'m.pt2', changed(good, graph, lambda o: set_size(o, text))), graph)


@pytest.mark.parametrize('text', [
    "Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(-1))", 'Max(1, 3*4 // 2)',
    "L['x'].size()[0] == L['z']['k'].size()[1]", 'FloorDiv(Integer(7), Integer(2)) >= 1e5'])
def test_texts_that_are_arithmetic(text, good, tmp_path):
    "They are let through, and not evaluated either"
    path = written(tmp_path/'m.pt2', changed(good, graph, lambda o: set_guard(o, text)))

    assert load_exported(path)(torch.ones(1, 4)).shape == (1, 2)


# ---- operators and their arguments

def nodes(o): return o['graph_module']['graph']['nodes']


@pytest.mark.parametrize('target', [
    'torch.ops.aten.from_file.default', 'torch.ops.aten._print.default', 'torch.ops.load_library', 'os.system',
    'torch.ops.aten._sparse_coo_tensor_unsafe.default', 'torch.ops.aten._unsafe_index.Tensor', 'torch.load',
    'torch.ops.prims.add.default', 'torch.ops.aten.__class__.mro', 'torch.ops.aten.linear.__init__', 'math.exp',
    'torch.ops.aten.append.t', '_operator.methodcaller', '_operator.attrgetter', 'torch.hub.load', '#x:y', '', 5,
    'torch.ops.higher_order.cond', 'torch.ops.aten.linear.default.__call__', 'torch.ops.aten.linear.default\n'])
def test_other_operators(target, good, tmp_path):
    "Only torch's own operators on tensors, and arithmetic on sizes, can be called"
    refused(written(tmp_path/'m.pt2', changed(good, graph, lambda o: nodes(o)[-1].update(target=target))), graph)


@pytest.mark.parametrize('arg', [
    {'as_operator': 'torch.load'}, {'as_graph': {'name': 'g', 'graph': {}}}, {'as_custom_obj': {'name': 'x'}},
    {'as_device': {'type': 'cuda'}}, {'as_int': 'x', 'as_none': True}, {'as_int': [1]}, {'as_scalar_type': 99}, {}, [],
    3, {'as_string_to_argument': {}}, {'as_tensor': 'x'}, {'as_ints': 3}, {'as_float': 'wide'}, None], ids=str)
def test_other_arguments(arg, good, tmp_path):
    "What is no plain argument is refused"
    def change(o): nodes(o)[-1]['inputs'][0]['arg'] = arg

    refused(written(tmp_path/'m.pt2', changed(good, graph, change)), graph)


def signature(o): return o['graph_module']['signature']


@pytest.mark.parametrize('change', [
    lambda o: signature(o)['output_specs'].clear(), lambda o: signature(o).pop('output_specs'),
    lambda o: signature(o)['output_specs'][0]['user_output']['arg']['as_tensor'].update(name='nothing'),
    lambda o: nodes(o)[0]['inputs'][0].update(arg={'as_tensor': {'name': 'nothing'}}), lambda o: nodes(o).reverse(),
    lambda o: nodes(o).clear()], ids=['no outputs', 'no list', 'output', 'argument', 'order', 'no steps'])
def test_values_that_are_not_there(change, good, tmp_path):
    "What is used, or given, has a value by then"
    refused(written(tmp_path/'m.pt2', changed(good, graph, change)), graph)


def test_container_of_another_type(good, tmp_path):
    "Inputs and outputs are in tuples, lists and dicts: no type is looked up, or module imported"
    spec = json.dumps([1, dict(type='collections.defaultdict', context='["os", "system", []]', children_spec=[])])
    def change(o): o['graph_module']['module_call_graph'][0]['signature']['out_spec'] = spec

    refused(written(tmp_path/'m.pt2', changed(good, graph, change)), graph)


# ---- what does not fit, or is too large

def deep(n): return b'[' * n + b']' * n


@pytest.mark.parametrize('record', [graph, info, weights, constants])
@pytest.mark.parametrize('data', [b'', b'{', b'[]', b'\xff', b'{"a": ' + deep(200_000) + b'}', b'7', b'null', b'{}'],
                         ids=['nothing', 'open', 'list', 'bytes', 'deep', 'number', 'null', 'empty'])
def test_json_that_is_none(record, data, good, tmp_path):
    "Text that is no JSON, is nested too deep, or says something else is refused"
    refused(written(tmp_path/'m.pt2', good | {f'archive/{record}': data}), record)


@pytest.mark.parametrize('change', [
    dict(inputs=3), dict(inputs=[]), dict(inputs=[dict(name='x', dtype='load', shape=[None, 4])]),
    dict(inputs=[dict(name='x', dtype='float32', shape=['n'])]), dict(vocab='abc'), dict(model=5), dict(activation={}),
    dict(inputs=[dict(name=[], dtype='float32', shape=[])]), dict(activation=dict(name='system', args=[])),
    dict(activation=dict(name='softmax', args=['ls'])), dict(decodes='argmax'), dict(preprocess=[1]),
    dict(preprocess=dict(mean=['a'], std=[1.])), dict(preprocess=dict(mean=[1.])), dict(format=99), dict(format='1'),
    dict(preprocess=dict(mean=[1.]*3, std=[1.]*3)), dict(preprocess=dict(mean=[1.], std=[1.]*4)),
    dict(activation=dict(name='softmax', args=[])), dict(activation=dict(name='exp', args=[1])),
    dict(activation=dict(name='softmax', args=[.5])), dict(decodes=dict(name='over', args=['1']))], ids=str)
def test_info_of_wrong_types(change, good, tmp_path):
    "What is said beside the program is of the types that it has to be"
    path = written(tmp_path/'m.pt2', changed(good, info, lambda o: o.update(change)))

    with pytest.raises(ValueError, match='is refused: record `(extra/learner|models/model).json`'): load_exported(path)


@pytest.mark.parametrize('change', [
    dict(sizes=[{'as_int': 10**9}, {'as_int': 4}]), dict(storage_offset={'as_int': 5}),
    dict(storage_offset={'as_int': -1}), dict(strides=[{'as_int': 400}, {'as_int': 1}]), dict(dtype=8),
    dict(strides=[{'as_int': -4}, {'as_int': 1}]),
    dict(sizes=[{'as_int': 2}]), dict(sizes=[{'as_expr': {'expr_str': 's0'}}]*2), dict(dtype='float'), dict(layout=1),
    dict(sizes=[{'as_int': 2.}, {'as_int': 4}])], ids=str)
def test_tensor_beyond_its_memory(change, good, tmp_path):
    "A weight is where the archive holds it, and no larger"
    def put(o): o['config']['layer.weight']['tensor_meta'].update(change)

    refused(written(tmp_path/'m.pt2', changed(good, weights, put)), weights)


def test_weights_elsewhere(good, tmp_path):
    "A weight comes from a record of its own folder"
    def put(o): o['config']['layer.weight'].update(path_name='../../../etc/passwd')

    refused(written(tmp_path/'m.pt2', changed(good, weights, put)), 'data/weights/../../../etc/passwd')


def test_compressed(good, tmp_path):
    "torch compresses nothing, so that nothing is larger than the file"
    path = written(tmp_path/'m.pt2', good | {'archive/data/weights/weight_9': bytes(10**7)}, zipfile.ZIP_DEFLATED)

    assert 'compressed' in refused(path, 'data/weights/weight_0')


def test_larger_than_the_file(good, tmp_path):
    "Records that claim to be larger than the file are refused before any memory is taken"
    path = written(tmp_path/'m.pt2', good)
    data = bytearray(path.read_bytes())
    at = data.rindex(b'PK\1\2')  # the last entry of the directory
    data[at+20:at+28] = (2**31).to_bytes(4, 'little')*2
    path.write_bytes(data)

    with pytest.raises(ValueError, match='is refused: its records are larger than itself'): load_exported(path)


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_two_of_one_name(good, tmp_path):
    "Of two records of one name, different programs might read different ones"
    path = written(tmp_path/'m.pt2', good)
    with zipfile.ZipFile(path, 'a') as z: z.writestr(f'archive/{graph}', b'{}')

    with pytest.raises(ValueError, match='two have one name'): load_exported(path)


@pytest.mark.parametrize('name, data', [('archive_format', b'zip'), ('archive_version', b'1'), ('byteorder', b'big')])
def test_another_format(name, data, good, tmp_path):
    "Archives of another kind are refused, telling what they say"
    assert repr(data) in refused(written(tmp_path/'m.pt2', good | {f'archive/{name}': data}), name)


def test_another_schema(good, tmp_path):
    "So are programs that are written another way"
    def change(o): o['schema_version']['major'] = 9

    assert 'export the model again' in refused(written(tmp_path/'m.pt2', changed(good, graph, change)), graph)


@pytest.mark.parametrize('name', ['models/model.json', 'extra/learner.json', 'data/weights/weight_0', 'archive_format'])
def test_missing_record(name, good, tmp_path):
    "What is missing is named"
    records = {k: v for k, v in good.items() if k != f'archive/{name}'}

    assert 'it is missing' in refused(written(tmp_path/'m.pt2', records), name)


@pytest.mark.parametrize('share', [0, .1, .5, .9, .99])
def test_cut_short(share, good, tmp_path):
    "A file that was cut short is refused"
    path = written(tmp_path/'m.pt2', good)
    path.write_bytes(path.read_bytes()[:int(share*path.stat().st_size)])

    with pytest.raises(ValueError, match='cut short'): load_exported(path)


def test_flipped_bits(good, tmp_path):
    "With any bit flipped a file is refused, or gives what it gave"
    path = written(tmp_path/'m.pt2', good)
    data, x = path.read_bytes(), torch.ones(3, 4)
    known, n_refused = load_exported(path)(x), 0
    for i in range(0, len(data), 53):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i+1:])
        try: assert torch.equal(load_exported(path)(x), known), i
        except ValueError as e:
            assert 'is refused' in str(e), (i, e)
            n_refused += 1

    assert n_refused > len(data)/53*.8
