"""L1, what pulls weights to 0 by the same amount whatever their size; weight decay (L2) is the optimizer's `wd`."""
import torch

from ..callback import Callback
from ..utils import check_number

__all__ = ['L1']


class L1(Callback):
    """Adds the gradient of `wd*|w|` for each parameter that decays, just before the step; the loss stays as it is

    The sign of a weight that is 0 is 0. `wd_mult` of `param_opts` multiplies it, as it does weight decay: biases and
    normalisation layers have none, unless the Learner has `wd_bn_bias`.
    Raises: ValueError or TypeError if `wd` is no number of 0 or more; TypeError for sparse gradients.
    Order: after clipping (11), which sees the loss's gradients alone."""
    order = 11.5
    run_in = {'fit', 'lr_find'}
    run_valid = False

    def __init__(self,
        wd: float,  # the share of the sign that is added to the gradient
    ):
        check_number('L1: `wd`', wd, 0)
        self.wd = wd

    @torch.no_grad()
    def before_step(self):
        opts, by_share = self.learn.opt.opts, {}
        for p in self.learn.opt.all_params():
            if p.grad is None: continue
            if p.grad.is_sparse: raise TypeError(
                f"L1: the gradient of `{self.learn.opt.names[p][0]}` is sparse: L1 would change all of its weights")
            by_share.setdefault(self.wd*opts[p].get('wd_mult', 1.), []).append(p)
        for share, ps in by_share.items():
            if share: torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
                [p.grad for p in ps], torch._foreach_sign(ps), alpha=share)  # pyright: ignore[reportPrivateImportUsage]
