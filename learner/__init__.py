"""A training loop for PyTorch: a fastai-style Learner with exception-driven callbacks.

`from learner import Learner`, or `from learner.all import *` in a notebook. To read the code, begin with events.py,
callback.py and learner.py; host.py runs the callbacks, each file in callbacks/ is one feature."""
from .events import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelException,
                     CancelFitException, CancelStepException, CancelTrainException, CancelValidException, declare_event,
                     event, event_names)
from .callback import Callback, TrainEvalCallback, before_batch_cb
from .order import CallbackOrderError, sort_by_run
from .host import default_callbacks
from .learner import Learner
from .data import DataLoaders
from .optim import (QHAdam, SGD, Adadelta, Adagrad, Adam, Adamax, Lamb, Larc, Lookahead, NAdam, Optimizer, OptimWrapper,
                    RAdam, RMSProp, params, ranger, trainable_params)
from .splitters import default_split, split_blocks, split_patterns
from .losses import (BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, FocalLossFlat, L1LossFlat,
                     LabelSmoothingCrossEntropy, LabelSmoothingCrossEntropyFlat, MSELossFlat)
from .metrics import (AccumMetric, ActivationType, AvgLoss, AvgMetric, Dice, DiceMulti, JaccardCoeff, JaccardCoeffMulti,
                      Metric, Perplexity, TorchMetric, ValueMetric, accuracy, accuracy_multi, error_rate, exp_rmspe,
                      foreground_acc, mae, mk_metric, mse, msle, perplexity, rmse, top_k_accuracy)
from .skmetrics import (APScoreBinary, APScoreMulti, BalancedAccuracy, BrierScore, BrierScoreMulti, CohenKappa,
                        ExplainedVariance, F1Score, F1ScoreMulti, FBeta, FBetaMulti, HammingLoss, HammingLossMulti,
                        Jaccard, JaccardMulti, MatthewsCorrCoef, MatthewsCorrCoefMulti, PearsonCorrCoef, Precision,
                        PrecisionMulti, R2Score, Recall, RecallMulti, RocAuc, RocAucBinary, RocAucMulti,
                        SpearmanCorrCoef, skm_to_fastai)
from .callbacks.recorder import Recorder, Row
from .callbacks import readings as readings, testing as testing
from .callbacks.scalar_log import ScalarLogger
from .scalars import Scalars
from .meta import checkpoint_meta
from .callbacks.csv_logger import CSVLogger
from .callbacks.progress import ProgressCallback, ShowGraphCallback
from .callbacks.schedule import ParamScheduler, Scheduler
from .callbacks import fits as fits, preview as preview  # they add methods to the Learner
from .callbacks.torch_schedule import TorchScheduler
from .callbacks.lr_find import LRFinder, minimum, slide, steep, valley
from .callbacks.finetune import BnFreeze, FreezeUntil
from .callbacks.tracker import EarlyStoppingCallback, SaveModelCallback, TerminateOnNaNCallback, TrackerCallback
from .callbacks.training import GradientAccumulation, GradientClip
from .callbacks.averaging import EMA
from .callbacks.memory import EmptyCacheCallback
from .callbacks.switch import SwitchAt
from .callbacks.sync_buffers import SyncBuffersCallback
from .callbacks.regularize import L1
from .callbacks.precision import MixedPrecision
from .callbacks.channels import ChannelsLast
from .callbacks.compile import Compiled
from .callbacks.recompute import ActivationCheckpointing
from .callbacks.swa import SWA
from .hooks import Hook, Hooks, find_modules, hook_input, hook_inputs, hook_output, hook_outputs
from .callbacks.hook import HookCallback
from .callbacks.stats import ActivationStats, GradientStats
from .callbacks import batch_size as batch_size, doctor as doctor, rehearse as rehearse, results as results
from .callbacks.collect import CollectDataCallback, FetchPredsCallback
from .callbacks.turns import TakeTurns, Turn
from .callbacks.mixup import CutMix, MCDropout, MixHandler, MixUp, ProgressiveResize
from .callbacks.rnn import ModelResetter, RNNCallback, RNNRegularizer, rnn_cbs
from .callbacks.preds import GatherPredsCallback, Preds
from .callbacks import predict as predict
from .exported import Exported, load_exported
from .interpret import ClassificationInterpretation, Interpretation, RegressionInterpretation
from .pickled import load_learner
from . import export as export, publish as publish
from .callbacks.plateau import ReduceLROnPlateau
from .callbacks import iterations as iterations
from .callbacks.validate_every import ValidateEvery
from .callbacks.iter_log import DebugInfo, IterLogger
from .callbacks.control import ShortEpochCallback, SkipToEpoch, TimeLimit
from .callbacks.profile import ProfilerCallback, Timer
from . import resampled as resampled
from .callbacks.summary import Summary, layer_info
from .layers import (Module, ParameterModule, children_and_parameters, flatten_model, has_params, requires_grad,
                     set_bn_eval, total_params)
from .sizes import dummy_eval, in_channels, model_sizes, num_features_model
from .every import Every
from .files import DamagedFile
from .callbacks.checkpoint import Checkpoint
from .callbacks import resume as resume, save as save, saved_state as saved_state
from .solver import Solver, Tested
from .solver_param import SolverParam
from .callbacks.signals import SignalCallback
from .models import xresnet18, xresnet34, xresnet50
from .transfer import (AdaptiveConcatPool2d, apply_init, create_body, create_head, has_pool_type, init_head)
from .callbacks.show import outline
from .display import Live, new_live, set_display, show_table
from .pictures import draw_items
from .plot import plot_hypers, plot_loss, plot_lr_find
from .schedules import (SchedCos, SchedExp, SchedLin, SchedNo, SchedPoly, combine_scheds, combined_cos, cos_restarts,
                        policy_cos_restarts, policy_exp, policy_fixed, policy_inv, policy_multistep, policy_poly,
                        policy_sigmoid, policy_step, policy_warmup, three_phase_cos)
from .utils import replacing, set_seed

__all__ = [
    'CancelException', 'CancelFitException', 'CancelEpochException', 'CancelTrainException', 'CancelValidException',
    'CancelBatchException', 'CancelBackwardException', 'CancelStepException', 'event', 'event_names', 'declare_event',
    'Callback', 'TrainEvalCallback', 'before_batch_cb', 'sort_by_run', 'CallbackOrderError', 'Learner',
    'default_callbacks', 'DataLoaders',
    'Optimizer', 'SGD', 'RMSProp', 'Adam', 'RAdam', 'NAdam', 'Adagrad', 'Adadelta', 'Adamax', 'OptimWrapper', 'QHAdam',
    'Larc', 'Lamb', 'Lookahead', 'ranger', 'params', 'trainable_params',
    'CrossEntropyLossFlat', 'LabelSmoothingCrossEntropyFlat', 'LabelSmoothingCrossEntropy', 'FocalLossFlat',
    'BCEWithLogitsLossFlat', 'MSELossFlat', 'L1LossFlat', 'DiceLoss',
    'Metric', 'AvgMetric', 'AvgLoss', 'ValueMetric', 'AccumMetric', 'ActivationType', 'TorchMetric', 'mk_metric',
    'accuracy', 'error_rate', 'top_k_accuracy', 'accuracy_multi', 'foreground_acc', 'mse', 'mae', 'msle', 'rmse',
    'exp_rmspe', 'Dice', 'DiceMulti', 'JaccardCoeff', 'JaccardCoeffMulti', 'Perplexity', 'perplexity',
    'skm_to_fastai', 'APScoreBinary', 'BalancedAccuracy', 'BrierScore', 'CohenKappa', 'F1Score', 'FBeta', 'HammingLoss',
    'Jaccard', 'MatthewsCorrCoef', 'Precision', 'Recall', 'RocAuc', 'RocAucBinary', 'APScoreMulti', 'BrierScoreMulti',
    'F1ScoreMulti', 'FBetaMulti', 'HammingLossMulti', 'JaccardMulti', 'MatthewsCorrCoefMulti', 'PrecisionMulti',
    'RecallMulti', 'RocAucMulti', 'R2Score', 'ExplainedVariance', 'PearsonCorrCoef', 'SpearmanCorrCoef',
    'Recorder', 'Row', 'Scalars', 'ProgressCallback', 'ShowGraphCallback', 'CSVLogger', 'ScalarLogger', 'outline',
    'Scheduler', 'ParamScheduler', 'TorchScheduler', 'SchedLin', 'SchedCos', 'SchedNo', 'SchedExp', 'SchedPoly',
    'combine_scheds', 'combined_cos', 'three_phase_cos', 'cos_restarts', 'policy_fixed', 'policy_step', 'policy_exp',
    'policy_inv', 'policy_multistep', 'policy_poly', 'policy_sigmoid', 'policy_warmup', 'policy_cos_restarts',
    'TrackerCallback', 'SaveModelCallback', 'EarlyStoppingCallback', 'GradientClip',
    'GradientAccumulation', 'L1', 'EMA', 'SWA', 'MixedPrecision', 'ChannelsLast', 'Compiled', 'ActivationCheckpointing',
    'SwitchAt', 'EmptyCacheCallback', 'SyncBuffersCallback',
    'Every', 'Checkpoint', 'SignalCallback', 'DamagedFile', 'checkpoint_meta',
    'Hook', 'Hooks', 'hook_output', 'hook_outputs', 'hook_input', 'hook_inputs', 'find_modules', 'HookCallback',
    'ValidateEvery', 'IterLogger', 'DebugInfo', 'ShortEpochCallback', 'TimeLimit', 'SkipToEpoch',
    'Timer', 'ProfilerCallback',
    'CollectDataCallback', 'FetchPredsCallback', 'GatherPredsCallback', 'Preds', 'TakeTurns', 'Turn',
    'MixHandler', 'MixUp', 'CutMix', 'MCDropout', 'ProgressiveResize', 'ModelResetter', 'RNNCallback', 'RNNRegularizer',
    'rnn_cbs', 'ReduceLROnPlateau', 'TerminateOnNaNCallback',
    'Solver', 'SolverParam', 'Tested',
    'Exported', 'load_exported', 'load_learner', 'Interpretation', 'ClassificationInterpretation',
    'RegressionInterpretation', 'draw_items',
    'ActivationStats', 'GradientStats', 'Summary', 'layer_info', 'Module', 'ParameterModule', 'has_params',
    'requires_grad', 'total_params', 'children_and_parameters', 'flatten_model', 'set_bn_eval', 'dummy_eval',
    'in_channels', 'model_sizes', 'num_features_model',
    'LRFinder', 'valley', 'steep', 'minimum', 'slide', 'FreezeUntil', 'BnFreeze',
    'default_split', 'split_blocks', 'split_patterns', 'create_body', 'create_head', 'has_pool_type', 'apply_init',
    'init_head', 'AdaptiveConcatPool2d', 'xresnet18', 'xresnet34', 'xresnet50',
    'Live', 'new_live', 'set_display', 'show_table', 'plot_loss', 'plot_hypers',
    'plot_lr_find', 'replacing', 'set_seed']

__version__ = '0.1.0'
default_callbacks.update(recorder=Recorder, progress=ProgressCallback)
