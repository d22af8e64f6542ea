"""Several networks trained in turn, each against its own loss."""
import pytest
import torch
from torch import nn

from learner import Callback, CancelBatchException, Learner
from learner.callbacks.mixup import MixUp
from learner.callbacks.turns import TakeTurns, Turn
from learner.optim import SGD
from tests.helpers import raises, weights


class Gan(nn.Module):
    "Makes numbers out of noise, and has a critic that tells them from real ones"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, noise): return self.generator(noise)

    def gen_loss(self, fake, real): return nn.functional.softplus(-self.critic(fake)).mean()
    def crit_loss(self, fake, real):
        return (nn.functional.softplus(self.critic(fake)) + nn.functional.softplus(-self.critic(real))).mean()

def batches(n=6): return [(torch.randn(16, 2), 3+torch.randn(16, 1)) for _ in range(n)]

def learner(gan, *turns, n=6, **kwargs):
    groups = lambda m: [[*m.generator.parameters()], [*m.critic.parameters()]]
    return Learner((batches(n), batches(2)), gan, nn.MSELoss(), SGD, lr=.1, splitter=groups,
                   cbs=[TakeTurns([*turns]), *kwargs.pop('cbs', [])], default_cbs=dict(progress=None), **kwargs)


def test_it_equals_two_optimizers_by_hand():
    "Weights are bit for bit those of a loop with an optimizer for each network"
    torch.manual_seed(1)
    gan, other = Gan(), Gan()
    learn = learner(gan, ('critic', gan.crit_loss, 2), ('generator', gan.gen_loss))
    data = [b for _ in range(2) for b in learn.dls.train.dl]
    opts = {k: torch.optim.SGD(getattr(other, k).parameters(), lr=.1) for k in ('critic', 'generator')}
    for i, (noise, real) in enumerate(data):
        which = 'generator' if i % 3 == 2 else 'critic'
        fake = other(noise)
        (other.gen_loss(fake, real) if i % 3 == 2 else other.crit_loss(fake.detach(), real)).backward()
        opts[which].step()
        other.zero_grad()

    learn.fit(2)

    assert all(map(torch.equal, gan.state_dict().values(), other.state_dict().values())) and learn.n_step == 12

def test_validation_has_the_learners_own_loss():
    "After the epoch, and in an evaluation within a batch"
    gan = Gan()
    seen = []
    def look(cb):
        if cb.training: seen.append(cb.learn.validate()['valid_loss'])
    learn = learner(gan, ('critic', gan.crit_loss), ('generator', gan.gen_loss), cbs=[Callback(after_batch=look)])

    learn.fit(1)

    expected = torch.cat([(gan(x)-y).detach()**2 for x, y in learn.dls.valid]).mean()
    assert learn.final_record['valid_loss'] == pytest.approx(float(expected)) == pytest.approx(seen[-1])
    assert len(seen) == 6 and isinstance(learn.loss_func, nn.MSELoss)

@pytest.mark.parametrize('order', [-40, 50])
@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss'])
def test_validation_leaves_what_others_made_of_the_loss(event, order):
    "A batch that MixUp has mixed goes on with its mixed loss"
    data = [(torch.randn(8, 2), torch.randint(3, (8,))) for _ in range(3)]
    def fitted(*cbs):
        torch.manual_seed(1)
        turns = TakeTurns([('', nn.CrossEntropyLoss(label_smoothing=.1))])
        learn = Learner((data, data), nn.Sequential(nn.Linear(2, 3)), nn.CrossEntropyLoss(), SGD, lr=.1,
                        cbs=[turns, MixUp(), *cbs], default_cbs=dict(progress=None))
        learn.fit(1)
        return weights(learn)
    look = Callback(**{event: lambda cb: cb.training and cb.learn.validate()})
    look.order = order

    assert all(map(torch.equal, fitted(look), fitted()))

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_step'])
@pytest.mark.parametrize('ex', [ValueError, KeyboardInterrupt, CancelBatchException])
def test_loss_and_flags_come_back(event, ex):
    "Whatever ends a batch; a cancelled one has had its turn"
    gan = Gan()
    gan.critic[0].bias.requires_grad_(False)
    flags = [p.requires_grad for p in gan.parameters()]
    learn = learner(gan, ('critic', gan.crit_loss), ('generator', gan.gen_loss),
                    cbs=[Callback(**{event: raises(ex, nth=2)})])

    try: learn.fit(1)
    except (ValueError, KeyboardInterrupt): pass

    assert [p.requires_grad for p in gan.parameters()] == flags and isinstance(learn.loss_func, nn.MSELoss)

def test_the_generator_learns():
    "Numbers come to have the mean of the real ones"
    torch.manual_seed(0)
    gan = Gan()
    learn = learner(gan, Turn('critic', gan.crit_loss), Turn('generator', gan.gen_loss), n=300)

    learn.fit(2)

    assert abs(float(gan(torch.randn(1000, 2)).mean().detach())-3) < 1

def test_turns_go_on_after_a_stop(tmp_path):
    "A resumed fit takes the next turn"
    gan = Gan()
    learn = learner(gan, ('critic', gan.crit_loss, 2), ('generator', gan.gen_loss))

    learn.step(2)

    assert learn.take_turns.done == 2 and learn.take_turns.state_dict() == dict(done=2, taken=['critic'])

@pytest.mark.parametrize('turns, error, match', [
    ([], ValueError, 'no turn'), ([('critic', print, 0)], ValueError, "`n` of 'critic' is 0"),
    ([('critic', 'loss')], TypeError, 'give a function')])
def test_odd_turns(turns, error, match):
    "Refused when they are made"
    with pytest.raises(error, match=match): TakeTurns(turns)

def test_modules_that_cannot_take_a_turn():
    "Refused at the start of a fit"
    gan = Gan()
    with pytest.raises(ValueError, match="no part 'critics', but generator, critic"):
        learner(gan, ('critics', gan.gen_loss)).fit(1)
    with pytest.raises(ValueError, match="'critic.1' has no parameters"):
        learner(gan, ('critic.1', gan.gen_loss)).fit(1)

def test_each_part_has_a_column():
    "Of its own losses; `train_loss` is over all batches"
    gan = Gan()
    seen = {'critic': [], 'generator': []}
    look = Callback(after_loss=lambda cb: cb.training and seen[cb.learn.take_turns.now.module].append(float(cb.loss)))
    learn = learner(gan, ('critic', gan.crit_loss, 2), ('generator', gan.gen_loss), cbs=[look])

    learn.fit(1)

    row = learn.final_record
    for name, losses in seen.items(): assert row[f'train_{name}'] == pytest.approx(sum(losses)/len(losses))
    assert row['train_loss'] == pytest.approx(sum(map(sum, seen.values()))/6)

def test_what_is_never_trained_is_told():
    "A part without a turn in the optimizer, and one whose turn does not come"
    gan = Gan()
    with pytest.warns(UserWarning, match='TakeTurns: never trained, since no turn is theirs: generator.weight, gen'):
        learner(gan, ('critic', gan.crit_loss)).fit(1)
    with pytest.warns(UserWarning, match="'generator' had no turn in the 6 batches of this fit; each fit begins with"):
        learner(gan, ('critic', gan.crit_loss, 9), ('generator', gan.gen_loss)).fit(1)
