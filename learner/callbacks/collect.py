"""What batches hold, and what the model makes of them, kept: CollectDataCallback, and FetchPredsCallback each epoch."""
from typing import Any

from ..callback import Callback
from ..tensors import to_detach

__all__ = ['CollectDataCallback', 'FetchPredsCallback']


class CollectDataCallback(Callback):
    """Keeps inputs, targets, prediction and loss of each batch in `data`, on the CPU, of training and of evaluations

    They are as other callbacks have made them: with MixUp inputs and loss are mixed, while targets are the batch's own.
    It begins anew with each fit, and each evaluation outside of one; a fit that is resumed in another process keeps
    what comes from there on. Evaluations that others make within a fit, as FetchPredsCallback does, are not kept.
    Order: after what changes predictions and losses."""
    order = 20
    kind = ''  # of the run that is kept; '' in one that began before

    def __init__(self,
        run_train: bool = True,  # keep training batches?
        run_valid: bool = True,  # and those of evaluations?
    ):
        self.run_train, self.run_valid = run_train, run_valid
        self.data: list[tuple] = []  # `(xb, yb, pred, loss)`; a loss that was not computed is None

    def before_fit(self): self.data, self.kind = [], self.learn.run_kind

    def after_batch(self):
        if self.kind in ('', self.learn.run_kind):
            self.data.append(to_detach((self.xb, self.yb, self.pred, self.loss), cpu=True))

    def cleanup_fit(self): self.kind = ''


class FetchPredsCallback(Callback):
    """Predicts after each validation of a fit: `found` is what `get_preds` gave the last time, with `preds` and `targs`

    Order: after what the validation is done with has been put back."""
    run_in = {'fit'}
    remove_on_fetch = True
    found: Any = None  # Preds; None before there are any

    def __init__(self,
        ds_idx: int = 1,    # 0 for the training loader, 1 for the validation set or sets
        dl: Any = None,     # another loader instead
        cbs: Any = None,    # callbacks for these predictions only
        **kwargs: Any,      # of `get_preds`: `with_input`, `with_decoded`, `act`, `reorder` …
    ): self.kwargs = dict(ds_idx=ds_idx, dl=dl, cbs=cbs, **kwargs)

    @property
    def preds(self) -> Any: "Of all items; None before there are any"; return self.found and self.found.preds
    @property
    def targs(self) -> Any: "Their targets"; return self.found and self.found.targs

    def after_validate(self):  # of the last set: the predictions are of all
        if self.valid_name != [*self.dls.valid_sets][-1]: return
        self.found = self.learn.get_preds(**self.kwargs)
