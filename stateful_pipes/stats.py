"""What a loader's pipeline has done, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import ForeignNode, walk_all
from stateful_pipes.prefetch.prefetcher import has_workers, prefetchers_of
from stateful_pipes.prefetch.timings import Stopwatch, TimedNode

__all__ = ["Stats", "seconds_here", "seconds_in_workers", "seconds_pulling", "stats_of", "time_nodes"]


class Stats(TypedDict):
    """Counts and times of a loader.

    All add up over the life of the pipeline's nodes: epochs, loads, `restart`, `close` and a second loader over them reset
    nothing, and neither does a worker that is replaced. None of it is in the state. Take the difference of two for what came
    between.

    Attributes:
        delivered: Batches handed out.
        prefetched: Batches that workers have or have made, and that were not handed out; now, not in all.
        workers: Worker processes, as the pipeline was made.
        restarts: How many of these died and were replaced.
        skipped: Samples that were left out, over all resumes too.
        waiting: Seconds in the calling thread within `next`, for the batches handed out. The rest of a loop's time is its own.
        bytes: Of what workers have made, as it was sent: tensors, arrays, and the pickle of all else; including what a load
            dropped. 0 without workers, where nothing is sent.
        nodes: Seconds in each node's `run`, by the node's name, without that of the nodes that it calls; those of all workers
            and of this process added up. Of a node without sources `pull` counts, too: a foreign node reads there, a sampler
            makes its order. A `ProcessPrefetcher` at the top has the rest of `waiting`: the wait for its workers. A foreign node
            has the time of those in it, too; where these have the names of others, both are one entry. What `skip` and `replay`
            take is left out.
        worker_use: The share of their time in which workers had a task in hand, from 0 to 1, with the time that they took to
            start; each task counts when it is finished. 0 without workers.
    """

    delivered: int
    prefetched: int
    workers: int
    restarts: int
    skipped: int
    waiting: float
    bytes: int
    nodes: dict[str, float]
    worker_use: float


def stats_of(root: Node[Any]) -> Stats:
    """The counts and times of a pipeline."""
    nodes = list(walk_all(root))
    prefetchers = prefetchers_of(root)
    usages = [node.usage for node in prefetchers]
    present = sum(usage.present for usage in usages)
    seconds = {node.name: 0.0 for node in nodes}
    for found in (seconds_here(root), seconds_in_workers(root)):
        for name, spent in found.items():
            seconds[name] += spent
    return {
        "delivered": root.stream.delivered,
        "prefetched": sum(node.prefetched for node in prefetchers),
        "workers": sum(node.num_workers for node in prefetchers),
        "restarts": sum(node.restarts for node in prefetchers),
        "skipped": sum(count for stream in {node.reader() for node in nodes} for count in stream.skipped.values()),
        "waiting": root.stream.waited / 1e9,
        "bytes": sum(usage.bytes for usage in usages),
        "nodes": seconds,
        "worker_use": min(1.0, sum(usage.busy for usage in usages) / present) if present else 0.0,
    }


def seconds_here(root: Node[Any]) -> dict[str, float]:
    """The own time of each node in this process, by name."""
    own = [(node, timed.ran + timed.pulled) for node, timed in _timed(root)]
    if has_workers(root):  # it is not timed itself, which would be the half of what all this costs
        within = set(walk(root))
        own.append((root, max(0, root.stream.waited - sum(spent for node, spent in own if node in within))))
    return _by_name(own)


def seconds_pulling(root: Node[Any]) -> dict[str, float]:
    """The part of it in which sources were pulled."""
    return _by_name((node, timed.pulled) for node, timed in _timed(root))


def seconds_in_workers(root: Node[Any]) -> dict[str, float]:
    """The own time of each node that workers run, by name, all workers added up."""
    pools = filter(has_workers, prefetchers_of(root))
    return _by_name(pair for pool in pools for pair in zip(walk(pool.sources[0]), pool.usage.nodes, strict=True))


def time_nodes(top: Node[Any]) -> None:
    """Has the methods that this process calls timed from now on.

    Each pipeline within a foreign node has a stopwatch of its own, for it may run in another thread.
    """
    if top.is_timed:
        return
    top.is_timed = True
    for node in walk(top):
        if isinstance(node, ForeignNode):
            for inner in node.inner():
                time_nodes(inner)
    watch = Stopwatch()
    for node, names in _called_here(top, is_left=has_workers(top)):
        timed = TimedNode(node, watch)
        if (before := TimedNode.of(node)) is not None:
            timed.ran, timed.pulled = before.ran, before.pulled
        timed.stand_in(*names)


def _called_here(node: NodeContract, is_left: bool = False) -> Iterator[tuple[NodeContract, tuple[str, ...]]]:
    """The nodes that this process calls, and by what: `run` if they are not left to workers, and `pull` of sources."""
    names = (() if is_left else ("run",)) + (() if node.sources else ("pull",))
    if names:
        yield node, names
    for source in node.sources:
        yield from _called_here(source, is_left or has_workers(node))


def _timed(root: Node[Any]) -> Iterator[tuple[NodeContract, TimedNode]]:
    for node in walk_all(root):
        timed = TimedNode.of(node)
        if timed is not None:
            yield node, timed


def _by_name(spent: Iterable[tuple[NodeContract, int]]) -> dict[str, float]:
    """Nanoseconds of nodes as seconds of their names."""
    found: dict[str, int] = {}
    for node, nanoseconds in spent:
        found[node.name] = found.get(node.name, 0) + nanoseconds
    return {name: nanoseconds / 1e9 for name, nanoseconds in found.items()}
