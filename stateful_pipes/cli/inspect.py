"""`stateful-pipes inspect FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeGuard

from stateful_pipes.cli.any_file import NOTHING, AnyFile, inner, opened, reading, say, shown, shown_name, unreadable
from stateful_pipes.cli.arguments import AtLeast, Commands, Formatter
from stateful_pipes.drawing import Branch, branches
from stateful_pipes.progress import is_state, progress_of, states_in
from stateful_pipes.wording import counted, listed

__all__ = ["add", "told"]

_DESCRIPTION = """\
Prints what a checkpoint holds as a tree, and how far the training was: epoch, batches and samples. Reads the files of
StatefulDataLoader.checkpoint, MultiPipelineLoader.checkpoint, CheckpointManager and stateful_pipes.training, and states in
JSON or written by torch.save. Of tensors it prints type, shape and size. Nothing in the file is executed.
Exit code 0, or 1 if the file is damaged or cannot be read."""
_DEEPEST: Final = 30
_MOST_LINES: Final = 10_000
_MOST_IN_A_LINE: Final = 8


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    inspect = commands.add_parser(
        "inspect", help="print a checkpoint as a tree", description=_DESCRIPTION, formatter_class=Formatter
    )
    inspect.add_argument("file", help="a checkpoint")
    inspect.add_argument("--limit", type=AtLeast(1), default=50, help="entries of one container that are printed")
    inspect.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        file = opened(arguments.file)
    except Exception as error:
        print(unreadable(arguments.file, error), file=sys.stderr)
        return 1
    say([file.title, *told(file.value, arguments.limit), *_tree(file, arguments.limit)])
    return 1 if file.checksum == "wrong" else 0


def told(value: object, limit: int) -> Iterator[str]:
    """A line for each loader's state: where it is, and how far it was."""
    found = list(states_in(value))
    for path, state in found[:limit]:
        yield f"{reading(path)}: {progress_of(state)}" if path else str(progress_of(state))
    if len(found) > limit:
        yield f"and {counted(len(found) - limit, 'more state')}"
    if not found:
        yield "no state of a loader in it"


def _tree(file: AnyFile, limit: int) -> Iterator[str]:
    below = list(_below(file.value, limit, 0))
    if file.user is not NOTHING:
        below.append(_branch("user", file.user, limit, 1))
    # Shared containers are printed at each place: a file made for that grows without end.
    lines = branches(Branch("state" if is_state(file.value) else shown(file.value), below))
    yield from islice(lines, _MOST_LINES)
    if next(lines, None) is not None:
        yield f"cut after {_MOST_LINES:,} lines"


def _branch(key: object, value: object, limit: int, depth: int) -> Branch:
    name = shown_name(key)
    if is_state(value):
        return Branch(f"{name}: state of a loader, {progress_of(value)}", _below(value, limit, depth))
    if isinstance(value, Mapping) and value:
        kind = "" if type(value) is dict else f", {type(value).__name__}"
        return Branch(f"{name}: {counted(len(value), 'key')}{kind}", _below(value, limit, depth))
    if _is_sequence(value) and value:
        if all(isinstance(one, (int, float)) for one in value[:_MOST_IN_A_LINE]):
            return Branch(f"{name}: {shown(value)}: {listed(value, _MOST_IN_A_LINE, shown)}")
        return Branch(f"{name}: {shown(value)}", _below(value, limit, depth))
    return Branch(f"{name}: {shown(value)}")


def _below(value: Any, limit: int, depth: int) -> Iterator[Branch]:
    if depth > _DEEPEST:
        yield Branch("...")
    elif is_state(value):
        yield from _state(value, limit, depth + 1)
    elif isinstance(value, Mapping) or _is_sequence(value):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in islice(pairs, limit):
            yield _branch(key, one, limit, depth + 1)
        yield from _more(len(value), limit)


def _state(state: Mapping[str, Any], limit: int, depth: int) -> Iterator[Branch]:
    """A line for who wrote it, then each node."""
    versions = state.get("versions")
    told = [f"{shown_name(name)} {shown_name(one)}" for name, one in versions.items()] if isinstance(versions, Mapping) else []
    written = f"written by stateful_pipes {shown_name(state.get('library'))} (format {shown(state.get('version'))})"
    yield Branch(f"{written}{' with ' if told else ''}{', '.join(told[:limit])}")
    nodes = state["nodes"]
    for name, node in islice(nodes.items(), limit):
        if isinstance(node, Mapping):
            yield Branch(f"{shown_name(name)}: {shown_name(node.get('type'))}", _fields(node, limit, depth))
        else:
            yield _branch(name, node, limit, depth)
    yield from _more(len(nodes), limit)
    known = ("format", "version", "library", "versions", "epoch", "batch", "nodes")
    yield from _below({key: one for key, one in state.items() if key not in known}, limit, depth)


def _fields(node: Mapping[Any, Any], limit: int, depth: int) -> Iterator[Branch]:
    keys = [key for key in node if key != "type"]
    for key in keys[:limit]:
        yield _branch(key, inner(node, key), limit, depth + 1)
    yield from _more(len(keys), limit)


def _more(count: int, limit: int) -> Iterator[Branch]:
    if count > limit:
        yield Branch(f"... and {count - limit:,} more")


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
