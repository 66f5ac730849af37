"""What a loader's pipeline has done, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.node import Node
from stateful_pipes.nodes.foreign import ForeignNode, walk_all
from stateful_pipes.prefetch.prefetcher import ProcessPrefetcher
from stateful_pipes.prefetch.timings import Stopwatch, TimedMethod

__all__ = ["Stats", "seconds_here", "seconds_in_workers", "stats_of", "time_nodes"]


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
            makes its order. Of a `ProcessPrefetcher` it is the wait for its workers, in this process. Nodes of one name, within
            a foreign node, have one entry.
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
    prefetchers = [node for node in nodes if isinstance(node, ProcessPrefetcher)]
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


def seconds_here(root: Node[Any], methods: Sequence[str] = ("run", "pull")) -> dict[str, float]:
    """The own time of each node in this process, by name."""
    found: dict[str, float] = {}
    for node in walk_all(root):
        timed = [vars(node).get(name) for name in methods]
        own = sum(one.own for one in timed if isinstance(one, TimedMethod))
        found[node.name] = found.get(node.name, 0.0) + own / 1e9
    return found


def seconds_in_workers(root: Node[Any]) -> dict[str, float]:
    """The own time of each node that workers run, by name, all workers added up."""
    found: dict[str, float] = {}
    for prefetcher in walk_all(root):
        if isinstance(prefetcher, ProcessPrefetcher) and prefetcher.num_workers:
            for node, spent in zip(walk(prefetcher.sources[0]), prefetcher.usage.nodes, strict=True):
                found[node.name] = found.get(node.name, 0.0) + spent
    return found


def time_nodes(top: Node[Any]) -> None:
    """Has the methods that this process calls timed from now on.

    Each pipeline within a foreign node has a stopwatch of its own, for it may run in another thread.
    """
    for node in walk(top):
        if isinstance(node, ForeignNode) and "pull" not in vars(node):  # else it was here before
            for inner in node.inner():
                time_nodes(inner)
    methods = [(node, name, vars(node).get(name)) for node, name in _called_here(top)]
    first = methods[0][2]
    if all(isinstance(one, TimedMethod) and isinstance(first, TimedMethod) and one.watch is first.watch for _, _, one in methods):
        return
    watch = Stopwatch()
    for node, name, before in methods:
        timed = watch.time(node, name)
        if isinstance(before, TimedMethod):
            timed.own = before.own


def _called_here(node: NodeContract) -> Iterator[tuple[NodeContract, str]]:
    """`run` of the nodes that are not left to workers, and `pull` of all sources."""
    yield node, "run"
    is_left = isinstance(node, ProcessPrefetcher) and node.num_workers > 0
    for source in node.sources:
        yield from ((one, name) for one, name in _called_here(source) if name == "pull" or not is_left)
    if not node.sources:
        yield node, "pull"
