"""In a worker, torch's default collate stacks straight into the slot that the batch will be sent in.

It hooks the table that `torch.utils.data.default_collate` consults, so a collate_fn that calls that gains as well. Left
to itself, torch would make a new shared memory file for each tensor, because `get_worker_info()` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
import torch.utils.data._utils.collate as torch_collate

from stateful_pipes.prefetch.slots import Slot

__all__ = ["install", "into"]

_PLAIN = {torch.Tensor}
_dtype_of = attrgetter("dtype")

_slot: Slot | None = None


def into(slot: Slot | None) -> None:
    """Makes `slot` what this process collates into; None for memory of its own."""
    global _slot
    _slot = slot


def install() -> None:
    """Hooks torch's collate, unless the user has; for a worker process only."""
    table = torch_collate.default_collate_fn_map
    if table.get(torch.Tensor) is torch_collate.collate_tensor_fn:
        table[torch.Tensor] = _stack


def _stack(batch: list[torch.Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> torch.Tensor:
    """What torch's own does in the main process, where it is `torch.stack` after a few refusals."""
    first = batch[0]
    if first.layout is not torch.strided or first.is_nested:
        refused: torch.Tensor = torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return refused
    slot = _slot
    if (
        slot is not None
        and first.is_cpu
        and not first.is_quantized
        and set(map(type, batch)) == _PLAIN
        and len(set(map(_dtype_of, batch))) == 1
        and _stacks_to_contiguous(first)
    ):
        out = slot.tensor((len(batch), *first.shape), first.dtype)
        if out is not None:
            with suppress(RuntimeError):  # unequal shapes, gradients: for torch.stack alone to judge
                return torch.stack(batch, 0, out=out)
    return torch.stack(batch, 0)


def _stacks_to_contiguous(first: torch.Tensor) -> bool:
    """Whether torch.stack, left alone, gives the default memory format: it does if one tensor suggests that."""
    if first.is_contiguous():
        return True
    # A copy of one sample. On the device "meta" it would be none, but import sympy and torch's compiler: seconds in each worker.
    return torch.stack([first.detach()]).is_contiguous()
