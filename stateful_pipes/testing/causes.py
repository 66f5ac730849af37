"""Why a batch is another one when it is read again, found by reading it with one thing changed at a time."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.testing.experiments import Experiment, Found, perform
from stateful_pipes.testing.laboratory import CleanProcess, ExperimentFailed, hash_seeds, in_fork
from stateful_pipes.testing.moving_parts import UNSEEDED
from stateful_pipes.testing.pieces import Factory
from stateful_pipes.testing.surroundings import GENERATORS, Surroundings

__all__ = ["Cause", "Scene", "find_cause"]

Kind = Literal[
    "unseeded generator",
    "global generator",
    "private generator",
    "global counter",
    "state between samples",
    "time",
    "unordered listing",
    "process",
    "dataset changed",
    "unknown",
]


class Cause(NamedTuple):
    """Why a resume is not exact.

    Attributes:
        kind: One of a few; "unknown" if no experiment told.
        told: What was found, and where.
        remedy: What to do.
        tried: What was varied, in order, until it was found.
    """

    kind: Kind
    told: str
    remedy: str
    tried: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.told}. {self.remedy}"


_REMEDY: Final[dict[Kind, str]] = {
    "unseeded generator": "Draw from the global generators, which are seeded for each sample, or seed yours for each (reseed=)",
    "global generator": "Name it in rng=, or draw from one that is named there",
    "private generator": 'Seed it for each sample (reseed=), or draw from the one that rng="generator" hands to map_fn',
    "global counter": "Make what is read a function of the index alone",
    "state between samples": "Make what is read a function of the index alone, or have a node's state hold it",
    "time": "Read the clock once, outside, and keep what it said with the configuration",
    "unordered listing": "Sort it: sorted(...)",
    "process": "Make what is read independent of the process that reads it",
    "dataset changed": "Keep the data as they are while their states are to be loaded, and say fingerprint= which they are",
    "unknown": "Look whether it comes from C code, the network, a device, or sums whose order depends on the number of threads",
}


class Scene(NamedTuple):
    """A batch that differs.

    Attributes:
        factory: Makes the pipeline.
        states: Of the straight run: before each batch up to this one.
        expected: The batch there.
        where: In which trial it differed.
        timeout: Seconds that an experiment may take.
        clean: From a hash seed to a clean process; None where there is none.
    """

    factory: Factory
    states: list[str]
    expected: Any
    where: str
    timeout: float
    clean: Callable[[int], CleanProcess] | None


_SET: Final = Surroundings(entropy=0, clock=0, listing=0, process=0)


class _Search:
    """The experiments, one thing changed at a time; each is made once."""

    def __init__(self, scene: Scene, hash_seed: int | None) -> None:
        self.scene = scene
        self.hash_seed = hash_seed
        self.tried: list[str] = []
        self.base: Found | None = None
        self.is_unstable = False  # whatever is held, the batch differs

    def read(self, surroundings: Surroundings = _SET, hash_seed: int | None = None, **how: Any) -> Found:
        task = partial(perform, self.scene.factory, self.scene.states, Experiment(**how))
        seed = self.hash_seed if hash_seed is None else hash_seed
        if seed is None or self.scene.clean is None:
            found: Found = in_fork(task, surroundings, self.scene.timeout)
        else:
            found = self.scene.clean(seed).run(task, surroundings, self.scene.timeout)
        return found

    def cause(self, kind: Kind, told: str) -> Cause:
        return Cause(kind, told, _REMEDY[kind], tuple(self.tried))

    def run(self) -> Cause | None:
        self.base = base = self.read()
        self.tried.append("reading it again")
        self.is_unstable = base.differs(self.read())
        if self.is_unstable:
            return self.of_repetition()
        for search in (self.of_surroundings, self.of_generators, self.of_construction, self.of_history):
            for cause in search(base):
                return cause
        return None

    def of_repetition(self) -> Cause | None:
        """With all that can be held being held, the batch differs whenever it is read."""
        twice = self.read(before="both")
        if twice.is_refused:
            return self.cause("dataset changed", f"whenever factory is called it makes other data{_refused(twice)}")
        if twice.error or first_mismatch(twice.batches[0], twice.batches[1]) is not None:
            return None
        told = "whenever factory is called the data are others, though read twice they are the same"
        return self.cause("dataset changed", told)

    def of_surroundings(self, base: Found) -> Iterator[Cause]:
        for what, (varied, tried, kind, told) in _SURROUNDINGS.items():
            self.tried.append(tried)
            # What was not asked for cannot matter.
            if base.callers[what] and base.differs(self.read(varied)):
                yield self.cause(kind, f"{told}{_at(base, what)}")

    def of_generators(self, base: Found) -> Iterator[Cause]:
        self.tried.append("global generators that stand elsewhere")
        if base.differs(self.read(at_reading=(1, 1, 1))):
            names = [name for name, one in _ONE_EACH.items() if base.differs(self.read(at_reading=one))]
            yield self.cause(
                "global generator",
                f"reading draws from the global generator of {_and(names)}, which the pipeline does not seed there",
            )
        self.tried.append("the same while the dataset is made")
        if base.differs(self.read(at_construction=(1, 1, 1))):
            names = [name for name, one in _ONE_EACH.items() if base.differs(self.read(at_construction=one))]
            yield self.cause(
                "dataset changed",
                f"each call of factory makes other data, drawn from the global generator of {_and(names)}, which is not "
                "seeded there (an unseeded generator)",
            )

    def of_construction(self, base: Found) -> Iterator[Cause]:
        self.tried.append("a pipeline made once more")
        again = self.read(before="construction")
        if base.differs(again):
            yield self.cause("dataset changed", f"the second call of factory makes other data than the first{_refused(again)}")

    def of_history(self, base: Found) -> Iterator[Cause]:
        self.tried.append("the batch read by another pipeline before")
        if base.differs(self.read(before="pipeline")):
            yield self.named(base, "global counter", "it is another batch when another pipeline in the process has read before")
        self.tried.append("the batch read twice")
        if base.differs(self.read(before="batch")):
            yield self.named(base, "state between samples", "the batch is another one when it is read twice")
        self.tried.append("the batches before it read as well")
        if base.differs(self.read(before="stream")):
            yield self.named(base, "state between samples", "the batch is another one when those before it were read as well")

    def named(self, base: Found, kind: Kind, told: str) -> Cause:
        """The same, with the name of what lingers."""
        parts = self.read(before="batch").moved
        generators = [part for part in parts if part.generator]
        if generators and not base.differs(self.read(before="generators")):
            verb = "moves" if len(generators) == 1 else "move"
            is_unseeded = any(UNSEEDED in part.generator for part in generators)
            paths = " and ".join(f"{part.path}, a {part.generator}," for part in generators[:3])
            return self.cause(
                "unseeded generator" if is_unseeded else "private generator",
                f"{told}, since {paths} {verb} on from sample to sample, in no state",
            )
        shown = [f"{part.path}, now {part.value}" for part in parts if not part.generator][:3]
        return self.cause(kind, f"{told}, as a counter or cache makes it" + (f": see {'; '.join(shown)}" if shown else ""))

    def of_content(self) -> Cause | None:
        """Where nothing changes the batch, and yet it is not what it was at first, in this very process."""
        if self.base is None or self.is_unstable:
            return None
        self.tried.append("the content now and at first")
        if self.base.is_refused:
            return self.cause("dataset changed", f"what factory makes now is not what it made at first{_refused(self.base)}")
        if self.base.error or first_mismatch(self.scene.expected, self.base.batches[-1]) is None:
            return None
        return self.cause("dataset changed", "whatever is done, the batch is another one than it was at first")

    def of_hashes(self) -> Cause | None:
        if self.hash_seed is None or self.base is None or self.is_unstable:
            return None
        self.tried.append("another PYTHONHASHSEED")
        for other in hash_seeds()[1:]:
            if self.base.differs(self.read(hash_seed=other)):
                return self.cause(
                    "unordered listing", "the batch depends on PYTHONHASHSEED: on the order of a set of strings, or on hash()"
                )
        return None


_SURROUNDINGS: Final[dict[str, tuple[Surroundings, str, Kind, str]]] = {
    "entropy": (
        _SET._replace(entropy=1),
        "other entropy",
        "unseeded generator",
        "the batch depends on what the operating system gives as random, from which a generator without a seed is seeded",
    ),
    "clock": (_SET._replace(clock=1), "another time", "time", "the batch depends on the clock"),
    "listing": (
        _SET._replace(listing=1),
        "directory listings in another order",
        "unordered listing",
        "the batch depends on the order in which a directory is listed",
    ),
    "process": (
        _SET._replace(process=1),
        "another process number and worker",
        "process",
        "the batch depends on the process that reads it: on os.getpid() or get_worker_info()",
    ),
}
_ONE_EACH: Final = {name: tuple(int(name == other) for other in GENERATORS) for name in GENERATORS}


def find_cause(scene: Scene) -> Cause:
    """The likeliest cause. It costs up to some forty readings of the batch, and constructions of the pipeline, in forks."""
    here = _Search(scene, None)
    there = here if scene.clean is None else _Search(scene, hash_seeds()[0])
    # A clean process first, whose modules the straight run has not moved yet.
    trials = [there.run, *([here.run] if there is not here else []), here.of_content, there.of_hashes]
    tried: dict[str, None] = {}
    for trial in trials:
        try:
            cause = trial()
        except ExperimentFailed as error:
            cause = None
            here.tried.append(f"(not to its end: {error})")
        tried.update(dict.fromkeys([*there.tried, *here.tried]))
        if cause is not None:
            return cause._replace(tried=tuple(tried))
    told = "nothing that was tried changes the batch"
    if here.is_unstable or there.is_unstable:
        told = "the batch is another one whenever it is read, with entropy, clock, listings, hash seed and generators held"
    elif here.base is not None and here.base.error:
        told = f"wherever it is read, it raises {here.base.error}"
    elif "worker" in scene.where:
        told += ". It differed with worker processes: does it depend on get_worker_info(), or on how many threads compute?"
    return Cause("unknown", told, _REMEDY["unknown"], tuple(tried))


def _at(found: Found, what: str) -> str:
    places = [place for place in found.callers[what] if place][-1:]
    shown = []
    for place in places:
        path, _, line = place.rpartition(":")
        text = linecache.getline(path, int(line)).strip()
        shown.append(f" ({Path(path).name}:{line}: {text})" if text else f" ({Path(path).name}:{line})")
    return "".join(shown)


def _refused(found: Found) -> str:
    return f": {found.error}" if found.error else ""


def _and(names: list[str]) -> str:
    return " and ".join(names) or "several libraries together"
