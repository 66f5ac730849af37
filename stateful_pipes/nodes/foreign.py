"""Other people's torchdata nodes as a source: their item is the ticket's payload, their state one JSON string."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

from torchdata.nodes import BaseNode

from stateful_pipes.caught import add_note
from stateful_pipes.contract import NodeContract
from stateful_pipes.encoding import decode, encode
from stateful_pipes.errors import ResumableModeRequiredError, StatefulPipesError, StateMismatchError
from stateful_pipes.fields import Rule, Scalar, counter, text
from stateful_pipes.naming import snake_case
from stateful_pipes.node import Node
from stateful_pipes.samplers import ResumableSampler
from stateful_pipes.ticket import Mark, Ticket

__all__ = ["ForeignNode", "as_node", "sources_of", "walk_all"]


class ForeignNode(Node[Any]):
    """Adapts a torchdata node, which runs in the main process when it is pulled.

    Its state is taken after every pull and kept as text, so it costs what the node's `state_dict` and JSON cost. At the
    end of its epoch the node is reset, and its state taken after that. Nodes of this library that it holds go on
    resuming exactly: their state is inside its own.

    Args:
        node: A torchdata node that implements next, reset and get_state.

    State: epoch, position, state (JSON text; as large as the node's own).

    Raises:
        ResumableModeRequiredError: the node lacks one of these methods, is of DALI's dynamic mode, or (once its state is taken)
            leaves out the state of a node that it holds.
    """

    MAIN_ONLY = (*Node.MAIN_ONLY, "node")

    def __init__(self, node: BaseNode[Any]) -> None:
        for held in _held(node, set()):
            _check_contract(held)
        self.node = node
        self.kind = snake_case(type(node).__name__)  # type: ignore[misc]  # one adapter class, a kind for each node
        super().__init__()
        for inner in self.inner():
            inner._above = weakref.ref(self)
        self._epoch = 0
        self._position = 0
        self._ended = False
        self._started = False

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        self._started = True
        items: list[Any] = []
        try:
            while len(items) < count and not self._ended:
                try:
                    items.append(next(self.node))
                except StopIteration:
                    self._ended = True
            if not items:
                self.next_epoch((self._epoch,))
        except Exception as error:
            add_note(error, f"in node {self.name!r} at epoch {self._epoch}, position {self._position + len(items)}")
            raise
        if not items:
            raise StopIteration
        start = self._position
        self._position += len(items)
        return (self._epoch, (start, self._position, 1), items)

    def run(self, ticket: Ticket) -> list[Any]:
        return list(ticket[2])

    def mark(self) -> Mark:
        state = self.node.state_dict()
        if not state and (lost := _first_with_state(self.node)) is not None:
            raise ResumableModeRequiredError(
                f"{self.type_name} has an empty state, which leaves out that of the {type(lost).__name__} in it",
                node=self.name,
                remedy="Let its get_state hold that node's state_dict(), and its reset hand it on",
            )
        return (self._epoch, self._position, encode(state, self.name))

    def seek(self, mark: Mark) -> None:
        epoch, position, state = mark
        self._refuse_second_start()
        try:
            decoded = decode(state)
            if not isinstance(decoded, dict):  # reset(None) would not fail, but start anew
                raise TypeError(f"expected a mapping, got {type(decoded).__name__}")
            self.node.reset(decoded)
        except StatefulPipesError:
            raise
        except Exception as error:
            raise StateMismatchError(f"{self.type_name} {self.name!r} refuses its state: {error!r}") from error
        self._epoch, self._position, self._ended = epoch, position, False

    def values(self, mark: Mark) -> dict[str, Scalar]:
        epoch, position, state = mark
        return {"epoch": epoch, "position": position, "state": state}

    def rules(self) -> Mapping[str, Rule]:
        return {"epoch": counter, "position": counter, "state": text}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        self._refuse_second_start()
        return (entry["epoch"], entry["position"], entry["state"])

    def parts(self, mark: Mark) -> tuple[Mark, ...]:
        return ()

    def start(self, epoch: int) -> Mark:
        raise ResumableModeRequiredError(
            f"only {type(self.node).__name__} itself knows where an epoch of it starts",
            node=self.name,
            remedy="Read the epoch to its end, load a state that was saved at the start of one, or make a new node and loader",
        )

    def at_start(self, mark: Mark) -> bool:
        return bool(mark[1] == 0)

    def next_epoch(self, mark: Mark) -> None:
        if mark[0] != self._epoch:  # pulled ahead, into the epoch after that of `mark`
            self.seek(mark)
        self.node.reset(None)
        self._epoch, self._position, self._ended = self._epoch + 1, 0, False

    def length(self) -> int | None:
        with suppress(TypeError):  # as one that is endless now and then says
            return len(self.node) if isinstance(self.node, Sized) else None
        return None

    def _refuse_second_start(self) -> None:
        if self._started and any(_runs_once(held) for held in _held(self.node, set())):
            raise ResumableModeRequiredError(
                "it reads from an iterator, which cannot be started again",
                node=self.name,
                remedy="Give IterableWrapper something that iter() starts anew, such as a list or a class with __iter__",
            )

    @property
    def type_name(self) -> str:
        return type(self.node).__name__

    def release(self) -> None:
        for node in self.inner():
            node.close()

    def open(self) -> None:
        for node in self.inner():
            node.open()

    def inner(self) -> Iterator[Node[Any]]:
        """The tops of this library's pipelines that the foreign node holds."""
        for held in _held(self.node, set()):
            if isinstance(held, Node):
                yield held


def _check_contract(node: BaseNode[Any]) -> None:
    missing = [method for method in ("next", "reset", "get_state") if getattr(type(node), method) is getattr(BaseNode, method)]
    sampler = next((value for value in vars(node).values() if isinstance(value, ResumableSampler)), None)
    if sampler is not None and not isinstance(node, Node):
        raise ResumableModeRequiredError(
            f"{type(node).__name__} does not move the cursor of the {sampler.name} in it", remedy="Use a SamplerNode instead"
        )
    iterable = getattr(node, "iterable", None)
    if type(iterable).__module__.startswith("datasets.") and hasattr(iterable, "set_epoch"):
        raise ResumableModeRequiredError(
            f"{type(node).__name__} sets no epoch, and a {type(iterable).__name__} then begins later ones where it was resumed",
            remedy="Use stateful_pipes.IterableDatasetReader",
        )
    if not missing and _keeps_nothing(node):
        raise ResumableModeRequiredError(
            f"{type(node).__name__} of DALI's dynamic mode has no state, and loads none",
            remedy="Make a pipeline with nvidia.dali.pipeline_def and put in stateful_pipes.integrations.dali.DALIPipelineNode",
        )
    if missing:
        raise ResumableModeRequiredError(
            f"{type(node).__name__} does not implement {', '.join(missing)}",
            remedy="Give it the methods of a torchdata BaseNode, or make it a stateful_pipes.Node",
        )


def _keeps_nothing(node: BaseNode[Any]) -> bool:
    """Whether it is one of DALI's that have {} for a state; elsewhere that is the state of a node that needs none."""
    if type(node).get_state.__module__.startswith("nvidia.dali."):
        with suppress(Exception):  # of a later version, which has one from its first reset on
            return not node.get_state()
    return False


def _first_with_state(node: BaseNode[Any]) -> BaseNode[Any] | None:
    """A node within this one that has a state."""
    for held in _held(node, set()):
        if held is not node:
            with suppress(Exception):  # one that was not reset yet may have none
                if held.get_state():
                    return held
    return None


def _runs_once(node: BaseNode[Any]) -> bool:
    iterable = getattr(node, "iterable", None)
    return isinstance(iterable, Iterator) and not hasattr(iterable, "load_state_dict")


def _held(value: object, seen: set[int]) -> Iterator[BaseNode[Any]]:
    """The torchdata nodes within a value, down to the first node of this library on each way."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Node):
        yield value
    elif isinstance(value, BaseNode):
        yield value
        yield from _held(vars(value), seen)
    elif isinstance(value, dict):
        for one in list(value.values()):
            yield from _held(one, seen)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _held(one, seen)


def sources_of(node: NodeContract) -> Sequence[NodeContract]:
    """The node's sources; of a foreign one the pipelines that it holds."""
    return list(node.inner()) if isinstance(node, ForeignNode) else node.sources


def walk_all(node: NodeContract) -> Iterator[NodeContract]:
    """As `walk`, and what foreign nodes hold as well."""
    for one in sources_of(node):
        yield from walk_all(one)
    yield node


def as_node(source: object) -> Node[Any]:
    """The source itself if it is a node of this library, another torchdata node in an adapter.

    Raises:
        TypeError: not a torchdata node.
    """
    if isinstance(source, Node):
        return source
    if isinstance(source, BaseNode):
        return ForeignNode(source)
    raise TypeError(
        f"source must be a torchdata node, got {type(source).__name__}; wrap an iterable in torchdata.nodes.IterableWrapper, "
        "a sampler in stateful_pipes.SamplerNode"
    )
