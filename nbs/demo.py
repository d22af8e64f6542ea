"""Trains a small convolutional network to read handwritten digits; `make demo` runs it.

What it leaves behind is in runs/demo: history.csv, loss.png, lr_find.png, confusion.png and weights.pth."""
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import ClassificationInterpretation, CSVLogger, DataLoaders, Learner, accuracy, set_seed, steep

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


learn = Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=CSVLogger, path=out)

# Try learning rates from 1e-7 to 10; the network is afterwards as it was. `steep` is bolder than the default, `valley`.
lr = learn.lr_find(suggest_funcs=steep, show_plot=False).steep
print(f'Training on {len(dls.train_ds)} images of handwritten digits, 12 epochs, learning rate up to {lr:.2g}',
      flush=True)
learn.fit_one_cycle(12, lr)

learn.recorder.plot_loss(log=True).figure.savefig(out/'loss.png')
learn.recorder.plot_lr_find().figure.savefig(out/'lr_find.png')
torch.save(learn.model.state_dict(), out/'weights.pth')
held_out = DataLoader(TensorDataset(x_test, y_test), 64)
test = learn.validate(dl=held_out)
confusion = ClassificationInterpretation.from_learner(learn, dl=held_out).plot_confusion_matrix()
confusion.figure.savefig(out/'confusion.png')
print(f"\nTest accuracy: {test['accuracy']:.2%} of {len(y_test)} images that the network had never seen")
print(f'{out} holds history.csv, loss.png, lr_find.png, confusion.png and weights.pth')
