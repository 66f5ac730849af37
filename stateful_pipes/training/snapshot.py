"""A nested state as a copy of its own, on the CPU."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from typing import Any, Final, TypeVar, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["cpu_state"]

T = TypeVar("T")
_ATOMS: Final = (int, float, str, bool, bytes, type(None))
_CONTAINERS: Final = (OrderedDict, defaultdict, dict, list, deque)


def cpu_state(value: T) -> T:
    """An independent snapshot of a nested state, with its tensors on the CPU.

    Dicts, lists, deques, tuples, named tuples and their subclasses are gone through, with the attributes of their own that they
    have, as the `_metadata` of a module's `state_dict()`. Tensors keep their dtype, shape, strides, class, attributes and
    `requires_grad`, but no graph and no gradient; those that shared memory share it in the copy, and what stood at several
    places is one thing again. Everything else is deep-copied, its attributes that are tensors like these; one that lies
    deeper in it stays on its device, and may not have a graph.

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
        # As deepcopy's, which gets it: the copies by the id of what was copied, and under "torch" those of CPU storages, where
        # torch's own deepcopy looks when it comes upon the same memory in an object of another class.
        self._memo: dict[Any, Any] = {"torch": {}}
        self._storages: dict[int, torch.UntypedStorage] = {}  # the copies of those of other devices

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, torch.Tensor):
            made = self._memo[id(value)] = self._tensor(value)
            self._attributes(value, made)
            return made
        if not hasattr(kind, "__deepcopy__"):
            if isinstance(value, _CONTAINERS):
                return self._container(value)
            if isinstance(value, tuple) and kind is not torch.Size:
                return self._tuple(value)
        for attribute in getattr(value, "__dict__", {}).values():
            if isinstance(attribute, torch.Tensor):
                self.copy(attribute)  # where deepcopy finds it
        return copy.deepcopy(value, self._memo)

    def _container(self, value: Any) -> Any:
        # As it is in memory, whatever methods a subclass has: one of them may refuse, convert or compute.
        base: Any = next(one for one in _CONTAINERS if isinstance(value, one))
        made = self._memo[id(value)] = base.__new__(type(value))  # before its items, which may lead back to it
        if base is deque:
            base.__init__(made, (), value.maxlen)
        elif base is defaultdict:
            base.__init__(made, value.default_factory)
        if issubclass(base, dict):
            for key, item in base.items(value):
                base.__setitem__(made, self.copy(key), self.copy(item))
        else:
            base.extend(made, [self.copy(item) for item in base.__iter__(value)])
        self._attributes(value, made)
        return made

    def _tuple(self, value: Any) -> Any:
        kind = type(value)
        items = [self.copy(item) for item in tuple.__iter__(value)]
        if id(value) in self._memo:  # one of them has led back to it
            return self._memo[id(value)]
        is_c_struct = hasattr(kind, "n_sequence_fields")  # as what torch.max returns
        made = kind(items, value.__reduce__()[1][1]) if is_c_struct else tuple.__new__(kind, items)
        self._memo[id(value)] = made
        self._attributes(value, made)
        return made

    def _attributes(self, value: Any, made: Any) -> None:
        """Those that the copy does not have yet: one of a class that wraps other tensors has them."""
        (own, slots), (own_made, slots_made) = _attributes_of(value), _attributes_of(made)
        for name, attribute in own.items():
            if name not in own_made:
                vars(made)[name] = self.copy(attribute)
        for name, attribute in slots.items():
            if name not in slots_made:
                object.__setattr__(made, name, self.copy(attribute))

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if is_lazy(value):
            return copy.deepcopy(value, self._memo)
        with torch._C.DisableTorchFunctionSubclass():
            made = self._detached(value.detach())
            if type(made) is torch.Tensor and type(value) is not torch.Tensor:
                made = torch.Tensor._make_subclass(type(value), made)
            return made.requires_grad_(value.requires_grad)

    def _detached(self, value: torch.Tensor) -> torch.Tensor:
        if not _has_storage(value):
            return value.clone() if value.device.type in ("cpu", "meta") else value.cpu()
        if value.is_conj():
            return self._detached(value.conj()).conj()
        if value.is_neg():
            return torch._neg_view(self._detached(torch._neg_view(value)))
        made = torch.empty(0, dtype=value.dtype, device="cpu")
        return made.set_(self._storage(value.untyped_storage()), value.storage_offset(), value.size(), value.stride())

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copies = self._memo["torch"] if storage.device.type == "cpu" else self._storages
        key = storage._cdata
        if key not in copies:
            copies[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage().copy_(storage)
        return cast(torch.UntypedStorage, copies[key])


def _attributes_of(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those in its `__dict__`, and those in slots."""
    state: Any = object.__getstate__(value)  # whatever a subclass makes of it for pickle
    own, slots = state if isinstance(state, tuple) else (state, None)
    return own or {}, slots or {}


def _has_storage(value: torch.Tensor) -> bool:
    """Whether it is a view of one plain storage, and not sparse, quantized, of a class that wraps others, without memory..."""
    return (
        type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_traceable_wrapper_subclass(value)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not (value.is_nested or value.is_quantized or value._is_zerotensor())
    )
