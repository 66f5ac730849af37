"""torchdata's own nodes below and above ours: exact at every step, while the loop disturbs the global generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
    StopCriteria,
    Unbatcher,
)

from stateful_pipes import ProcessPrefetcher, RandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import GlobalGeneratorThreadError, ResumableModeRequiredError
from tests.integration.pipelines import EPOCHS, batches, check_resumes, epochs, samples, shut, take
from tests.streams import drawing_collate, generator_states, same


class Filter(BaseNode[Any]):
    """Leaves out what does not fit, and counts it, as the documentation of torchdata shows."""

    def __init__(self, source: BaseNode[Any], fits: Any) -> None:
        super().__init__()
        self.source, self.fits, self.dropped = source, fits, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self.dropped = 0 if initial_state is None else initial_state["dropped"]

    def next(self) -> Any:
        while not self.fits(item := next(self.source)):
            self.dropped += 1
        return item, self.dropped

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "dropped": self.dropped}


class Words:
    """An iterable with a state, which holds what JSON lacks."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 7:
            self.position += 1
            yield f"wörd {self.position}"
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "tensor": torch.arange(3), "bytes": b"\0\xff", "array": np.ones((2, 2)), 1: (None,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert same(
            [state["tensor"], state["bytes"], state["array"], state[1]], [torch.arange(3), b"\0\xff", np.ones((2, 2)), (None,)]
        )
        self.position = state["position"]


def square(item: Any) -> Any:
    return item, item * 2


def draw(item: Any) -> Any:
    return item, random.random(), np.random.random(), torch.rand(2)


def draw_own(item: Any, rng: np.random.Generator) -> Any:
    return item, rng.random()


def weighted(stop_criteria: str) -> BaseNode[Any]:
    sources = {"ours": SamplerNode(RandomSampler(5, seed=1)), "theirs": IterableWrapper(range(100, 103))}
    return MultiNodeWeightedSampler(sources, {"ours": 2.0, "theirs": 1.0}, stop_criteria, rank=0, world_size=1, seed=3)


BELOW = {
    "IterableWrapper": lambda: IterableWrapper(range(7)),
    "stateful iterable": lambda: IterableWrapper(Words()),
    "Mapper": lambda: Mapper(IterableWrapper(range(7)), square),
    "ParallelMapper": lambda: ParallelMapper(IterableWrapper(range(7)), square, num_workers=2),
    "Filter": lambda: Filter(IterableWrapper(range(14)), lambda number: number % 3),
    "Filter of ours": lambda: Filter(SamplerNode(RandomSampler(9, seed=1)), lambda index: index != 4),
    "SamplerWrapper": lambda: SamplerWrapper(DistributedSampler(range(7), num_replicas=1, rank=0, seed=4)),
    "Prefetcher": lambda: Prefetcher(IterableWrapper(range(7)), prefetch_factor=2),
    "Prefetcher with rare snapshots": lambda: Prefetcher(IterableWrapper(range(7)), prefetch_factor=2, snapshot_frequency=3),
    "Unbatcher": lambda: Unbatcher(Batcher(IterableWrapper(range(7)), 3, drop_last=False)),
    "first exhausted": lambda: weighted(StopCriteria.FIRST_DATASET_EXHAUSTED),
    "all exhausted": lambda: weighted(StopCriteria.ALL_DATASETS_EXHAUSTED),
    "cycle": lambda: weighted(StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", BELOW)
def test_foreign_below(source, workers):
    def make():
        batcher = SeededBatcher(SeededMapper(BELOW[source](), draw, seed=1), 2, collate_fn=drawing_collate, seed=2)
        return StatefulDataLoader(ProcessPrefetcher(batcher, workers))

    # A start of processes or threads for each state takes its time.
    check_resumes(make, 2 if workers or "Parallel" in source or "Prefetcher" in source else EPOCHS)


ABOVE = {
    "Batcher": lambda: Batcher(samples(), 3, drop_last=False),
    "Batcher, dropping": lambda: Batcher(samples(), 3),
    "Batcher over workers": lambda: Batcher(ProcessPrefetcher(samples(), 1), 3, drop_last=False),
    "Batcher of batches": lambda: Batcher(batches(0), 3, drop_last=False),
    "Unbatcher": lambda: Unbatcher(SeededBatcher(samples(), 3, collate_fn=list, seed=1)),
    "Mapper": lambda: Mapper(batches(1), square_batch),
    "Filter": lambda: Filter(samples(), lambda sample: sample[0] % 3),
    "Prefetcher over workers": lambda: Prefetcher(batches(2), prefetch_factor=2),
    "Prefetcher over workers, rare snapshots": lambda: Prefetcher(batches(1), prefetch_factor=2, snapshot_frequency=3),
    "Prefetcher over generators": lambda: Prefetcher(
        SeededMapper(SamplerNode(RandomSampler(7, seed=1)), draw_own, seed=1, rng="generator"), 2
    ),
    "ParallelMapper": lambda: ParallelMapper(batches(1), square_batch, num_workers=2),
    "Prefetcher of Batcher": lambda: Prefetcher(Batcher(ProcessPrefetcher(samples(), 1), 3, drop_last=False), 2),
}


def square_batch(batch: Any) -> Any:
    return batch, len(batch["samples"])


each_above = pytest.mark.parametrize("top", ABOVE)


@pytest.mark.parametrize("door", [StatefulDataLoader, Loader])
@each_above
def test_foreign_above(top, door):
    check_resumes(lambda: door(ABOVE[top]()), 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torchdata's PinMemory asks for a CUDA device when it is made")
@pytest.mark.parametrize("door", [StatefulDataLoader, Loader])
def test_pin_memory_above(door):
    whole = check_resumes(lambda: door(PinMemory(batches(1))), 2)
    assert whole[0][0]["draws"][2].is_pinned()


class Chain(BaseNode[Any]):
    """One source after the other: a node that goes by the end of a source in the middle of its own epoch."""

    def __init__(self, *sources: BaseNode[Any]) -> None:
        super().__init__()
        self.sources, self.current = sources, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.current = 0 if initial_state is None else initial_state["current"]
        for i, source in enumerate(self.sources):
            source.reset(None if initial_state is None else initial_state["sources"][i])

    def next(self) -> Any:
        while self.current < len(self.sources):
            try:
                return next(self.sources[self.current])
            except StopIteration:
                self.current += 1
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"current": self.current, "sources": [source.state_dict() for source in self.sources]}


@pytest.mark.parametrize("door", [StatefulDataLoader, Loader])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_end_of_one_source_in_the_middle_of_an_epoch(door, workers):
    """Saved when the first source has given its last item but not yet been asked for one more."""
    check_resumes(lambda: door(Chain(batches(workers), IterableWrapper(range(2)), samples(2))), 2)


def test_a_torchdata_sampler_wrapper_over_our_sampler_is_refused():
    """It asks the sampler, not the iterator, for the position, and the sampler's own cursor stands still."""
    with pytest.raises(ResumableModeRequiredError, match="SamplerNode"):
        StatefulDataLoader(SamplerWrapper(RandomSampler(7, seed=1)))


def test_a_generator_as_a_source_is_read_once():
    """No state leads back to a position in it, so what would have to is refused, and nothing is left out in silence."""
    loader = StatefulDataLoader(IterableWrapper(number for number in range(7)))
    iterator = iter(loader)
    assert take(iterator, 3) == [0, 1, 2]
    state = loader.state_dict()
    with pytest.raises(ResumableModeRequiredError, match="iterable_wrapper"):
        loader.load_state_dict(state)
    assert list(iterator) == [3, 4, 5, 6]

    fresh = StatefulDataLoader(IterableWrapper(number for number in range(7)))
    fresh.load_state_dict(state)
    assert take(iter(fresh), 1) == [3]
    fresh.close()
    with pytest.raises(ResumableModeRequiredError, match="iterable_wrapper"):
        list(fresh)


def test_a_node_without_a_state_is_refused():
    class Stateless(BaseNode[Any]):
        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            super().reset(initial_state)

        def next(self) -> Any:
            return 0

    with pytest.raises(ResumableModeRequiredError, match="Stateless does not implement get_state"):
        StatefulDataLoader(Stateless())


def test_global_generators_on_a_thread_of_torchdata_are_refused():
    loader = StatefulDataLoader(Prefetcher(samples(), prefetch_factor=2))
    with pytest.raises(GlobalGeneratorThreadError, match="ProcessPrefetcher"):
        next(iter(loader))
    shut(loader)


@each_above
def test_the_loop_keeps_its_own_generators(top):
    """A whole epoch, resume included, draws nothing of the caller's."""
    loader = StatefulDataLoader(ABOVE[top]())
    resumed = StatefulDataLoader(ABOVE[top]())
    before = generator_states()
    take(iter(loader), 1)
    resumed.load_state_dict(loader.state_dict())
    for _ in resumed:
        assert generator_states() == before
    shut(loader)
    shut(resumed)
    assert generator_states() == before


@pytest.mark.parametrize("source", BELOW)
def test_a_state_goes_into_a_used_pipeline(source):
    def make():
        return StatefulDataLoader(SeededMapper(BELOW[source](), draw, seed=1))

    whole = epochs(make(), 2)
    loader, used = make(), make()
    take(iter(loader), 2)
    state = loader.state_dict()
    for read in (1, 3, len(whole[0])):
        take(iter(used), read)
        used.load_state_dict(state)
        assert same(epochs(used, 2), [whole[0][2:], whole[1]])


@pytest.mark.parametrize("source", BELOW)
def test_closing_in_the_middle_and_going_on(source):
    def make():
        return StatefulDataLoader(ProcessPrefetcher(SeededMapper(BELOW[source](), draw, seed=1), 1))

    loader = make()
    whole = epochs(loader, 2)
    loader.close()
    loader = make()
    read = take(iter(loader), 3)
    loader.close()
    assert same([read + list(loader), list(loader)], whole)
    loader.close()
