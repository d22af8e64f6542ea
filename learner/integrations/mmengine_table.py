"""What MMEngine's Runner and hooks do, and the line that does it with a Learner: `counterparts()`.

What the names in these lines stand for, its docstring says."""
from ..display import show_table

__all__ = ['counterparts', 'sections', 'not_planned']

sections = {
    'Sites': {
        'before_run, after_run': 'learn.validate(cbs=Callback(before_fit=f, cleanup_fit=f))  # a fit has them too',
        'before_train, after_train': 'learn.fit(1, cbs=Callback(before_fit=f, after_fit=f))',
        'before_train_epoch, after_train_epoch': 'learn.fit(1, cbs=Callback(before_train=f, after_train=f))',
        'before_train_iter, after_train_iter':
            'learn.fit(1, cbs=Callback(before_batch=f, after_pred=f, after_loss=f, after_step=f, after_batch=f))',
        'before_val, before_val_epoch': 'learn.add_cb(Callback(before_validate=f))',
        'after_val_epoch(metrics), after_val':
            "learn.add_cb(Callback(after_validate=lambda cb: print(cb.recorder.row['valid_loss'])), order='LOW')",
        'before_val_iter, after_val_iter': 'learn.add_cb(Callback(after_batch=lambda cb: cb.training or f(cb)))',
        'the sites of a test': 'learn.test(valid_dl)',
        'before_save_checkpoint': "learn.add_cb(Callback(before_save=lambda cb, state: state.update(dataset='v3')))",
        'after_load_checkpoint': "learn.add_cb(Callback(before_load=lambda cb, state: state['model'].pop('old', 0)))",
        "runner.call_hook('after_render')": "declare_event('after_render'); learn('after_render')",
        '_before_iter(mode), _after_iter(mode)':
            'learn.add_cb(Callback(before_batch=lambda cb: print(cb.learn.stage)))',
        'every_n_epochs, every_n_train_iters':
            "due = Every('10it'); learn.add_cb(Callback(after_batch=lambda cb: due.at_step(cb.learn) and f(cb)))",
        'end_of_epoch': 'learn.add_cb(Callback(after_batch=lambda cb: cb.iter+1 == cb.n_iter and f(cb)))',
        'is_last_train_iter':
            'learn.add_cb(Callback(after_batch=lambda cb: cb.training and cb.pct_train == 1 and f(cb)))',
        'is_last_train_epoch': 'learn.add_cb(Callback(before_epoch=lambda cb: cb.epoch+1 == cb.n_epoch and f(cb)))',
        'train_loop.stop_training': 'learn.fit(9, cbs=Callback(after_batch=stop))  # at once; other cancels end less',
    },
    'Hooks and their order': {
        "MMEngine's own hook": 'learn.fit(1, cbs=as_callback(hook))',
        'priority': "learn.add_cb(Callback(after_batch=f), order='VERY_LOW')",
        'default_hooks': 'Learner(learn.dls, model, loss_func, default_cbs=dict(progress=None, timer=Timer))',
        'two hooks of a kind': 'learn.add_cb(EMA())  # a second one is refused',
        'custom_hooks, register_hook': 'learn.add_cb(EMA()); learn.fit(1, cbs=GradientClip(1.))',
        'get_hooks_info': 'learn.show_training_loop()',
        'a hook that switches the pipeline': 'learn.fit(2, cbs=SwitchAt(-1, do=lambda learn: None))',
        'a hook that keeps BatchNorm in eval': 'learn.fit(1, cbs=BnFreeze())',
    },
    'What is told': {
        'MessageHub, HistoryBuffer': "learn.note('my/number', 3.); learn.recorder['my/number'].mean(10)",
        'RuntimeInfoHook': "learn.fit(1); learn.recorder['loss'].mean(10), learn.recorder['lr'].current()",
        'IterTimerHook': 'learn.fit(1, cbs=Timer())',
        'LoggerHook, LogProcessor': 'learn.fit(1, cbs=[IterLogger(10, window=10), CSVLogger()])',
        'Visualizer and its backends': "learn.fit(1, cbs=ScalarLogger('scalars.jsonl'))  # or a function",
        'several losses in a dict':
            'learn.loss_func = lambda pred, y: dict(l2=loss_func(pred, y), l1=mean_abs(pred, y))',
        'NaiveVisualizationHook': 'learn.show_results()',
        'ProfilerHook': 'learn.fit(1, cbs=ProfilerCallback(wait=1, warmup=1, active=2))',
    },
    'Files': {
        'CheckpointHook(interval=2, save_begin=1)': "learn.fit(1, cbs=Checkpoint(Every('2ep', begin=1)))",
        'CheckpointHook(max_keep_ckpts=3, save_last=True)': "learn.fit(1, cbs=Checkpoint('1ep', keep=3, at_end=True))",
        "CheckpointHook(save_best=['a', 'b'])": "learn.fit(1, cbs=Checkpoint(monitor=['valid_loss', 'mean_abs']))",
        'CheckpointHook(published_keys=…)': "learn.create_opt(); learn.publish('net', keys=['opt', 'meta'])",
        'last_checkpoint, resume=True': 'learn.fit(2, cbs=Checkpoint(), resume=True)',
        'what a checkpoint holds': "learn.load_state(learn.save_state('run'))",
        'resume in the midst of an epoch': "learn.fit(2, cbs=Checkpoint('1it'), resume=True)",
        'load_from, strict, revise_keys':
            "learn.load(learn.save('net'), strict=False, rename={r'^backbone\\.|^': ''})",
        'experiment name, versions, time':
            "learn.meta['name'] = 'first'; checkpoint_meta(learn.save_state('run'))",
    },
    'Other hooks': {
        'EMAHook(momentum=1e-3, interval=2)':
            "learn.fit(1, cbs=EMA(1-1e-3, every=2, warmup=False))  # start='1ep', buffers='average'",
        'EMAHook(StochasticWeightAverage)': "learn.fit(2, cbs=SWA(start='1ep'))",
        'EMAHook(MomentumAnnealingEMA)': 'learn.fit(1, cbs=EMA(1-1e-3, warmup=True))  # the default',
        'EarlyStoppingHook': 'learn.fit(1, cbs=EarlyStoppingCallback(min_delta=.1, patience=5, check_finite=True))',
        'EmptyCacheHook': 'EmptyCacheCallback(after_epoch=True)',
        'SyncBuffersHook': 'learn.fit(1, cbs=SyncBuffersCallback())',
        'DistSamplerSeedHook': 'learn.fit(2)  # every fit tells samplers the number of the epoch',
        'PrepareTTAHook, BaseTTAModel': "learn.tta(augs=[lambda x: x, lambda x: -x], merge='mean')",
    },
    'Loops': {
        'EpochBasedTrainLoop': 'learn.fit(2)',
        'IterBasedTrainLoop, InfiniteSampler': 'learn.fit_iters(5)',
        'val_interval, val_begin': "learn.fit(2, cbs=ValidateEvery(Every('2ep', begin=1), first=False))",
        'dynamic_intervals': "learn.fit_iters(8, cbs=ValidateEvery('4it', schedule=[(4, 2)], first=False))",
        'num_batch_per_epoch': 'learn.fit(1, cbs=ShortEpochCallback(n=1))',
        'several validation sets': 'DataLoaders(train_dl, dict(near=valid_dl, far=valid_dl))',
        'ValLoop(fp16=True)': 'learn.to_bf16().validate()',
        'Evaluator, BaseMetric': 'learn.validate(metrics=AvgMetric(mean_abs))',
        'data_preprocessor': 'learn.add_cb(before_batch_cb(lambda cb, xb, yb: (xb, yb)))',
    },
    'Optimizers and schedules': {
        'param_scheduler, a list of them':
            "learn.fit(2, cbs=[ParamScheduler({'lr': SchedLin(0., .1)}, end=.3), "
            "ParamScheduler({'lr': SchedCos(.1, 0.)}, begin=.3)])",
        'StepLR, MultiStepLR, ExponentialLR, PolyLR …':
            'learn.fit(2, cbs=partial(optim.lr_scheduler.MultiStepLR, milestones=[1]))',
        'CosineRestartLR': "learn.fit(2, cbs=ParamScheduler({'lr': cos_restarts(.1, 0., 2)}))",
        'ReduceOnPlateauLR': 'learn.fit(1, cbs=ReduceLROnPlateau(patience=2, cooldown=1))',
        'convert_to_iter_based': "learn.fit(2, cbs=TorchScheduler(optim.lr_scheduler.CosineAnnealingLR, by='step'))",
        'optim_wrapper.param_groups, get_lr':
            "learn.create_opt(); learn.opt.set_hyper('lr', .01); learn.opt.opt.param_groups",
        'AmpOptimWrapper': "learn.fit(1, cbs=MixedPrecision('bf16'))",
        'accumulative_counts': "learn.fit(1, cbs=GradientAccumulation(2, 'batches'))",
        'clip_grad, and the norm in the log':
            'learn.add_cb(GradientClip(1., norm_type=2.)); learn.fit(1); learn.gradient_clip.grad_norms',
        'paramwise_cfg': "Learner(learn.dls, model, loss_func, param_opts={'*.bias': dict(wd=0, lr_mult=2)})",
        'OptimWrapperDict': "learn.fit(1, cbs=TakeTurns([Turn('0', loss_func), Turn('1', loss_func)]))",
        'auto_scale_lr': 'learn.scaled_lr(.1, base_bs=256)',
    },
    'Around it': {
        'randomness': 'set_seed(0, reproducible=True)',
        'init_weights': 'apply_init(model)',
        'cfg.compile': 'learn.compile()',
        'activation_checkpointing': 'learn.add_cb(ActivationCheckpointing(nn.Linear))',
        'strategies: DDP': 'Learner(learn.dls, nn.parallel.DistributedDataParallel(model), loss_func).fit(1)',
    },
}
not_planned = {
    'Config, Registry': 'code is the configuration; `learn.meta` notes in checkpoints what a run was made with',
    'strategies: DeepSpeed, ColossalAI': 'they are frameworks of their own, which make and own the training step',
}


def counterparts(
    find: str = '',  # only what has this in its row, whether in capitals or not; '': all
) -> None:
    """Show a table: each thing of MMEngine's, with the line that does it here, or why there is none

    In the lines `learn` is a Learner of `model` and `loss_func` on `train_dl` and `valid_dl`, `f` and `stop` are
    functions of the callback, of which `stop` raises CancelFitException, `hook` is one of MMEngine's, and `mean_abs` a
    metric.
    Raises: ValueError if no row has it."""
    tables = {**sections, 'Not planned': not_planned}
    found = {title: [row for row in rows.items() if find.lower() in ' '.join(row).lower()]
             for title, rows in tables.items()}
    if not any(found.values()): raise ValueError(
        f"counterparts: no row has {find!r} in it; `counterparts()` shows all of them")
    for title, rows in found.items():
        if rows: show_table(['MMEngine', 'Learner'], rows, title)
