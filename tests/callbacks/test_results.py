"""`show_batch` and `show_results`: what the model gets, what it should say and what it says, with no trace."""
import matplotlib
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learner import (BCEWithLogitsLossFlat, Callback, CancelBatchException, DataLoaders, Learner, MixUp, accuracy,
                     set_display)
from tests.helpers import synth_learner

matplotlib.use('Agg')
g = torch.Generator().manual_seed(1)
x, y = torch.rand(20, 1, 6, 5, generator=g), torch.arange(20) % 3
vocab = ['cat', 'dog', 'cow']
data = TensorDataset(x, y)


def classifier(train=None, valid=None, model=None, loss=None, cbs=None, words: list|None=vocab, **kwargs):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(30, 3))
    dls = DataLoaders(DataLoader(data, 8, shuffle=True) if train is None else train,
                      DataLoader(data, 4) if valid is None else valid)
    if words: dls.vocab = words
    return Learner(dls, model, loss or nn.CrossEntropyLoss(), cbs=cbs, default_cbs=dict(progress=None), **kwargs)

def titles(axs): return [ax.get_title() for ax in axs.flat if ax.get_title()]
def shown(axs): return np.stack([ax.images[0].get_array() for ax in axs.flat if ax.images])
def both(xs, texts): return xs, texts

class Shifts(Callback):
    "Changes inputs of training and evaluations, at random"
    def before_batch(self): self.learn.xb = (self.x+torch.rand(()),)

class Takes(Callback):
    "Keeps the inputs of a fit's training batches"
    order, run_valid, run_in = 999, False, {'fit'}
    def __init__(self): self.seen = []
    def before_batch(self): self.seen.append(self.x.clone())


# ---- show_batch

def test_a_batch():
    "Its first items, with their targets in words"
    axs = classifier(train=DataLoader(data, 8)).show_batch(n=5)

    assert axs.shape == (2, 3) and titles(axs) == ['cat', 'dog', 'cow', 'cat', 'dog']
    assert np.allclose(shown(axs), x[:5, 0])

@pytest.mark.parametrize('cbs, n_workers', [(None, 0), (MixUp, 0), ([Shifts, MixUp], 0), (MixUp, 1)],
                         ids=['plain', 'mixed', 'shifted', 'workers'])
def test_it_is_the_batch_with_which_the_next_fit_begins(cbs, n_workers):
    "As callbacks make it, with the same random numbers; all is as before, and the fit is as without"
    def make(): return classifier(DataLoader(data, 8, shuffle=True, num_workers=n_workers), cbs=cbs)
    learn, plain, takes = make(), make(), Takes()
    for o in learn, plain:
        torch.manual_seed(4)
        o.fit(1)
    before, random = learn.state_hash(), torch.get_rng_state()

    found = [learn.show_batch(n=20, show=both)[0] for _ in range(2)]

    assert learn.state_hash() == before and torch.equal(torch.get_rng_state(), random)
    learn.fit(1, cbs=takes)
    torch.set_rng_state(random)
    plain.fit(1)
    assert len(found[0]) == 8 and all(torch.equal(xs, takes.seen[0]) for xs in found)
    assert learn.recorder.values == plain.recorder.values

def test_before_any_fit():
    "Neither an optimizer nor a layer is made by it"
    layer = nn.LazyLinear(3)
    learn = classifier(model=nn.Sequential(nn.Flatten(), layer))

    learn.show_batch()

    assert learn.opt is None and is_lazy(layer.weight) and learn.n_step == 0

@pytest.mark.parametrize('given', [dict(ds_idx=1), dict(dl=[(x[:4], y[:4]), (x, y)])])
def test_another_loader(given):
    "Is shown as an evaluation gets it; metrics are not asked"
    learn = classifier(cbs=[MixUp, Shifts], metrics=accuracy)
    random = torch.get_rng_state()

    xs, texts = learn.show_batch(**given, show=both)

    shift = xs-x[:4]
    assert torch.allclose(shift, shift.flatten()[0].expand_as(shift), atol=1e-6) and shift.flatten()[0] > 0
    assert texts == ['cat', 'dog', 'cow', 'cat'] and torch.equal(torch.get_rng_state(), random)

@pytest.mark.parametrize('targ, expected', [
    (y, ['cat', 'dog']), (y+99, ['99', '100']), (y-100, ['-100', '-99']), (y.float()/3, ['0', '0.3333']),
    (nn.functional.one_hot(y, 3).float(), ['cat', 'dog']),
    (torch.tensor([[.75, .25, 0.]]*20), ['cat 0.75, dog 0.25']*2), (nn.functional.one_hot(y, 3) > 0, ['cat', 'dog']),
    (torch.zeros(20, 3), ['none']*2), (torch.tensor([[1, 0, 1]]*20), ['cat, cow']*2), (y[:, None], ['cat', 'dog']),
    (y.double()*54321, ['0', '54321']), ([[1], [2]]*10, ['[int]']*2), (['a', 'b']*10, ['a', 'b']),
    (torch.full((20, 5), .5), ['[0.5, 0.5, 0.5, 0.5, …]']*2), (torch.zeros(20, 5, 2, 2), ['float32[5, 2, 2]']*2),
    (torch.tensor([[0, 2]]*20), ['cat cow']*2), ([y, y.float()], ['cat / 0', 'dog / 1'])], ids=range(17))
def test_targets(targ, expected):
    "Classes are words, also several or shares of them; numbers are short; several targets are side by side"
    assert classifier().show_batch(n=2, dl=[(x, targ)], show=both)[1] == expected

def test_targets_that_are_pictures():
    "Are drawn beside the input"
    axs = classifier(train=[(x, torch.cat([x, x, x], 1))]).show_batch(n=2)

    assert axs.shape == (2, 2) and titles(axs) == ['input', 'target'] and axs[1, 1].images[0].get_array().shape[2] == 3

def test_no_target():
    "There is no title then"
    assert titles(classifier().show_batch(n=2, dl=[(x,)])) == []

def test_a_batch_of_words(capsys):
    "Is a table, printed where nothing shows it otherwise"
    tokens = torch.tensor([[0, 1], [2, 0]])

    df = classifier().show_batch(dl=[(tokens, y[:2])], vocab=['a', 'b', 'c'])

    assert df.text.tolist() == ['a b', 'c a'] and df.target.tolist() == ['cat', 'dog']
    assert 'a b    cat' in capsys.readouterr().out

def test_show_batch_refuses():
    "What cannot be shown, what would be used up, and what is no number of items"
    def cancel(cb): raise CancelBatchException
    learn, once = classifier(), synth_learner(dls=(iter([(x, y)]), None))

    with pytest.raises(TypeError, match=r'in float32\[2, 5, 2, 2\]; `show=f`'):
        learn.show_batch(dl=[(torch.randn(2, 5, 2, 2), y[:2])])
    with pytest.raises(ValueError, match='use up the training loader'): once.show_batch()
    with pytest.raises(TypeError, match='use up batches of a `list_iterator`'): learn.show_batch(dl=iter([(x, y)]))
    with pytest.raises(ValueError, match='no validation set'): once.show_batch(ds_idx=1)
    with pytest.raises(ValueError, match='`n` is 0'): learn.show_batch(n=0)
    with pytest.raises(ValueError, match='no batch to show'): learn.show_batch(dl=[])
    for given in {}, dict(ds_idx=1):
        with pytest.raises(RuntimeError, match='cancelled the batch before the model'):
            classifier(cbs=Callback(before_batch=cancel)).show_batch(**given)


# ---- show_results

def test_results():
    "Target and decision in words, the wrong ones red; the first items in the dataset's order"
    learn = classifier()
    random = torch.get_rng_state()

    axs = learn.show_results(ds_idx=0)

    guess = learn.model(x[:9]).argmax(1)
    assert titles(axs) == [f'{vocab[a]} / {vocab[b]}' for a, b in zip(y, guess)] and np.allclose(shown(axs), x[:9, 0])
    assert [ax.title.get_color() == 'red' for ax in axs.flat] == (guess != y[:9]).tolist()
    assert torch.equal(torch.get_rng_state(), random) and learn.model.training

@pytest.mark.parametrize('n, n_batches', [(1, 1), (4, 1), (5, 2), (99, 5)])
def test_only_what_is_needed_is_predicted(n, n_batches):
    "As many batches as hold the items; fewer items if there are fewer"
    seen = []
    learn = classifier(cbs=Callback(after_pred=lambda cb: seen.append(len(cb.x))))

    axs = learn.show_results(n=n)

    assert seen == [4]*n_batches and len(titles(axs)) == min(n, 20)

def test_items_drawn_at_random():
    "Each with its own target, others each time or by the seed; no random stream moves"
    numbers = TensorDataset(torch.arange(2000.)[:, None], torch.arange(2000.)[:, None])
    learn = synth_learner(dls=(DataLoader(numbers, 8, shuffle=True), DataLoader(numbers, 8)))
    random = torch.get_rng_state()

    a, b, c, d = (learn.show_results(shuffle=True, seed=seed) for seed in (3, 3, None, None))

    assert a.x0.tolist() == a.target.tolist() == b.target.tolist() and len({*a.target}) == 9
    assert c.target.tolist() != d.target.tolist() and torch.equal(torch.get_rng_state(), random)

def test_results_of_values(capsys):
    "Are numbers, in columns"
    learn = synth_learner()

    df = learn.show_results(n=3)

    assert [*df] == ['x0', 'target', 'prediction'] and 'prediction' in capsys.readouterr().out
    with torch.no_grad(): expected = learn.model(torch.tensor(df.x0)[:, None].float())
    assert np.allclose(df.prediction, expected.flatten(), atol=1e-5)

@pytest.mark.parametrize('targ', [torch.tensor([[1, 0, 1]]*20), torch.tensor([[1., 0., 1.]]*20)])
def test_several_labels(targ):
    "Are all told; one that is wrong makes the item so"
    class Says(nn.Module):
        def __init__(self, score): super().__init__(); self.score = nn.Parameter(torch.tensor(score))
        def forward(self, x): return self.score.expand(len(x), 3)
    found = [classifier(valid=[(x, targ)], model=Says(score), loss=BCEWithLogitsLossFlat()).show_results(n=1)
             for score in ([1., -1, 1], [-1., -1, -1])]

    assert [titles(axs) for axs in found] == [['cat, cow / cat, cow'], ['cat, cow / none']]
    assert [axs[0, 0].title.get_color() == 'red' for axs in found] == [False, True]

@pytest.mark.parametrize('words, expected', [
    (None, 'True / True'), (['no', 'yes'], 'yes / yes'), (['cat'], 'cat / cat')])
def test_yes_or_no(words, expected):
    "Is said in the words there are"
    layer = nn.Linear(30, 1)
    nn.init.constant_(layer.bias, 99)
    model = nn.Sequential(nn.Flatten(), layer)
    learn = classifier(valid=[(x, torch.ones(20))], model=model, loss=BCEWithLogitsLossFlat(), words=words)

    assert titles(learn.show_results(n=1)) == [expected]

@pytest.mark.parametrize('loss, n_out, targ', [
    (nn.CrossEntropyLoss(), 3, torch.randint(3, (20, 6, 5), generator=g)), (nn.MSELoss(), 3, x.expand(-1, 3, -1, -1)),
    (BCEWithLogitsLossFlat(), 1, (x > .5).float())], ids=['mask', 'image', 'yes or no'])
def test_pictures_as_predictions(loss, n_out, targ):
    "Are drawn in a row with input and target; no title is red"
    learn = classifier(valid=[(x, targ)], model=nn.Conv2d(1, n_out, 3, padding=1), loss=loss)

    axs = learn.show_results(n=2)

    assert axs.shape == (2, 3) and titles(axs) == ['input', 'target', 'prediction']
    assert all(ax.images[0].get_array().shape[:2] == (6, 5) for ax in axs.flat)
    assert all(ax.title.get_color() != 'red' for ax in axs.flat)

def test_several_inputs_and_outputs():
    "The first input that can be shown; an output of several parts has as many predictions"
    class Two(nn.Module):
        def __init__(self): super().__init__(); self.a = nn.Linear(1, 1)
        def forward(self, scale, x): return dict(a=self.a(scale[:, None]), b=x.flatten(1).sum(1))
    learn = classifier(valid=[(torch.ones(()).expand(20), x, y)], model=Two(), loss=lambda p, y: 0)
    learn.dls.n_inp = learn.n_inp = 2

    df = learn.show_results(n=2)

    assert [*df] == ['x0', 'target', 'prediction a', 'prediction b'] and df.target.tolist() == ['cat', 'dog']
    assert np.allclose(df['prediction b'], x[:2].flatten(1).sum(1))

def test_no_target_in_results():
    "There is a prediction only"
    assert len(titles(classifier().show_results(dl=[x], n=2))[0].split(' / ')) == 1

def test_within_a_fit():
    "Results of each epoch can be shown; a batch of training cannot"
    found = []
    learn = classifier(cbs=Callback(after_epoch=lambda cb: found.append(cb.learn.show_results(n=2))))

    learn.fit(2)

    assert [len(titles(axs)) for axs in found] == [2, 2]
    with pytest.raises(RuntimeError, match='within a fit'):
        learn.fit(1, cbs=Callback(after_epoch=lambda cb: cb.learn.show_batch()))

def test_show_results_refuses():
    "Items without numbers cannot be drawn; others as `show_batch` does"
    class Stream(IterableDataset):
        def __iter__(self): return iter(data)
    learn = classifier()

    for dl in DataLoader(Stream(), 4), [(x, y)]:
        with pytest.raises(TypeError, match=f'items with numbers, not a `{type(dl).__name__}`'):
            learn.show_results(dl=dl, shuffle=True)
        assert len(titles(learn.show_results(dl=dl))) == 9
    with pytest.raises(ValueError, match='no validation set'): synth_learner(n_valid=0).show_results()
    with pytest.raises(TypeError, match='use up'): learn.show_results(dl=iter([(x, y)]))
    with pytest.raises(ValueError, match='no batch to show'): learn.show_results(dl=[])
    with pytest.raises(ValueError, match='cannot be joined'):
        classifier(model=nn.AdaptiveAvgPool2d(2)).show_results(dl=[(x[:4], y[:4]), (x[:4, :, 1:], y[:4])])


# ---- where it is shown

@pytest.mark.parametrize('mode, n_shown', [('notebook', 1), ('off', 0), ('log', 0)])
def test_figures_are_shown_once(mode, n_shown, monkeypatch):
    "In a notebook at once, and not again at the end of the cell; in a script they wait"
    plt = pytest.importorskip('matplotlib.pyplot')
    seen = []
    monkeypatch.setattr(pytest.importorskip('IPython.display'), 'display', seen.append)
    learn = classifier()
    set_display(mode)
    try: axs = [learn.show_batch(), learn.show_results()]
    finally: set_display('auto')

    assert len(seen) == 2*n_shown and all((a is None) == (mode == 'notebook') for a in axs)
    assert len(plt.get_fignums()) == 2*(mode == 'log')
