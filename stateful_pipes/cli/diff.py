"""`stateful-pipes diff A B`."""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from stateful_pipes.cli.any_file import (
    NOTHING,
    AnyFile,
    Digits,
    inner,
    opened,
    reading,
    say,
    shown,
    shown_name,
    step,
    unreadable,
)
from stateful_pipes.cli.arguments import AtLeast, Commands, Formatter
from stateful_pipes.progress import Progress, is_state, progress_of, states_in
from stateful_pipes.testing.comparison import bits_of
from stateful_pipes.wording import counted

__all__ = ["add", "apart", "differences"]

_DESCRIPTION = """\
Compares two checkpoints: prints every difference by node and field with both values, and how far apart the trainings were.
Reads what `stateful-pipes inspect` reads. Of tensors that differ it prints in how many values. Nothing in the files is executed.
Exit code 0 if they are equal, 1 if they differ, 2 if one is damaged or cannot be read."""
_AROUND: Final = 20


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    diff = commands.add_parser("diff", help="compare two checkpoints", description=_DESCRIPTION, formatter_class=Formatter)
    diff.add_argument("a", metavar="A", help="a checkpoint")
    diff.add_argument("b", metavar="B", help="another one")
    diff.add_argument("--limit", type=AtLeast(1), default=100, help="differences that are printed")
    diff.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    files: list[AnyFile] = []
    for path in (arguments.a, arguments.b):
        try:
            files.append(opened(path))
        except Exception as error:
            print(unreadable(path, error), file=sys.stderr)
    files_damaged = [one for one in files if one.checksum == "wrong"]
    for one in files_damaged:
        print(one.title, file=sys.stderr)
    if len(files) < 2 or files_damaged:
        return 2
    one, other = files
    alone = _states_alone(one, other)
    if alone:
        found = differences(alone[0], alone[1])
    else:
        found = chain(differences(one.value, other.value), differences(one.user, other.user, "user"))
    some = list(islice(found, arguments.limit))
    more = sum(1 for _ in found)
    say(
        [
            f"A: {one.title}",
            f"B: {other.title}",
            *islice(_distances(one.value, other.value), arguments.limit),
            *(["only the loaders' states are compared"] if alone else []),
            *(some or ["equal"]),
            *([f"and {counted(more, 'more difference')}"] if more else []),
        ]
    )
    return 1 if some else 0


def _states_alone(one: AnyFile, other: AnyFile) -> tuple[Mapping[str, Any], ...]:
    """Where one file is a loader's state and the other holds just one among other things: those two; else nothing."""
    if is_state(one.value) == is_state(other.value):
        return ()
    found = tuple(state for file in (one, other) for _, state in islice(states_in(file.value), 2))
    return found if len(found) == 2 else ()


class _Pair(NamedTuple):
    """Two values that stand at the same place.

    Attributes:
        where: The loader's state, and the node in it.
        path: From there on.
    """

    where: str
    path: str
    one: Any
    other: Any

    @property
    def place(self) -> str:
        return ", ".join(filter(None, (self.where, self.path.removeprefix(".")))) or "the whole"

    def below(self, key: object, one: Any, other: Any) -> _Pair:
        return _Pair(self.where, f"{self.path}{step(key)}", one, other)


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """A line for each difference of two values: where, and what is in A and in B. Keys are in A's order, then B's."""
    seen: dict[tuple[int, int], _Pair] = {}  # and kept, so that no id is used again
    todo = [_Pair("", place, one, other)]
    while todo:
        pair = todo.pop()
        if (id(pair.one), id(pair.other)) in seen:
            continue
        if isinstance(pair.one, (Mapping, list, tuple)):
            seen[id(pair.one), id(pair.other)] = pair
        if isinstance(pair.one, Mapping) and isinstance(pair.other, Mapping):
            todo += reversed(list(_of_mappings(pair)))
        elif isinstance(pair.one, (list, tuple)) and type(pair.one) is type(pair.other):
            if len(pair.one) != len(pair.other):
                yield f"{pair.place}: A {len(pair.one):,} items, B {len(pair.other):,}"
            both = list(zip(pair.one, pair.other, strict=False))
            todo += reversed([pair.below(number, *values) for number, values in enumerate(both)])
        elif told := _told(pair.one, pair.other):
            yield f"{pair.place}: {told}"


def _of_mappings(pair: _Pair) -> Iterator[_Pair]:
    is_node = pair.where and not pair.path
    for key, one, other in _joined(pair.one, pair.other, inner if is_node else operator.getitem):
        if key == "nodes" and is_state(pair.one) and is_state(pair.other):
            where = f"{pair.place}, " if pair.where or pair.path else ""
            for name, *nodes in _joined(one, other, operator.getitem):
                yield _Pair(f"{where}node {shown_name(name)}", "", *nodes)
        else:
            yield pair.below(key, one, other)


def _joined(one: Any, other: Any, get: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any, Any]]:
    """The keys of two mappings with their values in both."""
    for key in [*one, *(key for key in other if key not in one)]:
        yield key, *(get(each, key) if key in each else NOTHING for each in (one, other))


def _told(one: Any, other: Any) -> str:
    """How two values differ that are not gone into; empty if they do not."""
    if one is other:
        return ""
    if one is NOTHING or other is NOTHING:
        there = other if one is NOTHING else one
        kind = there.get("type") if isinstance(there, Mapping) else None
        return f"only in {'B' if one is NOTHING else 'A'} ({shown_name(kind) if isinstance(kind, str) else shown(there)})"
    if isinstance(one, (torch.Tensor, np.ndarray)) and type(one) is type(other):
        if shown(one) != shown(other):
            return f"A {shown(one)}; B {shown(other)}"
        differing = _differing(one, other)
        return f"{shown(one)}, {differing}" if differing else ""
    if _same(one, other):
        return ""
    if isinstance(one, (str, bytes)) and type(one) is type(other) and not isinstance(one, Digits):
        return _of_texts(one, other)
    if shown(one) != shown(other):
        kinds = [f" ({type(each).__name__})" if type(one) is not type(other) else "" for each in (one, other)]
        return f"A {shown(one)}{kinds[0]}, B {shown(other)}{kinds[1]}"
    if type(one) is not type(other):
        return f"A {shown(one)} is a {type(one).__name__}, B a {type(other).__name__}"
    return f"A {shown(one)}, B another"


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex, np.generic)):  # NaN is NaN, and 0.0 not -0.0
        return repr(one) == repr(other)
    try:
        return bool(one == other)
    except Exception:
        return repr(one) == repr(other)


def _of_texts(one: Any, other: Any) -> str:
    """Two texts; of long ones what stands around their first difference."""
    if shown(one) != shown(other):
        return f"A {shown(one)}, B {shown(other)}"
    first = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    part = slice(max(0, first - _AROUND), first + _AROUND)
    unit = "character" if isinstance(one, str) else "byte"
    return f"from {unit} {first:,} on, A ...{one[part]!r}..., B ...{other[part]!r}..."


def _differing(one: Any, other: Any) -> str:
    """In how many values two tensors or arrays of one type and shape differ, bit for bit."""
    try:
        if isinstance(one, torch.Tensor) and one.is_sparse and other.is_sparse:
            parts = [(one._indices(), other._indices()), (one._values(), other._values())]
            return "differ" if any(a.shape != b.shape or _differing(a, b) for a, b in parts) else ""
        size = one.nbytes // max(1, one.itemsize)
        count = int((bits_of(one) != bits_of(other)).any(axis=1).sum()) if size else 0
        return f"differ in {count:,} of {counted(size, 'value')}" if count else ""
    except Exception as error:  # a quantized one, one without content
        with suppress(Exception):
            return "" if torch.equal(one, other) else "differ"
        return f"not compared ({type(error).__name__})"


# How far apart.


def _distances(one: object, other: object) -> Iterator[str]:
    """A line for each loader's state that both have; the only ones of each are compared wherever they stand."""
    here, there = [dict(states_in(value)) for value in (one, other)]
    if len(here) == len(there) == 1:
        yield apart(*(progress_of(state) for found in (here, there) for state in found.values()))
        return
    for path, state in here.items():
        if path in there:
            yield f"{reading(path)}: {apart(progress_of(state), progress_of(there[path]))}"
    if not here or not there:
        yield f"no state of a loader in {'either' if not here and not there else 'B' if here else 'A'}"


def apart(one: Progress, other: Progress) -> str:
    """How far B is from A.

    >>> apart(Progress(0, 5, ()), Progress(2, 1, ()))
    'A: epoch 0, 5 batches. B: epoch 2, 1 batch. B is 2 epochs ahead of A'
    """
    both = f"A: {one}. B: {other}. "
    epochs, behind, ahead = other.epoch - one.epoch, "behind A", "ahead of A"
    if epochs:
        return f"{both}B is {counted(abs(epochs), 'epoch')} {ahead if epochs > 0 else behind}{_samples_apart(one, other)}"
    steps = [] if one.batches is None or other.batches is None else [(other.batches - one.batches, "batch")]
    numbers = {count.node: count.number for count in one.samples}
    steps += [(count.number - numbers[count.node], count.noun) for count in other.samples if count.node in numbers]
    sides = [(ahead, [one for one in steps if one[0] > 0]), (behind, [one for one in steps if one[0] < 0])]
    told = [f"{' and '.join(counted(abs(step), noun) for step, noun in some)} {side}" for side, some in sides if some]
    if not told:
        return f"{both}Both stand at the same place" if steps else f"{both}Nothing tells how far apart they are"
    return f"{both}B is {', '.join(told)}"


def _samples_apart(one: Progress, other: Progress) -> str:
    """The samples of the epochs between, where both count those of one order."""
    if len(one.samples) != 1 or len(other.samples) != 1:
        return ""
    (a,), (b,) = one.samples, other.samples
    if a.node != b.node or a.length is None or a.length != b.length:
        return ""
    samples = (other.epoch - one.epoch) * a.length + b.number - a.number
    return f" ({counted(abs(samples), 'sample')})"
