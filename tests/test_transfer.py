"""Promises of learner.transfer about bodies: they are the models up to the cut, whatever the models look like."""
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.models import xresnet18
from learner.transfer import AdaptiveConcatPool2d, create_body, create_head, has_pool_type
from tests.transfer_helpers import (LiteLike, MobileLike, ResNetLike, SelectAdaptivePool2d, TimmLike, conv, images,
                                    made, names, plain)


foreign = pytest.mark.parametrize('cls,last', [(ResNetLike, 'layer2.1.bn.bias'), (LiteLike, '_bn1.bias'),
                                               (TimmLike, 'bn2.bias')])


# ---- the body

@foreign
def test_body_is_the_models_own_features(cls, last):
    "The body gives bit for bit what comes to the last pooling layer, and has no parameters of the head"
    model = made(cls)

    body = create_body(model)

    assert torch.equal(body(images()), model.features(images()))
    assert names(body) == [f'model.{n}' for n in names(model)[:names(model).index(last)+1]]


@foreign
def test_model_is_not_changed(cls, last):
    "A model whose body was taken has its layers and gives its scores as before"
    model = made(cls)
    before, layers = model(images()), dict(model.named_modules())

    create_body(model)(images())

    assert torch.equal(model(images()), before) and dict(model.named_modules()) == layers


@foreign
@pytest.mark.parametrize('copied', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
def test_body_can_be_copied(cls, last, copied):
    "A copy of a body gives the same, and shares nothing"
    body = create_body(made(cls))

    other = copied(body)

    assert torch.equal(other(images()), body(images()))
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in body.parameters()}


def test_state_goes_from_body_to_body():
    "A body takes the `state_dict` of another one"
    body, other = create_body(made(ResNetLike)), create_body(ResNetLike().eval())
    assert not torch.equal(other(images()), body(images()))

    other.load_state_dict(body.state_dict())

    assert torch.equal(other(images()), body(images()))


def test_gradients_reach_the_shared_parameters():
    "The parameters of a body are the model's; they get the gradients of the features, those of the head none"
    model, same = made(ResNetLike), made(ResNetLike)

    create_body(model)(images()).square().sum().backward()
    same.features(images()).square().sum().backward()

    assert model.fc.weight.grad is None
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(list(model.parameters())[:-2], same.parameters()))


@pytest.mark.parametrize('cls', [ResNetLike, plain])
def test_body_has_the_models_mode(cls):
    "A body starts in the mode of its model, and passes `train` and `eval` on"
    body, training = create_body(cls().eval()), create_body(cls())

    assert not any(m.training for m in body.modules()) and all(m.training for m in training.modules())
    assert all(m.training for m in body.train().modules())


def test_body_compiles_whole():
    "torch.compile takes a body as one graph"
    body = create_body(made(ResNetLike))

    compiled = torch.compile(body, backend='eager', fullgraph=True)

    assert torch.equal(compiled(images()), body(images()))


@pytest.mark.parametrize('cut,n', [(None, 3), (2, 2), (-1, 5), (-3, 3), ('5', 5), (6, 6)])
def test_body_of_a_sequential(cut, n):
    "The body of an `nn.Sequential` is one of its first children"
    model = plain()

    body = create_body(model, cut)

    assert type(body) is nn.Sequential and list(body) == list(model)[:n]


def test_layer_that_is_there_twice_counts_twice():
    "A layer that stands in a Sequential twice is in the body twice"
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 1))

    assert list(create_body(model, -1)) == [model[0], act, model[2], act]


def test_sequential_with_its_own_forward_keeps_it():
    "A subclass of Sequential with another forward is cut by that forward"
    class Doubles(nn.Sequential):
        def forward(self, x): return super().forward(2*x)
    model = Doubles(nn.Linear(3, 3), nn.Linear(3, 1))

    assert torch.equal(create_body(model, -1)(torch.ones(2, 3)), model[0](2*torch.ones(2, 3)))


@pytest.mark.parametrize('cut,features,n_params', [
    ('avgpool', lambda m, x: m.features(x), 15), (-2, lambda m, x: m.features(x), 15), (4, lambda m, x: m.stem(x), 3),
    ('fc', lambda m, x: m.features(x).mean((2, 3)), 15), (-1, lambda m, x: m.features(x).mean((2, 3)), 15),
    ('layer2.1', lambda m, x: m.layer2[0](m.layer1(m.stem(x))), 11)])
def test_cut_of_any_model(cut, features, n_params):
    "A number or a dotted name says in front of which layer the body ends; later layers are gone at each level"
    model = made(ResNetLike)

    body = create_body(model, cut)

    torch.testing.assert_close(body(images()), features(model, images()))
    assert len(names(body)) == n_params


def test_cut_inside_a_module_list():
    "A body may end in front of one of the layers of a ModuleList"
    model = made(LiteLike)

    body = create_body(model, '_blocks.1')

    assert torch.equal(body(images()), model._blocks[0](model._swish(model._bn0(model._conv_stem(images())))))
    assert names(body)[-1] == 'model._blocks.0.bn.bias'


def test_pooling_in_forward_is_kept():
    "Where the forward itself pools, the body that ends at the classifier gives pooled features"
    model = made(MobileLike)

    features = create_body(model, 'classifier')(images())

    assert torch.equal(features, model.features(images()).mean((2, 3), keepdim=True).flatten(1))


def test_function_makes_the_body():
    "A function is given the model and returns the body"
    model = made(MobileLike)

    assert create_body(model, lambda m: m.features) is model.features


def test_body_of_a_body():
    "A body can be cut again, and in a model that holds one each cut ends its own body"
    model = made(ResNetLike)
    whole = nn.Sequential(create_body(model), nn.Flatten())

    inner = create_body(whole, '0.model.layer2.1')

    assert torch.equal(inner(images()), model.layer2[0](model.layer1(model.stem(images()))))
    assert torch.equal(whole(images()), model.features(images()).flatten(1))


def test_body_and_head_train():
    "The body of an xresnet and a new head are a model that learns"
    model = nn.Sequential(create_body(xresnet18(n_in=1)), create_head(512, 2))

    F.cross_entropy(model(torch.randn(4, 1, 28, 28)), torch.tensor([0, 1, 0, 1])).backward()

    assert len(model[0]) == 8 and all(p.grad is not None for p in model.parameters())


# ---- where it cannot be cut

@pytest.mark.parametrize('cls,cut,error,message', [
    (MobileLike, None, ValueError,
     r"no child after the first is a pooling layer.* cut='name' .*features \(Sequential\)"),
    (plain, 'top', ValueError, r"no layer 'top': `Sequential` has 0 \(Conv2d\), 1 "),
    (ResNetLike, 'head', ValueError, r"no layer 'head': `ResNetLike` has conv1 \(Conv2d\), "),
    (ResNetLike, 'layer2.7', ValueError, r"no layer 'layer2.7': `layer2` has 0 \(Stage\), 1 "),
    (LiteLike, '_blocks', ValueError, r"`_blocks` is a ModuleList.*such as '_blocks.0'"),
    (ResNetLike, 0, ValueError, 'cut=0 is no place to cut `ResNetLike`'), (plain, '0', ValueError, "cut='0' is no"),
    (ResNetLike, 8, ValueError, r'cut=8 .*fc \(Linear\)'), (plain, 7, ValueError, 'cut=7'),
    (plain, -6, ValueError, 'cut=-6'),
    (plain, 1.5, TypeError, '`cut` is 1.5: give a number, a name'),
    (plain, len, TypeError, '`cut` returned a `int`')])
def test_bad_cut(cls, cut, error, message):
    "A cut that is not there is refused, with the children there are"
    with pytest.raises(error, match=message): create_body(cls(), cut)


def test_pooling_of_the_stem_is_not_the_head():
    "Pooling that convolutions follow is not taken for the begin of the head"
    model = nn.Sequential(conv(3, 4), nn.MaxPool2d(2), conv(4, 4), nn.Flatten(), nn.Linear(64, 2))

    with pytest.raises(ValueError, match='last pooling layer is followed by convolutions in `2`'): create_body(model)


def test_head_may_hold_its_pooling():
    "A last child that pools and has no large convolution is the head"
    head = nn.Sequential(conv(4, 2, 1), nn.AdaptiveAvgPool2d(1))

    assert len(create_body(nn.Sequential(conv(3, 4), nn.ReLU(), head))) == 2


def test_cut_that_is_not_reached():
    "A body whose forward ends without the cut layer says so"
    class Idle(ResNetLike):
        def forward(self, x): return self.features(x)

    with pytest.raises(RuntimeError, match='forward of `Idle` ended without calling `avgpool`'):
        create_body(Idle())(images())


@pytest.mark.parametrize('use', [lambda m, x: m(x), lambda m, x: m[0](x), lambda m, x: next(iter(m))(x)])
def test_layer_of_the_head_used_in_the_body(use):
    "A layer after the cut that the forward uses before it is named"
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.late = nn.AdaptiveAvgPool2d(1), nn.Sequential(conv(3, 4))
        def forward(self, x): return self.pool(use(self.late, x))
    body = create_body(Early(), 'pool')

    with pytest.raises(RuntimeError, match='`late` comes after `pool` .* `cut` the model at another layer'):
        body(images())


def test_an_error_of_the_model_is_its_own():
    "An error inside the model comes out as it is"
    with pytest.raises(RuntimeError, match='expected input'): create_body(ResNetLike())(images()[:, :2])


@pytest.mark.parametrize('m,has', [
    (nn.AdaptiveAvgPool2d(1), True), (nn.MaxPool1d(2), True), (nn.LPPool3d(2, 2), True), (AdaptiveConcatPool2d(), True),
    (SelectAdaptivePool2d(), True), (nn.Sequential(nn.Sequential(nn.AvgPool2d(2))), True), (nn.Linear(1, 1), False),
    (nn.Sequential(conv(1, 1)), False), (nn.MaxUnpool2d(2), False)], ids=str)
def test_has_pool_type(m, has):
    "Pooling layers of any library are known by the name of their class, at any depth"
    assert has_pool_type(m) == has


# ---- models of other libraries, where they are installed

def test_body_of_efficientnet_lite():
    "The body of EfficientNet-Lite0 gives its own `extract_features`"
    lite = pytest.importorskip('efficientnet_lite_pytorch')
    model = lite.EfficientNet.from_name('efficientnet-lite0').eval()
    x = torch.randn(2, 3, 64, 64)

    body = create_body(model)

    with torch.no_grad(): assert torch.equal(body(x), model.extract_features(x))
    assert len(names(model)) - len(names(body)) == 2


@pytest.mark.parametrize('name,cut,shape', [
    ('resnet18', None, (2, 512, 2, 2)), ('squeezenet1_1', None, (2, 512, 3, 3)), ('vgg11_bn', None, (2, 512, 2, 2)),
    ('mobilenet_v3_small', None, (2, 576, 2, 2)), ('mobilenet_v2', 'classifier', (2, 1280))])
def test_body_of_torchvisions(name, cut, shape):
    "Models of torchvision are cut at their head"
    model = getattr(pytest.importorskip('torchvision').models, name)().eval()

    with torch.no_grad(): assert create_body(model, cut)(torch.randn(2, 3, 64, 64)).shape == shape


@pytest.mark.parametrize('name', ['resnet18', 'efficientnet_lite0', 'convnext_atto'])
def test_body_of_timms(name):
    "Models of timm are cut at their head"
    model, x = pytest.importorskip('timm').create_model(name).eval(), torch.randn(2, 3, 64, 64)

    with torch.no_grad(): assert torch.equal(create_body(model)(x), model.forward_features(x))
