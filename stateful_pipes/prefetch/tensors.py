"""Tensors in a pickle: as out-of-band buffers (protocol 5), which torch's own reduction would copy into it."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

import numpy as np
import torch

__all__ = ["TensorPickler", "as_shape"]


class TensorPickler(pickle.Pickler):
    """Takes plain tensors of the CPU so; all else is as pickle and torch have it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        if (code := _CODES.get(value.dtype)) is not None:
            with suppress(RuntimeError, TypeError):  # gradients, lazy conjugates, other devices and layouts
                array: Any = value.numpy()
                if array.flags.c_contiguous:
                    return rebuild_tensor, (pickle.PickleBuffer(array), code, array.shape, None)
        if (
            value.layout is torch.strided
            and value.device.type == "cpu"
            and not value.requires_grad
            and not value.is_quantized
            and not value.is_nested
        ):
            value = value.resolve_conj().resolve_neg()
            # Another memory format, such as channels last, is kept, if there are no gaps.
            order = sorted(range(value.dim()), key=value.stride, reverse=True)
            strides = value.stride() if value.permute(order).is_contiguous() else None
            dense = value.contiguous() if strides is None else value.permute(order)
            # A single element may have any stride and still be called contiguous.
            flat = dense.as_strided((dense.numel(),), (1,))
            data: Any = flat.view(torch.uint8).numpy() if dense.numel() else b""
            return rebuild_tensor, (pickle.PickleBuffer(data), value.dtype, tuple(value.shape), strides)
        return NotImplemented


def rebuild_tensor(data: Any, dtype: int | torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> torch.Tensor:
    # A storage of exactly this tensor's size: torch.save writes whole storages.
    if isinstance(dtype, int):
        return torch.from_numpy(np.ndarray(shape, _NUMPY[dtype], data))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return as_shape(torch.frombuffer(data, dtype=dtype), shape, strides)


def as_shape(flat: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Gives a tensor another shape in place: it shall be no view, which could not be detached in place."""
    strides = strides or torch.empty(shape, device="meta").stride()
    return flat.set_(flat.untyped_storage(), flat.storage_offset(), shape, strides)


# The types that NumPy has as well go by number and through it: that takes a third of the time.
_NUMPY = [np.dtype(code) for code in "?bhilBHILefdFD"]
_CODES = {torch.from_numpy(np.empty(0, dtype)).dtype: code for code, dtype in enumerate(_NUMPY)}
