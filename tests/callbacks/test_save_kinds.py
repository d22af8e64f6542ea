"""`learn.save` and `learn.load` with losses and models of all kinds: lazy, tied, with a state of their own."""
import pytest
import torch
from torch import nn

from learner.utils import set_seed
from tests.callbacks.test_save import equal, opt_digest, state, trained
from tests.helpers import synth_learner
from tests.resume_helpers import noisy_learner


class ScaledLoss(nn.Module):
    "Has a parameter of its own"
    def __init__(self, n=1):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))
    def forward(self, pred, y): return ((pred-y)**2).mean()*self.scale.exp().sum() - self.scale.sum()


def test_state_of_the_loss(tmp_path):
    "A loss with parameters is saved and loaded with the model and the optimizer; weights alone are without it"
    def learner(loss): return synth_learner(path=tmp_path, loss_func=loss, lr=.1, splitter=lambda m: [
        *m.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())])
    learn = learner(ScaledLoss())
    learn.fit(1)
    path, bare = learn.save('m'), learn.save('bare', with_opt=False)
    other = learner(ScaledLoss())

    other.load(bare)
    unchanged = other.loss_func.scale.item() == 1.
    other.load(path)

    assert unchanged and torch.equal(other.loss_func.scale, learn.loss_func.scale)
    assert learn.loss_func.scale.item() != 1. and opt_digest(other) == opt_digest(learn)
    with pytest.raises(ValueError, match=r'another shape or type: `loss_func.scale` float32\[1\] in the file, float'):
        learner(ScaledLoss(2)).load(path)
    with pytest.raises(ValueError, match=r'not in the model: `loss_func.scale`'): learner(nn.L1Loss()).load(path)
    learner(nn.functional.mse_loss).load(path, drop='loss_func.*', with_opt=False)


def test_lazy_model(tmp_path):
    "A model that has not seen a batch gets its shapes from the file, and the optimizer its state; it cannot be saved"
    def lazy(): return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    learn = trained(tmp_path, model=lazy())
    learn.save('m')
    other = noisy_learner(tmp_path, model=lazy())
    with pytest.raises(ValueError, match='lazy parameters.*0.weight.*learn.validate'): other.save('n', with_opt=False)

    other.load('m')
    loaded = equal(state(other), state(learn)), opt_digest(other) == opt_digest(learn)
    for one in (learn, other):
        set_seed(5)
        one.fit(1, 1e-2)

    assert loaded == (True, True) and equal(state(other), state(learn))


def test_state_of_a_lazy_model(tmp_path):
    "Weights without a shape are loaded into such, and refused by a model that has shapes"
    def learner(): return synth_learner(model=nn.Sequential(nn.LazyLinear(1)), path=tmp_path)
    lazy, learn = learner(), learner()
    learn.validate()

    learner().load_state_dict(lazy.state_dict())
    with pytest.raises(ValueError, match='model has another shape of 0.weight, 0.bias'):
        learn.load_state_dict(lazy.state_dict())


class Extra(nn.Linear):
    "Has a state that is no tensor, and a buffer that comes with its first batch"
    def __init__(self):
        super().__init__(1, 1)
        self.seen = {}
        self.register_buffer('mean', None)

    def forward(self, x):
        self.seen[len(self.seen)], self.mean = (len(x), {'a'}), x.mean(0)
        return super().forward(x)

    def get_extra_state(self): return self.seen
    def set_extra_state(self, state): self.seen = state


def test_extra_state_and_buffers_that_appear(tmp_path):
    "A module's extra state comes back; a buffer that the new model has not yet is named, unless it is dropped"
    learn = synth_learner(model=Extra(), path=tmp_path)
    learn.fit(1)
    path = learn.save('m')
    other, third = synth_learner(model=Extra(), path=tmp_path), synth_learner(model=Extra(), path=tmp_path)

    with pytest.raises(ValueError, match=r'not in the model: `mean` float32\[1\]'): other.load(path)
    other.load(path, drop='mean')
    third.validate()
    third.load(path)

    assert other.model.seen == third.model.seen == learn.model.seen != {} and other.model.mean is None
    assert torch.equal(third.model.mean, learn.model.mean) and torch.equal(third.model.weight, learn.model.weight)


class Grows(nn.Linear):
    "Has an extra state that is a tensor of any length"
    rows = torch.zeros(1)
    def get_extra_state(self): return self.rows
    def set_extra_state(self, state): self.rows = state


def test_extra_state_that_is_a_tensor(tmp_path):
    "What fits there, only the module knows"
    learn, other = synth_learner(model=Grows(1, 1), path=tmp_path), synth_learner(model=Grows(1, 1), path=tmp_path)
    learn.model.rows = torch.ones(3)

    other.load(learn.save('m'))

    assert other.model.rows.tolist() == [1, 1, 1]


@pytest.mark.parametrize('of', ['parameter', 'module'])
def test_tied_weights(of, tmp_path):
    "What is one tensor stays one, and the file holds its memory once; a file with one of its names is enough"
    def model():
        new = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        if of == 'module': new[1] = new[0]
        else: new[1].weight = new[0].weight
        return new
    learn, other = synth_learner(model=model(), path=tmp_path), synth_learner(model=model(), path=tmp_path)
    path = learn.save('m')
    torch.nn.init.zeros_(other.model[0].weight)

    other.load('m')
    whole = equal(state(other), state(learn))
    torch.save({k: v+1 for k, v in state(learn).items() if k in ('0.weight', '0.bias', '1.bias')}, tmp_path/'one.pth')
    with pytest.warns(UserWarning, match='unverified'): other.load(tmp_path/'one.pth')

    assert whole and other.model[1].weight is other.model[0].weight and path.stat().st_size < 2*64*64*4
    assert torch.equal(other.model[1].weight, learn.model[0].weight+1)


def test_types(tmp_path):
    "Weights take the model's type; what it cannot hold, as fractions in integers, does not fit"
    learn = synth_learner(path=tmp_path)
    half, ints = synth_learner(path=tmp_path), synth_learner(path=tmp_path)
    half.model.half()
    for k in ('a', 'b'): setattr(ints.model, k, nn.Parameter(torch.ones(1, dtype=torch.int32), requires_grad=False))
    learn.save('m', with_opt=False)

    half.load('m')

    assert half.model.a.dtype == torch.float16 and half.model.a == learn.model.a.half()
    with pytest.raises(ValueError, match=r'another shape or type: `a` float32\[1\] in the file, int32\[1\] here'):
        ints.load('m')


def test_sparse(tmp_path):
    "So does not what is sparse where the model is not"
    learn = synth_learner(path=tmp_path)
    torch.save({k: v.to_sparse() for k, v in learn.model.state_dict().items()}, tmp_path/'m.pth')

    with pytest.warns(UserWarning, match='unverified'), pytest.raises(ValueError, match=(
            r'or type: `a` float32\[1\] torch.sparse_coo in the file, float32\[1\] here')): learn.load(tmp_path/'m.pth')


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_from_a_gpu_to_the_cpu_and_back(tmp_path):
    "Tensors come from whatever device to the model's own"
    learn = trained(tmp_path)
    learn.save('gpu')
    cpu = noisy_learner(tmp_path).load('gpu')
    cpu.save('cpu')
    known = opt_digest(cpu)

    learn.load('cpu')

    assert {p.device.type for p in learn.model.parameters()} == {'cuda'} and opt_digest(learn) == known
    assert {p.device.type for p in cpu.model.parameters()} == {'cpu'}
