"""scikit-learn's metrics under fastai's names: what they measure is computed by scikit-learn (or SciPy) alone.

Most functions below are signatures: their parameters say what is done to predictions, the rest goes to the library's
function, and an `AccumMetric` comes back. Those for single-label problems take the argmax of scores along `axis`, those
named `Multi` compare one score a label with `thresh`; a metric of probabilities gets the softmax or sigmoid of scores.
"""
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec

from .measure import AccumMetric
from .utils import optional

__all__ = ['skm_to_fastai', 'APScoreBinary', 'BalancedAccuracy', 'BrierScore', 'CohenKappa', 'F1Score', 'FBeta',
           'HammingLoss', 'Jaccard', 'MatthewsCorrCoef', 'Precision', 'Recall', 'RocAuc', 'RocAucBinary',
           'APScoreMulti', 'BrierScoreMulti', 'F1ScoreMulti', 'FBetaMulti', 'HammingLossMulti', 'JaccardMulti',
           'MatthewsCorrCoefMulti', 'PrecisionMulti', 'RecallMulti', 'RocAucMulti', 'R2Score', 'ExplainedVariance',
           'PearsonCorrCoef', 'SpearmanCorrCoef']

P = ParamSpec('P')

# What the parameters of the metrics mean, for all of them
Axis = Annotated[int, "class axis of the predictions"]
Thresh = Annotated[float, "a label is predicted from this probability on, 0 to 1"]
Sigmoid = Annotated[bool, "apply the sigmoid to the predictions first"]
Labels = Annotated[Any, "classes to include; all that occur if None"]
PosLabel = Annotated[Any, "the positive class of a binary problem"]
Average = Annotated[str|None, "over classes: 'binary', 'micro', 'macro', 'weighted', 'samples'; a column each if None"]
Weight = Annotated[Any, "weight of each item in the order seen; equal if None"]
Adjusted = Annotated[bool, "rescale so that guessing scores 0"]
Beta = Annotated[float, "how many times as much as precision recall counts"]
KappaWeights = Annotated[str|None, "distance of classes, 'linear' or 'quadratic' in their indices; all alike if None"]
MaxFpr = Annotated[float|None, "false-positive rate up to which the area counts; the whole if None"]
MultiClass = Annotated[str, "'ovr' (each class against the rest), 'ovo' (pairs of classes) or 'raise'"]


def skm_to_fastai(
    func: Callable,                   # a function of `(y_true, y_pred)` such as those of `sklearn.metrics`
    is_class: bool = True,            # False: predictions are values, and left as they are
    thresh: float|None = None,        # None: argmax along `axis`; else labels are predicted from this probability on
    axis: int = -1,                   # class axis of the predictions
    activation: str|None = None,      # see `ActivationType`; if None the sigmoid where there is a `thresh`, else none
    **kwargs,                         # arguments of `AccumMetric`, and keywords for `func`
) -> AccumMetric:
    """Make a metric of a function from `sklearn.metrics`

    The direction of scikit-learn's own follows its naming rule: what ends in `_score` is better when greater, what ends
    in `_error`, `_loss` or `_deviance` when smaller."""
    dim_argmax = axis if is_class and thresh is None else None
    if activation is None: activation = 'sigmoid' if is_class and thresh is not None else 'no'
    res = AccumMetric(func, dim_argmax, activation, thresh, to_np=True, invert_arg=True, **kwargs)
    if getattr(func, '__module__', '').startswith('sklearn.'):
        if func.__name__.endswith(('_score', '_corrcoef')): res.greater_is_better = True
        if func.__name__.endswith(('_error', '_loss', '_deviance')): res.greater_is_better = False
    return res


def _sklearn(
    func,       # name in `sklearn.metrics`
    **options,  # fixed arguments of `skm_to_fastai`
) -> Callable[[Callable[P, Any]], Callable[P, AccumMetric]]:
    "Turn a signature into a maker of metrics that passes its arguments on to `skm_to_fastai`"
    def decorate(f):
        @wraps(f)
        def make(*args, **kwargs):
            f(*args, **kwargs)  # for Python's own error if these do not fit
            given = signature(f).bind(*args, **kwargs)
            given.apply_defaults()
            kw = {**options, **given.arguments}
            if 'sigmoid' in kw: kw['activation'] = 'sigmoid' if kw.pop('sigmoid') else 'no'
            return skm_to_fastai(getattr(optional('sklearn.metrics', f.__name__, 'scikit-learn'), func), **kw)
        vars(make)['makes_metric'] = True  # read by mk_metric
        return make
    return decorate


# ---- single-label problems: a score a class, targets are class indices

@_sklearn('average_precision_score', activation='binarysoftmax')
def APScoreBinary(axis: Axis = -1, average: Average = 'macro', pos_label: PosLabel = 1, sample_weight: Weight = None):
    "Average precision of a binary problem with two scores an item"


@_sklearn('balanced_accuracy_score')
def BalancedAccuracy(axis: Axis = -1, sample_weight: Weight = None, adjusted: Adjusted = False):
    "Mean of the recalls of all classes"


@_sklearn('brier_score_loss', activation='softmax', flatten=False)
def BrierScore(axis: Axis = -1, sample_weight: Weight = None):
    "Mean squared error of the probabilities of single-label problems (not, as in fastai, of the class predicted)"


@_sklearn('cohen_kappa_score')
def CohenKappa(axis: Axis = -1, labels: Labels = None, weights: KappaWeights = None, sample_weight: Weight = None):
    "Agreement of prediction and target beyond chance, Cohen's kappa"


@_sklearn('f1_score')
def F1Score(axis: Axis = -1, labels: Labels = None, pos_label: PosLabel = 1, average: Average = 'binary',
            sample_weight: Weight = None):
    "Harmonic mean of precision and recall"


@_sklearn('fbeta_score')
def FBeta(beta: Beta, axis: Axis = -1, labels: Labels = None, pos_label: PosLabel = 1, average: Average = 'binary',
          sample_weight: Weight = None):
    "Weighted harmonic mean of precision and recall"


@_sklearn('hamming_loss')
def HammingLoss(axis: Axis = -1, sample_weight: Weight = None):
    "Share of items predicted wrongly"


@_sklearn('jaccard_score')
def Jaccard(axis: Axis = -1, labels: Labels = None, pos_label: PosLabel = 1, average: Average = 'binary',
            sample_weight: Weight = None):
    "Intersection over union of the items predicted and the items of a class"


@_sklearn('matthews_corrcoef')
def MatthewsCorrCoef(sample_weight: Weight = None, axis: Axis = -1):
    "Matthews correlation coefficient"


@_sklearn('precision_score')
def Precision(axis: Axis = -1, labels: Labels = None, pos_label: PosLabel = 1, average: Average = 'binary',
              sample_weight: Weight = None):
    "Share of the items predicted as a class that are of it"


@_sklearn('recall_score')
def Recall(axis: Axis = -1, labels: Labels = None, pos_label: PosLabel = 1, average: Average = 'binary',
           sample_weight: Weight = None):
    "Share of the items of a class that are predicted as it"


@_sklearn('roc_auc_score', activation='softmax', flatten=False)
def RocAuc(axis: Axis = -1, average: Average = 'macro', sample_weight: Weight = None, max_fpr: MaxFpr = None,
           multi_class: MultiClass = 'ovr'):
    "Area under the ROC curve of single-label problems with three classes or more"


@_sklearn('roc_auc_score', activation='binarysoftmax')
def RocAucBinary(axis: Axis = -1, average: Average = 'macro', sample_weight: Weight = None, max_fpr: MaxFpr = None,
                 multi_class: MultiClass = 'raise'):
    "Area under the ROC curve of a binary problem with two scores an item"


# ---- multi-label problems: a score a label, targets are 0 or 1 for each

@_sklearn('average_precision_score', is_class=False, flatten=False)
def APScoreMulti(sigmoid: Sigmoid = True, average: Average = 'macro', pos_label: PosLabel = 1,
                 sample_weight: Weight = None):
    "Average precision of multi-label problems"


@_sklearn('brier_score_loss', is_class=False)
def BrierScoreMulti(sigmoid: Sigmoid = True, sample_weight: Weight = None, pos_label: PosLabel = None):
    "Mean squared error of the probabilities of all labels together"


@_sklearn('f1_score', flatten=False)
def F1ScoreMulti(thresh: Thresh = 0.5, sigmoid: Sigmoid = True, labels: Labels = None, pos_label: PosLabel = 1,
                 average: Average = 'macro', sample_weight: Weight = None):
    "Harmonic mean of precision and recall of multi-label problems"


@_sklearn('fbeta_score', flatten=False)
def FBetaMulti(beta: Beta, thresh: Thresh = 0.5, sigmoid: Sigmoid = True, labels: Labels = None,
               pos_label: PosLabel = 1, average: Average = 'macro', sample_weight: Weight = None):
    "Weighted harmonic mean of precision and recall of multi-label problems"


@_sklearn('hamming_loss', flatten=False)
def HammingLossMulti(thresh: Thresh = 0.5, sigmoid: Sigmoid = True, sample_weight: Weight = None):
    "Share of labels predicted wrongly"


@_sklearn('jaccard_score', flatten=False)
def JaccardMulti(thresh: Thresh = 0.5, sigmoid: Sigmoid = True, labels: Labels = None, pos_label: PosLabel = 1,
                 average: Average = 'macro', sample_weight: Weight = None):
    "Intersection over union of labels predicted and labels given, of multi-label problems"


@_sklearn('matthews_corrcoef')
def MatthewsCorrCoefMulti(thresh: Thresh = 0.5, sigmoid: Sigmoid = True, sample_weight: Weight = None):
    "Matthews correlation coefficient of all labels together"


@_sklearn('precision_score', flatten=False)
def PrecisionMulti(thresh: Thresh = 0.5, sigmoid: Sigmoid = True, labels: Labels = None, pos_label: PosLabel = 1,
                   average: Average = 'macro', sample_weight: Weight = None):
    "Precision of multi-label problems"


@_sklearn('recall_score', flatten=False)
def RecallMulti(thresh: Thresh = 0.5, sigmoid: Sigmoid = True, labels: Labels = None, pos_label: PosLabel = 1,
                average: Average = 'macro', sample_weight: Weight = None):
    "Recall of multi-label problems"


@_sklearn('roc_auc_score', is_class=False, flatten=False)
def RocAucMulti(sigmoid: Sigmoid = True, average: Average = 'macro', sample_weight: Weight = None,
                max_fpr: MaxFpr = None):
    "Area under the ROC curve of multi-label problems"


# ---- values

@_sklearn('r2_score', is_class=False)
def R2Score(sample_weight: Weight = None):
    "Coefficient of determination, over all elements"


@_sklearn('explained_variance_score', is_class=False)
def ExplainedVariance(sample_weight: Weight = None):
    "Share of the targets' variance that the predictions explain, over all elements"


def pearsonr(pred, targ): return optional('scipy.stats', 'PearsonCorrCoef', 'scipy').pearsonr(pred, targ).statistic


class PearsonCorrCoef(AccumMetric):
    "Pearson correlation of predictions and targets, over all elements"
    def __init__(self,
        dim_argmax: int|None = None,  # see `AccumMetric`
        activation: str = 'no',       # see `AccumMetric`
        thresh: float|None = None,    # see `AccumMetric`
    ):
        optional('scipy.stats', 'PearsonCorrCoef', 'scipy')  # now rather than after an epoch
        super().__init__(pearsonr, dim_argmax, activation, thresh, to_np=True)
        self.greater_is_better = True


def spearmanr(pred, targ, **kwargs):
    return optional('scipy.stats', 'SpearmanCorrCoef', 'scipy').spearmanr(pred, targ, **kwargs).statistic


class SpearmanCorrCoef(AccumMetric):
    "Spearman correlation (of ranks) of predictions and targets, over all elements"
    def __init__(self,
        dim_argmax: int|None = None,    # see `AccumMetric`
        nan_policy: str = 'propagate',  # what a NaN does: 'propagate', 'omit' or 'raise'
        activation: str = 'no',         # see `AccumMetric`
        thresh: float|None = None,      # see `AccumMetric`
    ):
        optional('scipy.stats', 'SpearmanCorrCoef', 'scipy')
        super().__init__(spearmanr, dim_argmax, activation, thresh, to_np=True, nan_policy=nan_policy)
        self.greater_is_better = True
