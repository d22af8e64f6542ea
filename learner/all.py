"""For notebooks: `from learner.all import *` gives all of learner, and what nearly every notebook needs beside it."""
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from fastcore.basics import noop, patch, store_attr
from fastcore.foundation import L
from fastcore.meta import delegates
from fastcore.test import test_close, test_eq
from torch import Tensor, nn, optim, tensor
from torch.utils.data import DataLoader, TensorDataset

import learner
from learner import *  # noqa: F403

__all__ = ['torch', 'nn', 'F', 'optim', 'tensor', 'Tensor', 'DataLoader', 'TensorDataset', 'np', 'pd', 'plt', 'partial',
           'Path', 'patch', 'L', 'store_attr', 'delegates', 'noop', 'test_eq', 'test_close']
__all__ += learner.__all__
