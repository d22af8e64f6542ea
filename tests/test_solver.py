"""Solver: what happens when, as in Caffe; the events are those of the vectors."""
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from learner import DataLoaders, Learner, accuracy
from learner.solver import Solver

vectors = json.loads((Path(__file__).parent/'data'/'caffe_loop.json').read_text())
loops = {c['name']: c for c in vectors['loop']}
first_stop = next(name for name in loops if 'NO snapshot at all' in name)  # where a snapshot is made here


class Echo(nn.Module):
    "Its loss is what it is given"
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(()))
    def forward(self, x): return x + 0*self.w

class Recording(Solver):
    "Notes what it does"
    def __init__(self, *args, **kwargs):
        self.events = []
        super().__init__(*args, **kwargs)
        self.add_callback(lambda: self.note('on_start'), lambda: self.note('on_gradients_ready'))

    def note(self, what, more=''): self.events.append(f'{what}@{self.iter}{more}')

    def apply_update(self):
        super().apply_update()
        self.events.append(f'update->{self.iter+1}')

    def snapshot(self):
        self.note('snapshot')
        return super().snapshot()

    def test(self, i):
        n, found = self.param.test_iter[i], None
        try: return (found := super().test(i))
        finally: self.note(f'test{i}', f':{n}/{n}' if found else f':{self.test_batches}/{n} interrupted')

    def show(self, final=False): self.note('final display' if final else 'display', f':{self.smoothed_loss:g}')


def recording(path, **params):
    "On batches whose losses are 1, 2, 3 …"
    train = [(torch.tensor([float(i+1)]), torch.zeros(1)) for i in range(50)]
    sets = {str(i): [(torch.ones(1), torch.zeros(1))]*4 for i in range(len(params.get('test_iter', ())))}
    learn = Learner(DataLoaders(train, sets or None), Echo(), lambda pred, y: pred.mean(), path=path,
                    default_cbs=dict(progress=None))
    return Recording(learn, **{**dict(base_lr=.1, lr_policy='fixed'), **params})


@pytest.mark.parametrize('name', loops)
def test_events(tmp_path, name):
    "In Caffe's order, but that a stop in the first test is followed by a snapshot, if one is wanted at the end"
    params, n = {**loops[name]['params']}, [0]
    actions = params.pop('actions', {})
    solver = recording(tmp_path, **params)
    def action():
        n[0] += 1
        return actions.get(str(n[0]-1))
    solver.action_request = action

    solver.solve()

    expected = [*loops[name]['events']]
    if name == first_stop: expected.insert(1, 'snapshot@0')
    assert [*solver.events, 'stopped early' if solver.stopped else 'done'] == expected


# ---- numbers

updates = {c['name']: c for c in json.loads((Path(__file__).parent/'data'/'caffe_updates.json').read_text())['cases']}

class Weight(nn.Module):
    "(w - target)², with w = 3"
    def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.tensor(3., dtype=torch.float64))
    def forward(self, x): return (self.weight-x)**2

def mean(pred, y): return pred.mean()

@pytest.mark.parametrize('name', updates)
def test_updates(tmp_path, name):
    "Caffe's iterates of one weight to 1e-9, clipped ones to the vectors' precision too"
    case = updates[name]
    params = {k: v for k, v in case['params'].items() if k not in ('lr', 'lr_mult', 'decay_mult')}
    mults = {k: case['params'][f'{other}_mult'] for k, other in (('lr_mult', 'lr'), ('wd_mult', 'decay'))
             if f'{other}_mult' in case['params']}
    batches = [(torch.tensor([t], dtype=torch.float64), torch.zeros(1)) for t in case['targets']]
    learn = Learner((batches, None), Weight(), mean, path=tmp_path, default_cbs=dict(progress=None),
                    param_opts={'weight': mults})
    policy = dict(lr_policy='step', gamma=.1, stepsize=2) if 'step' in name else dict(lr_policy='fixed')
    solver = Solver(learn, base_lr=case['lr'][0], **policy, **params)
    seen = [3.]

    for _ in case['lr']:
        solver.step(1)
        seen.append(learn.model.weight.item())

    assert seen == pytest.approx(case['w'], abs=1e-9)

@pytest.mark.parametrize('case', vectors['smoothed_loss'], ids=str)
def test_smoothed_losses(tmp_path, case):
    "The mean of the last ones"
    solver, seen = recording(tmp_path, average_loss=case['average_loss']), []
    solver.learn.dls.train.dl = [(torch.tensor([float(v)]), torch.zeros(1)) for v in case['losses']]
    solver.add_callback(on_gradients_ready=lambda: seen.append(solver.smoothed_loss))

    solver.step(len(case['losses']))

    assert seen == pytest.approx(case['smoothed'])

def test_a_huge_first_loss_leaves_nothing(tmp_path):
    "The window's mean has no drift"
    solver, losses = recording(tmp_path, average_loss=20), [1e8, *torch.rand(200).tolist()]
    solver.learn.dls.train.dl = [(torch.tensor([v]), torch.zeros(1)) for v in losses]

    solver.step(201)

    assert solver.smoothed_loss == pytest.approx(sum(losses[-20:])/20, rel=1e-6)


# ---- a network

def digits_solver(path, cls=Solver, **params):
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    dls = DataLoaders.from_tensors(x[:40], y[:40], valid=(x[40:], y[40:]), bs=8)
    dls = DataLoaders(dls.train, dict(one=dls.valid, two=[(x[40:43], y[40:43]), (x[43:48], y[43:48])]))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(.3), nn.Linear(8, 3))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), path=path, metrics=accuracy, default_cbs=dict(progress=None))
    return cls(learn, **{**dict(base_lr=.1, lr_policy='inv', gamma=.01, power=.75, momentum=.9, weight_decay=5e-4,
                                max_iter=20, display=3, average_loss=4, test_iter=[2, 2], test_interval=7,
                                snapshot=6, iter_size=2, clip_gradients=2.), **params})

def weights(solver): return [p.detach().clone() for p in solver.net.parameters()]

@pytest.mark.parametrize('type', ['SGD', 'Adam'])
def test_a_restored_solve_goes_on(tmp_path, capsys, type):
    "Bit for bit, in another Learner, with the same lines; the file is found below the path"
    whole = digits_solver(tmp_path/'a', type=type)
    whole.solve()
    told = capsys.readouterr().out.splitlines()
    cut = digits_solver(tmp_path/'b', type=type)
    cut.action_request = lambda: 'stop' if cut.iter == 12 else None
    cut.solve()
    other = digits_solver(tmp_path/'b', type=type)
    torch.manual_seed(99)
    capsys.readouterr()

    other.solve(resume=tmp_path/'b'/'solver_iter_12.ckpt')

    assert cut.stopped and other.iter == 20 and all(map(torch.equal, weights(whole), weights(other)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('Iteration')]
    assert lines == [line for line in told if line.startswith('Iteration')][-len(lines):] and len(lines) > 4
    assert {p.name for p in (tmp_path/'b').glob('*.ckpt')} == {f'solver_iter_{i}.ckpt' for i in (6, 12, 18, 20)}

def test_steps_are_one_long_fit(tmp_path):
    "However they are cut"
    whole, parts = digits_solver(tmp_path/'a'), digits_solver(tmp_path/'b')

    torch.manual_seed(1)
    whole.step(11)
    torch.manual_seed(1)
    for n in 1, 4, 0, 6: parts.step(n)

    assert parts.iter == 11 and all(map(torch.equal, weights(whole), weights(parts)))

def test_a_snapshot_by_hand(tmp_path):
    "Between two calls of `step`"
    solver = digits_solver(tmp_path/'a')
    solver.step(5)
    file = solver.snapshot()
    solver.step(4)
    other = digits_solver(tmp_path/'b')

    other.restore(file)
    assert other.iter == 5
    other.step(4)

    assert all(map(torch.equal, weights(solver), weights(other)))

def test_what_is_no_snapshot_of_it(tmp_path):
    "Weights, and the state of another type, are refused by name"
    solver = digits_solver(tmp_path)
    solver.step(1)
    file = solver.snapshot()
    solver.learn.save('weights')

    with pytest.raises(ValueError, match='weights.pth` is no snapshot of a Solver, but weights'):
        solver.restore(tmp_path/'models'/'weights.pth')
    with pytest.raises(ValueError, match='of a solver of type SGD, and this one is Adam'):
        digits_solver(tmp_path, type='Adam').restore(file)

def test_a_test_counts_batches_alike(tmp_path):
    "Beside the metrics over items; around again where a set has fewer; the loss if it is wanted"
    solver = digits_solver(tmp_path, test_iter=[5, 2], test_compute_loss=True)
    x, y = zip(*[(x, y) for x, y in solver.learn.dls.valid_sets['two'].dl])
    solver.net.eval()
    with torch.no_grad(): accs = [float(accuracy(solver.net(a), b)) for a, b in zip(x, y)]

    first, second = solver.test_all()

    assert second.outputs['accuracy'] == pytest.approx(sum(accs)/2)
    assert second.row['accuracy'] == pytest.approx((3*accs[0]+5*accs[1])/8) and second.outputs['loss'] > 0
    assert first.outputs.keys() == {'accuracy', 'loss'} and solver.test_batches == 2

def test_a_rule_of_ones_own(tmp_path):
    "Sign descent, in a few lines"
    class SignSGD(Solver):
        def apply_update(self):
            for p in self.learn.opt.all_params(): p -= self.lr_at(self.iter)*p.grad.sign()
    solver = digits_solver(tmp_path, SignSGD, iter_size=1, clip_gradients=-1)
    before = weights(solver)

    solver.step(1)

    for old, new in zip(before, weights(solver)):
        moved = (old-new).abs()
        assert torch.allclose(moved[moved > 0], torch.tensor(.1), atol=1e-6)

def test_the_rate_may_be_set(tmp_path):
    "From the next iteration on"
    solver, seen = digits_solver(tmp_path, lr_policy='fixed'), []
    solver.add_callback(on_gradients_ready=lambda: seen.append(solver.learn.opt.hypers[0]['lr']))

    solver.step(2)
    solver.param.base_lr = .5
    solver.step(1)

    assert seen == [.1, .1, .5]

@pytest.mark.parametrize('ask', ['request_stop', 'SIGINT', 'SIGHUP'])
def test_requests_during_a_test_are_not_lost(tmp_path, ask):
    "A stop ends it before the next update, a hangup saves"
    solver = digits_solver(tmp_path, iter_size=1)
    def during(pred, targ):
        if solver.iter == 7 and not asked:
            asked.append(1)
            solver.learn.request_stop() if ask == 'request_stop' else os.kill(os.getpid(), getattr(signal, ask))
        return accuracy(pred, targ)
    asked = []
    solver.learn.metrics = during

    solver.solve()

    assert asked and solver.stopped == (ask != 'SIGHUP') and solver.iter == (20 if ask == 'SIGHUP' else 7)
    assert (tmp_path/'solver_iter_7.ckpt').exists() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL

def test_requests_while_training(tmp_path):
    "At the end of the iteration"
    solver = digits_solver(tmp_path, test_interval=0, test_iter=[], snapshot=0)
    solver.add_callback(on_start=lambda: solver.iter == 4 and os.kill(os.getpid(), signal.SIGINT))

    solver.solve()

    assert solver.stopped and solver.iter == 5 and (tmp_path/'solver_iter_5.ckpt').exists()
    solver.solve()  # goes on
    assert solver.iter == 20 and not solver.stopped

@pytest.mark.parametrize('fields, error, match', [
    (dict(test_iter=[1]), ValueError, '`test_iter` has 1 numbers, and there are 2 validation sets'),
    (dict(test_iter=[]), ValueError, '`test_interval` is given, and no `test_iter`'),
    (dict(stepsze=3), TypeError, 'there is no field `stepsze`; did you mean `stepsize`'),
    (dict(sigint_effect='halt'), ValueError, "sigint_effect='halt'; give 'stop'"),
    (dict(max_iter=-1), ValueError, 'Solver: `max_iter` is -1'), (dict(lr_policy='cos'), ValueError, "is 'cos'; give")])
def test_fields_that_mean_nothing(tmp_path, fields, error, match):
    "Are refused by name when it is made"
    with pytest.raises(error, match=match): digits_solver(tmp_path, **fields)

def test_fields_without_effect_are_told_once(tmp_path, capsys):
    "And do nothing"
    digits_solver(tmp_path, solver_mode='GPU', device_id=1, snapshot_format='HDF5')

    assert capsys.readouterr().out == 'Solver: without effect here: snapshot_format, solver_mode, device_id\n'
