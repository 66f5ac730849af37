"""One batch, read in one way or another."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any, NamedTuple

from stateful_pipes.caught import brief
from stateful_pipes.errors import StateMismatchError
from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.testing.fakes import callers
from stateful_pipes.testing.moving_parts import moved, parts_of, put_back
from stateful_pipes.testing.pieces import Factory, kept, opened, steps
from stateful_pipes.testing.surroundings import move_generators
from stateful_pipes.wording import short_repr

__all__ = ["Experiment", "Found", "Moved", "perform"]

_LAST = 8
"""How far before the batch a pipeline is read for what may linger."""


class Experiment(NamedTuple):
    """How the batch is read: once, or twice, with something in between or before.

    Attributes:
        at_construction, at_reading: Numbers that the three global generators are seeded with before these.
        before: "construction": another pipeline is made first. "pipeline": another one is made and reads the batch first.
            "batch": this one does. "generators": likewise, and then all its generators are led back. "stream": it reads the
            batches before. "both": it reads the batch twice, and then another pipeline does.
    """

    at_construction: tuple[int, int, int] = (0, 0, 0)
    at_reading: tuple[int, int, int] = (0, 0, 0)
    before: str = ""


class Moved(NamedTuple):
    """A part of the user's own that has moved: where it is, what kind of generator if it is one, how it stands."""

    path: str
    generator: str
    value: str


class Found(NamedTuple):
    """What was read; or the error, and whether it refuses the state; the lines that asked for entropy...; what has moved."""

    batches: list[Any]
    error: str
    is_refused: bool
    callers: dict[str, list[str]]
    moved: list[Moved]

    def differs(self, other: Found) -> bool:
        return self.error != other.error or first_mismatch(self.batches[-1:], other.batches[-1:]) is not None


def perform(factory: Factory, states: list[str], experiment: Experiment) -> Found:
    """Makes the experiment on the batch behind the last of `states`, in this process, whose generators it moves."""
    batches: list[Any] = []
    changed: list[Moved] = []
    error, is_refused = "", False

    def load(loader: Any, back: int = 1) -> None:
        loader.load_state_dict(json.loads(states[-back]))

    def read(loader: Any, count: int = 1) -> None:
        batch = steps(loader)
        for _ in range(count):
            move_generators(experiment.at_reading)
            found = next(batch)
        batches.append(kept(found).content)

    try:
        move_generators(experiment.at_construction)
        if experiment.before in ("construction", "pipeline"):
            with closing(opened(factory, 0)) as first:
                if experiment.before == "pipeline":
                    load(first)
                    read(first)
            move_generators(experiment.at_construction)
        with closing(opened(factory, 0)) as loader:
            if experiment.before in ("batch", "generators", "both"):
                load(loader)
                before = parts_of(loader)
                read(loader)
                after = moved(before, parts_of(loader))
                changed = [Moved(one.path, one.kind, short_repr(one.value, 40)) for one in after]
                if experiment.before == "generators":
                    put_back({path: part for path, part in before.items() if part.kind})
            count = min(_LAST, len(states)) if experiment.before == "stream" else 1
            load(loader, count)
            read(loader, count)
        if experiment.before == "both":
            move_generators(experiment.at_construction)
            with closing(opened(factory, 0)) as loader:
                load(loader)
                read(loader)
    except StateMismatchError as refused:
        error, is_refused = " ".join(str(refused).split()), True
    except Exception as raised:
        error = brief(raised)
    return Found(
        batches, error, is_refused, {what: callers(what) for what in ("entropy", "clock", "listing", "process")}, changed
    )
