"""Solver settings in text format: those people train by, as Caffe reads them, and what cannot be read."""
import json
from pathlib import Path

import pytest

from learner.prototxt import Word, parse_prototxt
from learner.solver_param import SolverParam

lenet = '''
# the training protocol
net: "lenet_train_test.prototxt"
test_iter: 100      # 100 batches of 100 images
test_interval: 500
base_lr: 0.01
momentum: 0.9
weight_decay: 0.0005
lr_policy: "inv"
gamma: 0.0001
power: 0.75
display: 100
max_iter: 10000
snapshot: 5000
snapshot_prefix: "lenet"
solver_mode: GPU
'''
alexnet = '''net: 'train_val.prototxt' test_iter: 1000 test_interval: 1000 base_lr: 0.01 lr_policy: 'step' gamma: 0.1
stepsize: 100000 display: 20 max_iter: 450000 momentum: 0.9 weight_decay: 0.0005 snapshot: 10000
snapshot_prefix: 'caffe_alexnet_train' solver_mode: GPU'''
googlenet = '''net: "train_val.prototxt"
test_iter: 1000 test_interval: 4000 test_initialization: false
display: 40 average_loss: 40
base_lr: 0.01 lr_policy: "step" stepsize: 320000 gamma: 0.96 max_iter: 10000000
momentum: 0.9 weight_decay: 0.0002
snapshot: 40000 snapshot_prefix: "bvlc_googlenet"
solver_mode: GPU
'''
resnet = '''base_lr: 0.1; lr_policy: "multistep"; gamma: 0.1
stepvalue: 150000
stepvalue: 300000
max_iter: 600000, momentum: 0.9, weight_decay: 1e-4 iter_size: 4 type: "Nesterov" random_seed: 0
'''
ssd = '''train_net: "train.prototxt" test_net: "test.prototxt" test_iter: 619 test_interval: 10000
base_lr: 0.001 display: 10 max_iter: 120000 lr_policy: "multistep" gamma: 0.1 momentum: 0.9 weight_decay: 0.0005
snapshot: 80000 snapshot_prefix: "VGG_SSD" solver_mode: GPU device_id: 0 debug_info: false
snapshot_after_train: true test_initialization: false average_loss: 10
stepvalue: [80000, 100000, 120000] iter_size: 1 type: "SGD" eval_type: "detection"'''.replace(
    ' eval_type: "detection"', '')
drop = {0: 1, 99_999: 1, 100_000: .1, 199_999: .1, 200_000: .01, 250_000: .01, 299_999: .01, 300_000: 1e-3,
        400_000: 1e-4, 449_999: 1e-4}
networks = dict(
    lenet=(lenet, dict(test_iter=[100], test_interval=500, momentum=.9, max_iter=10_000, snapshot=5000, display=100),
           {i: .01*(1+1e-4*i)**-.75 for i in (0, 1, 10, 100, 500, 1000, 2500, 5000, 7500, 9999)}),
    alexnet=(alexnet, dict(stepsize=100_000, snapshot_prefix='caffe_alexnet_train', weight_decay=5e-4),
             {i: .01*f for i, f in drop.items()}),
    caffenet=(alexnet.replace('alexnet', 'caffenet').replace('max_iter: 450000', 'max_iter: 310000'),
              dict(max_iter=310_000, snapshot_prefix='caffe_caffenet_train'), {i: .01*f for i, f in drop.items()}),
    googlenet=(googlenet, dict(average_loss=40, test_initialization=False, weight_decay=2e-4),
               {i*100_000: .01*.96**(i*100_000//320_000) for i in (0, 1, 3, 4, 7, 10, 20, 50, 80, 99)}),
    resnet=(resnet, dict(type='Nesterov', stepvalue=[150_000, 300_000], iter_size=4, random_seed=0),
            {i: .1 if i < 150_000 else .01 if i < 300_000 else .001 for i in
             (0, 1, 149_999, 150_000, 200_000, 299_999, 300_000, 300_001, 500_000, 599_999)}),
    ssd=(ssd, dict(stepvalue=[80_000, 100_000, 120_000], debug_info=False, snapshot_after_train=True),
         {i: 1e-3 if i < 80_000 else 1e-4 if i < 100_000 else 1e-5 for i in
          (0, 1, 79_999, 80_000, 90_000, 99_999, 100_000, 110_000, 119_998, 119_999)}))


@pytest.mark.parametrize('text, fields, rates', networks.values(), ids=networks)
def test_usual_settings(text, fields, rates):
    "The right fields, and the right rate at ten iterations"
    param = SolverParam.from_prototxt(text)

    assert {k: getattr(param, k) for k in fields} == fields and len(rates) == 10
    assert [param.lr_at(i) for i in rates] == pytest.approx([*rates.values()], rel=1e-6)

def test_a_file_gives_its_name(tmp_path):
    "To snapshots, unless it says another"
    (tmp_path/'my_solver.prototxt').write_text('base_lr: .1 lr_policy: "fixed"')

    assert SolverParam.from_prototxt(tmp_path/'my_solver.prototxt').snapshot_prefix == str(tmp_path/'my_solver')
    assert SolverParam.from_prototxt(lenet).snapshot_prefix == 'lenet'

@pytest.mark.parametrize('text, found', [
    ('a: 1 a: -2.5e3 a: 1f', dict(a=[1, -2500., 1.])), ('a: "x" \'y\'', dict(a=['xy'])),
    (r'''a: "q\"\n" b: 'it''s' ''', dict(a=['q"\n'], b=['its'])), ('a { b: 1 c <d: GPU> }', dict(a=[dict(b=[1], c=[dict(
        d=['GPU'])])])), ('a: [1, 2] # c', dict(a=[1, 2])), ('', {}), ('a: {b: true}', dict(a=[dict(b=['true'])]))])
def test_text_format(text, found):
    "Comments, both kinds of quotes, repeated fields, lists, messages within messages"
    assert parse_prototxt(text) == found

def test_words_are_no_texts():
    "The value of an enum is told from a text"
    a, b = parse_prototxt('a: GPU b: "GPU"').values()
    assert isinstance(a[0], Word) and not isinstance(b[0], Word)

@pytest.mark.parametrize('text, message', [
    ('a:\n\n', 'line 3: `a` has no value'), ('a: 1\nb', 'line 2: `b` has no value: a colon'),
    ('a { b: 1', 'line 1: `a` is not closed by `}`'), ('a: 1 }', 'a name should be here, not `}`'),
    ('a: "x\n"', "line 1: '\"x' cannot be read"), ('3: 1', 'a name should be here, not `3`'),
    ('a: ?', 'cannot be read')])
def test_what_cannot_be_read(text, message):
    "Is an error that names the line"
    with pytest.raises(ValueError, match=message): parse_prototxt(text)

@pytest.mark.parametrize('text, error, message', [
    ('base_lr: 1 lr_policy: "fixed" max_itr: 3', TypeError, 'no field `max_itr`; did you mean `max_iter`'),
    ('base_lr: 1 base_lr: 2 lr_policy: "fixed"', ValueError, '`base_lr` is given 2 times'),
    ('base_lr: "a" lr_policy: "fixed"', TypeError, "`base_lr` is 'a'; give a number, 0 or more"),
    ('lr_policy: "fixed"', ValueError, "lr_policy='fixed' needs `base_lr`"),
    ('base_lr: 1 lr_policy: "step" gamma: .1', ValueError, "needs `stepsize`"),
    ('base_lr: 1 lr_policy: "fixed" type: "AdaGrad" momentum: .9', ValueError, 'AdaGrad has no momentum'),
    ('base_lr: 1 lr_policy: "fixed" debug_info: 7', TypeError, '`debug_info` is 7; give True or False'),
    ('base_lr: 1 lr_policy: "fixed" solver_type: ADAMS', ValueError, "`solver_type` is 'ADAMS'")])
def test_settings_that_mean_nothing(text, error, message):
    "Are refused by the field's name"
    with pytest.raises(error, match=message): SolverParam.from_prototxt(text)

def test_the_old_name_of_the_type():
    "By word or number"
    for old, new in dict(NESTEROV='Nesterov').items() | {(5, 'Adam')}:
        assert SolverParam.from_prototxt(f'base_lr: 1 lr_policy: "fixed" solver_type: {old}').type == new

rates = json.loads((Path(__file__).parent/'data'/'lr_policies.json').read_text())['examples']

@pytest.mark.parametrize('case', rates, ids=lambda c: f"{c['policy']}-{c['params']}")
def test_rates_are_caffes(case):
    "To the precision of float32, in which Caffe has them"
    param = SolverParam(lr_policy=case['policy'], **case['params'])

    assert [param.lr_at(int(i)) for i in case['lr']] == pytest.approx([*case['lr'].values()], rel=1e-6)

@pytest.mark.parametrize('text, found', [
    ('a: 0x1F b: 010 c: -7', dict(a=[31], b=[8], c=[-7])), ('\ufeffa: 1', dict(a=[1])),
    (r'a: "\x41\101\\"', dict(a=['AA\\']))])
def test_odd_numbers_and_texts(text, found):
    "Hexadecimal and octal ones, a mark at the beginning, escapes"
    assert parse_prototxt(text) == found

@pytest.mark.parametrize('word, value', [('1', True), ('True', True), ('t', True), ('0', False), ('false', False)])
def test_yes_and_no(word, value):
    "In all forms that are allowed"
    assert SolverParam.from_prototxt(f'base_lr: 1 lr_policy: "fixed" debug_info: {word}').debug_info is value

def test_several_files_of_weights():
    "In one text, by commas"
    param = SolverParam.from_prototxt('base_lr: 1 lr_policy: "fixed" weights: "a.pth, b.pth" weights: "c.pth"')
    assert param.weights == ['a.pth', 'b.pth', 'c.pth']

@pytest.mark.parametrize('fields', [dict(momentum=1.5), dict(rms_decay=1), dict(momentum2=1.), dict(snapshot_prefix=5),
                                    dict(lr_policy='multistep', gamma=.1, stepvalue=[30, 10])])
def test_values_out_of_range(fields):
    "Are refused by name"
    with pytest.raises((ValueError, TypeError), match=f'Solver: `{[*fields][-1]}` is'):
        SolverParam.of({**dict(base_lr=.1, lr_policy='fixed'), **fields})
