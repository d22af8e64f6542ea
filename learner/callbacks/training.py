"""What changes a training step: gradient clipping."""
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..callback import Callback

__all__ = ['GradientClip']


class GradientClip(Callback):
    """Scales all gradients down, just before each step, so that their total norm is at most `max_norm`

    They are those of the optimizer's parameters; the norm is that of all of them together, by what torch's
    own `clip_grad_norm_` is made of, which does not wait for the device; sparse gradients are clipped too.
    Raises: ValueError if `max_norm` or `norm_type` is not above 0.
    Order: after mixed precision (10), which unscales the gradients."""
    order = 11
    run_valid = False

    def __init__(self,
        max_norm: float = 1.,   # largest total norm allowed
        norm_type: float = 2.,  # p of the p-norm; `inf` bounds the largest single entry
    ):
        for name, value in dict(max_norm=max_norm, norm_type=norm_type).items():
            if not value > 0: raise ValueError(f"GradientClip: `{name}` is {value!r}; give a number above 0")
        self.max_norm, self.norm_type = max_norm, norm_type

    def before_step(self):
        ps = [p for p in self.opt.all_params() if p.grad is not None]
        for p in ps:
            if p.grad.is_sparse: p.grad = p.grad.coalesce()  # so that each of its values is there once
        norm = get_total_norm([p.grad.values() if p.grad.is_sparse else p.grad for p in ps], self.norm_type)
        clip_grads_with_norm_(ps, self.max_norm, norm)
