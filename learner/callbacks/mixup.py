"""What makes training harder, or evaluation random, on purpose: mixed items, growing images, dropout that stays on."""
import math
from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from ..callback import Callback
from ..losses import unreduced
from ..tensors import describe, map_tensors, n_items, pinned, tensors_in
from ..utils import check_number, warn

__all__ = ['MixHandler', 'MixUp', 'CutMix', 'MCDropout', 'ProgressiveResize']


def _by_part(f, *losses):  # a loss is a tensor, or a dict of them
    if not isinstance(losses[0], Mapping): return f(*losses)
    return {k: f(*(loss[k] for loss in losses)) for k in losses[0]}


def _sent(t, device):  # what is drawn on the CPU, so that it is the same on all devices
    return pinned(t).to(device, non_blocking=True) if device.type == 'cuda' else t.to(device)


class MixHandler(Callback):
    """What MixUp and CutMix have in common: each item of a training batch is mixed with another one of it

    Of the inputs all tensors of floats with a row for each item are mixed, and others left. Targets that are floats
    are mixed likewise: `lam*y + (1-lam)*y2`. If there are others, such as classes, the loss is mixed instead:
    `lam*loss(pred, y) + (1-lam)*loss(pred, y2)`; that is what is recorded, while metrics see the batch's own targets. A
    loss with a `reduction` is taken for the mean or the sum of its terms; from one that makes something else of them,
    such as a root of their mean, take the `reduction`, or give it as a function.
    `learn.loss_func` is another one from `after_pred` to the loss only. Random numbers are torch's, drawn on the CPU;
    nothing waits for a GPU.
    Raises: ValueError if `alpha` means nothing, or the model computes the loss by itself; TypeError for a batch in
    which nothing can be mixed.
    Order: that of other callbacks which change batches: one that makes other targets has to be added before."""
    run_in = {'fit', 'lr_find'}
    run_valid = False
    unique = True
    lam: Any = None    # share of the batch's own items, `(bs,)` or `(1,)`; None outside of a batch, as all that follows
    perm: Any = None   # with which items they are mixed, `(bs,)`
    other: Any = None  # their targets, where the loss is mixed
    plain: Any = None  # the Learner's own loss, while another one is in its place
    known: Any = None, None, None  # a loss, and what `unreduced` says of it

    def __init__(self,
        alpha: float,  # both parameters of the Beta distribution of `lam`: the larger, the more is mixed
    ):
        check_number(f'{self}: `alpha`', alpha, 0, above=True)
        self.alpha, self.beta = alpha, Beta(alpha, alpha)

    def before_fit(self):
        if self.loss_func is None: raise ValueError(
            f"{self}: the model computes its loss by itself, from targets that cannot be mixed there: give the Learner "
            "a `loss_func`")

    def before_batch(self):
        learn, n = self.learn, n_items(self.xb, self.yb)
        def is_mixed(t): return t.is_floating_point() and t.ndim > 0 and len(t) == n
        if bad := [y for y in self.yb if not isinstance(y, Tensor) or not y.ndim or len(y) != n]: raise TypeError(
            f"{self}: a target is {describe(bad[0])}; it must be a tensor with a row for each of the {n} items")
        xs = [x for x in tensors_in(self.xb) if is_mixed(x)]
        if not xs: raise TypeError(f"{self}: no input is a tensor of floats with a row for each of the {n} items: "
                                   f"{describe(self.xb)}")
        if learn.loss_func is not self.known[0]: self.known = learn.loss_func, *unreduced(learn.loss_func)
        as_floats = all(y.is_floating_point() for y in self.yb)
        lam, perm = self.draw(xs, n if as_floats or self.known[1] else 1), torch.randperm(n)
        self.lam, self.perm = (_sent(t, xs[0].device) for t in (lam, perm))
        learn.xb = map_tensors(lambda x: self.mix(x) if is_mixed(x) else x, self.xb)
        if as_floats: learn.yb = tuple(map(self._lerp, self.yb))
        else: self.other = tuple(y[self.perm] for y in self.yb)

    def draw(self,
        xs: list[Tensor],  # the inputs that will be mixed, `(bs, …)`
        n: int,            # how many shares: one an item, or 1 where the loss's terms cannot be told apart
    ) -> Tensor:           # `(n,)` or `(1,)`, 0 to 1, on the CPU
        "Shares of the items themselves in what comes of them"
        raise NotImplementedError

    def mix(self,
        x: Tensor,  # `(bs, …)`
    ) -> Tensor:    # of the same shape, another one
        "An input with its items mixed"
        raise NotImplementedError

    def _lam(self, t): return self.lam.to(t.dtype).view(-1, *[1]*(t.ndim-1))  # to be multiplied with `t`
    def _lerp(self, t): return torch.lerp(t[self.perm], t, self._lam(t))

    # ---- the loss

    def after_pred(self):  # until the loss has been called, or `cleanup_batch`
        if self.other is None: return
        mixed: Any = partial(self.mixed_loss)
        self.plain = self.learn.loss_func
        mixed.unmixed = self.plain  # for predictions from within the batch
        self.learn.loss_func = mixed

    def after_loss(self): self._put_back()

    def _put_back(self):
        if self.plain is not None: self.learn.loss_func, self.plain = self.plain, None

    def cleanup_batch(self):
        self._put_back()
        self.lam = self.perm = self.other = None

    def mixed_loss(self,
        pred: Any,    # as the Learner's loss takes it
        *yb: Tensor,  # the batch's own targets
    ) -> Any:         # 0-d, or a dict of such
        "The Learner's loss of both targets, mixed; in an evaluation from within the batch the plain one"
        plain, (_, terms, reduction) = self.plain, self.known
        if not self.learn.training: return plain(pred, *yb)
        if len(self.lam) == 1: return _by_part(self._mean, plain(pred, *yb), plain(pred, *self.other))
        with torch.no_grad(): whole = plain(pred, *yb)
        return _by_part(partial(self._sum, reduction), whole, terms(pred, *yb), terms(pred, *self.other))

    def _mean(self, a, b): return torch.lerp(b, a, self.lam[0].to(a.dtype))

    def _sum(self, reduction, whole, a, b):
        if not a.ndim or len(a) != len(self.perm): raise ValueError(
            f"{self}: with reduction='none' the loss gives {describe(a)}, not a row for each of the {len(self.perm)} "
            "items; in a function that takes no `reduction` it is mixed with one `lam` a batch")
        mixed = torch.lerp(b, a, self._lam(a)).sum()
        if reduction == 'sum': return mixed
        # What a mean divides by (items, weights of classes, positions not ignored) goes by the targets, which are the
        # same ones in both orders; it is found in the loss as it is.
        total = a.detach().sum()
        return mixed*torch.where(total == 0, 1/a.numel(), whole/total)


class MixUp(MixHandler):
    """Mixes each item of a training batch with another one, with a share of its own, drawn from Beta(alpha, alpha)

    A share is the larger of what was drawn and the rest, so that no pair comes twice. Where the loss has to be mixed
    and its terms cannot be told apart, since it has no `reduction`, there is one share for the whole batch.
    Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv 1710.09412."""
    def __init__(self,
        alpha: float = .4,  # both parameters of the Beta distribution: the larger, the more is mixed
    ): super().__init__(alpha)

    def draw(self,
        xs: list[Tensor],  # the inputs that will be mixed, `(bs, …)`
        n: int,            # how many shares: one an item, or 1 where the loss's terms cannot be told apart
    ) -> Tensor:           # `(n,)`, .5 to 1, on the CPU
        "Shares of the items themselves in what comes of them"
        lam = self.beta.sample((n,))
        return torch.maximum(lam, 1-lam)

    def mix(self,
        x: Tensor,  # `(bs, …)`
    ) -> Tensor:    # of the same shape
        "`lam*x + (1-lam)*x2`"
        return self._lerp(x)


class CutMix(MixHandler):
    """Puts a box of another image into each image of a training batch, the same box in the whole batch

    `lam`, drawn from Beta(alpha, alpha), is the share of the image that stays; since the box is cut off at the border
    it is corrected to what the box really leaves. Targets are mixed as what is true of whole images; masks are not cut.
    Source: Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers", arXiv 1905.04899."""
    box: Any = None  # top, bottom, left, right

    def __init__(self,
        alpha: float = 1.,  # both parameters of the Beta distribution: 1 is uniform
    ): super().__init__(alpha)

    def draw(self,
        xs: list[Tensor],  # the images, `(bs, …, height, width)`, all of one size
        n: int,            # not used: there is one box a batch
    ) -> Tensor:           # `(1,)`, 0 to 1, on the CPU
        """The share of each image that the box leaves

        Raises: TypeError if there are floats that are no images, or images of several sizes."""
        sizes = {x.shape[-2:] for x in xs}
        if len(sizes) > 1 or any(x.ndim < 4 for x in xs): raise TypeError(
            f"{self}: takes images of one size, (bs, channels, height, width), and got {describe(tuple(xs))}; MixUp "
            "mixes anything")
        side, (centre_y, centre_x) = math.sqrt(1-self.beta.sample().item()), torch.rand(2).tolist()
        (height, width), = sizes
        self.box = *_cut(height, side, centre_y), *_cut(width, side, centre_x)
        y, y_end, x, x_end = self.box
        return torch.tensor([1 - (y_end-y)*(x_end-x)/(height*width)])

    def mix(self,
        x: Tensor,  # `(bs, …, height, width)`
    ) -> Tensor:    # of the same shape
        "`x` with the box from other items"
        y, y_end, x0, x_end = self.box
        new = x.clone()  # the batch may be the loader's own
        new[..., y:y_end, x0:x_end] = x[..., y:y_end, x0:x_end][self.perm]
        return new


def _cut(size, share, centre):  # where a part of `share` begins and ends, in pixels
    n, middle = int(size*share), int(size*centre)
    return max(0, middle-n//2), min(size, middle-n//2+n)


class MCDropout(Callback):
    """Leaves dropout on in evaluations, for Monte Carlo dropout: each evaluation outside of a fit draws new masks

    That is dropout of torch's dropout, recurrent, attention and transformer layers. All else is in eval mode.
    Source: Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation", arXiv 1506.02142.
    Order: after TrainEvalCallback, which switches all to eval mode."""
    unique = True
    kinds: Any = nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer
    n_runs = 0  # evaluations so far; no part of `state`, which an evaluation puts back

    def before_validate(self):
        layers = [m for m in self.model.modules() if isinstance(m, self.kinds)]
        if not layers: warn(f"MCDropout: the {type(self.model).__name__} has no layer with dropout that could stay on")
        for m in layers: m.train()
        if self.run_kind == 'fit': return
        # each evaluation begins with the same random numbers, and puts them back
        self.n_runs += 1
        torch.manual_seed(int(torch.randint(2**48, ()))+self.n_runs)


class ProgressiveResize(Callback):
    """Resizes images, in training and validation, to sizes that change in the course of a fit, bilinear and antialiased

    Images are all inputs that are 4-d tensors of floats; targets are left. An evaluation within a fit takes the size of
    the last training batch, one outside of it the last of `sizes`; `lr_find` takes the first.
    Raises: TypeError or ValueError if `sizes` mean nothing; TypeError for a batch without images.
    Order: before what mixes images."""
    order = -2
    unique = True
    state = ('now',)
    now: int|None = None  # which of the sizes; None outside of a fit

    def __init__(self,
        sizes: Mapping,  # by when each begins, as `{0: 128, 5: (192, 256), 8: None}`: whole numbers are epochs, floats
                         # shares of the fit, 0 to 1; a size is that of both sides or (height, width), None: as it is
    ):
        if not isinstance(sizes, Mapping): raise TypeError(
            f"ProgressiveResize: sizes={sizes!r}; give them by when they begin: {{0: 128, 5: 224}}")
        starts = [*sizes]
        for k in starts: check_number('ProgressiveResize: where a size begins', k, 0)
        if not starts or starts != sorted(starts) or starts[0] != 0: raise ValueError(
            f"ProgressiveResize: sizes={sizes!r}; give them by when they begin, in that order, from 0 on: {{0: 128, 5: "
            "224}}")
        self.of_epochs = all(isinstance(k, Integral) for k in starts)
        if not self.of_epochs and starts[-1] >= 1: raise ValueError(
            f"ProgressiveResize: sizes begin at {starts}; give epochs, or shares of the fit from 0 to 1")
        self.starts, self.sizes = starts, [_height_and_width(size) for size in sizes.values()]

    def before_batch(self):
        if self.training: self.now = self._place()
        size = self.sizes[-1 if self.now is None else self.now]
        if not any(map(_is_image, tensors_in(self.xb))): raise TypeError(
            f"ProgressiveResize: no input is a 4-d tensor of floats: {describe(self.xb)}")
        if size: self.learn.xb = map_tensors(lambda x: _resized(x, size) if _is_image(x) else x, self.xb)

    def _place(self):
        at = 0 if self.run_kind == 'lr_find' else self.epoch if self.of_epochs else self.pct_train
        return sum(start <= at for start in self.starts)-1

    def cleanup_fit(self): self.now = None


def _height_and_width(size):
    if size is None: return None
    both = (size, size) if isinstance(size, Integral) else size
    if not isinstance(both, (tuple, list)) or len(both) != 2: raise TypeError(
        f"ProgressiveResize: {size!r} is no size: give a number of pixels, (height, width), or None")
    for n in both: check_number('ProgressiveResize: a size', n, 1, whole=True, of='pixels')
    return tuple(both)


def _is_image(t): return t.ndim == 4 and t.is_floating_point()

def _resized(x, size):
    if x.shape[-2:] == size: return x
    return nn.functional.interpolate(x, size, mode='bilinear', antialias=True)
