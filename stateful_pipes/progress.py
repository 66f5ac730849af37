"""How far a training was, told by a loader's state alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from stateful_pipes.errors import StateMismatchError
from stateful_pipes.state import FORMAT
from stateful_pipes.wording import counted

__all__ = ["Count", "Progress", "is_state", "progress_of", "states_in"]


class Count(NamedTuple):
    """What was consumed of an epoch, by one node's count.

    Attributes:
        node: The node that counts.
        number: Its count.
        noun: What it counts, one of them: a "sample" of a `SamplerNode`, a "place" of a `FileReader`'s shard, an "item" of any
            other node.
        over_ranks: Whether it counts what all ranks consume together.
        length: Samples in an epoch, of a `SamplerNode` whose order is not endless; else None.
        epoch: The node's own, which is not the loader's for what a `Mixer` cycles.
    """

    node: str
    number: int
    noun: str
    over_ranks: bool
    length: int | None
    epoch: int

    def __str__(self) -> str:
        whole = "" if self.length is None else f" of {self.length:,}"
        noun = self.noun if self.number == 1 and not whole else f"{self.noun}s"
        return f"{self.number:,}{whole} {noun}{' over all ranks' if self.over_ranks else ''} ({self.node})"


class Progress(NamedTuple):
    """How far a training was.

    Attributes:
        epoch: The epoch in which the pipeline stands: with the last batch of one consumed, the next.
        batches: Batches of it that were consumed on each rank, or items of the node at the top; None in a state that does not
            count them.
        samples: What was consumed of it by the counts of the nodes that have one. A mixture's own stands alone: what it drew of
            each source is in the state. Of several sources without a mixture, each has its own.
    """

    epoch: int
    batches: int | None
    samples: tuple[Count, ...]

    def __str__(self) -> str:
        batches = "batches not counted" if self.batches is None else counted(self.batches, "batch")
        return ", ".join([f"epoch {self.epoch:,}", batches, *map(str, self.samples)])


def is_state(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a loader's or node's state, of whatever version."""
    return (
        isinstance(value, Mapping)
        and value.get("format") == FORMAT
        and _is_count(value.get("epoch"))
        and isinstance(value.get("nodes"), Mapping)
    )


def states_in(value: object) -> Iterator[tuple[tuple[object, ...], Mapping[str, Any]]]:
    """The loaders' states within a value, each with the keys that lead there; each object is looked at once."""
    seen: set[int] = set()
    todo: list[tuple[tuple[object, ...], object]] = [((), value)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen:
            continue
        if is_state(one):
            yield path, one
        elif isinstance(one, (Mapping, list, tuple)):
            seen.add(id(one))
            pairs = one.items() if isinstance(one, Mapping) else enumerate(one)
            todo += reversed([((*path, key), below) for key, below in pairs if isinstance(below, (Mapping, list, tuple))])


def progress_of(state: object) -> Progress:
    """How far the loader was that this is a state of. The pipeline is not needed, and no entry is compared with one.

    Args:
        state: What `state_dict()` of a loader or node returned, of whatever version; also what came of it in JSON with
            its keys sorted.

    Raises:
        StateMismatchError: it is no such state.

    >>> from stateful_pipes import StatefulDataLoader
    >>> loader = StatefulDataLoader(range(10), batch_size=4)
    >>> _ = next(iter(loader))
    >>> print(progress_of(loader.state_dict()))
    epoch 0, 1 batch, 4 of 10 samples (sampler)
    """
    if not is_state(state):
        raise StateMismatchError("this is no state of a loader: it has no format, epoch and nodes")
    epoch = state["epoch"]
    top = _top(state["nodes"], epoch)
    if top and all(one.epoch == epoch + 1 and one.number == 0 for one in top):
        epoch += 1  # a node's state, saved before the end of its epoch was told
    batches = state.get("batch")
    return Progress(epoch, batches if _is_count(batches) else None, tuple(top))


def _count_of(name: object, entry: object) -> Count | None:
    if not isinstance(entry, Mapping):
        return None
    number, epoch = entry.get("consumed", entry.get("position")), entry.get("epoch")
    if not _is_count(number) or not _is_count(epoch):
        return None
    is_sampler = "order" in entry
    noun = "sample" if is_sampler else "place" if "num_shards" in entry else "item"
    ranks, length = entry.get("world_size", 1), entry.get("length") if is_sampler else None
    over_ranks = _is_count(ranks) and ranks > 1
    return Count(str(name), number, noun, over_ranks, length if _is_count(length) else None, epoch)


def _top(nodes: Mapping[Any, Any], epoch: int) -> list[Count]:
    """The highest mixture's count; where there is none, every source's.

    A state does not tell which node stands above which: of mixtures, the highest stands in the state's epoch and has consumed the
    most of it.
    """
    counts = [(count, "exhausted" in entry) for name, entry in nodes.items() if (count := _count_of(name, entry))]
    mixtures = [count for count, is_mixture in counts if is_mixture]
    if not mixtures:
        return [count for count, _ in counts]
    return [max(mixtures, key=lambda one: (one.epoch in (epoch, epoch + 1), one.number))]


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63
