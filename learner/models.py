"""Small convolutional networks to train from scratch: xresnet, plain `nn.Sequential`s from stem to scores.

A network is a stem of three convolutions and a pooling layer, four stages of residual blocks, and a head of pooling and
one linear layer: `create_body` of transfer.py takes the head off. Images from about 28 pixels on will do.
Source: K. He et al., "Bag of Tricks for Image Classification with CNNs", arXiv 1812.01187 (2018), figure 2."""
from torch import Tensor, nn

__all__ = ['ResBlock', 'xresnet18', 'xresnet34', 'xresnet50']


def _conv(n_in: int, n_out: int, ks: int, stride: int = 1, act: bool = True) -> nn.Sequential:
    "Convolution that keeps the size (but for the stride), batch normalisation, and ReLU if `act`"
    conv = nn.Conv2d(n_in, n_out, ks, stride, padding=ks//2, bias=False)
    nn.init.kaiming_normal_(conv.weight)
    return nn.Sequential(conv, nn.BatchNorm2d(n_out), *[nn.ReLU()]*act)


class ResBlock(nn.Module):
    """A few convolutions, added to their input and followed by ReLU

    It starts as its shortcut alone, as the last batch normalisation of its branch has weight 0.
    Source: arXiv 1812.01187: ResNet-B (stride in the 3x3 convolution), ResNet-D (shortcut pools first), zero gamma."""
    def __init__(self,
        n_in: int,        # channels of the input
        n: int,           # channels of the 3x3 convolutions
        expansion: int,   # 1: two 3x3 convolutions; more: 1x1, 3x3, and 1x1 to `n*expansion` channels
        stride: int = 1,  # 2 halves height and width, rounded up
    ):
        super().__init__()
        n_out = n*expansion
        convs = ([_conv(n_in, n, 3, stride), _conv(n, n, 3, act=False)] if expansion == 1 else
                 [_conv(n_in, n, 1), _conv(n, n, 3, stride), _conv(n, n_out, 1, act=False)])
        nn.init.zeros_(convs[-1].get_parameter('1.weight'))
        pool = [nn.AvgPool2d(2, ceil_mode=True)] if stride == 2 else []  # rounds up, as the convolution does
        project = [_conv(n_in, n_out, 1, act=False)] if n_in != n_out else []
        self.branch, self.shortcut, self.act = nn.Sequential(*convs), nn.Sequential(*pool, *project), nn.ReLU()

    def forward(self,
        x: Tensor,  # `(bs, n_in, h, w)`
    ) -> Tensor:    # `(bs, n*expansion, h/stride, w/stride)`
        "Branch and shortcut, added"
        return self.act(self.branch(x) + self.shortcut(x))


def _xresnet(n_blocks: list[int], expansion: int, n_out: int, n_in: int, ps: float) -> nn.Sequential:
    "An xresnet with `n_blocks` in each of its four stages"
    stem = [_conv(a, b, 3, 1 if i else 2) for i, (a, b) in enumerate([(n_in, 32), (32, 32), (32, 64)])]
    stages, n_last = [], 64
    for i, k in enumerate(n_blocks):
        n = 64*2**i
        stages.append(nn.Sequential(*(ResBlock(n*expansion if j else n_last, n, expansion, 2 if i and not j else 1)
                                      for j in range(k))))
        n_last = n*expansion
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(ps),
                         nn.Linear(n_last, n_out))


def xresnet18(
    n_out: int = 1000,  # scores per image
    n_in: int = 3,      # channels of the images
    ps: float = 0.,     # probability of dropout before the last layer, 0 to 1
) -> nn.Sequential:     # takes `(bs, n_in, h, w)`, gives `(bs, n_out)`
    "A residual network of 2, 2, 2, 2 blocks, untrained; 11.7 million parameters"
    return _xresnet([2, 2, 2, 2], 1, n_out, n_in, ps)


def xresnet34(
    n_out: int = 1000,  # scores per image
    n_in: int = 3,      # channels of the images
    ps: float = 0.,     # probability of dropout before the last layer, 0 to 1
) -> nn.Sequential:     # takes `(bs, n_in, h, w)`, gives `(bs, n_out)`
    "A residual network of 3, 4, 6, 3 blocks, untrained; 21.8 million parameters"
    return _xresnet([3, 4, 6, 3], 1, n_out, n_in, ps)


def xresnet50(
    n_out: int = 1000,  # scores per image
    n_in: int = 3,      # channels of the images
    ps: float = 0.,     # probability of dropout before the last layer, 0 to 1
) -> nn.Sequential:     # takes `(bs, n_in, h, w)`, gives `(bs, n_out)`
    "A residual network of 3, 4, 6, 3 bottleneck blocks with 4 times the channels, untrained; 25.6 million parameters"
    return _xresnet([3, 4, 6, 3], 4, n_out, n_in, ps)
