"""pictures.py draws what tensors look like: images, masks, curves, texts, tables; what it cannot see it says."""
import matplotlib
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from learner.pictures import draw_items, is_picture, word

matplotlib.use('Agg')
images = torch.rand(12, 3, 6, 5, generator=torch.Generator().manual_seed(1))
names = [f'item {i}' for i in range(12)]


def shown(ax): return np.asarray(ax.images[0].get_array())
def titles(axs): return [ax.get_title() for ax in axs.flat]
def is_off(ax): return not ax.axison


# ---- figures

@pytest.mark.parametrize('n, shape', [(1, (1, 1)), (2, (1, 2)), (5, (2, 3)), (7, (3, 3)), (9, (3, 3)), (12, (3, 4))])
def test_the_grid_is_nearly_square(n, shape):
    "As many items as there are titles; axes that are left over are hidden"
    axs = draw_items(images, names[:n])

    assert axs.shape == shape and [len(ax.images) for ax in axs.flat] == [1]*n + [0]*(axs.size-n)
    assert titles(axs) == names[:n] + ['']*(axs.size-n) and all(map(is_off, axs.flat))

def test_colours():
    "Values from 0 to 1 are shown as they are, channels last; bytes are 0 to 255"
    axs, of_bytes = draw_items(images, names[:2]), draw_items((images*255).byte(), names[:2])

    assert np.allclose(shown(axs[0, 1]), images[1].permute(1, 2, 0))
    assert np.allclose(shown(of_bytes[0, 1]), (images[1]*255).byte().permute(1, 2, 0)/255)

def test_other_values():
    "Each image has a scale of its own; without opacity, which such a fourth channel cannot be"
    x = torch.stack([images[0]*8-3, images[1]*.5])

    axs = draw_items(torch.cat([x, x[:, :1]], 1), names[:2])

    lows, highs = zip(*((shown(ax).min(), shown(ax).max()) for ax in axs.flat))
    assert [shown(ax).shape for ax in axs.flat] == [(6, 5, 3)]*2
    assert np.allclose(lows, 0) and np.allclose(highs, 1)

def test_opacity():
    "Four channels from 0 to 1 are shown with it"
    axs = draw_items(torch.cat([images, images[:, :1]], 1), names[:1])

    assert shown(axs[0, 0]).shape == (6, 5, 4)

@pytest.mark.parametrize('x', [images[:, :1], images[:, 0], images[:, 0].bfloat16(), images[:, 0] > .5,
                               (images[:, 0]*255).byte()], ids=['one', 'none', 'half', 'bool', 'bytes'])
def test_gray(x):
    "One channel, or none, is gray from 0 to 1"
    image = draw_items(x, names[:1])[0, 0].images[0]

    assert image.get_cmap().name == 'gray' and image.get_clim() == (0, 1) and image.get_array().shape == (6, 5)

@pytest.mark.parametrize('bad', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('span', [1, 9])
def test_what_is_not_finite(bad, span):
    "Leaves the rest of the image as it is; an image of nothing else is drawn too"
    x = images[:2]*span
    x[0, :, 0, 0], x[1] = bad, bad

    axs = draw_items(x, names[:2])

    a = shown(axs[0, 0])
    assert np.isfinite(a).all() and a[1:].std() > .1 and (a[0, 0] == (bad > 0)).all()

def test_curves():
    "A line a channel, as it is in time"
    x = torch.randn(4, 2, 50)

    axs = draw_items(x, names[:3])

    assert [len(ax.lines) for ax in axs.flat] == [2, 2, 2, 0] and titles(axs)[:3] == names[:3]
    assert np.array_equal(axs[1, 0].lines[1].get_ydata(), x[2, 1]) and is_off(axs[1, 1])

def test_titles():
    "Wrong ones are red, dollars are dollars, long ones have lines"
    axs = draw_items(images, ['$a$ / b', 'x', 'a word '*20], wrong=[True, False, False])

    assert [ax.title.get_color() == 'red' for ax in axs.flat] == [True, False, False, False]
    assert axs[0, 0].get_title() == '$a$ / b' and axs[1, 0].get_title().count('\n') == 2
    axs[0, 0].figure.canvas.draw()

@pytest.mark.parametrize('text', ['cat / dog', 'a very long name of a class / an even longer name of a class'])
def test_nothing_overlaps(text):
    "With nine items no title or image lies over another"
    axs = draw_items(images, [text]*9)

    fig = axs[0, 0].figure
    fig.canvas.draw()
    boxes = [o.get_window_extent() for ax in axs.flat for o in (ax.title, ax.images[0])]
    assert [(i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes[:i]) if a.overlaps(b)] == []
    assert all(fig.bbox.x0 <= b.x0 and b.x1 <= fig.bbox.x1 and b.y1 <= fig.bbox.y1 for b in boxes)


# ---- beside

def test_rows():
    "What is drawn beside the input has columns with names; other titles stand over the input"
    axs = draw_items(images, names[:2], beside=dict(target=images[:, :1], prediction=torch.randn(12, 2, 9)))

    assert axs.shape == (2, 3) and [len(ax.images) for ax in axs.flat] == [1, 1, 0]*2
    assert titles(axs) == ['input\nitem 0', 'target', 'prediction', 'item 1', '', '']
    assert [len(ax.lines) for ax in axs[:, 2]] == [2, 2]

def test_masks():
    "A number has the same colour in all masks, one below 0 has none"
    target, guess = torch.randint(3, (2, 6, 5)), torch.randint(3, (2, 1, 6, 5))
    target[:, 0], target[:, 1] = 255, -100

    axs = draw_items(images, names[:2], beside=dict(target=target, prediction=guess))

    a, b = (ax.images[0] for ax in axs[0, 1:])
    assert a.get_clim() == b.get_clim() == (0, 9) and a.get_cmap().name == 'tab10'
    assert a.get_array().mask[1].all() and a.get_array().mask.sum() == 5
    assert np.array_equal(a.get_array()[2:], target[0, 2:]+1) and np.array_equal(b.get_array(), guess[0, 0]+1)
    assert (a.get_array()[0] == 4).all()

@pytest.mark.parametrize('n, cmap', [(10, 'tab10'), (11, 'tab20'), (25, 'nipy_spectral')])
def test_masks_of_many_classes(n, cmap):
    "Have as many colours"
    mask = torch.arange(30).view(1, 5, 6) % n

    image = draw_items(images, names[:1], beside=dict(target=mask))[0, 1].images[0]

    assert image.get_cmap().name == cmap and len(np.unique(image.get_array())) == n

def test_the_same_scale():
    "An image beside the target is on the target's scale, so that equal colours are equal values"
    target, guess = images*4-2, images*8-2

    axs = draw_items(images, names[:1], beside=dict(target=target, prediction=guess))

    low, high = target[0].min(), target[0].max()
    assert np.allclose(shown(axs[0, 2]), ((guess[0]-low)/(high-low)).clip(0, 1).permute(1, 2, 0), atol=1e-5)

def test_pictures_without_an_input():
    "Are drawn alone if the input is none"
    axs = draw_items(torch.randn(12, 2), names[:2], beside=dict(target=images))

    assert axs.shape == (1, 2) and titles(axs) == names[:2]

@pytest.mark.parametrize('x, expected', [
    (images, True), (images[:, :1].long(), True), (images[:, 0].long(), True), (torch.randn(2, 1, 9), True),
    (images[:, :2], False), (torch.randn(2, 9), False), (torch.arange(3), False), (['a'], False), (None, False)])
def test_is_picture(x, expected):
    "Images, masks and curves are, numbers and words are not"
    assert is_picture(x) == expected


# ---- tables and texts

@pytest.mark.parametrize('x, columns', [
    (torch.randn(5, 3), ['x0', 'x1', 'x2']), (torch.randn(5), ['x0']), (torch.arange(5), ['x0']),
    ((torch.arange(10).view(5, 2), torch.randn(5, 1)), ['x0', 'x1', 'x2']),
    (dict(age=torch.randn(5), codes=torch.arange(10).view(5, 2)), ['age', 'codes0', 'codes1'])])
def test_tables(x, columns):
    "A column for each number, by key where there are keys, then those of the titles"
    df = draw_items(x, {'target': [1.5, 2., 3.], 'prediction': ['a', 'b', 'c']})

    assert [*df] == [*columns, 'target', 'prediction'] and len(df) == 3
    assert df.target.tolist() == [1.5, 2., 3.]
    last = [*x.values()][-1] if isinstance(x, dict) else x[-1] if isinstance(x, tuple) else x
    assert df[columns[-1]].tolist() == last.reshape(5, -1)[:3, -1].tolist()

@pytest.mark.parametrize('x, vocab, expected', [
    (torch.tensor([[0, 2], [1, 9]]), ['the', 'cat', 'sat'], ['the sat', 'cat 9']),
    (torch.tensor([[0, 2], [1, -1]]), {0: 'a', 2: 'c'}, ['a c', '1 -1']),
    (torch.tensor([[0, 2], [1, 9]]), None, ['0 2', '1 9']), (['a b', 'c'], None, ['a b', 'c']),
    (dict(ids=torch.tensor([[0, 2], [1, 1]]), mask=torch.ones(2, 2)), ['a', 'b', 'c'], ['a c', 'b b'])])
def test_texts(x, vocab, expected):
    "Numbers of tokens become words, where there are some; of several members the first is shown"
    df = draw_items(x, ['pos', 'neg'], vocab=vocab)

    assert df.text.tolist() == expected and df.title.tolist() == ['pos', 'neg']

def test_no_titles():
    "Give no column"
    assert [*draw_items(['a', 'b'], ['', ''])] == ['text']

def test_word():
    "A number that is no word's stays"
    assert [word(i, ['a', 'b']) for i in (1, 2, -1)] == ['b', 2, -1] and word(1, None) == 1


# ---- which

def test_the_first_that_can_be_shown():
    "Is taken, however deep it is, if it has a row for each item"
    axs = draw_items(dict(scale=torch.tensor(2.), edges=torch.arange(8).view(2, 4), views=[(images,)]), names[:4])

    assert axs.shape == (2, 2) and np.allclose(shown(axs[0, 0]), images[0].permute(1, 2, 0))

@pytest.mark.parametrize('x', [torch.randn(2, 5, 6, 7), torch.zeros(2, 3, 4, dtype=torch.long), torch.tensor(1.), None,
                               torch.randn(2, 3, dtype=torch.complex64), torch.eye(2).to_sparse(), {}, [],
                               pack_sequence([torch.randn(3, 2)])], ids=range(9))
def test_what_cannot_be_seen(x):
    "Is described, with the way out"
    with pytest.raises(TypeError, match=r'no picture, curve, text or table .* `show=f`'): draw_items(x, names[:2])

def test_show():
    "Draws whatever there is instead"
    found = draw_items(None, {'a': [1., 2.], 'b': ['x', 'y']}, show=lambda xs, texts: (xs, texts))

    assert found == (None, ['1 / x', '2 / y'])
