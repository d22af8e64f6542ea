"""Small models with the structure of well-known ones, from which the tests of transfer learning take bodies."""
import torch
import torch.nn.functional as F
from torch import nn

__all__ = ['conv', 'Stage', 'ResNetLike', 'LiteLike', 'SelectAdaptivePool2d', 'TimmLike', 'MobileLike', 'plain', 'made',
           'images', 'names']


def conv(a, b, ks=3, stride=1): return nn.Conv2d(a, b, ks, stride, padding=ks//2, bias=False)

class Stage(nn.Module):
    "Two convolutions with functional activations, the second one registered first"
    def __init__(self, a, b):
        super().__init__()
        self.second, self.first, self.bn = conv(b, b), conv(a, b), nn.BatchNorm2d(b)

    def forward(self, x): return F.relu(self.bn(self.second(F.relu(self.first(x)))))

class ResNetLike(nn.Module):
    "The children of torchvision's ResNet, in its order"
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        self.layer1, self.layer2 = Stage(4, 6), nn.Sequential(Stage(6, 8), Stage(8, 8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def stem(self, x): return self.maxpool(self.relu(self.bn1(self.conv1(x))))
    def features(self, x): return self.layer2(self.layer1(self.stem(x)))
    def forward(self, x): return self.fc(torch.flatten(self.avgpool(self.features(x)), 1))

class LiteLike(nn.Module):
    "The children of EfficientNet-Lite, in its order: blocks in a ModuleList, an activation registered after the head"
    def __init__(self):
        super().__init__()
        self._conv_stem, self._bn0 = conv(3, 4), nn.BatchNorm2d(4)
        self._blocks = nn.ModuleList([Stage(4, 4), Stage(4, 6)])
        self._conv_head, self._bn1, self._avg_pooling = conv(6, 8, 1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1)
        self._dropout, self._fc, self._swish = nn.Dropout(.2), nn.Linear(8, 5), nn.ReLU6()

    def features(self, x):
        x = self._swish(self._bn0(self._conv_stem(x)))
        for block in self._blocks: x = block(x)
        return self._swish(self._bn1(self._conv_head(x)))

    def forward(self, x): return self._fc(self._dropout(self._avg_pooling(self.features(x)).flatten(1)))

class SelectAdaptivePool2d(nn.Module):
    "Named as timm's, which is no pooling layer of torch's"
    def forward(self, x): return x.mean((2, 3))

class TimmLike(nn.Module):
    "The children of timm's EfficientNet, in its order"
    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1, self.blocks = conv(3, 4), nn.BatchNorm2d(4), nn.Sequential(Stage(4, 6))
        self.conv_head, self.bn2, self.global_pool = conv(6, 8, 1), nn.BatchNorm2d(8), SelectAdaptivePool2d()
        self.classifier = nn.Linear(8, 5)

    def features(self, x): return F.silu(self.bn2(self.conv_head(self.blocks(F.silu(self.bn1(self.conv_stem(x)))))))
    def forward(self, x): return self.classifier(self.global_pool(self.features(x)))

class MobileLike(nn.Module):
    "The children of torchvision's MobileNetV2, whose forward pools"
    def __init__(self):
        super().__init__()
        self.features, self.classifier = nn.Sequential(conv(3, 4), nn.AvgPool2d(2)), nn.Sequential(nn.Linear(4, 5))

    def forward(self, x): return self.classifier(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def made(cls):
    torch.manual_seed(0)
    return cls().eval()

def images(): return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))

def names(m): return [n for n, _ in m.named_parameters()]

def plain(): return nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 6), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 5))
