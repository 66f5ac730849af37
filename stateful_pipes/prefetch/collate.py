"""In a worker, torch's default collate stacks straight into the slot that the batch will be sent in.

It hooks the table that `torch.utils.data.default_collate` consults, so a collate_fn that calls that gains as well. Left
to itself, torch would make a new shared memory file for each tensor, because `get_worker_info()` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.utils.data._utils.collate as torch_collate

from stateful_pipes.prefetch.slots import Slot

__all__ = ["install", "into"]

_slot: Slot | None = None


def into(slot: Slot | None) -> None:
    """Makes `slot` what this process collates into; None for memory of its own."""
    global _slot
    _slot = slot


def install() -> None:
    """Hooks torch's collate; for a worker process only."""
    torch_collate.default_collate_fn_map[torch.Tensor] = _stack


def _stack(batch: list[torch.Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> torch.Tensor:
    first = batch[0]
    if first.layout is not torch.strided or first.device.type != "cpu" or first.is_nested or first.is_quantized:
        stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return stacked
    slot, dtype = _slot, first.dtype
    if slot is not None and all(type(one) is torch.Tensor and one.dtype is dtype for one in batch):
        out = slot.tensor((len(batch), *first.shape), dtype)
        with suppress(RuntimeError):  # unequal shapes, gradients: for torch.stack alone to judge
            return torch.stack(batch, 0, out=out)
    return torch.stack(batch, 0)
