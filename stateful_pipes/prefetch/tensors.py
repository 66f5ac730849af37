"""Tensors in a pickle: as out-of-band buffers (protocol 5), which torch's own reduction would copy into it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

__all__ = ["TensorPickler", "as_tensor"]


class TensorPickler(pickle.Pickler):
    """Takes plain tensors of the CPU so; all else is as pickle and torch have it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.__dict__:  # torch keeps attributes
            return NotImplemented
        if (code := _CODES.get(value.dtype)) is not None:
            try:
                array: Any = value.numpy()
            except (RuntimeError, TypeError):  # gradients, lazy conjugates, other devices and layouts
                array = None
            if array is not None and array.flags.c_contiguous:
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
    if isinstance(dtype, int):
        return torch.from_numpy(np.ndarray(shape, _NUMPY[dtype], data))
    return as_tensor(data, dtype, shape, strides)


def as_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor over a buffer of exactly its size, which is what `torch.save` would write. It is no view, which could not be
    detached in place.
    """
    if strides is None and (code := _CODES.get(dtype)) is not None:
        return torch.from_numpy(np.ndarray(shape, _NUMPY[code], data))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(data, dtype=dtype)
    strides = strides or torch.empty(shape, device="meta").stride()
    return flat.set_(flat.untyped_storage(), flat.storage_offset(), shape, strides)


# The types that NumPy has as well go by number and through it: that takes a third of the time.
_NUMPY = [np.dtype(code) for code in "?bhilBHILefdFD"]
_CODES = {torch.from_numpy(np.empty(0, dtype)).dtype: code for code, dtype in enumerate(_NUMPY)}
