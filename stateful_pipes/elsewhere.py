"""A look at another place of the stream, in this process: nothing that is under way is lost, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.errors import ResumableModeRequiredError
from stateful_pipes.fields import Scalar, ruled
from stateful_pipes.node import Node
from stateful_pipes.nodes.plain_sampler import PlainSamplerNode
from stateful_pipes.pipeline_state import located, state_at
from stateful_pipes.prefetch.prefetcher import has_workers
from stateful_pipes.prefetch.timings import TimedNode
from stateful_pipes.pulled import run_one
from stateful_pipes.skips import LEFT_OUT
from stateful_pipes.stream import Place
from stateful_pipes.ticket import EpochEnd, Mark

__all__ = ["item_at", "place_behind"]

T = TypeVar("T")


def place_behind(top: Node[Any], place: Place, count: int) -> tuple[Place, int]:
    """The place `count` items behind `place`, or the start of the next epoch if that comes first; and how many lie between.

    Cost: a pull for each.
    """
    for node in walk(top):
        if node.ends_in_run:
            raise ResumableModeRequiredError(
                "it tells its epoch's end only when it is read, so nothing can be left out unread",
                node=node.name,
                remedy="Read on instead",
            )
    _refuse_sources(top, place.mark[0])

    def behind() -> tuple[Place, int]:
        top.seek(place.mark)
        for passed in range(count):
            if not _pulls(top):
                return place._replace(mark=top.mark(), batch=0), passed
        mark = top.mark()
        # With an epoch's last item consumed, the place is the next one's start.
        if count and not _pulls(top):
            return place._replace(mark=top.mark(), batch=0), count
        return place._replace(mark=mark, batch=place.batch + count), count

    return _aside(top, behind)


def item_at(top: Node[Any], epoch: int, position: int, name: str | None) -> Any:
    """What the node of this name, or the top, makes at a position of an epoch.

    Raises:
        ValueError: there is no such node or position.
    """
    nodes: dict[str, Any] = {node.name: node for node in walk(top)}
    if name is not None and name not in nodes:
        raise ValueError(f"no node is named {name!r}; there are {', '.join(map(repr, nodes))}")
    node = top if name is None else nodes[name]
    start = _refuse_sources(top, epoch)

    def made() -> Any:
        try:
            top.seek(_mark_at(top, start, position))
            item, skips = run_one(node, node.pull(1))
        except (StopIteration, EpochEnd):
            raise ValueError(f"epoch {epoch} has nothing at position {position}") from None
        if item is LEFT_OUT:
            raise skips[0].error
        return item

    return _aside(top, made)


def _refuse_sources(top: Node[Any], epoch: int) -> Mark:
    """Refuses a source that could not be led back, before anything is moved; the start of the epoch."""
    for node in walk(top):
        if isinstance(node, PlainSamplerNode):
            raise ResumableModeRequiredError(
                f"a {type(node.sampler).__name__} cannot be led back to where it stood",
                node=node.name,
                remedy="Make the loader with resumable=True",
            )
    # A load of where it stands now is refused by an ExternalSource that can be read only onwards, a start by a foreign source.
    located(top, state_at(top, Place(top.mark(), 0, {}))["nodes"])
    return top.start(epoch)


def _mark_at(top: Node[Any], start: Mark, position: int) -> Mark:
    """The mark with as many consumed since the start of an epoch; StopIteration where it has not as many."""
    cursors = dict(_cursors(top, start))
    if [cursor.keys() for cursor in cursors.values()] == [{"epoch", "consumed"}]:
        (name,) = cursors
        (node,) = (node for node in walk(top) if node.name == name)
        if not ruled({"consumed": position}, node.rules())["consumed"].accepts(position):
            raise StopIteration
        entries = state_at(top, Place(start, 0, {}))["nodes"]
        entries[name]["consumed"] = position
        return located(top, entries)
    # A cursor with more to it, or several: from the epoch's start on, without reading.
    top.seek(start)
    mark = start
    while mark[1] < position:
        top.pull(1)
        mark = top.mark()
    return mark


def _cursors(node: NodeContract, mark: Mark) -> Iterator[tuple[str, Mapping[str, Scalar]]]:
    """What the nodes that have a part in the cursor say of it."""
    for source, part in zip(node.sources, node.parts(mark), strict=True):
        yield from _cursors(source, part)
    if found := node.values(mark):
        yield node.name, found


def _pulls(node: NodeContract) -> bool:
    try:
        node.pull(1)
    except StopIteration:
        return False
    return True


def _aside(top: Node[Any], ask: Callable[[], T]) -> T:
    """What `ask` finds, which may lead the pipeline anywhere. What that takes is no part of the stream's times."""
    pools = list(filter(has_workers, walk(top)))
    for pool in pools:
        pool.is_looked_through = True
    timed = [found for node in walk(top) if (found := TimedNode.of(node)) is not None]
    spent = [(one.ran, one.pulled) for one in timed]
    # With workers, what they have was pulled ahead of where the top stands.
    marks = [(node, node.mark()) for node in (top, *(pool.sources[0] for pool in pools))]
    ends = [(node, node._ended) for node in walk(top)]

    def lead_back() -> None:
        for one, mark in marks:
            one.seek(mark)
        for each, ended in ends:
            each._ended = ended

    try:
        return top.stream.look(ask, lead_back)
    finally:
        for one, (ran, pulled) in zip(timed, spent, strict=True):
            one.ran, one.pulled = ran, pulled
