"""MMEngine's hooks in a Learner: when their methods are called, with what, and in which order."""
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.swa import SWA
from learner.integrations.mmengine import as_callback, priority_order
from learner.metrics import mae
from tests.helpers import synth_learner
from tests.mmengine_helpers import All, EMAHook, Hook, Priority, StopHook, SwitchHook, places


def phase(mode, n, e, i, step):  # of MMEngine's loop: `n` batches from iteration `i` on, `step` by each
    epoch, iters = [(f'before_{mode}_epoch', e, i)], []
    for k in range(n): iters += [(f'before_{mode}_iter', e, i+k*step), (f'after_{mode}_iter', e, i+k*step)]
    rows = [*epoch, *iters, (f'after_{mode}_epoch', e, i+n*step)]
    return rows if mode == 'train' else [(f'before_{mode}', e, i), *rows, (f'after_{mode}', e, i)]


def test_order_of_sites_in_a_fit():
    "All sites of training and validation come as in MMEngine's runner, with its numbers of epoch and iteration"
    hook = All()

    synth_learner(cbs=as_callback(hook), n=2, n_valid=1).fit(2)

    assert places(hook.seen) == [
        ('before_run', 0, 0), ('before_train', 0, 0), *phase('train', 2, 0, 0, 1), *phase('val', 1, 1, 2, 0),
        *phase('train', 2, 1, 2, 1), *phase('val', 1, 2, 4, 0), ('after_train', 2, 4), ('after_run', 2, 4)]


@pytest.mark.parametrize('stage, mode', [('valid', 'val'), ('test', 'test')])
def test_order_of_sites_in_an_evaluation(stage, mode):
    "`learn.validate()` and a test call those of validation or test, at the place where training has ended"
    hook = All()
    learn = synth_learner(cbs=as_callback(hook), n=2, n_valid=1)
    learn.fit(1)
    hook.seen.clear()

    learn.validate(dl=learn.dls.valid.dl if stage == 'test' else None)

    assert places(hook.seen) == [('before_run', 1, 2), *phase(mode, 1, 1, 2, 0), ('after_run', 1, 2)]


def test_order_of_sites_in_fit_iters():
    "A fit by steps is the iteration-based loop: one epoch, and iterations that are counted through"
    hook = All()

    synth_learner(cbs=as_callback(hook), n=2, n_valid=0).fit_iters(3)

    assert places(hook.seen) == [('before_run', 0, 0), ('before_train', 0, 0), *phase('train', 3, 0, 0, 1),
                                 ('after_train', 0, 3), ('after_run', 0, 3)]
    assert [row[3]['batch_idx'] for row in hook.seen if row[0] == 'before_train_iter'] == [0, 1, 2]


def test_each_site_is_called_on_all_hooks_before_the_next_one():
    "Also where two sites come at one event"
    seen = []
    learn = synth_learner(cbs=[as_callback(All(seen, 'a')), as_callback(All(seen, 'b'))], n=1)

    learn.fit(1)

    assert [s for s, label in seen if label == 'a'] == [s for s, label in seen if label == 'b']
    assert [label for _, label in seen] == ['a', 'b']*(len(seen)//2)


@pytest.mark.parametrize('mode', ['train', 'val'])
def test_arguments_of_batches(mode):
    "Hooks get the batch as the loader gives it, what came of it, and the number of the batch in its phase"
    batches, hook = [], All()
    class Batches(list):
        def __iter__(self):
            for b in super().__iter__():
                batches.append(b)
                yield b
    data = Batches([{'x': torch.randn(4, 1), 'label': torch.randn(4, 1)} for _ in range(2)])
    learn = synth_learner(cbs=as_callback(hook), dls=(data, data))
    batches.clear()

    learn.fit(1)

    rows = [row[3] for row in hook.seen if row[0] == f'after_{mode}_iter']
    given = batches[:2] if mode == 'train' else batches[2:]
    assert [row['batch_idx'] for row in rows] == [0, 1]
    assert all(row['data_batch'] is b for row, b in zip(rows, given, strict=True))
    if mode == 'val': assert all(row['outputs'].shape == (4, 1) for row in rows)
    else: assert [row['outputs']['loss'].item() for row in rows] == learn.recorder.raw_losses


def test_parts_of_the_loss_are_outputs():
    "A loss that is a dict gives its parts, as MMEngine's `log_vars` do"
    hook = All()
    def loss(pred, targ): return dict(a=(pred-targ).square().mean(), b=pred.abs().mean())

    synth_learner(cbs=as_callback(hook), n=1, loss_func=loss).fit(1)

    outputs = next(row[3]['outputs'] for row in hook.seen if row[0] == 'after_train_iter')
    assert outputs.keys() == {'loss', 'a', 'b'} and outputs['loss'] == outputs['a']+outputs['b']


@pytest.mark.parametrize('priority', ['LOWEST', 'VERY_HIGH'])
def test_metrics_are_those_of_the_pass(priority):
    "`after_val_epoch` gets loss and metrics by name, whether it comes before the Recorder or after it"
    hook = All()
    def mae(pred, targ): return (pred-targ).abs().mean()
    learn = synth_learner(cbs=as_callback(hook, priority), metrics=mae)

    learn.fit(1)

    metrics = next(row[3]['metrics'] for row in hook.seen if row[0] == 'after_val_epoch')
    assert metrics == dict(zip(['valid_loss', 'mae'], learn.final_record[1:]))


# ---- order

@pytest.mark.parametrize('priority, order', [
    ('HIGHEST', -100), ('very_low', 90), (Priority.VERY_LOW, 90), (0, -100), (10, -50), (20, -35), (45, -2.5), (50, 0),
    (100, 100)])
def test_priorities(priority, order):
    "A name, a number or an enum's member says where a hook stands, and numbers between names lie between"
    assert priority_order(priority) == order


@pytest.mark.parametrize('priority, error', [
    ('HIGHISH', ValueError), (101, ValueError), (-1, ValueError), (None, TypeError), (True, TypeError)])
def test_odd_priorities(priority, error):
    "Others are refused, naming the hook"
    class Odd(Hook): pass
    Odd.priority = priority
    with pytest.raises(error, match=r"`priority` of `Odd` is .*: give a number from 0 to 100, or one of HIGHEST"):
        as_callback(Odd())


def test_hooks_stand_among_the_learners_callbacks():
    "Hooks and callbacks act in one order, and a priority that is given wins over the class's"
    seen = []
    class Low(All): priority = 'LOW'
    class Mine(Callback):
        order = 'BELOW_NORMAL'
        def before_train(self): seen.append('mine')
    cbs = [as_callback(Low(seen, 'low')), Mine(), as_callback(All(seen, 'normal')), as_callback(Low(seen, 'first'), 0)]

    synth_learner(cbs=cbs, n=1, n_valid=0).fit(1)

    assert [row if row == 'mine' else row[1] for row in seen if row == 'mine' or row[0] == 'before_train_epoch'] == [
        'first', 'normal', 'mine', 'low']


def test_add_cb_with_an_order():
    "`learn.add_cb(cb, order=…)` takes MMEngine's names too"
    learn = synth_learner()
    for cb, order in (as_callback(All()), 'VERY_LOW'), (as_callback(StopHook()), 'HIGHEST'): learn.add_cb(cb, order)

    assert [type(cb.hook) for cb in learn.ordered if hasattr(cb, 'hook')] == [StopHook, All]


def test_register_hook():
    "A hook may add others: the argument wins over the class, equal ones come in the order of adding, all are listed"
    class Adds(Hook):
        def before_run(self, runner):
            for hook, priority in (All(), None), (StopHook(), 'HIGH'), (SwitchHook(1), 50):
                runner.register_hook(hook, priority=priority)
            self.hooks, self.info = runner.hooks, runner.get_hooks_info()
    hook = Adds()
    learn = synth_learner(cbs=as_callback(hook), n=1)

    learn.fit(1)

    assert [type(h) for h in hook.hooks] == [StopHook, Adds, All, SwitchHook]
    assert 'after_train_iter:\n  (-20) StopHook\n  (0) All' in hook.info
    assert learn.all_hook.hook.seen[0][0] == 'before_run' and isinstance(learn.stop_hook.hook, StopHook)


def test_config_dicts_are_refused():
    "`register_hook(dict(type=…))` needs a registry: the object is to be made"
    class Adds(Hook):
        def before_run(self, runner): runner.register_hook(dict(type='EMAHook'))

    with pytest.raises(TypeError, match=r"the hook is a config dict, \{'type': 'EMAHook'\}: make the object"):
        synth_learner(cbs=as_callback(Adds())).fit(1)


@pytest.mark.parametrize('hook, match', [(All, r'the hook is a class: write `All\(\)`'),
                                         (object(), r'a `object` is no hook: it has no method named like before_run')])
def test_what_is_no_hook(hook, match):
    "A class, or what has none of the methods, is refused"
    with pytest.raises(TypeError, match=match): as_callback(hook)


def test_anything_with_the_methods_is_a_hook():
    "No base class is needed, and a generic method serves all modes"
    seen = []
    class Bare:
        def _before_epoch(self, runner, mode): seen.append(mode)
        def before_test_epoch(self, runner): seen.append('own')
    learn = synth_learner(cbs=as_callback(Bare()))

    learn.fit(1)
    learn.validate(dl=learn.dls.valid.dl)

    assert seen == ['train', 'val', 'own']


def test_points_of_ones_own():
    "`runner.call_hook` calls any method of all hooks that have it"
    seen = []
    class Calls(Hook):
        def after_train_epoch(self, runner): runner.call_hook('after_render', image=3)
    class Renders(Hook):
        def after_render(self, runner, image): seen.append((runner.epoch, image))

    synth_learner(cbs=[as_callback(Calls()), as_callback(Renders())]).fit(1)

    assert seen == [(0, 3)]


# ---- what is refused, and what a test is

class NormHook(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None): pass

class LoggerHook(NormHook): pass

class MyEMAHook(EMAHook): pass


@pytest.mark.parametrize('hook, error, match', [
    (LoggerHook(), ValueError, 'a `LoggerHook` works on what only MMEngine.s Runner has; in a Learner it is IterLogg'),
    ([NormHook()], TypeError, r'as_callback takes one hook: `\[\*map\(as_callback, hooks\)\]`')],
    ids=['logger', 'list'])
def test_what_as_callback_refuses(hook, error, match):
    "What cannot work is told before there is a fit, with what does"
    with pytest.raises(error, match=match): as_callback(hook)

def test_a_bare_hook():
    "A hook among callbacks is no callback, and the error says what makes it one"
    with pytest.raises(TypeError, match=r'or `as_callback\(hook\)` of learner.integrations.mmengine'):
        synth_learner(cbs=NormHook())

@pytest.mark.parametrize('hook', [EMAHook(), MyEMAHook()], ids=['own', 'derived'])
@pytest.mark.parametrize('cb', [EMA, SWA])
def test_two_averages(hook, cb):
    "An EMAHook beside EMA or SWA is refused before training: each would evaluate with the other's average"
    learn = synth_learner(cbs=cb)

    with pytest.raises(ValueError, match='both put averages into the model'): learn.fit(1, cbs=as_callback(hook))

    assert learn.n_step == 0

def test_metrics_of_a_test():
    "In `learn.test` the columns are called as in its row"
    class Sees(Hook):
        def after_test_epoch(self, runner, metrics=None): self.seen = metrics
    learn = synth_learner(cbs=as_callback(hook := Sees()), metrics=mae)

    row = learn.test(learn.dls.valid)

    assert hook.seen == dict(zip(row.names, row)) and [*row.names] == ['test_loss', 'mae']
