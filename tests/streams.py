"""What the tests share: data sets whose samples show every generator, and a comparison bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class DrawingDataset:
    """Sample i shows its index and a draw of each global generator, so whatever changes a seed changes a sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, Any, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, random.random(), np.random.random(2), torch.rand(3)


def drawing_collate(samples: list[Any]) -> dict[str, Any]:
    """A collate function that draws from every generator itself."""
    return {
        "samples": samples,
        "draws": (random.random(), float(np.random.random()), torch.rand(2)),
    }


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, in type and structure too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()  # tells 0.0 from -0.0, and not nan from nan
    return bool(one == other)


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().to_dense().clone(memory_format=torch.contiguous_format)
    return dense.flatten().view(torch.uint8).numpy().tobytes()


def generator_states() -> tuple[Any, ...]:
    """The three global generators' states, comparable with ==."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


def disturb() -> None:
    """What a training loop does to the global generators between batches."""
    random.random()
    np.random.standard_normal()
    torch.rand(5)


def place_of(loader):
    """Where the training loop stands: the epoch, and the samples consumed in it."""
    return loader.position.epoch, loader.position.consumed
