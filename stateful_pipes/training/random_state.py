"""The main process's generators: what the training loop itself draws from."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
import torch

__all__ = [
    "RandomState",
    "check_device",
    "check_generators",
    "check_random_state",
    "generators_kept",
    "random_state",
    "restore_random_state",
]

_MT19937: Final = 624
"""Words of the generator that Python's and NumPy's global ones are."""


class PythonState(TypedDict):
    """Of the module `random`.

    Attributes:
        version: Of `random.getstate()`.
        words: int64 of shape (625,): the generator's words of 32 bits and its index.
        gauss: The second number of the last pair, if it is still to be given.
    """

    version: int
    words: torch.Tensor
    gauss: float | None


class NumpyState(TypedDict):
    """Of `numpy.random`'s functions.

    Attributes:
        words: int64 of shape (624,): the generator's words of 32 bits.
        position: Its index, from 0 to 624.
        has_gauss: 1 if the second number of the last pair is still to be given.
        gauss: That number.
    """

    words: torch.Tensor
    position: int
    has_gauss: int
    gauss: float


class RandomState(TypedDict):
    """What `random_state` returns: tensors, numbers and None, which `torch.load(weights_only=True)` takes as they are.

    Attributes:
        python, numpy: Of the global generators of these.
        torch: uint8, of torch's default CPU generator.
        cuda: uint8, of one CUDA device's default generator; only where a device was named.
    """

    python: PythonState
    numpy: NumpyState
    torch: torch.Tensor
    cuda: NotRequired[torch.Tensor]


def random_state(device: torch.device | str | None = None) -> RandomState:
    """The states of Python's, NumPy's and torch's global generators; nothing is drawn.

    Args:
        device: A CUDA device whose generator is to be held as well; None or the CPU: none is.

    Size: 15 KB. Cost: 0.1 ms.

    Raises:
        ValueError: another kind of device, or one that is not there, or NumPy's global generator is not the MT19937 that it is
            by default.

    >>> state = random_state()
    >>> drawn = random.random(), np.random.random(), torch.rand(()).item()
    >>> restore_random_state(state)
    >>> drawn == (random.random(), np.random.random(), torch.rand(()).item())
    True
    """
    cuda = check_generators(device)
    version, words, gauss = random.getstate()
    numpy = _numpy_state()
    state: RandomState = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "numpy": {
            "words": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "torch": torch.default_generator.get_state(),
    }
    if cuda is not None:
        state["cuda"] = torch.cuda.get_rng_state(cuda)
    return state


def restore_random_state(state: RandomState, device: torch.device | str | None = None) -> None:
    """Puts the generators back; either all of them or none.

    Args:
        state: What `random_state` returned.
        device: The CUDA device whose generator is to take `state["cuda"]`; has to be named if the state has that, and only then.

    Raises:
        ValueError, TypeError: the state is damaged, or of other generators; nothing is changed.
    """
    check_random_state(state, device)
    random.setstate(_python(state["python"]))
    np.random.set_state(_numpy(state["numpy"]))
    torch.default_generator.set_state(state["torch"].cpu())
    cuda = check_device(device)
    if cuda is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), cuda)


@contextmanager
def generators_kept(device: torch.device | str | None = None) -> Iterator[None]:
    """After it the generators are as before it, whatever was drawn."""
    before = random_state(device)
    try:
        yield
    finally:
        restore_random_state(before, device)


def check_generators(device: torch.device | str | None = None) -> torch.device | None:
    """Raises ValueError where this process has no generators to take a state; returns the device as `check_device`."""
    cuda = check_device(device)
    if cuda is not None and not torch.cuda.is_available():
        raise ValueError(f"device {cuda} is not available")
    _numpy_state()
    return cuda


def check_random_state(state: Any, device: torch.device | str | None = None) -> None:
    """Raises what `restore_random_state` would; sets nothing but generators of its own."""
    cuda = check_generators(device)
    if cuda is None and isinstance(state, Mapping) and "cuda" in state:
        raise ValueError("the random state has a CUDA generator's: name the device that is to take it")
    fields = {"python", "numpy", "torch"} | (set() if cuda is None else {"cuda"})
    _check_keys("a random state", state, fields)
    try:
        random.Random().setstate(_python(state["python"]))
        np.random.RandomState(0).set_state(_numpy(state["numpy"]))
        torch.Generator().set_state(state["torch"].cpu())
        if cuda is not None:
            torch.Generator(cuda).set_state(state["cuda"].cpu())
    except (RuntimeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the state of a generator is damaged: {error}") from error


def check_device(device: torch.device | str | None) -> torch.device | None:
    """The device if it is a CUDA device, None for the CPU; ValueError for one whose generator is not known here."""
    found = torch.device("cpu" if device is None else device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device must be a CPU or CUDA device, got {found}: name the CPU, and save that one's generator yourself"
        )
    return found if found.type == "cuda" else None


def _numpy_state() -> Any:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise ValueError(f"NumPy's global generator is a {state['bit_generator']}; only MT19937 can be saved and restored")
    return state


def _python(state: PythonState) -> tuple[int, tuple[int, ...], float | None]:
    _check_keys("Python's random state", state, PythonState.__annotations__.keys())
    words = _words("Python's random state", state["words"], _MT19937 + 1)
    version, gauss = state["version"], state["gauss"]
    # Python takes older versions, converts their words, and gives out whatever the second number is.
    is_own = type(version) is int and version == random.Random.VERSION
    if not is_own or not (gauss is None or _is_number(gauss)):
        raise ValueError(f"Python's random state has version {version!r} and gauss {gauss!r}")
    return version, tuple(words.tolist()), gauss


def _numpy(state: NumpyState) -> tuple[str, Any, int, int, float]:
    _check_keys("NumPy's random state", state, NumpyState.__annotations__.keys())
    words = _words("NumPy's random state", state["words"], _MT19937)
    position, has_gauss, gauss = state["position"], state["has_gauss"], state["gauss"]
    # NumPy believes these, and reads beyond the words.
    if not (type(position) is int and 0 <= position <= _MT19937 and type(has_gauss) is int and has_gauss in (0, 1)):
        raise ValueError(f"NumPy's random state has position {position!r} and has_gauss {has_gauss!r}")
    if not _is_number(gauss):
        raise ValueError(f"NumPy's random state has gauss {gauss!r}")
    return "MT19937", words.numpy().astype(np.uint32), position, has_gauss, gauss


def _is_number(gauss: object) -> bool:
    return type(gauss) is float and math.isfinite(gauss)


def _words(what: str, words: object, count: int) -> torch.Tensor:
    if not isinstance(words, torch.Tensor) or words.dtype is not torch.int64 or words.shape != (count,):
        raise ValueError(f"{what} must have {count} words as an int64 tensor")
    if not bool(((words >= 0) & (words < 2**32)).all()):
        raise ValueError(f"{what} has words of more than 32 bits")
    if not bool(words[:_MT19937].any()):
        raise ValueError(f"{what} has only words of 0, from which it would draw nothing else")
    return words.cpu()


def _check_keys(what: str, state: Any, expected: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"{what} must be a mapping, got {type(state).__name__}")
    if set(state) != set(expected):
        raise ValueError(f"{what} must have the entries {sorted(expected)}, got {sorted(map(str, state))}")
