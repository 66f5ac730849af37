"""Batches into page-locked memory, for fast and asynchronous copies to an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.data._utils.pin_memory as torch_pin_memory

from stateful_pipes.node import Node
from stateful_pipes.ticket import Ticket

__all__ = ["PinnedMemory"]

T_co = TypeVar("T_co", covariant=True)


class PinnedMemory(Node[T_co]):
    """Copies the tensors of each item to page-locked memory, in the process that asks, as torch's own DataLoader does.

    Stateless, so unlike torchdata's `PinMemory` node it leaves `set_epoch`, `len` and `allow=` as they are.

    Args:
        source: The node below, a `ProcessPrefetcher` as a rule.
        device: As torch's `pin_memory_device`; "" for the current accelerator.
    """

    kind = "pin_memory"

    def __init__(self, source: Node[T_co], device: str = "") -> None:
        self.device = device or None
        super().__init__(source)

    def run(self, ticket: Ticket) -> list[Any]:
        pin: Callable[[Any, str | None], Any] = torch_pin_memory.pin_memory
        return [pin(item, self.device) for item in self._source.run(ticket)]
