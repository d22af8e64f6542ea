"""Files that do not fit the model: what is said of them, what of them is loaded, and other names for what they hold."""
import pytest
import torch
from torch import nn

from tests.callbacks.test_save import equal, state, trained
from tests.resume_helpers import noisy_learner


def net(n_hidden=8, n_out=2, *more):
    return nn.Sequential(nn.Linear(4, n_hidden), nn.BatchNorm1d(n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_out), *more)


class Named(nn.Module):
    "A body and a head"
    def __init__(self, n_out=2):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, n_out)
    def forward(self, x): return self.head(self.body(x))


def unchanged_by(learn, match, *args, **kwargs):
    "Is `load` refused, with all as it was before?"
    before = state(learn)
    with pytest.raises(ValueError, match=match): learn.load(*args, **kwargs)
    return equal(state(learn), before)


# ---- what does not fit

wider = r'''m.pth` does not fit this model:
  missing in the file: `4.weight` float32\[2, 2\], `4.bias` float32\[2\]
  of another shape or type: `0.weight` float32\[8, 4\] in the file, float32\[12, 4\] here, .*`1.bias` .* 7 in all
`strict=False`'''
shorter = r'''m.pth` does not fit this model:
  not in the model: `1.weight` float32\[8\], .*`1.num_batches_tracked` int64\[\] … 7 in all
`strict=False`'''


@pytest.mark.parametrize(('model', 'match'), [(lambda: net(12, 2, nn.Linear(2, 2)), wider),
                                              (lambda: nn.Sequential(nn.Linear(4, 8)), shorter)])
def test_all_is_named(model, match, tmp_path):
    "What is missing, not in the model and of another shape is named with its shape, and nothing is changed"
    noisy_learner(tmp_path, model=net()).save('m')

    assert unchanged_by(noisy_learner(tmp_path, model=model()), match, 'm')


def test_what_fits_is_loaded(tmp_path):
    "With `strict=False` it is one warning that names all three kinds, and what fits is loaded"
    learn = noisy_learner(tmp_path, model=net(8, 2, nn.Linear(2, 2)))
    learn.save('m')
    other = noisy_learner(tmp_path, model=net(8, 3, nn.Tanh(), nn.Linear(3, 2)))
    before = state(other)

    with pytest.warns(UserWarning, match='loaded in part') as said: other.load('m', strict=False)

    text, = (str(w.message) for w in said)
    rows = [line.split(' float32')[0] for line in text.splitlines()[1:]]
    assert rows == ['  missing in the file: `5.weight`', '  not in the model: `4.weight`',
                    '  of another shape or type: `3.weight`']
    assert said[0].filename == __file__
    loaded = {k for k in before if k[0] in '01'}
    assert equal({k: state(other)[k] for k in loaded}, {k: state(learn)[k] for k in loaded})
    assert all(torch.equal(v, before[k]) for k, v in state(other).items() if k not in loaded)


@pytest.mark.parametrize('strict', [True, False])
def test_nothing_fits(strict, tmp_path):
    "A file in which nothing fits is refused in any case"
    noisy_learner(tmp_path, model=Named()).save('m')

    assert unchanged_by(noisy_learner(tmp_path, model=net()), 'nothing in `.*m.pth` fits', 'm', strict=strict)


def test_partly_with_the_optimizer(tmp_path):
    "Of what does not fit, such as another head, the optimizer gets no state; of all else it does"
    learn = trained(tmp_path, model=Named())
    learn.save('m')
    other = noisy_learner(tmp_path, model=Named(3))

    with pytest.warns(UserWarning, match='loaded in part'): other.load('m', strict=False)

    assert torch.equal(other.model.body[0].weight, learn.model.body[0].weight)
    theirs, ours = learn.opt.opt.state, other.opt.opt.state
    assert torch.equal(ours[other.model.body[0].weight]['exp_avg'], theirs[learn.model.body[0].weight]['exp_avg'])
    assert other.model.head.weight not in ours


# ---- leaving out

def test_drop(tmp_path):
    "Names that match are neither loaded nor missing, and the optimizer gets nothing of them"
    learn = trained(tmp_path, model=Named())
    learn.save('m')
    other = noisy_learner(tmp_path, model=Named())
    before = state(other)

    other.load('m', drop='head.*')

    assert torch.equal(other.model.head.weight, before['head.weight'])
    assert torch.equal(other.model.body[0].weight, learn.model.body[0].weight)
    known = {k for k, p in other.model.named_parameters() if p in other.opt.opt.state}
    assert known == {'body.0.weight', 'body.0.bias', 'body.1.weight', 'body.1.bias'}
    other.fit(1, 1e-2)


@pytest.mark.parametrize('drop', [['head.weight', 'head.bias'], 'head.*', ('*.weight', '*.bias', '*.running*')])
def test_drop_what_does_not_fit(drop, tmp_path):
    "What is left out may have any shape, or be missing in the file"
    learn = noisy_learner(tmp_path, model=Named())
    learn.save('m', with_opt=False)
    learn.model.head = nn.Identity()
    learn.save('body', with_opt=False)
    other = noisy_learner(tmp_path, model=Named(3))

    other.load('m', drop=drop)
    other.load('body', drop=drop)

    assert torch.equal(other.model.body[1].num_batches_tracked, learn.model.body[1].num_batches_tracked)


@pytest.mark.parametrize(('kwargs', 'match'), [
    (dict(drop='haed.*'), r"drop='haed\.\*' matches none of body\.0\.weight, body"),
    (dict(drop=['head.*', 'body']), "drop='body' matches none"), (dict(rename={'^mod': ''}), r"rename='\^mod' matches"),
    (dict(rename={'head': 'body.0'}), r'`body.0.weight` and `head.weight` both become `body.0.weight`'),
    (dict(rename={'(': ''}), r"rename=\{'\(': ''\}: "), (dict(rename={'head': r'\2'}), 'invalid group reference'),
    (dict(rename={'head': r'\g<x>'}), 'unknown group name'), (dict(drop='*'), 'nothing in')])
def test_patterns_that_mean_nothing(kwargs, match, tmp_path):
    "A pattern that matches nothing is named, as is one that makes one name of two or cannot be read"
    noisy_learner(tmp_path, model=Named()).save('m')

    assert unchanged_by(noisy_learner(tmp_path, model=Named()), match, 'm', **kwargs)


# ---- other names

def test_rename(tmp_path):
    "Regular expressions make the model's names of those in the file, one after the other; the optimizer is loaded too"
    learn = trained(tmp_path, model=Named())
    learn.save('m')
    other = noisy_learner(tmp_path, model=net())

    other.load('m', rename={r'^body\.': '', '^head': '4', r'^4\.(\w+)$': r'3.\1'})

    assert [torch.equal(a, b) for a, b in zip(state(other).values(), state(learn).values())] == [True]*len(state(learn))
    assert len(other.opt.opt.state) == 6


def test_rename_and_drop(tmp_path):
    "Names to leave out are those of the file or those that they become"
    learn = noisy_learner(tmp_path, model=Named())
    torch.save({f'module.net.{k}': v for k, v in learn.model.state_dict().items()}, tmp_path/'m.pth')
    other = noisy_learner(tmp_path, model=Named(3))

    with pytest.warns(UserWarning, match='unverified'):
        for drop in ('head.*', 'module.net.head.*'): other.load(tmp_path/'m.pth', drop=drop, rename={r'net\.': ''})

    assert torch.equal(other.model.body[0].weight, learn.model.body[0].weight)
