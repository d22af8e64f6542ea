"""plot.py draws on the axes it is given, and shows every point where it belongs."""
import matplotlib
import pytest
from matplotlib.figure import Figure

from learner.plot import plot_loss

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
