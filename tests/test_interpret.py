"""interpret.py: worst items, confusion of classes, residuals and curves, of predictions that are made once."""
import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn

from learner import Callback, DataLoaders, Learner
from learner.interpret import ClassificationInterpretation, Interpretation, RegressionInterpretation
from tests.helpers import synth_learner

matplotlib.use('Agg')
x = torch.eye(4).repeat(5, 1)
y = torch.arange(4).repeat(5)
wrong = y.clone()
wrong[[0, 4, 3]] = torch.tensor([1, 1, 2])  # two of class 0 are labelled 1, one of class 3 is labelled 2


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')

def reader(vocab='abcd', targs=wrong, model=None):
    "A network that says the class of `x`, which is not always the label"
    dls = DataLoaders.from_tensors(x, targs, valid=(x, targs), bs=8)
    dls.vocab = vocab
    if model is None:
        model = nn.Linear(4, 4, bias=False)
        model.weight.data.copy_(3*torch.eye(4))
    return Learner(dls, model, nn.CrossEntropyLoss())

def classes(**kwargs): return ClassificationInterpretation.from_learner(reader(**kwargs))


# ---- items

def test_it_predicts_once():
    "When something is first asked for"
    n = []
    learn = reader()
    learn.add_cb(Callback(after_batch=lambda cb: n.append(1)))
    interp = Interpretation.from_learner(learn)
    assert not n

    for _ in range(2): interp.top_losses(), interp.preds, interp.losses, interp.targs, interp.to_frame()

    assert len(n) == 3 and len(interp) == 20

def test_the_worst_items():
    "By their losses, the worst first, with their positions and inputs"
    interp = classes()

    losses, positions, items = interp.top_losses(3, items=True)
    best, _ = interp.top_losses(2, largest=False)

    assert {*positions.tolist()} == {0, 3, 4} and torch.equal(items, x[positions])
    assert losses[0] >= losses[-1] > best[1] >= best[0] and len(interp.top_losses()[0]) == 20
    with pytest.raises(ValueError, match='top_losses: `k` is 0'): interp.top_losses(0)

@pytest.mark.parametrize('dl', [None, [(x[:12], wrong[:12]), (x[12:], wrong[12:])]], ids=['set', 'list'])
def test_inputs_are_read_anew(dl):
    "Also of a list of batches"
    interp = Interpretation(reader(), dl=dl)

    assert torch.equal(interp.inputs([4, 15, 1]), x[[4, 15, 1]])

def test_the_training_set():
    "In the dataset's order, though its loader shuffles"
    interp = ClassificationInterpretation(reader(), ds_idx=0)

    assert torch.equal(interp.targs, wrong) and interp.indices == [*range(20)]

def test_a_table():
    "An item a row, with the scores of all classes by name"
    table = classes().to_frame()

    assert [*table.columns] == ['index', 'target', 'decision', 'loss', 'pred_a', 'pred_b', 'pred_c', 'pred_d']
    assert table.target.tolist() == ['abcd'[i] for i in wrong] and table.decision.tolist() == ['abcd'[i] for i in y]
    assert table.loss.idxmax() in (0, 3, 4) and table.filter(like='pred_').sum(axis=1).to_numpy() == pytest.approx(1)

def test_worst_items_are_drawn_or_tabled():
    "With prediction, target and loss; `show` draws instead"
    interp = classes()

    table = interp.plot_top_losses(3)
    shown = interp.plot_top_losses(2, show=lambda xs, titles: (xs.shape, titles))

    assert len(table) == 3 and [*table.columns][-4:] == ['target', 'prediction', 'loss', 'probability']
    assert shown[0] == (2, 4) and all(' / ' in t for t in shown[1])

def test_no_targets():
    "Are an error that says so"
    with pytest.raises(ValueError, match='`with_loss` needs'): Interpretation(reader(), dl=[x]).top_losses()


# ---- classes

def test_confusion():
    "True classes are rows; shares are of them"
    interp = classes()

    matrix, shares = interp.confusion_matrix(), interp.confusion_matrix(normalize=True)

    assert matrix.tolist() == [[3, 0, 0, 0], [2, 5, 0, 0], [0, 0, 5, 1], [0, 0, 0, 4]]
    assert shares.sum(1) == pytest.approx(1) and shares[1].tolist() == pytest.approx([2/7, 5/7, 0, 0])
    assert interp.most_confused() == [('b', 'a', 2), ('c', 'd', 1)] and interp.most_confused(2) == [('b', 'a', 2)]

def test_a_class_that_is_not_there():
    "Has zeros, and no curve"
    interp = classes(targs=torch.where(wrong == 3, 2, wrong))

    assert interp.confusion_matrix(True)[3].tolist() == [0]*4
    assert [line.get_label()[0] for line in interp.plot_curves().lines] == ['a', 'b', 'c']

def test_pixels():
    "Each counts; what the loss ignores does not"
    class Same(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(()))
        def forward(self, x): return x*self.w
    scores = nn.functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 2).permute(0, 3, 1, 2).float()
    dl = [(scores, torch.tensor([[[0, 1], [0, -100]]]))]
    interp = ClassificationInterpretation(reader(None, model=Same()), dl=dl)

    assert interp.confusion_matrix().tolist() == [[1, 1], [0, 1]] and interp.names == ['0', '1']

def test_the_report():
    "scikit-learn's numbers by class"
    interp = classes()

    report = interp.classification_report()

    assert report.loc['a', 'recall'] == 1 and report.loc['b', 'recall'] == pytest.approx(5/7)
    assert report.loc['accuracy', 'f1-score'] == pytest.approx(17/20)

def test_the_report_is_printed(capsys):
    "As a table"
    classes().print_classification_report()

    assert 'precision' in capsys.readouterr().out

def test_values_are_no_classes():
    "Which is said"
    with pytest.raises(ValueError, match='which are no classes: how the loss, `mse_loss`, decides'):
        ClassificationInterpretation(synth_learner()).confusion_matrix()


# ---- pictures

@pytest.mark.parametrize('normalize, first', [(False, '3'), (True, '1.00')])
def test_the_confusion_matrix_is_drawn(normalize, first):
    "A number in each field, names at the sides"
    ax = classes().plot_confusion_matrix(normalize, title='digits')

    assert [t.get_text() for t in ax.texts][0] == first and len(ax.texts) == 16 and ax.get_title() == 'digits'
    assert [t.get_text() for t in ax.get_xticklabels()] == [*'abcd'] and ax.get_ylabel() == 'true'
    assert ax.images[0].get_array().shape == (4, 4) and not classes().plot_confusion_matrix(plot_txt=False).texts

@pytest.mark.parametrize('kind, labels', [
    ('roc', ('false positives', 'true positives')), ('pr', ('recall', 'precision'))])
def test_curves(kind, labels):
    "One for each class, with its area"
    ax = classes().plot_curves(kind)

    assert (ax.get_xlabel(), ax.get_ylabel()) == labels and len(ax.lines) == 4
    assert ax.lines[3].get_label().startswith('d (')
    with pytest.raises(ValueError, match="kind='lift'; give 'roc' or 'pr'"): classes().plot_curves('lift')

def test_residuals():
    "Predicted less true values; points and a histogram"
    interp = RegressionInterpretation.from_learner(synth_learner())

    axs = interp.plot_residuals()

    assert torch.equal(interp.residuals, interp.preds-interp.targs)
    assert [ax.get_xlabel() for ax in axs] == ['true', 'predicted less true'] and len(axs[0].lines) == 2
    assert np.sum([p.get_height() for p in axs[1].patches]) == 8


# ---- odd sets

def test_yes_and_no():
    "Of one score an item there are two classes"
    from learner.losses import BCEWithLogitsLossFlat
    dls = DataLoaders.from_tensors(x, (y % 2).float()[:, None], valid=(x, (y % 2).float()[:, None]), bs=8)
    dls.vocab = ['even', 'odd']
    torch.manual_seed(0)
    interp = ClassificationInterpretation(Learner(dls, nn.Linear(4, 1), BCEWithLogitsLossFlat()))

    matrix = interp.confusion_matrix()

    assert matrix.shape == (2, 2) and matrix.sum() == 20 and interp.names == ['even', 'odd']
    assert len(interp.plot_curves().lines) == 2 and {*interp.to_frame().target} == {'even', 'odd'}

def test_what_is_ignored_counts_nowhere():
    "Neither in the report nor in the curves"
    targs = y.clone()
    targs[:8] = -100
    interp = classes(targs=y)
    interp = ClassificationInterpretation(interp.learn, dl=[(x, targs)])

    assert interp.confusion_matrix().sum() == 12 and interp.classification_report().loc['macro avg', 'support'] == 12
    assert interp.to_frame().target[0] == -100

def test_classes_along_another_axis():
    "The loss says which"
    from learner.losses import CrossEntropyLossFlat
    class Same(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(()))
        def forward(self, x): return x*self.w
    learn = reader(None, model=Same())
    learn.loss_func = CrossEntropyLossFlat()
    interp = ClassificationInterpretation(learn, dl=[(torch.randn(8, 5, 3), torch.randint(3, (8, 5)))])

    assert interp.confusion_matrix().shape == (3, 3) and interp.confusion_matrix().sum() == 40

def test_items_are_those_that_were_predicted():
    "Whatever a sampler draws later, and whatever data the Learner gets"
    class Draws(torch.utils.data.Sampler):
        def __len__(self): return 4
        def __iter__(self): return iter(torch.randperm(20)[:4].tolist())
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, wrong), 2, sampler=Draws())
    interp = classes()
    interp.dl = dl
    interp.found
    torch.rand(3)
    interp.learn.dls = DataLoaders.from_tensors(-x, wrong, valid=(-x, wrong))

    assert torch.equal(interp.targs, wrong[interp.indices]) and torch.equal(interp.inputs(range(4)), x[interp.indices])

def test_several_targets_are_told_of():
    "A table needs one tensor"
    interp = classes()
    interp.found = interp.found.__class__(interp.found.names, [interp.preds, (y, y), *interp.found[2:]])

    with pytest.raises(TypeError, match='one of targets are needed'): interp.to_frame()
