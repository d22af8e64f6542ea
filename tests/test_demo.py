"""`make demo`: what it prints where there is no terminal, what it reaches, and what it leaves behind."""
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

root = Path(__file__).parents[1]


@pytest.fixture(scope='module')
def demo(tmp_path_factory):
    "The output of the demo, and the folder with its files"
    folder = tmp_path_factory.mktemp('demo')
    env = {k: v for k, v in os.environ.items() if k != 'LEARNER_DISPLAY'}
    env |= dict(PYTHONPATH=str(root), OMP_NUM_THREADS='1')
    done = subprocess.run([sys.executable, '-W', 'error', root/'nbs'/'demo.py'], cwd=folder, env=env,
                          capture_output=True, encoding='utf-8', timeout=200)
    assert done.returncode == 0, done.stderr
    return done, folder/'runs'/'demo'


def test_demo_prints_plain_lines(demo):
    "Piped, the demo prints a header, a line an epoch and the result, without a control character, and warns of nothing"
    done, _ = demo
    first, head, *rows = done.stdout.partition('\n\n')[0].splitlines()

    assert first == 'Training on 1294 images of handwritten digits, 12 epochs, learning rate up to 0.0071'
    assert head.split() == ['epoch', 'train_loss', 'valid_loss', 'accuracy', 'time']
    assert [int(row.split()[0]) for row in rows] == list(range(12))
    assert not re.search(r'[\x00-\x09\x0b-\x1f\x7f]', done.stdout) and not done.stderr


def test_demo_learns(demo):
    "At least 98 % of the images that the network has never seen are read right"
    done, _ = demo

    accuracy, n = re.search(r'Test accuracy: ([\d.]+)% of (\d+) images', done.stdout).groups()

    assert float(accuracy) >= 98 and n == '360'


def test_demo_leaves_five_files(demo):
    "The history has a row an epoch, the pictures are some, and the weights open without running any code in them"
    _, folder = demo

    with open(folder/'history.csv', newline='', encoding='utf-8') as f: rows = list(csv.DictReader(f))
    weights = torch.load(folder/'weights.pth', weights_only=True)

    assert sorted(p.name for p in folder.iterdir()) == [
        'confusion.png', 'history.csv', 'loss.png', 'lr_find.png', 'weights.pth']
    assert [row['epoch'] for row in rows] == [str(i) for i in range(12)] and float(rows[-1]['accuracy']) > .95
    pictures = 'loss.png', 'lr_find.png', 'confusion.png'
    assert all((folder/name).read_bytes().startswith(b'\x89PNG') for name in pictures)
    assert weights['7.weight'].shape == (10, 256)
