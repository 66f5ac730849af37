"""The state: plain JSON, a flat map of node entries, and the one loop that compares it with a pipeline.

A node's entry is its settings and its part of the cursor, each a `Field` by the node's rules. What may differ between a
saved state and the pipeline that loads it is decided by the field's kind alone, so validation, errors and diffs are all
`differences`.
"""

from __future__ import annotations

import copy
import functools
import platform
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypedDict, cast

import numpy as np
import torch

from stateful_pipes.errors import Difference, StateMismatchError, StateVersionError
from stateful_pipes.fields import Field, Scalar, counter, fixed, tally, text
from stateful_pipes.wording import short_repr

__all__ = [
    "FORMAT",
    "LIBRARY_VERSION",
    "MIGRATIONS",
    "VERSION",
    "LoaderState",
    "SamplerState",
    "validate",
    "validate_entry",
]

FORMAT: Final = "stateful_pipes"
VERSION: Final = 1
LIBRARY_VERSION: Final = "0.1.0"

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From a state of version n to the same state of version n + 1. Version 1 is the first, so there is none yet."""


class LoaderState(TypedDict):
    """What `state_dict()` of a loader or node returns. Every leaf is an int, float, str or bool.

    Attributes:
        format: Always "stateful_pipes".
        version: Version of this structure.
        library: Version of the library that wrote it.
        versions: Versions of python, numpy and torch, whose streams the user's own draws depend on.
        epoch: The epoch under way. Right after its last item the nodes already stand in the next one.
        batch: How many batches, or items of the node at the top, were consumed in the epoch in which the nodes stand.
        nodes: One entry for each node that has a state, by instance name; "type" and the node's own fields.
    """

    format: str
    version: int
    library: str
    versions: dict[str, str]
    epoch: int
    batch: int
    nodes: dict[str, dict[str, Scalar]]


class _OrderState(TypedDict, total=False):
    seed: int
    items: int
    replacement: bool
    weights: str
    batch_size: int
    repeat: bool
    drop_last: bool
    shuffle: bool
    samples: int
    labels: str
    ratios: str
    cycle: int
    offset: int


class SamplerState(_OrderState):
    """What `state_dict()` of a sampler, a batch sampler and their iterators returns.

    Attributes:
        type: Name of the order.
        length: Samples in an epoch; -1 for an endless order.
        epoch: The current epoch.
        consumed: Samples of this epoch that have been consumed.
        seed: The order's seed, unless it has none.
        items, replacement, weights: What is drawn from: how many, whether independently, and a hash of the weights.
        batch_size, repeat, drop_last, shuffle: As a batch sampler has them.
        samples: In a cycle of a batch sampler.
        labels, ratios: Hashes of those that a batch sampler balances by.
        cycle, offset: Where a batch sampler stands: the cycle within the epoch, and samples consumed of it.
    """

    type: str
    length: int
    epoch: int
    consumed: int


def envelope(epoch: int, batch: int, nodes: dict[str, dict[str, Scalar]]) -> LoaderState:
    """A state of these node entries."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "library": LIBRARY_VERSION,
        "versions": dict(_versions()),
        "epoch": epoch,
        "batch": batch,
        "nodes": nodes,
    }


@functools.cache
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "torch": str(torch.__version__)}


def validate(state: object, nodes: Mapping[str, Mapping[str, Field]], allow: Collection[str] = ()) -> LoaderState:
    """Compares a saved state with a pipeline's entries and returns it, migrated to this version.

    Nothing is changed; a difference in the versions of Python, NumPy or torch is warned of once in a process.

    Raises:
        StateVersionError: the state's version is newer than this library's.
        StateMismatchError: anything else is wrong; it lists every entry that differs.
    """
    if not isinstance(state, Mapping):
        raise StateMismatchError(f"a state is a mapping, got {type(state).__name__}; a path or bytes go to checkpoint=")
    if {"sha256", "state"} <= state.keys():
        raise StateMismatchError('this is the content of a checkpoint: pass the file as checkpoint=, or this["state"]')
    if state.keys() == {"pipelines"}:
        raise StateMismatchError("this is a state of a MultiPipelineLoader: load it into one, or one of its pipelines' here")
    if "format" not in state and ("_num_yielded" in state or "_snapshot" in state):
        raise StateMismatchError(
            "this is a state of torchdata's StatefulDataLoader. To move over, finish the epoch with the old loader, then "
            "start this one with set_epoch(next epoch); its order is another, so a position inside an epoch has no meaning here"
        )
    migrated = _migrate(state)
    wrong = _compare("", _ENVELOPE, {key: value for key, value in migrated.items() if key not in ("nodes", "versions")}, ())
    for key in ("nodes", "versions"):
        if key not in migrated:
            wrong.append(Difference("", key, "missing", "a mapping", "the state is damaged"))
    versions, saved = migrated.get("versions", {}), migrated.get("nodes", {})
    wrong += _compare_versions(versions)
    if isinstance(saved, Mapping):
        wrong += differences(saved, nodes, allow)
    else:
        wrong.append(Difference("", "nodes", repr(saved), "a mapping", "the state is damaged"))
    if wrong:
        raise StateMismatchError(differences=tuple(wrong))
    _warn_of_versions(versions)
    return cast(LoaderState, migrated)


def validate_entry(state: object, entry: Mapping[str, Field], name: str) -> dict[str, Any]:
    """The same for a single entry without an envelope, as a sampler's own state is.

    Raises:
        StateMismatchError: it lists every field that differs.
    """
    wrong = differences({name: state}, {name: entry}, ())
    if wrong:
        raise StateMismatchError(differences=tuple(wrong))
    return dict(cast("Mapping[str, Any]", state))


def differences(
    saved: Mapping[Any, object], nodes: Mapping[str, Mapping[str, Field]], allow: Collection[str]
) -> list[Difference]:
    """Every missing, extra and unacceptable entry and field of `saved`, in the pipeline's order."""
    wrong: list[Difference] = []
    for name, entry in nodes.items():
        if name not in saved:
            wrong.append(Difference(name, "", "missing", _type_of(entry), "build the pipeline that the state was saved from"))
            continue
        found = saved[name]
        if isinstance(found, Mapping):
            wrong += _compare(name, entry, found, allow)
        else:
            wrong.append(Difference(name, "", short_repr(found), "a mapping", "the state is damaged"))
    for name, found in saved.items():
        if name not in nodes:
            kind = found.get("type", "a node") if isinstance(found, Mapping) else found
            wrong.append(
                Difference(str(name), "", short_repr(kind), "missing", "build the pipeline that the state was saved from")
            )
    return wrong


def _compare(name: str, entry: Mapping[str, Field], saved: Mapping[Any, object], allow: Collection[str]) -> list[Difference]:
    wrong: list[Difference] = []
    for key, field in entry.items():
        if key not in saved:
            if field.may_be_missing:
                continue
            wrong.append(Difference(name, key, "missing", short_repr(field.value), f"it should be {field.expects}"))
        elif not field.accepts(saved[key]):
            wrong.append(Difference(name, key, short_repr(saved[key]), short_repr(field.value), field.remedy))
        elif field.kind == "allowable" and key not in allow and saved[key] != field.value:
            remedy = f"set it as it was, or name it: load_state_dict(state, allow=({key!r},))"
            wrong.append(Difference(name, key, short_repr(saved[key]), short_repr(field.value), remedy))
    for key, value in saved.items():
        if key not in entry:
            wrong.append(Difference(name, str(key), short_repr(value), "missing", "this pipeline has no such entry"))
    return wrong


_ENVELOPE: Final[Mapping[str, Field]] = {
    "format": fixed(FORMAT),
    "version": fixed(VERSION),
    "library": text(LIBRARY_VERSION),
    "epoch": counter(0),
    "batch": tally(0),
}


def _migrate(state: Mapping[Any, Any]) -> dict[str, Any]:
    """A shallow copy of the state, brought to this version step by step."""
    migrated = dict(state)
    if migrated.get("version") != VERSION:
        migrated = copy.deepcopy(migrated)  # a migration may change it in place
    version = migrated.get("version")
    if type(version) is int and version > VERSION:
        raise StateVersionError(
            expected=f"at most {VERSION}",
            found=version,
            remedy=f"Load it with the library that wrote it ({migrated.get('library')})",
        )
    while type(version) is int and version in MIGRATIONS and version < VERSION:
        try:
            migrated = MIGRATIONS[version](migrated)
        except Exception as error:
            raise StateMismatchError(f"it cannot be brought from version {version} to {version + 1}: {error!r}") from error
        version = migrated["version"]
    return migrated


def _compare_versions(saved: object) -> list[Difference]:
    if not isinstance(saved, Mapping):
        return [Difference("", "versions", short_repr(saved), "a mapping", "the state is damaged")]
    return _compare("versions", {name: text(value) for name, value in _versions().items()}, saved, ())


_warned: set[tuple[str, str, str]] = set()


def _warn_of_versions(saved: Mapping[str, str]) -> None:
    changed = [(name, saved[name], here) for name, here in _versions().items() if saved[name] != here]
    if changed and not _warned.issuperset(changed):
        _warned.update(changed)
        named = ", ".join(f"{name} {old} (here {new})" for name, old, new in changed)
        warnings.warn(
            f"the state was saved with {named}: order and seeds resume exactly, but what your own functions draw "
            "from these libraries under a seed may differ",
            UserWarning,
            stacklevel=5,
        )


def _type_of(entry: Mapping[str, Field]) -> str:
    return str(entry["type"].value) if "type" in entry else "a node"
