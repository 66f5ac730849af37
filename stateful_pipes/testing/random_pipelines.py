"""Small pipelines of many compositions, each as a factory. Apart from the strategies, so that workers need no Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torchdata.nodes import IterableWrapper

from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.node import Node
from stateful_pipes.nodes.batcher import SeededBatcher
from stateful_pipes.nodes.flat_mapper import SeededFlatMapper
from stateful_pipes.nodes.foreign import as_node
from stateful_pipes.nodes.index_filter import IndexFilter
from stateful_pipes.nodes.mapper import SeededMapper
from stateful_pipes.nodes.mixer import Mixer
from stateful_pipes.nodes.sampler import SamplerNode
from stateful_pipes.prefetch.prefetcher import ProcessPrefetcher
from stateful_pipes.rng import Rng, derive
from stateful_pipes.samplers import InfiniteRandomSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

__all__ = ["ORDERS", "STEPS", "RandomPipeline"]

Step = Literal["map", "flat_map", "mix"]
STEPS: Final[tuple[Step, ...]] = ("map", "flat_map", "mix")
ORDERS: Final = ("sequential", "random", "infinite", "weighted", "foreign")


@dataclass(frozen=True)
class RandomPipeline:
    """A pipeline over the numbers from 0 to length - 1, as a factory: each call makes a new loader of the same stream.

    Its items show what was read and what was drawn for it, so that whatever goes wrong shows in them. It can be pickled.

    Attributes:
        length: Samples in the data set.
        order: "foreign" is a torchdata node that this library adapts.
        filtered: Whether an `IndexFilter` leaves out every third index.
        rng: Of the mappers.
        steps: The nodes between source and batcher, from below.
        batch_size: None for unbatched samples.
        drop_last: Whether a smaller last batch is left out.
        draws_in_collate: Whether the collate function draws, too.
        seed: Of all nodes.
    """

    length: int
    order: str = "random"
    filtered: bool = False
    rng: Rng = ("python", "numpy", "torch")
    steps: tuple[Step, ...] = ("map",)
    batch_size: int | None = 2
    drop_last: bool = False
    draws_in_collate: bool = False
    seed: int = 0

    @property
    def is_endless(self) -> bool:
        """Whether its epoch has no end."""
        return self.order == "infinite"

    def __call__(self, num_workers: int = 0) -> StatefulDataLoader[Any]:
        node: Node[Any] = SeededMapper(self._source(), _as_item, rng=())
        for number, step in enumerate(self.steps):
            node = self._above(node, step, number)
        if self.batch_size is not None:
            collate = _drawing_collate if self.draws_in_collate else None
            node = SeededBatcher(node, self.batch_size, drop_last=self.drop_last, collate_fn=collate, seed=self._seed(9))
        return StatefulDataLoader(ProcessPrefetcher(node, num_workers))

    def _seed(self, number: int) -> int:
        return derive(self.seed, number)

    def _source(self) -> Node[Any]:
        if self.order == "foreign":
            return as_node(IterableWrapper(range(self.length)))
        node = SamplerNode(self._sampler())
        return IndexFilter(node, _is_kept) if self.filtered else node

    def _sampler(self) -> Any:
        if self.order == "sequential":
            return SequentialSampler(self.length)
        if self.order == "weighted":
            return WeightedRandomSampler(np.arange(1, self.length + 1), seed=self._seed(0))
        return (InfiniteRandomSampler if self.order == "infinite" else RandomSampler)(self.length, seed=self._seed(0))

    def _above(self, node: Node[Any], step: Step, number: int) -> Node[Any]:
        seed = self._seed(number + 1)
        if step == "mix":
            other = SamplerNode(RandomSampler(self.length, seed=self._seed(8)))
            return Mixer([node, SeededMapper(other, _Draws(self.rng), rng=self.rng, seed=seed)], [2, 1], seed=seed)
        draws: Callable[..., Any] = _Draws(self.rng)
        if step == "flat_map":
            return SeededFlatMapper(node, _Twice(draws), 2, rng=self.rng, seed=seed)
        return SeededMapper(node, draws, rng=self.rng, seed=seed)


def _torch_random() -> float:
    return torch.rand((), dtype=torch.float64).item()


_DRAW: Final[dict[str, Callable[[], float]]] = {"python": random.random, "numpy": np.random.random, "torch": _torch_random}


def _as_item(number: int) -> torch.Tensor:
    """What was read, and the sum of what was drawn for it."""
    return torch.tensor([number, 0], dtype=torch.float64)


class _Draws:
    """Adds to what it is given, a number or an item, a draw of each generator that is named."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng

    def __call__(self, item: Any, generator: np.random.Generator | None = None) -> torch.Tensor:
        drawn = generator.random() if generator is not None else sum(_DRAW[name]() for name in self.rng)
        before: torch.Tensor = item if isinstance(item, torch.Tensor) else _as_item(item)
        return before + torch.tensor([0, drawn], dtype=torch.float64)


class _Twice:
    def __init__(self, draws: Callable[..., Any]) -> None:
        self.draws = draws

    def __call__(self, *arguments: Any) -> list[Any]:
        return [self.draws(*arguments), self.draws(*arguments)]


def _is_kept(index: int) -> bool:
    return index % 3 < 2


def _drawing_collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    return torch.stack(samples), random.random()
