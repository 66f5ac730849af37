"""Hypothesis strategies for pipelines and for where to cut them. Needs the extra `test`.

They test what stands around a pipeline, over many of them: your own trainer, checkpoints or nodes.

>>> import json
>>> from itertools import islice
>>> from hypothesis import given, settings, strategies as st
>>> from stateful_pipes.testing.comparison import first_mismatch
>>> from stateful_pipes.testing.strategies import cuts, pipelines
>>> def save(loader):  # your own code
...     return json.dumps(loader.state_dict())
>>> def load(loader, saved):
...     loader.load_state_dict(json.loads(saved))
...     return loader
>>> @settings(max_examples=10, deadline=None, derandomize=True, database=None)
... @given(pipelines(is_endless=False), st.data())
... def test_that_it_goes_on_where_it_was(factory, data):
...     expected = list(factory())
...     (cut,) = data.draw(cuts(len(expected) - 1, max_size=1))
...     first = factory()
...     found = list(islice(first, cut))
...     found += load(factory(), save(first))
...     assert first_mismatch(expected, found) is None
>>> test_that_it_goes_on_where_it_was()
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "stateful_pipes.testing.strategies needs hypothesis: pip install 'stateful_pipes[hypothesis]'", name=error.name
    ) from error

from stateful_pipes.rng import GLOBAL_GENERATORS, Rng
from stateful_pipes.testing.random_pipelines import ORDERS, STEPS, RandomPipeline

__all__ = ["cuts", "pipelines", "rngs", "seeds"]


def seeds() -> st.SearchStrategy[int]:
    """Seeds from 0 to 2**64 - 1, often at the ends of what 64 bits hold."""
    return st.one_of(st.sampled_from([0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


def rngs() -> st.SearchStrategy[Rng]:
    """What `rng=` may be: all subsets of the global generators, the largest first, and "generator"."""
    subsets: list[Rng] = [some for size in range(3, -1, -1) for some in combinations(GLOBAL_GENERATORS, size)]
    return st.sampled_from([*subsets, "generator"])


def cuts(batches: int, *, ends: Sequence[int] = (), max_size: int = 3) -> st.SearchStrategy[list[int]]:
    """Places to cut a stream of so many batches, in order: numbers of batches before the cut, from 0 to `batches`.

    Often at its ends and at `ends`, those of its epochs; and, beyond `max_size`, often one of them twice, for a resume of a
    pipeline that was resumed and has read nothing.
    """
    place = st.one_of(st.sampled_from([0, batches, *ends]), st.integers(0, batches))
    places = st.lists(place, min_size=1, max_size=max_size)
    return st.builds(_with_one_twice, places, st.booleans() if max_size > 1 else st.just(False))


def _with_one_twice(places: list[int], twice: bool) -> list[int]:
    return sorted([*places, *places[: int(twice)]])


def pipelines(
    *, max_length: int = 40, is_endless: bool | None = None, orders: Sequence[str] = ORDERS
) -> st.SearchStrategy[RandomPipeline]:
    """Random compositions of this library's nodes over small data, as factories.

    A drawn `factory()` returns a new `StatefulDataLoader` of the same stream at each call, and takes `num_workers`; so
    `assert_pipeline_resume(factory)` takes it. Its repr makes it again. Each epoch has a batch.

    Args:
        max_length: Of the data, at least 1.
        is_endless: Only those with an endless epoch, or only others; None: either.
        orders: Those to choose from: "sequential", "random", "infinite", "weighted", "foreign" (a torchdata node below).
    """
    return _pipelines(max_length, [one for one in orders if is_endless is None or (one == "infinite") == is_endless])


@st.composite
def _pipelines(draw: st.DrawFn, max_length: int, orders: list[str]) -> RandomPipeline:
    order = draw(st.sampled_from(orders))
    length = draw(st.integers(1, max_length))
    filtered = order != "foreign" and draw(st.booleans())
    steps: Any = draw(st.lists(st.sampled_from(STEPS), max_size=3, unique=True))
    kept = sum(index % 3 < 2 for index in range(length)) if filtered else length
    batch_size = draw(st.none() | st.integers(1, 5))
    return RandomPipeline(
        length=length,
        order=order,
        filtered=filtered,
        rng=draw(rngs()),
        steps=tuple(steps),
        batch_size=batch_size,
        drop_last=batch_size is not None and batch_size <= kept and draw(st.booleans()),
        draws_in_collate=batch_size is not None and draw(st.booleans()),
        seed=draw(seeds()),
    )
