"""Other libraries at the work of `by_hand`: each function makes a fit of `k` ready batches with torch's SGD.

Each is set up as its documentation shows, with bars, tables, logs and checkpoints switched off, and records as much as
it does by itself. Also where a library wants a loader, it is given the list, so that no time goes into data.
"""
import logging
from functools import partial

from torch.optim import SGD

from tests.bench.work import mse_loss, ready_batches, small_net

__all__ = ['peers']

lr = 1e-3


def fastai(k):
    from fastai.callback.progress import ProgressCallback  # noqa: F401  # adds `no_bar`
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper
    learn = Learner(DataLoaders(ready_batches(k), []), small_net(), mse_loss, partial(OptimWrapper, opt=SGD), lr)
    def run():
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return run


def lightning(k):
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_net()

        def training_step(self, batch, i): return mse_loss(self.model(batch[0]), batch[1])
        def configure_optimizers(self): return SGD(self.parameters(), lr=lr)

    class Batches:  # a list would be taken for a list of loaders
        batches = ready_batches(k)
        def __len__(self): return len(self.batches)
        def __iter__(self): return iter(self.batches)

    module, batches = Module(), Batches()
    off = dict.fromkeys(('logger', 'enable_checkpointing', 'enable_progress_bar', 'enable_model_summary'), False)
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    def run(): lightning.Trainer(accelerator='cpu', max_epochs=1, **off).fit(module, batches)
    return run


def ignite(k):
    from ignite.engine import create_supervised_trainer
    model, batches = small_net(), ready_batches(k)
    trainer = create_supervised_trainer(model, SGD(model.parameters(), lr=lr), mse_loss)
    return lambda: trainer.run(batches, max_epochs=1)


def accelerate(k):
    from accelerate import Accelerator
    accelerator, model, batches = Accelerator(cpu=True), small_net(), ready_batches(k)
    model, opt = accelerator.prepare(model, SGD(model.parameters(), lr=lr))
    def run():
        model.train()
        for xb, yb in batches:
            loss = mse_loss(model(xb), yb)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
    return run


def skorch(k):
    from skorch import NeuralNet
    from torch.nn import MSELoss
    batches = ready_batches(k)
    class Net(NeuralNet):
        def get_iterator(self, dataset, training=False): return batches
    net = Net(small_net(), MSELoss, optimizer=SGD, lr=lr, max_epochs=1, train_split=None, verbose=0).initialize()
    return lambda: net.partial_fit(*batches[0])


peers = dict(fastai=fastai, lightning=lightning, ignite=ignite, accelerate=accelerate, skorch=skorch)
