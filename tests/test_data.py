"""DataLoaders hold what a Learner trains and validates on, made from loaders, datasets or tables; errors come early."""
import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from learner.data import DataLoaders, as_dls
from learner.loader import Loader
from learner.losses import MSELossFlat
from learner.utils import rng_state, set_seed

n = 20
x, y = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)), torch.arange(n)


def ds(k=n): return TensorDataset(x[:k], y[:k])
def dl(k=n, bs=4, **kwargs): return DataLoader(ds(k), bs, **kwargs)


class Stream(IterableDataset):
    def __iter__(self): return iter(zip(x, y))


class Noisy(Dataset):
    def __len__(self): return n
    def __getitem__(self, i): return x[i] + torch.rand(3), np.random.rand() + random.random()


def test_loaders_by_name_and_number():
    "Training, validation and further loaders by name and number, with the datasets, the batch size and the path"
    train, valid, test = dl(), dl(8), dl(4)

    dls = DataLoaders(train, valid, test, path='here')

    assert [o.dl for o in dls] == [train, valid, test] and len(dls) == 3
    assert dls.train is dls[0] and dls.valid is dls[1] and dls.valid_sets == {'': dls[1]}
    assert dls.train_ds is train.dataset and dls.valid_ds is valid.dataset
    assert dls.bs == 4 and str(dls.path) == 'here' and dls.device is None


@pytest.mark.parametrize('loaders', [(dl(),), (dl(), None), ([(x, y)],)])
def test_no_validation_set(loaders):
    "The validation loader may be missing or None"
    dls = DataLoaders(*loaders)

    assert dls.valid is None and dls.valid_ds is None and dls.valid_sets == {} and len(dls) == 1


def test_what_a_list_of_batches_has_not():
    "Batch size and dataset of ready batches are AttributeErrors that name the list"
    dls = DataLoaders([(x, y)], [(x, y)])

    with pytest.raises(AttributeError, match='`list` has `bs`'): dls.bs
    with pytest.raises(AttributeError, match='`list` has `dataset`'): dls.train_ds
    with pytest.raises(AttributeError, match='`list` has `dataset`'): dls.valid_ds


def test_several_validation_sets():
    "A dict gives validation sets by name; the first of them is `valid`"
    a, b = dl(8), dl(4)

    dls = DataLoaders(dl(), dict(a=a, b=b))

    assert {k: o.dl for k, o in dls.valid_sets.items()} == dict(a=a, b=b)
    assert dls.valid is dls[1] and dls[2].dl is b


def test_a_loader_is_wrapped_once():
    "Loaders taken from other DataLoaders are used as they are, with their workers"
    one = DataLoaders(dl())

    assert DataLoaders(one.train).train is one.train


@pytest.mark.parametrize('loaders, message', [
    ((), 'training, is missing'), ((None,), 'training, is missing'), ((None, dl()), 'training, is missing'),
    ((dl(), None, dl()), 'a third loader needs a validation loader')])
def test_a_loader_is_missing(loaders, message):
    "A training loader is needed, and a validation loader if there are others"
    with pytest.raises(TypeError, match=message): DataLoaders(*loaders)


def test_device():
    "The device is that of all loaders, and batches go to it"
    dls = DataLoaders(dl(), dl(), device='meta')
    assert dls.one_batch()[0].device.type == 'meta' and dls.valid.device == 'meta'

    assert dls.to('cpu') is dls and dls.device == 'cpu' and dls.one_batch()[0].device.type == 'cpu'
    assert dls.cuda().device == 'cuda' and dls.cpu().valid.device == 'cpu'


@pytest.mark.parametrize('loader', [DataLoader(Subset(ds(), [1])), [(x, y)]])
def test_unknown_classes(loader):
    "What neither loaders nor dataset know is an AttributeError that says what to set, and can be set"
    dls = DataLoaders(loader)
    with pytest.raises(AttributeError, match='knows the classes: set `dls.vocab`'): dls.c
    with pytest.raises(AttributeError, match='knows the classes: set `dls.vocab`'): dls.vocab

    dls.vocab = ['a', 'b']

    assert dls.c == 2


def with_attrs(o, **attrs):
    for k, v in attrs.items(): setattr(o, k, v)
    return o


@pytest.mark.parametrize('data, c, vocab', [
    (with_attrs(ds(), vocab=['a', 'b']), 2, ['a', 'b']), (with_attrs(ds(), classes=['a', 'b']), 2, ['a', 'b']),
    (with_attrs(ds(), c=5, vocab=['a']), 5, ['a']), (Subset(with_attrs(ds(), classes=['a']), [0]), 1, ['a'])])
def test_classes_of_the_dataset(data, c, vocab):
    "`c` and `vocab` come from the training dataset, also through a Subset and under torchvision's name `classes`"
    dls = DataLoaders(DataLoader(data))

    assert (dls.c, dls.vocab) == (c, vocab)


def test_from_dsets():
    "Training is shuffled, validation is not; samplers and `drop_last` are for training, other options for both"
    dls = DataLoaders.from_dsets(ds(), ds(7), bs=3, drop_last=True, timeout=0, collate_fn=list)

    assert isinstance(dls.train.sampler, RandomSampler) and not isinstance(dls.valid.sampler, RandomSampler)
    assert (dls.train.n_batches, dls.valid.n_batches, dls.bs) == (6, 3, 3)
    assert dls.train.collate_fn is list and dls.valid.collate_fn is list


@pytest.mark.parametrize('data, kwargs', [
    (Stream(), {}), (ds(), dict(sampler=[1, 2])), (ds(), dict(batch_sampler=[[1, 2]])), (ds(), dict(shuffle=False))])
def test_from_dsets_does_not_shuffle(data, kwargs):
    "An iterable dataset, a sampler of the user's and `shuffle=False` leave the order alone"
    assert not isinstance(DataLoaders.from_dsets(data, ds(), **kwargs).train.sampler, RandomSampler)


def test_from_dsets_with_several_validation_sets():
    "A dict of datasets gives validation sets by name"
    assert [*DataLoaders.from_dsets(ds(), dict(a=ds(), b=ds())).valid_sets] == ['a', 'b']


@pytest.mark.parametrize('dsets, name', [((ds(0),), 'train'), ((ds(), ds(0)), 'valid'), ((ds(), dict(a=ds(0))), 'a')])
def test_empty_dataset(dsets, name):
    "An empty dataset is an error that names it"
    with pytest.raises(ValueError, match=f'the {name} dataset is empty'): DataLoaders.from_dsets(*dsets)


frame = pd.DataFrame(dict(a=np.arange(n)/2, b=np.arange(n), c=np.arange(n) % 2 == 0))


@pytest.mark.parametrize('data, dtype, shape', [
    (x, torch.float32, (3,)), (x.double(), torch.float32, (3,)), (x.numpy().astype('float64'), torch.float32, (3,)),
    (frame, torch.float32, (3,)), (frame['a'], torch.float32, ()), (frame[['b']], torch.int64, (1,)),
    (frame[['c']], torch.float32, (1,)), (x.numpy()[::-1], torch.float32, (3,)), ([[1., 2.]]*n, torch.float32, (2,)),
    (np.zeros((n, 2), 'uint8'), torch.uint8, (2,)), (np.zeros((n, 2), 'uint16'), torch.int64, (2,))])
def test_from_tensors_inputs(data, dtype, shape):
    "Tensors, arrays, frames and lists become tensors; float64 becomes float32, truth values become floats"
    xb = DataLoaders.from_tensors(data, y).one_batch()[0]

    assert xb.dtype == dtype and xb.shape[1:] == shape


@pytest.mark.parametrize('targ, dtype, shape, loss, c', [
    (y, torch.int64, (), nn.CrossEntropyLoss, n), (y.numpy().astype('uint8'), torch.int64, (), nn.CrossEntropyLoss, n),
    (frame['b'], torch.int64, (), nn.CrossEntropyLoss, n), (frame[['b']], torch.int64, (), nn.CrossEntropyLoss, n),
    (frame['c'], torch.int64, (), nn.CrossEntropyLoss, 2), (y.view(n, 1, 1).repeat(1, 4, 5), torch.int64, (4, 5),
                                                            nn.CrossEntropyLoss, n),
    (x, torch.float32, (3,), MSELossFlat, 3), (frame['a'], torch.float32, (), MSELossFlat, 1),
    (frame[['a', 'b']].to_numpy(), torch.float32, (2,), MSELossFlat, 2)])
def test_from_tensors_targets(targ, dtype, shape, loss, c):
    "Integers and truth values are classes with cross entropy, floats are values with mean squared error"
    dls = DataLoaders.from_tensors(x, targ)
    yb = dls.one_batch()[1]

    assert yb.dtype == dtype and yb.shape[1:] == shape
    assert type(dls.loss_func) is loss and dls.c == c


def test_from_tensors_keeps_the_data():
    "The tables are not changed, and every row is in one of the two sets, the same ones for a seed"
    before = frame.copy()
    dls, again, other = (DataLoaders.from_tensors(frame, y, seed=s) for s in (1, 1, 2))

    rows = torch.cat([dls.train_ds.tensors[1], dls.valid_ds.tensors[1]])

    assert rows.sort().values.equal(y) and len(dls.valid_ds) == 4
    assert dls.valid_ds.tensors[1].equal(again.valid_ds.tensors[1])
    assert not dls.valid_ds.tensors[1].equal(other.valid_ds.tensors[1])
    assert torch.equal(dls.train_ds.tensors[0][:, 1].long(), dls.train_ds.tensors[1])
    pd.testing.assert_frame_equal(frame, before)


def test_from_tensors_draws_nothing():
    "Making DataLoaders of tensors moves no random stream"
    set_seed(3)
    before = torch.get_rng_state()

    DataLoaders.from_tensors(x, y)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize('kwargs, sizes', [
    (dict(x=x[:5], y=y[:5], valid=(x[5:], y[5:])), [5, 15]), (dict(x=x, y=y, valid_pct=0), [20]),
    (dict(x=x, y=y), [16, 4])])
def test_from_tensors_validation_set(kwargs, sizes):
    "The validation set is what is given, or none, or a fifth of the rows; classes are counted in both"
    dls = DataLoaders.from_tensors(**kwargs, bs=2)

    assert [len(o.dataset) for o in dls] == sizes and (dls.c, dls.bs) == (n, 2)


text = pd.DataFrame(dict(a=['p']*n, b=range(n), d=pd.Categorical(['q']*n)))


@pytest.mark.parametrize('args, kwargs, error, message', [
    ((text, y), {}, TypeError, '`x` has columns that are no numbers: a, d; encode'),
    ((x, text['a']), {}, TypeError, '`y` has columns that are no numbers: a; encode'),
    ((np.array(['a']*n), y), {}, TypeError, '`x` holds `<U1`'), ((x, 3), {}, ValueError, '`y` is a single number'),
    ((x, y[:3]), {}, ValueError, '`x` has 20 rows, but `y` has 3'),
    ((x, y), dict(valid=(x, y[:3])), ValueError, '`valid x` has 20 rows, but `valid y` has 3'),
    ((x[:3], y[:3]), {}, ValueError, '`valid_pct=0.2` of 3 rows leaves 3 to train and 0 to validate with'),
    ((x, y), dict(valid_pct=1.), ValueError, '0 to train')])
def test_from_tensors_refuses(args, kwargs, error, message):
    "Text, unequal lengths and empty parts are errors that name the argument"
    with pytest.raises(error, match=message): DataLoaders.from_tensors(*args, **kwargs)


@pytest.mark.parametrize('workers', [0, 1])
def test_one_batch_moves_no_random_stream(workers):
    "`one_batch` is the batch that training will see next, and leaves all random states alone"
    g = torch.Generator().manual_seed(1)
    dls = DataLoaders(DataLoader(Noisy(), 4, shuffle=True, generator=g, num_workers=workers,
                                 persistent_workers=workers > 0))
    set_seed(1)
    before, own = repr(rng_state()), g.get_state()

    b = dls.one_batch()

    assert repr(rng_state()) == before and torch.equal(g.get_state(), own)
    assert all(map(torch.equal, b, next(iter(dls.train))))


@pytest.mark.parametrize('loader, error, message', [
    (iter([x]), TypeError, 'one_batch would use up a batch.*list_iterator'), ([], ValueError, '`list` yields nothing')])
def test_one_batch_of_what_has_none(loader, error, message):
    "`one_batch` takes no batch away from a generator, and says why there is none"
    with pytest.raises(error, match=message): DataLoaders(loader).one_batch()


@pytest.mark.parametrize('loaders, message', [
    ((dl(3, drop_last=True),), 'the train loader gives no batch: its dataset holds 3 items, less than one batch of 4'),
    ((dl(), dl(0)), 'the valid loader gives no batch: its dataset, a `TensorDataset`, is empty'),
    ((dl(), dict(a=dl(), b=[])), 'the b loader gives no batch: its `list` yields nothing')])
def test_check_names_the_loader_without_batches(loaders, message):
    "Before training, a loader without a batch is named, with the reason"
    with pytest.raises(ValueError, match=message): DataLoaders(*loaders).check()


def test_check_passes_what_it_cannot_know():
    "Loaders without a length pass"
    DataLoaders(DataLoader(Stream(), 4), (b for b in [x])).check()


def test_loader_for_training():
    "The loader itself, with the device for the epoch"
    dls = DataLoaders(dl())

    assert dls.loader(0, 'meta') is dls.train and dls.train.device == 'meta' and dls.device is None


@pytest.mark.parametrize('ds_idx, given, expected', [
    (1, None, {'a': 1, 'b': 2}), (2, None, {'': 2}), (1, [x], {'': None})])
def test_loaders_for_evaluation(ds_idx, given, expected):
    "All validation sets by name, one loader by its number, or another iterable"
    dls = DataLoaders(dl(), dict(a=dl(), b=dl()))

    found = dict(dls.eval_loaders(ds_idx, given, 'cpu'))

    assert {k: next((i for i, o in enumerate(dls) if o is v), None) for k, v in found.items()} == expected
    assert {v.device for v in found.values()} == {'cpu'}


def test_evaluation_never_iterates_the_training_loader_itself():
    "On the training loader, or on one in use, an evaluation runs on a fork"
    dls = DataLoaders(dl(), dl())
    [(_, on_train)] = dls.eval_loaders(0, None, 'cpu')
    [(_, given)] = dls.eval_loaders(1, dls.train, 'cpu')
    for _ in dls.valid: [(_, in_use)] = dls.eval_loaders(1, None, 'cpu')

    assert on_train.dl is given.dl is dls.train.dl and dls.train not in (on_train, given)
    assert in_use.dl is dls.valid.dl and in_use is not dls.valid


def test_no_validation_set_gives_no_loader():
    "Without a validation set there is nothing to evaluate; a number that does not exist is an error"
    dls = DataLoaders(dl())

    assert [*dls.eval_loaders(1, None, 'cpu')] == []
    with pytest.raises(IndexError, match='no loader number 2, but 1'): list(dls.eval_loaders(2, None, 'cpu'))


train, valid, batch = dl(), dl(8), (x, y)


@pytest.mark.parametrize('o, loaders', [
    ((train, valid), [train, valid]), ([train, valid], [train, valid]), ((train, None), [train]), (train, [train]),
    ((train, dict(a=valid)), [train, valid]), (ready := [batch, batch], [ready]), (three := [batch]*3, [three]),
    (pair := ([batch, batch], [batch]), list(pair)), (dicts := [dict(x=x), dict(x=x)], [dicts]),
    (SimpleNamespace(train=train, valid=valid), [train, valid]), (once := iter([batch]), [once])])
def test_what_stands_for_dataloaders(o, loaders):
    "A pair of loaders, one loader, a list of ready batches, or an object with `train` and `valid`"
    assert [dl.dl for dl in as_dls(o)] == loaders


def test_dataloaders_stay_themselves():
    "DataLoaders are taken as they are"
    assert as_dls(dls := DataLoaders(train)) is dls


def test_foreign_dataloaders_keep_what_a_learner_asks_for():
    "Of an object with `train` and `valid`, device, path, loss, classes and number of inputs are kept"
    kept = dict(device='cpu', path='here', loss_func=nn.MSELoss(), n_inp=2, c=3, vocab=['a'])

    dls = as_dls(SimpleNamespace(train=train, valid=valid, **kept))

    assert {k: getattr(dls, k) for k in kept} == {**kept, 'path': dls.path} and str(dls.path) == 'here'


@pytest.mark.parametrize('o, message', [
    ((x, y), 'from_tensors'), ([x.numpy(), y.numpy()], 'from_tensors'), (x, 'no loader of batches'),
    (ds(), 'from_dsets'), ((ds(), ds()), 'from_dsets'), ((train, valid, train), '3 loaders are no pair'),
    ('text', 'no loader'), ((train,), '1 loaders are no pair'), (dict(train=train), '`dict` is no loader'),
    (None, 'training, is missing'), (3, '`int` is no loader'), ((train, 3), 'no pair'),
    (nn.Linear(1, 1), '`Linear` is no loader'), (frame, '`DataFrame` is no loader')])
def test_data_that_is_in_no_loader(o, message):
    "Tensors, datasets, frames and other numbers of loaders are refused, with what to do"
    with pytest.raises(TypeError, match=message): as_dls(o)


def test_any_iterable_is_a_loader():
    "Whatever yields batches can be iterated through DataLoaders, again and again"
    dls = as_dls([batch, batch])

    assert isinstance(dls.train, Loader) and [list(dls.train), list(dls.train)] == [[batch, batch]]*2
