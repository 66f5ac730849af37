"""A foreign node's state as JSON text that gives the same state back: what JSON lacks is a mapping with one marked key."""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import torch

from stateful_pipes.errors import StateEncodingError

__all__ = ["decode", "encode"]

_MARK = "__stateful_pipes__"


def encode(state: object, node: str) -> str:
    """JSON text of a state made of None, bool, int, float, str, bytes, lists, tuples, dicts, NumPy arrays and CPU tensors.

    Raises:
        StateEncodingError: the state of `node` holds anything else; it names the place.
    """
    return json.dumps(_to_json(state, node, "state"), separators=(",", ":"), allow_nan=False)


def decode(encoded: str) -> Any:
    """The state that `encode` was given: equal, with the same types, and sharing nothing."""
    return _from_json(json.loads(encoded))


def _to_json(value: object, node: str, path: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_MARK: "float", "value": repr(value)}
    if type(value) is list:
        return [_to_json(one, node, f"{path}[{i}]") for i, one in enumerate(value)]
    if type(value) is tuple:
        return {_MARK: "tuple", "value": [_to_json(one, node, f"{path}[{i}]") for i, one in enumerate(value)]}
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        pairs = [(key, _to_json(one, node, f"{path}[{key!r}]")) for key, one in value.items()]
        if type(value) is dict and all(type(key) is str for key, _ in pairs) and _MARK not in value:
            return dict(pairs)
        return {_MARK: type(value).__name__, "value": [[_to_json(key, node, f"key of {path}"), one] for key, one in pairs]}
    if isinstance(value, (bytes, bytearray)) and type(value) in (bytes, bytearray):
        return {_MARK: type(value).__name__, "value": base64.b64encode(value).decode()}
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return _block(kind, np.lib.format.dtype_to_descr(value.dtype), value.shape, np.asarray(value).tobytes())
    if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized:
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # A single element may have any stride and still be called contiguous.
        flat = dense.as_strided((dense.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return _block("tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    raise StateEncodingError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}",
        node=node,
        remedy="Let get_state() return plain values, bytes, arrays and tensors",
    )


def _block(kind: str, dtype: object, shape: tuple[int, ...], data: bytes) -> dict[str, Any]:
    return {_MARK: kind, "dtype": dtype, "shape": list(shape), "value": base64.b64encode(data).decode()}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: _from_json(one) for key, one in value.items()}
    held = value["value"]
    if kind == "float":
        return float(held)
    if kind == "tuple":
        return tuple(_from_json(one) for one in held)
    if kind in ("dict", "OrderedDict"):
        pairs = [(_from_json(key), _from_json(one)) for key, one in held]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    data = bytearray(base64.b64decode(held))
    if kind in ("bytes", "bytearray"):
        return bytes(data) if kind == "bytes" else data
    shape = tuple(value["shape"])
    if kind == "tensor":
        dtype = cast(torch.dtype, getattr(torch, value["dtype"]))
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    descr = value["dtype"]
    array_dtype = np.lib.format.descr_to_dtype([tuple(one) for one in descr] if isinstance(descr, list) else descr)
    # A type of width 0, such as that of an empty string, has no bytes to count items by.
    array = np.frombuffer(data, array_dtype).reshape(shape) if array_dtype.itemsize else np.ndarray(shape, array_dtype)
    return array[()] if kind == "scalar" else array
