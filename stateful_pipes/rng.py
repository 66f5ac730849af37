"""Seeds as a pure function of (seed, purpose, epoch, position), and the scope in which global generators carry them.

The derivation is frozen, since every stream ever saved depends on it: tests/golden pins it. It is a chain of
SplitMix64 finalisers (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants
of variant 13 by David Stafford): `h = mix(seed + G)`, then `h = mix((h ^ word) + G)` for each word.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from stateful_pipes.errors import GlobalGeneratorThreadError
from stateful_pipes.integers import as_integer

__all__ = [
    "GLOBAL_GENERATORS",
    "GlobalGenerator",
    "Rng",
    "as_seed",
    "check_rng",
    "derive",
    "derive_each",
    "draw_seed",
    "preserved",
    "private_seed",
    "seeder",
]

GlobalGenerator = Literal["python", "numpy", "torch"]
Rng = Sequence[GlobalGenerator] | Literal["generator"]
GLOBAL_GENERATORS: Final[tuple[GlobalGenerator, ...]] = ("python", "numpy", "torch")

ORDER: Final = 1
SAMPLE: Final = 2
COLLATE: Final = 3
WORKER: Final = 4
MIX: Final = 5
PRIVATE: Final = 6

_MASK = 2**64 - 1
_INT64 = 2**63 - 1
_NOTHING_TO_PRESERVE = nullcontext()
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix64` of each element, in place where the array is writable and its own; returns the array."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MIX1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MIX2)
    values ^= values >> np.uint64(31)
    return values


@functools.lru_cache(maxsize=64)  # asked again for every batch of an epoch
def derive(seed: int, *words: int) -> int:
    """A 64-bit seed from a 64-bit seed and any number of non-negative 64-bit words, such as purpose and epoch."""
    value = mix64((seed + _GOLDEN) & _MASK)
    for word in words:
        value = mix64(((value ^ word) + _GOLDEN) & _MASK)
    return value


def derive_each(key: int, positions: Sequence[int]) -> list[int]:
    """The last link of `derive` for many positions at once: `derive(*words, p) == derive_each(derive(*words), [p])[0]`.

    Cost: about 0.1 us a position in blocks of 64.
    """
    values = np.array(positions, dtype=np.uint64)
    values ^= np.uint64(key)
    values += np.uint64(_GOLDEN)
    return cast("list[int]", mix64_array(values).tolist())


def private_seed(seed: int) -> int:
    """A sample's seed for generators that its transform owns, from the one for the global generators.

    It is one link more: `derive(*words, PRIVATE) == private_seed(derive(*words))`. Cost: 0.4 us.
    """
    return mix64(((seed ^ PRIVATE) + _GOLDEN) & _MASK)


def as_seed(seed: object) -> int:
    """The seed as an `int`.

    Raises:
        TypeError: not an integer.
        ValueError: not in 0 .. 2**64 - 1.
    """
    return as_integer("seed", seed, 0, _MASK, "2**64 - 1")


def draw_seed(generator: torch.Generator | None = None) -> int:
    """One seed from `generator`, else from torch's default CPU generator, which is moved by exactly one draw."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item())


def check_rng(rng: object) -> tuple[GlobalGenerator, ...] | Literal["generator"]:
    """The choice of generators in canonical form.

    Raises:
        ValueError: neither "generator" nor a sequence of names out of "python", "numpy" and "torch".
    """
    if rng == "generator":
        return "generator"
    if isinstance(rng, str) or not isinstance(rng, Iterable):
        raise ValueError(f'rng must be "generator" or a sequence of {GLOBAL_GENERATORS}, got {rng!r}')
    names = list(rng)
    unknown = [name for name in names if name not in GLOBAL_GENERATORS]
    if unknown:
        raise ValueError(f'rng must be "generator" or a sequence of {GLOBAL_GENERATORS}, got {unknown[0]!r} in {rng!r}')
    return tuple(name for name in GLOBAL_GENERATORS if name in names)


def seeder(names: tuple[GlobalGenerator, ...]) -> Callable[[int], None]:
    """A function that seeds the named global generators from one 64-bit seed.

    Python takes all 64 bits. NumPy's scalar seeding and torch's CPU engine use 32: they get different halves, so that
    two samples agree in both with a chance of 2**-64 only. torch's is cut to what an int64 tensor can hold, as that of torch's
    own workers is: functions collate `torch.initial_seed()`. CUDA generators are not touched: `torch.manual_seed`
    would, hence the default generator's own method. `random.seed` looks for other kinds of seeds first, which takes a
    quarter of its time: its C engine is seeded at once, and the Gaussian that it may hold dropped, as it would do.
    """
    seed_torch = torch.default_generator.manual_seed
    seed_numpy = np.random.seed
    instance = _python_generator()
    seed_python = super(random.Random, instance).seed
    python, numpy, torch_ = (name in names for name in GLOBAL_GENERATORS)

    def seed_all(seed: int) -> None:
        seed_python(seed)
        instance.gauss_next = None
        seed_numpy(seed >> 32)
        seed_torch(seed & _INT64)

    def seed_some(seed: int) -> None:
        if python:
            seed_python(seed)
            instance.gauss_next = None
        if numpy:
            seed_numpy(seed >> 32)
        if torch_:
            seed_torch(seed & _INT64)

    return seed_all if len(names) == len(GLOBAL_GENERATORS) else seed_some


def _python_generator() -> Any:
    """The instance whose methods are the functions of the module `random`."""
    return cast(MethodType, random.getstate).__self__


class _Preserved:
    """Saves the named global generators on entry and puts them back on exit, byte for byte."""

    def __init__(self, names: frozenset[GlobalGenerator]) -> None:
        self.names = names

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise GlobalGeneratorThreadError(
                f"{', '.join(sorted(self.names))} would race with the training loop's own draws",
                found=threading.current_thread().name,
                remedy='Use rng="generator", or put a ProcessPrefetcher below the node that runs in this thread',
            )
        names = self.names
        self.python = random.getstate() if "python" in names else None
        # get_state/set_state and not a swap of bit generators, which would lose the cached Gaussian.
        self.numpy = np.random.get_state(legacy=False) if "numpy" in names else None
        self.torch = torch.default_generator.get_state() if "torch" in names else None

    def __exit__(self, *_: object) -> None:
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        if self.torch is not None:
            torch.default_generator.set_state(self.torch)


def preserved(names: frozenset[GlobalGenerator]) -> AbstractContextManager[None]:
    """A scope after which the caller's named global generators are as before, also when an exception leaves it.

    Cost: about 0.2 ms for all three, so it is entered once a batch, and never in a worker.

    Raises:
        GlobalGeneratorThreadError: entered on a thread that is not the main one.
    """
    return _Preserved(names) if names else _NOTHING_TO_PRESERVE
