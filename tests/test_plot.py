"""plot.py draws on the axes it is given, and shows every point where it belongs."""
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from learner.plot import plot_histogram, plot_layers, plot_loss

matplotlib.use('Agg')
nan = float('nan')
losses = [float(v) for v in range(10, 0, -1)]


@pytest.fixture
def ax(): return Figure().subplots()


def drawn(ax): return {line.get_label(): [*zip(*(d.tolist() for d in line.get_data()))] for line in ax.lines}


def test_plot_loss(ax):
    "Training losses stand at the number of their batch, validation losses at the batch after which they were computed"
    result = plot_loss(losses, [4, 6, 10], [3.5, 2.5, nan], skip_start=2, ax=ax)

    assert result is ax and (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ('batch', 'loss', 'linear')
    assert drawn(ax) == {'train (smoothed)': [*zip(range(3, 11), losses[2:])], 'valid': [(4, 3.5), (6, 2.5)]}
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['train (smoothed)', 'valid']


def test_plot_loss_of_several_validation_sets(ax):
    "Validation losses by name have a curve each"
    plot_loss(losses, [6, 10], dict(a_valid_loss=[1., 2.], b_valid_loss=[nan, 4.]), ax=ax)

    assert {k: v for k, v in drawn(ax).items() if k != 'train (smoothed)'} == dict(a_valid=[(6, 1.), (10, 2.)],
                                                                                   b_valid=[(10, 4.)])


@pytest.mark.parametrize('valid', [{}, dict(iters=[5, 10], valid_losses=[nan, nan])])
def test_plot_loss_without_validation(ax, valid):
    "Without a validation loss the training loss is drawn alone"
    plot_loss(losses, **valid, ax=ax)

    assert [*drawn(ax)] == ['train (smoothed)']


@pytest.mark.parametrize('n, skip_start, first', [(10, 5, 6), (10, 0, 1), (5, 5, 1), (3, 5, 1), (6, 5, 6)])
def test_plot_loss_skips_the_start(ax, n, skip_start, first):
    "The first batches are left out, with the validation in them, unless nothing would be left"
    plot_loss(losses[:n], [2, n], [1., 2.], skip_start=skip_start, ax=ax)

    assert drawn(ax)['train (smoothed)'][0][0] == first
    assert drawn(ax)['valid'] == [p for p in [(2, 1.), (n, 2.)] if p[0] >= first]


def test_plot_loss_of_no_batch(ax):
    "A fit without batches gives empty axes"
    plot_loss([], ax=ax)

    assert drawn(ax) == {'train (smoothed)': []}


def test_plot_loss_on_log_axis(ax):
    "`log` makes the loss axis logarithmic"
    assert plot_loss(losses, log=True, ax=ax).get_yscale() == 'log'


def test_plot_loss_makes_axes():
    "Without axes it makes its own"
    import matplotlib.pyplot as plt
    ax = plot_loss(losses)

    assert drawn(ax)['train (smoothed)'][0] == (6, 5.)
    plt.close(ax.figure)


def test_plot_loss_refuses_unknown_batches(ax):
    "Validation losses without the batches they belong to are an error, not a guess"
    with pytest.raises(ValueError, match="2 values of `valid_loss`, but 0 `iters`"):
        plot_loss(losses, valid_losses=[1., 2.], ax=ax)


# ---- layers

series = {'mean': np.array([[1., 5.], [2., nan], [3., 7.]]), 'update_ratio': np.full((3, 2), .1)}


def test_plot_layers():
    "Each series has axes of its own with a line a layer, at the numbers of the batches; ratios are on a log axis"
    axs = Figure().subplots(1, 2)

    result = plot_layers(series, [0, 10, 20], ['a', 'b.c'], axs)

    assert result is axs and [(ax.get_title(), ax.get_yscale(), ax.get_xlabel()) for ax in axs] == [
        ('mean', 'linear', 'batch'), ('update ratio', 'log', 'batch')]
    assert str(drawn(axs[0])) == str({'a': [(0, 1.), (10, 2.), (20, 3.)], 'b.c': [(0, 5.), (10, nan), (20, 7.)]})
    assert [t.get_text() for t in axs[1].get_legend().get_texts()] == ['a', 'b.c']


@pytest.mark.parametrize('n, legend', [(12, [f'l{i}' for i in range(12)]), (13, ['l0', 'l12'])])
def test_plot_layers_of_many(n, legend):
    "Lines go from dark to light; of more than a dozen the legend names the first and the last"
    axs = plot_layers(dict(std=np.ones((2, n))), [0, 1], [f'l{i}' for i in range(n)], [Figure().subplots()])

    light = [sum(line.get_color()[:3]) for line in axs[0].lines]
    assert light[0] == min(light) and light[-1] == max(light) and len(set(light)) == n
    assert [t.get_text() for t in axs[0].get_legend().get_texts()] == legend


def test_plot_layers_of_odd_names_and_ratios(ax):
    "The model itself, and names that matplotlib would leave out, are in the legend; no ratio above 0 needs no log axis"
    plot_layers(dict(update_ratio=np.zeros((2, 2))), [0, 1], ['', '_fc'], [ax])

    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['(the model)', '(_fc)']
    assert ax.get_yscale() == 'linear'


def test_plot_layers_refuses_other_axes(ax):
    "Another number of axes is an error that names the series"
    with pytest.raises(ValueError, match='1 axes for 2 series: mean, upd'): plot_layers(series, [0], ['a'], [ax])


def test_plot_histogram(ax):
    "Batches go from left to right, values upward between the given ends, and colour is the log of counts"
    counts = np.array([[0, 1, 20], [4, 3, 20]])  # of the last batch more

    result = plot_histogram(counts, [3, 13, 23], (-10., 10.), 'activation', 'conv', ax)

    image, = ax.images
    assert result is ax and image.get_extent() == [3, 33, -10, 10] and image.origin == 'lower'
    assert np.allclose(image.get_array(), np.log1p([[0, 10, 20], [40, 30, 20]]))
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ('batch', 'activation', 'conv')


@pytest.mark.parametrize('draw', [lambda: plot_layers(series, [0, 1, 2], ['a', 'b']),
                                  lambda: [plot_histogram(np.ones((2, 2)), [0, 1], (0, 1))],
                                  lambda: [plot_histogram(np.empty((2, 0)), [], (0, 1))]])
def test_layers_make_axes(draw):
    "Without axes they make their own, which can be drawn, also without a batch"
    import matplotlib.pyplot as plt
    axs = draw()

    axs[0].figure.canvas.draw()

    assert all(ax.figure is axs[0].figure for ax in axs)
    plt.close('all')
