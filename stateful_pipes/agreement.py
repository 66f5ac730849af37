"""That all ranks load the same state, or none does."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from stateful_pipes.caught import brief
from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.errors import StateMismatchError
from stateful_pipes.fields import adopted_seed, tally, text
from stateful_pipes.nodes.dealing import DealingNode
from stateful_pipes.nodes.foreign import ForeignNode
from stateful_pipes.pipeline_state import check
from stateful_pipes.wording import listed

__all__ = ["check_agreement", "failing_together", "keeping_nobody_waiting"]

T = TypeVar("T")
_SHOWN = 8
_DAMAGED = {"state": "damaged"}


@contextmanager
def keeping_nobody_waiting(top: NodeContract) -> Iterator[None]:
    """Where what comes before the comparison fails on this rank, the others are told that it has no state."""
    try:
        yield
    except Exception:
        with suppress(StateMismatchError):
            check_agreement(top, None)
        raise


def check_agreement(top: NodeContract, state: object, allow: Collection[str] | None = None) -> None:
    """Compares what the ranks of the default process group are about to load; all of them have to call it.

    Only a pipeline that is dealt out to that group's ranks, or whose reader has as many shards (a `FileReader`'s, or DALI's),
    is compared: one with another world size (each process its own data, or a part of the ranks alone) asks nobody. Left
    out is what each rank may have for itself: the entries of other sources and of the nodes above them, of shards the seeds
    but that by which all are shuffled, and what a buffer or DALI's checkpoint holds; counts of samples left out, and the
    versions of the libraries that wrote the state. One gather of a digest; where the digests differ, or a rank refuses its
    state, a second one of what is wrong.

    Args:
        top: The pipeline's.
        state: What this rank is about to load.
        allow: As `load` takes it, which is then asked beforehand whether it will refuse the state; None asks nothing.

    Raises:
        StateMismatchError: on all ranks alike; it names the ranks that differ from most, and the entries. Or on those ranks
            that would load their states, where others refuse theirs; `load` tells these why.
    """
    world_size = _sharing(top)
    if world_size == 1:
        return
    told = json.dumps(_common(top, state, world_size), sort_keys=True)
    refusal = "" if allow is None else _refusal(top, state, allow)
    digests, refused = zip(*_gathered((hashlib.sha256(told.encode()).digest(), bool(refusal)), world_size), strict=True)
    if len(set(digests)) > 1:
        raise StateMismatchError(_disagreement(_gathered(told, world_size)))
    if any(refused):
        _raise_others(_gathered(refusal, world_size), but=refusal)


def _refusal(top: NodeContract, state: Any, allow: Collection[str]) -> str:
    try:
        if state != {}:  # which does nothing
            check(top, state, allow)
    except Exception as error:
        return brief(error)
    return ""


def _raise_others(told: list[str], but: str = "") -> None:
    """Raises what other ranks told, unless this one has something of its own to tell."""
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(told) if one]
    if failed and not but:
        raise StateMismatchError("\n  ".join(["another rank refused its own", *failed[:_SHOWN]]))


@contextmanager
def failing_together(tops: Iterable[NodeContract]) -> Iterator[None]:
    """Where what is inside fails on one of the ranks that share one of these pipelines, it fails on all of them.

    Raises:
        StateMismatchError: it is another rank on which it failed.
    """
    world_size = max((_sharing(top) for top in tops), default=1)
    try:
        yield
    except Exception as error:
        if world_size > 1:
            _gathered(brief(error), world_size)
        raise
    if world_size > 1:
        _raise_others(_gathered("", world_size))


def _sharing(top: NodeContract) -> int:
    """How many ranks of the default process group this pipeline is dealt out to."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    world_size = dist.get_world_size()
    return world_size if len(_own(top, world_size)) < len(list(walk(top))) else 1


def _gathered(value: T, world_size: int) -> list[T]:
    # The variant for objects finds the device that the backend needs, whichever that is.
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def _own(node: NodeContract, world_size: int) -> list[str]:
    """The nodes that may stand elsewhere on each rank: sources that are not dealt out, and what is above them."""
    if isinstance(node, DealingNode):
        # One that does not deal out to these ranks reads from what is below it as it will, such as a mixture of shards.
        return [] if node.world_size == world_size else [one.name for one in walk(node)]
    if not node.sources:
        return [] if _is_shard(node, world_size) else [node.name]
    below = [name for source in node.sources for name in _own(source, world_size)]
    return [*below, node.name] if below else []


def _is_shard(node: NodeContract, world_size: int) -> bool:
    """Whether it reads one of as many shards as there are ranks, each of which then takes as many steps."""
    held = node.node if isinstance(node, ForeignNode) else node
    return hasattr(held, "reader_meta") and held.reader_meta().get("number_of_shards") == world_size


def _left_out(node: NodeContract, world_size: int) -> set[str]:
    """The fields of a node's entry that each rank may have for itself."""
    rules = node.rules()
    found = {key for key, rule in rules.items() if rule is tally}
    if any(_is_shard(one, world_size) for one in walk(node)):
        found |= {key for key, rule in rules.items() if rule in (adopted_seed, text) and key != "shuffle_after_epoch_seed"}
    return found


def _common(top: NodeContract, state: Any, world_size: int) -> dict[str, Any]:
    """What has to be equal on all ranks, flat. Never an error: the others would wait for this rank in vain."""
    own = _own(top, world_size)
    left_out = {f"{node.name}.{key}" for node in walk(top) for key in _left_out(node, world_size)}
    left_out |= {"library", "versions", "batch"} | ({"epoch"} if top.name in own else set())
    try:
        found = {key: value for key, value in state.items() if key != "nodes"}
        for name, entry in state.get("nodes", {}).items():
            if name not in own:
                found.update((f"{name}.{key}", value) for key, value in entry.items())
        found = {key: value for key, value in found.items() if key not in left_out}
        json.dumps(found, sort_keys=True)
    except Exception:
        return _DAMAGED
    return found


def _disagreement(told: list[str]) -> str:
    usual = Counter(told).most_common(1)[0][0]
    alike = [rank for rank, one in enumerate(told) if one == usual]
    others = [rank for rank, one in enumerate(told) if one != usual]
    lines = [f"rank {rank}: {_difference(json.loads(told[rank]), json.loads(usual))}" for rank in others[:_SHOWN]]
    first = f"ranks [{listed(others, _SHOWN)}] were given another one than ranks [{listed(alike, _SHOWN)}]; load the same on all"
    return "\n  ".join([first, *lines])


def _difference(one: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    if not one or one == _DAMAGED:
        return "a damaged state" if one else "an empty state"
    keys = [key for key in {**one, **usual} if _shown(one, key) != _shown(usual, key)]
    return listed(keys, _SHOWN, lambda key: f"{key} {_shown(one, key):.80} instead of {_shown(usual, key):.80}")


def _shown(state: Mapping[str, Any], key: str) -> str:
    return repr(state[key]) if key in state else "(missing)"
