"""Promises of learner.models: sizes of xresnets, what they take, and how they start."""
import pytest
import torch
from torch import nn

from learner.models import ResBlock, xresnet18, xresnet34, xresnet50

every_net = pytest.mark.parametrize('net', [xresnet18, xresnet34, xresnet50])


def conv(n_in, n_out, ks): return n_in*n_out*ks**2 + 2*n_out  # no bias; weight and bias of its batch normalisation

def block(n_in, n, expansion):
    n_out = n*expansion
    branch = conv(n_in, n, 3) + conv(n, n, 3) if expansion == 1 else conv(n_in, n, 1)+conv(n, n, 3)+conv(n, n_out, 1)
    return branch + (conv(n_in, n_out, 1) if n_in != n_out else 0)

def stage(n_in, n, expansion, n_blocks):
    return block(n_in, n, expansion) + (n_blocks-1)*block(n*expansion, n, expansion)

def total(n_blocks, expansion, n_out, n_in):
    e, (a, b, c, d) = expansion, n_blocks
    stem = conv(n_in, 32, 3) + conv(32, 32, 3) + conv(32, 64, 3)
    stages = stage(64, 64, e, a) + stage(64*e, 128, e, b) + stage(128*e, 256, e, c) + stage(256*e, 512, e, d)
    return stem + stages + 512*e*n_out + n_out


@pytest.mark.parametrize('net,n_blocks,expansion,n_params', [
    (xresnet18, [2, 2, 2, 2], 1, 11_708_744), (xresnet34, [3, 4, 6, 3], 1, 21_816_904),
    (xresnet50, [3, 4, 6, 3], 4, 25_576_264)])
@pytest.mark.parametrize('n_out,n_in', [(1000, 3), (10, 1)])
def test_number_of_parameters(net, n_blocks, expansion, n_params, n_out, n_in):
    "A network has the parameters of its stem, blocks and last layer, and no other"
    n = sum(p.numel() for p in net(n_out, n_in).parameters())

    assert n == total(n_blocks, expansion, n_out, n_in) and (n_out == 10 or n == n_params)


@every_net
@pytest.mark.parametrize('n_in,size', [(1, 28), (3, 64)])
def test_takes_small_images(net, n_in, size):
    "Images of 28 and of 64 pixels, of one channel or three, give `n_out` scores, and every parameter a gradient"
    model = net(5, n_in)

    scores = model(torch.randn(2, n_in, size, size))
    scores.sum().backward()

    assert scores.shape == (2, 5) and all(p.grad is not None for p in model.parameters())


@every_net
def test_layers_from_stem_to_scores(net):
    "A network is a plain Sequential: three convolutions, pooling, four stages, and the head"
    model = net(ps=.25)

    assert type(model) is nn.Sequential and [type(m) for m in model] == [
        nn.Sequential, nn.Sequential, nn.Sequential, nn.MaxPool2d, *[nn.Sequential]*4, nn.AdaptiveAvgPool2d, nn.Flatten,
        nn.Dropout, nn.Linear]
    assert [m[0].stride for m in model[:3]] == [(2, 2), (1, 1), (1, 1)] and model[-2].p == .25
    assert [m.kernel_size for m in model.modules() if getattr(m, 'stride', 1) == (2, 2)] == [(3, 3)]*4


@pytest.mark.parametrize('size,out', [(8, 4), (7, 4), (1, 1)])
@pytest.mark.parametrize('expansion', [1, 4])
def test_stride_rounds_up(size, out, expansion):
    "Branch and shortcut of a block of stride 2 agree on sizes that are odd too"
    x = ResBlock(6, 3, expansion, stride=2)(torch.randn(2, 6, size, size))

    assert x.shape == (2, 3*expansion, out, out)


@pytest.mark.parametrize('n_in,n,expansion', [(6, 6, 1), (8, 2, 4)])
def test_block_starts_as_its_shortcut(n_in, n, expansion):
    "A new block is ReLU of its input: the last batch normalisation of the branch starts at 0, and learns"
    block, x = ResBlock(n_in, n, expansion), torch.randn(2, n_in, 4, 4)

    y = block(x)
    y.sum().backward()

    assert torch.equal(y, x.relu())
    last = block.branch[-1][1].weight
    assert last.eq(0).all() and last.grad.ne(0).any()


def test_convolutions_start_as_kaiming_says():
    "The weights of convolutions have mean 0 and variance 2/fan_in"
    torch.manual_seed(0)
    weights = [m.weight for m in xresnet18().modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 50_000]

    scaled = torch.cat([(w*(w[0].numel()/2)**.5).flatten() for w in weights])

    assert len(weights) == 13 and abs(scaled.mean()) < .001 and abs(scaled.var()-1) < .002
