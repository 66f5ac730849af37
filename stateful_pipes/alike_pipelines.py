"""What is asked of several pipelines that are read together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.nodes.foreign import ForeignNode, as_node, walk_all

__all__ = ["check_alike", "check_positions", "loader_of"]


def loader_of(pipeline: Any) -> StatefulDataLoader[Any]:
    """The loader itself, or one over a pipeline; TypeError for a dataset, of which it is not known how it is to be read."""
    return pipeline if isinstance(pipeline, StatefulDataLoader) else StatefulDataLoader(as_node(pipeline))


def check_alike(loaders: Sequence[StatefulDataLoader[Any]]) -> None:
    """Raises ValueError where batch sizes or readers differ, or two read the same shard or are the same."""
    if len(set(map(id, loaders))) < len(loaders):
        raise ValueError("a loader is given twice; each pipeline needs one of its own")
    told = [{"batch_size": loader.batch_size, **_reader_of(loader)} for loader in loaders]
    shards = [one.pop("shard_id", None) for one in told]
    for number, one in enumerate(told):
        if one != told[0]:
            differ = [key for key in {**told[0], **one} if told[0].get(key) != one.get(key)]
            raise ValueError(f"pipelines 0 and {number} differ in {', '.join(differ)}: {told[0]} and {one}")
    if None not in shards and len(set(shards)) < len(shards):
        raise ValueError(f"each pipeline has to read a shard of its own, got shard_id {shards}")


def check_positions(loaders: Sequence[StatefulDataLoader[Any]], allow: Collection[str]) -> bool:
    """Whether they stand at different positions; ValueError where `allow` does not name that, or that only some were restored."""
    restored = {loader.is_restored_from_checkpoint for loader in loaders}
    if "unrestored" not in allow and len(restored) > 1:
        raise ValueError("some pipelines were restored from a checkpoint and some were not; or allow='unrestored'")
    places = {loader: (loader.position.epoch, loader.position.consumed) for loader in loaders}
    counting = [places[one] for one in loaders if restored == {False} or one.is_restored_from_checkpoint]
    if "position" not in allow and len(set(counting)) > 1:
        raise ValueError(f"the pipelines stand at different positions, {list(places.values())}; or allow='position'")
    return len(set(places.values())) > 1


def _reader_of(loader: StatefulDataLoader[Any]) -> dict[str, Any]:
    """What the reader at the source tells of itself, if there is one that does."""
    for node in walk_all(loader.pipeline):
        held = node.node if isinstance(node, ForeignNode) else node
        if hasattr(held, "reader_meta"):
            own = {name: getattr(held, name) for name in ("batch_size", "shuffle_after_epoch_seed") if hasattr(held, name)}
            return {**held.reader_meta(), **own}
    return {}
