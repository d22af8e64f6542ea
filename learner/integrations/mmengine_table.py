"""What MMEngine's Runner and hooks do, and the line that does it with a Learner: `counterparts()`.

In the lines `learn` is a Learner, `model` and `loss_func` are its own, `train_dl` and `valid_dl` its loaders, `f` is a
function of the callback, and `mean_abs` one of predictions and targets."""
from typing import Any

from ..utils import optional

__all__ = ['counterparts', 'lines', 'not_planned']

lines = {
    # ---- sites
    'before_run, after_run': 'learn.validate(cbs=Callback(before_fit=f, cleanup_fit=f))',
    'before_train, after_train': 'learn.fit(1, cbs=Callback(before_fit=f, after_fit=f))',
    'before_train_epoch, after_train_epoch': 'learn.fit(1, cbs=Callback(before_train=f, after_train=f))',
    'before_train_iter, after_train_iter':
        'learn.fit(1, cbs=Callback(before_batch=f, after_pred=f, after_loss=f, after_step=f, after_batch=f))',
    'before_val, before_val_epoch, after_val_epoch(metrics), after_val':
        "learn.add_cb(Callback(after_validate=lambda cb: print(cb.recorder.row['valid_loss'])), order='LOW')",
    'before_val_iter, after_val_iter': 'learn.add_cb(Callback(after_batch=lambda cb: cb.training or f(cb)))',
    'the sites of a test': 'learn.test(valid_dl)',
    'before_save_checkpoint': "learn.add_cb(Callback(before_save=lambda cb, state: state.update(dataset='v3')))",
    'after_load_checkpoint': "learn.add_cb(Callback(before_load=lambda cb, state: state['model'].pop('old', None)))",
    "runner.call_hook('after_render')": "declare_event('after_render'); learn('after_render')",
    '_before_iter(mode), _after_iter(mode)': 'learn.add_cb(Callback(before_batch=lambda cb: print(cb.learn.stage)))',
    'every_n_epochs, every_n_train_iters': "learn.fit(1, cbs=Checkpoint(Every('2ep', begin=1)))",
    'end_of_epoch, is_last_train_epoch, is_last_train_iter':
        'learn.add_cb(Callback(after_batch=lambda cb: cb.learn.pct_train == 1 and f(cb)))',
    'train_loop.stop_training': 'learn.fit(9, cbs=Callback(after_batch=raise_cancel_fit))',
    # ---- hooks and their order
    'priority': "learn.add_cb(Callback(after_batch=f), order='VERY_LOW')",
    'default_hooks': 'Learner(learn.dls, model, loss_func, default_cbs=dict(progress=None, timer=Timer))',
    'two hooks of a kind': 'with raises(ValueError): learn.add_cbs([EMA(), EMA()])',
    'custom_hooks, register_hook': 'learn.add_cb(EMA()); learn.fit(1, cbs=GradientClip(1.))',
    'get_hooks_info': 'learn.show_training_loop()',
    "MMEngine's own hook": 'learn.fit(1, cbs=as_callback(hook))',
    # ---- what is told
    'RuntimeInfoHook, MessageHub': "learn.note('my/number', 3.); learn.recorder['my/number'].mean(10)",
    'IterTimerHook': 'learn.fit(1, cbs=Timer())',
    'LoggerHook, LogProcessor': 'learn.fit(1, cbs=[IterLogger(10, window=10), CSVLogger()])',
    'Visualizer backends': "learn.fit(1, cbs=ScalarLogger('scalars.jsonl'))",
    'several losses in a dict': 'learn.loss_func = lambda pred, y: dict(l2=loss_func(pred, y), l1=mean_abs(pred, y))',
    'NaiveVisualizationHook': 'learn.show_results()',
    'ProfilerHook': 'learn.fit(1, cbs=ProfilerCallback(wait=1, warmup=1, active=2))',
    # ---- files
    'CheckpointHook(interval=2, save_begin=1)': "learn.fit(1, cbs=Checkpoint(Every('2ep', begin=1)))",
    'CheckpointHook(max_keep_ckpts=3, save_last=True)': "learn.fit(1, cbs=Checkpoint('1ep', keep=3, at_end=True))",
    "CheckpointHook(save_best=['a', 'b'])": "learn.fit(1, cbs=Checkpoint(monitor=['valid_loss', 'mean_abs']))",
    'CheckpointHook(published_keys=…)': "learn.create_opt(); learn.publish('net', keys=['opt', 'meta'])",
    'last_checkpoint, resume=True': 'learn.fit(2, cbs=Checkpoint(), resume=True)',
    'what a checkpoint holds': "learn.load_state(learn.save_state('run'))",
    'resume in the midst of an epoch': "learn.fit(2, cbs=Checkpoint('1it'), resume=True)",
    'load_from, strict, revise_keys': "learn.load(learn.save('net'), strict=False, rename={r'^backbone\\.|^': ''})",
    'experiment name, versions, time': "learn.meta['name'] = 'first'; checkpoint_meta(learn.save_state('run'))",
    # ---- other hooks
    'EMAHook': "learn.fit(1, cbs=EMA(.999, start='1it', every=2, buffers='average'))",
    'EMAHook(StochasticWeightAverage)': "learn.fit(2, cbs=SWA(start='1ep'))",
    'EMAHook(MomentumAnnealingEMA)': 'learn.fit(1, cbs=EMA(.999, warmup=True))',
    'EarlyStoppingHook': 'learn.fit(1, cbs=EarlyStoppingCallback(patience=5, check_finite=True))',
    'EmptyCacheHook': 'EmptyCacheCallback(after_epoch=True)',
    'SyncBuffersHook': 'learn.fit(1, cbs=SyncBuffersCallback())',
    'DistSamplerSeedHook': 'learn.fit(2)',
    'PrepareTTAHook, BaseTTAModel': "learn.tta(augs=[lambda x: x, lambda x: -x], merge='mean')",
    'a hook that switches the pipeline': 'learn.fit(2, cbs=SwitchAt(-1, do=lambda learn: None))',
    # ---- loops
    'EpochBasedTrainLoop': 'learn.fit(2)',
    'IterBasedTrainLoop, InfiniteSampler': 'learn.fit_iters(5)',
    'val_interval, val_begin': "learn.fit(2, cbs=ValidateEvery(Every('2ep', begin=1), first=True, last=True))",
    'dynamic_intervals': "learn.fit_iters(8, cbs=ValidateEvery('4it', schedule=[(4, 2)]))",
    'num_batch_per_epoch': 'learn.fit(1, cbs=ShortEpochCallback(n=1))',
    'several validation sets': 'DataLoaders(train_dl, dict(near=valid_dl, far=valid_dl))',
    'ValLoop(fp16=True)': 'learn.to_bf16().validate()',
    'Evaluator, BaseMetric': 'learn.validate(metrics=AvgMetric(mean_abs))',
    'data_preprocessor': 'learn.add_cb(before_batch_cb(lambda cb, xb, yb: (xb, yb)))',
    # ---- optimizers
    'param_scheduler, a list of them':
        "learn.fit(2, cbs=[ParamScheduler({'lr': SchedLin(0., .1)}, end=.3), "
        "ParamScheduler({'lr': SchedCos(.1, 0.)}, begin=.3)])",
    'StepLR, MultiStepLR, ExponentialLR, PolyLR …':
        "learn.fit(2, cbs=partial(optim.lr_scheduler.MultiStepLR, milestones=[1]))",
    'CosineRestartLR': "learn.fit(2, cbs=ParamScheduler({'lr': cos_restarts(.1, 0., 2)}))",
    'ReduceOnPlateauLR': 'learn.fit(1, cbs=ReduceLROnPlateau(patience=2, cooldown=1))',
    'convert_to_iter_based': "learn.fit(2, cbs=TorchScheduler(optim.lr_scheduler.CosineAnnealingLR, by='step'))",
    'AmpOptimWrapper': "learn.fit(1, cbs=MixedPrecision('bf16'))",
    'accumulative_counts': "learn.fit(1, cbs=GradientAccumulation(2, 'batches'))",
    'clip_grad': "learn.fit(1, cbs=GradientClip(1., norm_type=2.))",
    'paramwise_cfg': "Learner(learn.dls, model, loss_func, param_opts={'*.bias': dict(wd=0, lr_mult=2)})",
    'OptimWrapperDict': "learn.fit(1, cbs=TakeTurns([Turn('0', loss_func), Turn('1', loss_func)]))",
    'auto_scale_lr': 'learn.scaled_lr(.1, base_bs=256)',
    # ---- around it
    'randomness': 'set_seed(0, reproducible=True)',
    'init_weights': 'apply_init(model)',
    'cfg.compile': 'learn.compile()',
    'activation_checkpointing': 'learn.add_cb(ActivationCheckpointing(nn.Linear))',
    'strategies: DDP': 'Learner(learn.dls, nn.parallel.DistributedDataParallel(model), loss_func).fit(1)',
}
not_planned = {
    'Config, Registry': "code is the configuration; `learn.meta` notes in checkpoints what a run was made with",
    'strategies: DeepSpeed, ColossalAI': "they are frameworks of their own, which make and own the training step",
}


def counterparts() -> Any:  # a pandas DataFrame
    "A row for each thing of MMEngine's, with the line that does it here, or why there is none"
    rows = [*lines.items(), *((k, f'not planned: {why}') for k, why in not_planned.items())]
    return optional('pandas', 'counterparts').DataFrame(rows, columns=['MMEngine', 'Learner'])
