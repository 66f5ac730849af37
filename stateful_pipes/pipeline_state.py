"""A pipeline's state: gathered from its nodes, and loaded into them, altogether or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.errors import Difference, StateMismatchError
from stateful_pipes.fields import Scalar, ruled
from stateful_pipes.state import LoaderState, envelope, validate
from stateful_pipes.stream import Place
from stateful_pipes.ticket import Mark

__all__ = ["ALLOW", "check", "load", "located", "state_at"]

ALLOW: ContextVar[Collection[str]] = ContextVar("allow", default=())
"""Reaches the nodes of this library inside foreign ones, whose reset() has no way to pass it on."""


_Entries = Mapping[str, Mapping[str, Any]]


def state_at(node: NodeContract, place: Place) -> LoaderState:
    """The state of this node and all below it at `place`."""
    entries: dict[str, dict[str, Scalar]] = {}
    _collect(node, place.mark, place.skipped, entries)
    return envelope(place.mark[0], place.batch, entries)


def allowed(allow: Collection[str], allowable: tuple[str, ...]) -> tuple[str, ...]:
    """What a caller lets differ, by name; ValueError for a name that is not among those that may be."""
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in names:
        if name not in allowable:
            raise ValueError(f"allow may name {allowable}, got {name!r}")
    return names


def check(top: NodeContract, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
    """Raises what `load` would, and changes nothing.

    Raises:
        StateMismatchError, StateVersionError: the state does not fit.
    """
    with top.stream.entered():
        _checked(top, state, allow, state_at(top, top.stream.last(top))["nodes"])


def load(top: NodeContract, state: Mapping[str, Any], allow: Collection[str] = ()) -> int:
    """Validates a state, then adopts it and moves the stream there; returns the epoch that was under way.

    Raises:
        StateMismatchError, StateVersionError: the state does not fit; nothing is changed.
    """
    with top.stream.entered():
        before = top.stream.last(top)
        current = state_at(top, before)["nodes"]
        valid, mark = _checked(top, state, allow, current)
        nodes = valid["nodes"]
        skipped = {node.name: int(nodes[node.name].get("skipped", 0)) for node in walk(top) if node.max_skipped}
        _take_over(top, nodes, Place(mark, valid.get("batch", 0), skipped), allow, before, current)
        return valid["epoch"]


def _checked(top: NodeContract, state: Mapping[str, Any], allow: Collection[str], current: _Entries) -> tuple[LoaderState, Mark]:
    """The state, brought to this version, and its position."""
    rules = {node.name: node.rules() for node in walk(top)}
    valid = validate(state, {name: ruled(entry, rules[name]) for name, entry in current.items()}, allow)
    epoch, mark = valid["epoch"], located(top, valid["nodes"])
    if epoch != mark[0] and not (epoch == mark[0] - 1 and top.at_start(mark)):
        wrong = Difference("", "epoch", epoch, mark[0], "the nodes stand in that epoch")
        raise StateMismatchError(differences=(wrong,))
    return valid, mark


def _take_over(
    top: NodeContract, saved: _Entries, place: Place, allow: Collection[str], before: Place, current: _Entries
) -> None:
    """Adopts the entries and moves there. Where that fails, the nodes are as they were, or the position is known to be lost."""
    stream = top.stream
    token = ALLOW.set(allow)
    was_lost, stream.lost = stream.lost, "a load was cut short"
    try:
        _adopt(top, saved)
        stream.relocate(top, place)
        if allow:
            stream.remark(top)
    except BaseException:
        _adopt(top, current)
        if stream.last(top) is before:  # else it has arrived, and under the wrong seeds
            stream.lost = was_lost
        raise
    finally:
        ALLOW.reset(token)
    stream.lost = ""


def _collect(node: NodeContract, mark: Mark, skipped: Mapping[str, int], entries: dict[str, dict[str, Scalar]]) -> None:
    for source, part in zip(node.sources, node.parts(mark), strict=True):
        _collect(source, part, skipped, entries)
    entry = node.entry(mark)
    if node.max_skipped:
        entry["skipped"] = skipped.get(node.name, 0)
    if len(entry) > 1:
        entries[node.name] = entry


def _adopt(top: NodeContract, entries: Mapping[str, Mapping[str, Any]]) -> None:
    for node in walk(top):
        if node.name in entries:
            node.adopt_entry(entries[node.name])


def located(node: NodeContract, saved: Mapping[str, Mapping[str, Any]]) -> Mark:
    """The mark that these entries tell."""
    return node.locate(saved.get(node.name, {}), tuple(located(source, saved) for source in node.sources))
