"""Some batches of a pipeline read as a training loop would, and where the time went."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any, NamedTuple

from stateful_pipes import StatefulDataLoader
from stateful_pipes.prefetch.prefetcher import ProcessPrefetcher, prefetchers_of
from stateful_pipes.stats import Stats, seconds_here, seconds_in_workers, seconds_pulling

__all__ = ["Part", "Profile", "Step", "measure", "step_of", "table", "verdict"]

WORKERS, MAIN = "workers", "main"
PACKING, LOADER, STEP = "(packing)", "(loader)", "(step)"
_LITTLE, _BUSY = 0.05, 0.8


class Step(NamedTuple):
    """A batch as the loop sees it, by `monotonic_ns`: when it was asked for, when it was there, and when its step was done."""

    asked: int
    got: int
    done: int


class Part(NamedTuple):
    """What one node took.

    Attributes:
        place: WORKERS or MAIN.
        name: The node's; PACKING what workers make, the rest of what the LOADER does, and the STEP are no nodes.
        seconds: Its own, of all workers together.
        share: Of what all in this place took.
    """

    place: str
    name: str
    seconds: float
    share: float


class Profile(NamedTuple):
    """What was found, of the batches after the first one.

    Attributes:
        parts: All that took time.
        pulled: The node without sources that took most in the main process to be pulled, and its seconds.
        seconds: From the first batch's step to the last one's.
        waiting: Of these, those within `next`.
        first: Seconds to the first batch, with the start of the workers.
        workers: Worker processes.
        worker_use: The share of `seconds` in which they were busy.
        bytes: That the workers sent.
        restarts: Workers that died and were replaced.
        steps: The first batch's, too.
        spans: For each worker, when its last tasks began and ended.
    """

    parts: list[Part]
    pulled: tuple[str, float]
    seconds: float
    waiting: float
    first: float
    workers: int
    worker_use: float
    bytes: int
    restarts: int
    steps: list[Step]
    spans: list[list[tuple[int, int]]]

    @property
    def batches(self) -> int:
        """Those after the first one."""
        return len(self.steps) - 1


class _Reading(NamedTuple):
    """All counters at one moment."""

    at: int
    stats: Stats
    here: dict[str, float]
    pulled: dict[str, float]
    there: dict[str, float]
    busy: float


def step_of(seconds: float, busy: bool) -> Callable[[], None]:
    """A training step that takes so long, computing or waiting."""

    def compute() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def nothing() -> None:
        pass

    if not seconds:
        return nothing
    return compute if busy else lambda: time.sleep(seconds)


def measure(loader: StatefulDataLoader[Any], batches: int, step: Callable[[], None]) -> Profile | None:
    """Reads a first batch and so many more, over as many epochs as that takes.

    Returns:
        What was found, of fewer batches if an epoch is empty; None if there is no batch at all.
    """
    steps: list[Step] = []
    begin: _Reading | None = None
    while len(steps) <= batches:
        before, asked = len(steps), monotonic_ns()
        for _ in loader:
            got = monotonic_ns()
            step()
            steps.append(Step(asked, got, monotonic_ns()))
            if begin is None:
                begin = _read(loader)
            if len(steps) > batches:
                break
            asked = monotonic_ns()
        if len(steps) == before:
            break
    return None if begin is None else _between(begin, _read(loader), steps, prefetchers_of(loader.pipeline))


def table(found: Profile) -> str:
    """Plain text: a line for each part, those of workers first."""
    batches = max(1, found.batches)
    lines = [("where", "node", "seconds", "share", "ms/batch")]
    lines += [
        (part.place, part.name, f"{part.seconds:.3f}", f"{part.share:.1%}", f"{1000 * part.seconds / batches:.3f}")
        for part in found.parts
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    row = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>>", widths, strict=True))
    head = [f"{found.batches} batches in {found.seconds:.3f} s, after a first one that took {found.first:.3f} s to come"]
    if found.workers:
        restarts = f", {found.restarts} replaced" if found.restarts else ""
        size = f"{found.bytes / batches / 1e6:.3f} MB a batch"
        head.append(f"workers: {found.workers}, busy {found.worker_use:.0%} of the time{restarts}; they send {size}")
    return "\n".join([*head, "", *(row.format(*line) for line in lines), ""])


def verdict(found: Profile, seconds_per_step: float) -> str:
    """One line: whether the loop waits for data, for which node, and what to try."""
    share = found.waiting / found.seconds if found.seconds else 0.0
    if not seconds_per_step:
        took = 1000 * found.waiting / max(1, found.batches)
        return f"No training step was made (--seconds-per-step), so the loop only waited, {took:.3g} ms a batch: {_cause(found)}."
    if share < _LITTLE:
        spare = found.workers > 1 and found.worker_use < 0.5
        return f"The loop does not wait for data ({share:.1%} of the time)" + ("; fewer workers would do." if spare else ".")
    return f"The loop waits for data {share:.0%} of the time: {_cause(found)}."


def _cause(found: Profile) -> str:
    cores = len(os.sched_getaffinity(0))
    name, pulling = found.pulled
    if pulling > found.waiting / 2:
        return f"{name!r} is pulled in the main process, {pulling / found.waiting:.0%} of the wait; workers do not help there"
    if not found.workers:
        top = _largest(found.parts, MAIN)
        share = top.seconds / found.waiting
        return f"{top.name!r} takes {share:.0%} of that, in this process; try num_workers=1 or more ({cores} cores here)"
    if idle := sum(not spans for spans in found.spans):
        return f"{idle} of {found.workers} workers made no batch, as they were still starting, perhaps; try more --batches"
    if found.worker_use < _BUSY:
        return (
            f"yet the workers are idle {1 - found.worker_use:.0%} of it; try a larger prefetch_factor if batches are of uneven "
            "cost, a larger batch_size if they are small"
        )
    top = _largest(found.parts, WORKERS)
    more = (
        f"num_workers={found.workers + 1} or more"
        if found.workers < cores
        else f"to make it cheaper (the {cores} cores are taken)"
    )
    return f"the workers are busy {found.worker_use:.0%} of the time, {top.share:.0%} of that in {top.name!r}; try {more}"


def _largest(parts: Iterable[Part], place: str) -> Part:
    return max((part for part in parts if part.place == place and part.name != STEP), key=lambda part: part.seconds)


def _read(loader: StatefulDataLoader[Any]) -> _Reading:
    root = loader.pipeline
    busy = sum(node.usage.busy for node in prefetchers_of(loader.pipeline)) / 1e9
    return _Reading(monotonic_ns(), loader.stats(), seconds_here(root), seconds_pulling(root), seconds_in_workers(root), busy)


def _between(begin: _Reading, end: _Reading, steps: list[Step], prefetchers: list[ProcessPrefetcher[Any]]) -> Profile:
    seconds = max(1, end.at - begin.at) / 1e9
    waiting = end.stats["waiting"] - begin.stats["waiting"]
    busy = end.busy - begin.busy
    here, pulled, there = (_more(*pair) for pair in zip(begin[2:5], end[2:5], strict=True))
    there[PACKING] = busy - sum(there.values())
    waits = {node.name: f"{node.name} (waits for workers)" for node in prefetchers if node.num_workers}
    here = {waits.get(name, name): spent for name, spent in here.items()}
    here |= {LOADER: waiting - sum(here.values()), STEP: seconds - waiting}
    parts = [Part(WORKERS, name, spent, min(1.0, spent / busy)) for name, spent in there.items() if spent > 0 < busy]
    parts += [Part(MAIN, name, spent, spent / seconds) for name, spent in here.items() if spent > 1e-9]
    workers = end.stats["workers"]
    return Profile(
        parts=parts,
        pulled=max(pulled.items(), key=lambda item: item[1], default=("", 0.0)),
        seconds=seconds,
        waiting=waiting,
        first=(steps[0].got - steps[0].asked) / 1e9,
        workers=workers,
        # A task that was under way at the beginning counts whole.
        worker_use=min(1.0, busy / (workers * seconds)) if workers else 0.0,
        bytes=end.stats["bytes"] - begin.stats["bytes"],
        restarts=end.stats["restarts"],
        steps=steps,
        spans=[spans for node in prefetchers for spans in node.spans],
    )


def _more(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: spent - before.get(name, 0.0) for name, spent in after.items()}
