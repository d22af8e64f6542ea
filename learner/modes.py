"""A model's train/eval modes and its device: look, switch, put back."""
import torch
from torch import nn

from .utils import warn

__all__ = ['snapshot_modes', 'restore_modes', 'train_mode', 'devices', 'choose_device', 'move']


def snapshot_modes(
    *models: nn.Module,
) -> list[tuple[nn.Module, bool]]:  # every module with its `training` flag, outermost first
    "The mode of every submodule, to be given back to `restore_modes`"
    return [(m, m.training) for model in models for m in model.modules()]


def restore_modes(
    modes: list[tuple[nn.Module, bool]],  # what `snapshot_modes` returned
) -> None:
    "Put every module back to its mode, by its own `train` method where that gets it there"
    for m, training in modes:
        if m.training != training: m.train(training)  # outermost first: what it switches too much is mended below
    for m, training in modes:
        if m.training != training: m.training = training  # an overridden `train` that pins another mode


def train_mode(
    model: nn.Module,
) -> list[str]:  # names of the outermost submodules that stay in eval
    """`model.train()`, but submodules in eval under a training parent stay so; a model wholly in eval trains wholly

    Those that the model's own `train` method leaves in eval are not among the names."""
    names = [n for n, m in model.named_modules() if not m.training] if model.training else []
    model.train()
    names = [n for n in names if model.get_submodule(n).training]
    outer = [n for n in names if not any(n.startswith(f'{o}.') for o in names)]
    for n in outer: model.get_submodule(n).eval()
    return outer


def devices(
    model: nn.Module,
) -> list[torch.device]:  # in order of first appearance; empty if it has neither parameters nor buffers
    "All devices that hold parameters or buffers of `model`"
    return list(dict.fromkeys(t.device for ts in (model.parameters(), model.buffers()) for t in ts))


def choose_device(
    wanted: torch.device|str|int|None,  # what the DataLoaders ask for; None lets the model and the machine decide
    model: nn.Module,
) -> torch.device:
    "Where to train: `wanted`, else the accelerator it is on, else cuda, mps or cpu; the first one of a spread model"
    now = devices(model)
    if len(now) > 1: return now[0]
    if wanted is not None: device = torch.device(wanted)
    elif now and now[0].type != 'cpu': return now[0]
    else: device = torch.device('cuda' if torch.cuda.is_available() else
                                'mps' if torch.backends.mps.is_available() else 'cpu')
    # tensors say 'cuda:0' where people say 'cuda'
    return torch.device('cuda', torch.cuda.current_device()) if device == torch.device('cuda') else device


def move(
    model: nn.Module,
    device: torch.device,
) -> bool:  # was it moved?
    "Move `model` to `device`, unless it is there; a model spread over devices is left alone, with a warning"
    now = devices(model)
    if len(now) > 1: warn(f"`{type(model).__name__}` is spread over {', '.join(map(str, now))} and is left there; "
                          f"batches go to {device}")
    moves = len(now) == 1 and now[0] != device
    if moves: model.to(device)
    return moves
