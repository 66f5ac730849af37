"""A nested state as a copy of its own, on the CPU."""

from __future__ import annotations

import copy
from typing import Any, Final, TypeVar, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["cpu_state"]

T = TypeVar("T")
_ATOMS: Final = (int, float, str, bool, bytes, type(None))


def cpu_state(value: T) -> T:
    """An independent snapshot of a nested state, with its tensors on the CPU.

    Dicts, lists, tuples, named tuples and their subclasses are gone through, with the attributes of their own that they have,
    as the `_metadata` of a module's `state_dict()`. Tensors keep their dtype, shape, strides, class and `requires_grad`,
    but no graph; those that shared memory share it in the copy, and what stood at several places is one thing again.
    Everything else is deep-copied, which leaves a tensor in an object of another class on its device.

    Cost: one copy of each storage, whole, even of one that only a small view refers to.

    >>> weight = torch.zeros(2, 2)
    >>> state = cpu_state({"weight": weight, "tied": weight.T, "steps": [1, 2]})
    >>> _ = weight.fill_(1)
    >>> state["weight"].sum().item(), state["tied"].data_ptr() == state["weight"].data_ptr()
    (0.0, True)
    """
    return cast(T, _Snapshot().copy(value))


class _Snapshot:
    """One pass over a state."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}  # as deepcopy's, which gets it: the copies by the id of what was copied
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        made: Any
        if isinstance(value, torch.Tensor):
            made = self._tensor(value)
        elif hasattr(kind, "__deepcopy__"):
            made = copy.deepcopy(value, self._memo)
        elif isinstance(value, (dict, list)):
            return self._container(value)
        elif isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_make")):
            items = [self.copy(item) for item in value]
            made = tuple(items) if kind is tuple else kind._make(items)
        else:
            made = copy.deepcopy(value, self._memo)
        self._memo[id(value)] = made
        return made

    def _container(self, value: Any) -> Any:
        made = copy.copy(value)
        self._memo[id(value)] = made  # before its items, which may lead back to it
        if isinstance(value, dict):
            for key, item in value.items():
                made[key] = self.copy(item)
        else:
            made[:] = [self.copy(item) for item in value]
        self._attributes(value, made)
        return made

    def _attributes(self, value: Any, made: Any) -> None:
        for name, attribute in getattr(value, "__dict__", {}).items():
            made.__dict__[name] = self.copy(attribute)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if not _is_plain(value):
            return self._special(value)
        with torch._C.DisableTorchFunctionSubclass():
            storage = self._storage(value.untyped_storage())
            made = torch.empty(0, dtype=value.dtype)
            made.set_(storage, value.storage_offset(), value.size(), value.stride())
            if type(value) is not torch.Tensor:
                made = torch.Tensor._make_subclass(type(value), made)
            made.requires_grad_(value.requires_grad)
        self._attributes(value, made)
        return made

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage._cdata
        if key not in self._storages:
            made = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            made.copy_(storage)
            self._storages[key] = made
            if storage.device.type == "cpu":
                # Where torch's own deepcopy looks, when it comes upon the same memory in an object of another class.
                self._memo.setdefault(cast(int, "torch"), {})[key] = made
        return self._storages[key]

    def _special(self, value: torch.Tensor) -> torch.Tensor:
        """Without one plain storage: sparse, quantized, lazily conjugated, of a class that wraps others, not yet there."""
        if is_lazy(value) or value.device.type == "meta":
            return copy.deepcopy(value, self._memo)
        made = value.detach().cpu()
        made = made.clone() if value.device.type == "cpu" else made
        return made.requires_grad_(value.requires_grad)


def _is_plain(value: torch.Tensor) -> bool:
    return (
        value.layout is torch.strided
        and value.device.type != "meta"
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not is_lazy(value)
        and not is_traceable_wrapper_subclass(value)
        and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )
