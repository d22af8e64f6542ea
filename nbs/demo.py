"""Trains a small convolutional network to read handwritten digits; `make demo` runs it.

What it leaves behind is in runs/demo: history.csv, loss.png and weights.pth."""
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import Callback, CSVLogger, DataLoaders, Learner, accuracy, set_seed

set_seed(42)
torch.set_num_threads(1)  # a network this small gains nothing from threads, and loses much when other programs run
out = Path('runs/demo')

# 1,797 real images of 8×8 pixels. A fifth of them is set aside and looked at once, at the very end.
images, digits = load_digits(return_X_y=True)
images = torch.tensor(images/16, dtype=torch.float32).view(-1, 1, 8, 8)
digits = torch.tensor(digits)
x, x_test, y, y_test = train_test_split(images, digits, test_size=.2, random_state=42, stratify=digits)

# A tenth of the rest is the validation set, by which each epoch is judged.
dls = DataLoaders.from_tensors(x, y, valid_pct=.1, bs=64)

def conv(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())

model = nn.Sequential(conv(1, 32), conv(32, 32), nn.MaxPool2d(2), conv(32, 64), nn.MaxPool2d(2),
                      nn.Flatten(), nn.Dropout(.3), nn.Linear(64*2*2, 10))


class SlowDown(Callback):
    "Takes the last third of the epochs in smaller steps: a method named after an event is called at it"
    def before_epoch(self):
        if self.epoch == self.n_epoch*2//3: self.opt.set_hyper('lr', self.lr/10)


learn = Learner(dls, model, nn.CrossEntropyLoss(), lr=2e-3, metrics=accuracy, cbs=[SlowDown, CSVLogger], path=out)
print(f'Training on {len(dls.train_ds)} images of handwritten digits, 15 epochs', flush=True)
learn.fit(15)

learn.recorder.plot_loss(log=True).figure.savefig(out/'loss.png')
torch.save(learn.model.state_dict(), out/'weights.pth')
test = learn.validate(dl=DataLoader(TensorDataset(x_test, y_test), 64))
print(f"\nTest accuracy: {test['accuracy']:.2%} of {len(y_test)} images that the network had never seen")
print(f'{out} holds history.csv, loss.png and weights.pth')
