"""The node: the contract as a torchdata `BaseNode`, and what the one at the top of a pipeline does."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from torchdata.nodes import BaseNode

from stateful_pipes.contract import NodeContract, walk
from stateful_pipes.errors import NodeAttachedError, ResumableModeRequiredError
from stateful_pipes.naming import instance_name, snake_case, told_apart
from stateful_pipes.pipeline_state import ALLOW, load, state_at
from stateful_pipes.pulled import Pulled, pull_one
from stateful_pipes.rng import preserved
from stateful_pipes.samplers.order import check_epoch
from stateful_pipes.skips import Skip, admitted, noting
from stateful_pipes.stream import Place, Stream
from stateful_pipes.ticket import Mark, Ticket

__all__ = ["Node"]

T_co = TypeVar("T_co", covariant=True)

_BASE_NODE_DOOR = ("__next__", "next", "reset", "get_state", "state_dict", "load_state_dict")


class Node(NodeContract, BaseNode[T_co]):
    """Base of this library's nodes, and of your own.

    A node above one source has to implement `run`, and `settings` if it has arguments that shape its stream; all else
    passes through to the source. A node that is a source itself, or has several, implements `pull`, `run`, `mark`,
    `seek`, `values`, `rules`, `locate`, `start` and `next_epoch`; with several also `parts`, their marks within its own, and
    `samples`, for errors. `length` tells how many items an epoch has, if that is known.

    * `pull(count)` runs in the main process only and is cheap: it advances the cursor by up to `count` items (fewer only
      at the end of an epoch; None: by a batch that the source makes, or call `no_batches`) and returns a ticket.
      StopIteration ends the epoch; the cursor then stands at the start of the next one.
    * `run(ticket)` may be slow, runs in any process, touches no cursor, and gives the same items however often it is asked.
    * `mark()` and `seek(mark)` are the cursor: a small plain tuple, epoch first, then the items consumed in it.
    * `settings()` and `values(mark)` make up the node's entry in the state: its arguments, and its part of the cursor. `rules()`
      says with `stateful_pipes.fields` (`adopted_seed`, `counter`...) which of them need not be equal at a load;
      `locate(entry, parts)` leads back from an entry to the mark.

    A source that may leave samples out (`max_skipped`) gives `LEFT_OUT` in their places; a node passes that on.

    A ticket is a plain tuple (epoch, positions, ...) of tuples, ints and bytes. `positions` are those of its items, as the
    arguments of a `range`, or as the bytes of int64 numbers; read them with `positions_of`.

    Used on its own, or under torchdata's nodes and `Loader`, a node is a torchdata node like any other: `reset(None)` at
    the start of an epoch does nothing, elsewhere it goes to the next epoch; `load_state_dict` makes the next
    `reset(None)` a no-op.

    Args:
        sources: The nodes below.
        name: The node's name in the state; by default its kind, numbered from the source up when it recurs.

    Raises:
        NodeAttachedError: a source already belongs to another node.
        ResumableModeRequiredError: the class lacks a part of the contract, or overrides a method of torchdata's
            `BaseNode` that stands for the whole node.
        ValueError: two nodes of one name.
    """

    kind: ClassVar[str] = ""
    MAIN_ONLY: ClassVar[tuple[str, ...]] = ("stream", "_parent", "_above", "_loader")
    """Attributes that stay in the main process when the node is sent to a worker."""

    def __init__(self, *sources: Node[Any], name: str | None = None) -> None:
        self._check_contract()
        super().__init__()  # type: ignore[no-untyped-call]  # torchdata leaves it unannotated
        self.stream = Stream()
        self.sources: tuple[Node[Any], ...] = sources
        self._parent: weakref.ref[Node[Any]] | None = None
        self._above: weakref.ref[Node[Any]] | None = None  # the adapter of a foreign node that holds this one
        self._loader: weakref.ref[object] | None = None
        self.is_timed = False  # as the top of its pipeline
        self._pass_epoch: int | None = None  # the epoch that torchdata's next() is in
        self._closed = False
        self._keep = True  # the next reset(None) leaves the node where it stands
        kind = self.kind or snake_case(type(self).__name__)
        self._named_by: str | None = kind if name is None else None
        below = [(source, cast(Node[Any], node)) for source in sources for node in walk(source)]
        names = told_apart([(node.name, node._named_by) for _, node in below])
        self.name: str = instance_name(name, kind, names)
        for source in sources:
            source._refuse_parent("a second node above it")
            source.refuse_loader(None)
        for (source, node), own in zip(below, names, strict=True):
            source.stream.skipped = {own if key == node.name else key: n for key, n in source.stream.skipped.items()}
            node.name = own
        for source in sources:
            source._attach_to(self)

    # The torchdata side.

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """As torchdata's: to a state, or to the start of an epoch (see the class)."""
        self._refuse_parent("reset")
        self.refuse_loader(None)
        super().reset(cast("dict[str, Any] | None", initial_state))
        epoch = None
        if initial_state is not None:
            epoch = load(self, initial_state, ALLOW.get())
        elif not self._keep and not self.at_start(self.consumed()):
            self.stream.next_epoch(self)
        self._keep = False
        # Saved after the last item of an epoch, and before its end was told: that is still to be told.
        self._pass_epoch = self.consumed()[0] if epoch is None else epoch

    def next(self) -> T_co:
        """The next item of this epoch."""
        self._keep = False
        if self._closed:
            self.open()
            self._closed = False
        epoch = cast(int, self._pass_epoch)
        item: T_co = self.stream.take(self, epoch, self.stream.generation)
        return item  # after the commit in `take` nothing is called

    def state_dict(self) -> dict[str, Any]:
        """As `get_state`; torchdata's would reset the node first, but this one has a state at any time."""
        return self.get_state()

    def get_state(self) -> dict[str, Any]:
        """The state of this node and all below it, after the last item that was consumed."""
        place = self.place()
        state = state_at(self, place)
        if self._pass_epoch == place.mark[0] - 1 and self.at_start(place.mark):
            state["epoch"] -= 1  # its end is still to be told
        return cast("dict[str, Any]", state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a state at once; the next `reset(None)` leaves it there.

        Raises:
            StateMismatchError: the state does not fit; nothing is changed.
        """
        self._refuse_parent("load_state_dict")
        self.refuse_loader(None)
        load(self, state_dict)
        super().reset(cast("dict[str, Any]", state_dict))
        self._pass_epoch = self.consumed()[0]
        self._keep = True

    # What the top of a pipeline does for loaders.

    def close(self) -> None:
        """Ends workers and older iterators, and lets another loader have the node; the next goes on from the last item."""
        self._refuse_parent("close")
        self._loader = None
        self.stream.close(self)
        self.release()
        self._closed = True

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`, in the whole pipeline that this node is part of; nothing if that is the current one."""
        epoch = check_epoch(epoch)
        top = self.top()
        if epoch != top.consumed()[0]:
            top.stream.move(top, top.start(epoch), ends=True)

    def consumed(self) -> Mark:
        """This node's mark after the last item that the top of its pipeline handed out."""
        parent = None if self._parent is None else self._parent()
        if parent is None:
            return self.stream.committed(self)
        return parent.parts(parent.consumed())[parent.sources.index(self)]

    def place(self) -> Place:
        """How far the top of its pipeline has consumed this node; of a node within, its batches are not counted."""
        reader = self.reader()
        return reader.place(self) if reader is self.stream else Place(self.consumed(), 0, reader.skipped)

    def reader(self) -> Stream:
        """The stream through which this node's items are consumed."""
        parent = None if self._parent is None else self._parent()
        return self.stream if parent is None else parent.reader()

    def top(self) -> Node[Any]:
        """The node at the top of the pipeline that this one is part of, foreign nodes included."""
        for above in (self._parent, self._above):
            node = None if above is None else above()
            if node is not None:
                return node.top()
        return self

    def pull_ahead(self) -> Pulled:
        """What `pull` comes to for one item; an error is in it, and not raised."""
        return pull_one(self)

    def run_here(self, ticket: Ticket) -> tuple[list[Any], Sequence[Skip]]:
        """What `run` gives, and the samples that were left out; the global generators are as before then."""
        with noting() as skips, preserved(self.global_generators()):
            return self.run(ticket), skips

    def admit(self, skips: Sequence[Skip]) -> dict[str, int]:
        """Counts samples that the item about to be consumed was made without; raises where one is beyond its node's budget."""
        return admitted(skips, {node.name: node.max_skipped for node in walk(self)}, self.stream.skipped)

    def attach_loader(self, loader: object) -> None:
        """Makes this node the top of a loader; NodeAttachedError if it is part of another pipeline that is still open."""
        self._refuse_parent("a loader over it")
        self.refuse_loader(loader)
        self._loader = weakref.ref(loader)

    def refuse_loader(self, besides: object) -> None:
        """Raises NodeAttachedError if an open loader, but this one, reads from the node."""
        loader = None if self._loader is None else self._loader()
        if loader is not None and loader is not besides:
            raise NodeAttachedError("another loader reads from it", node=self.name, remedy="Close that one first")

    # Inside.

    def _attach_to(self, parent: Node[Any]) -> None:
        self.stream.hand_over(self)
        parent.stream.skipped = {**parent.stream.skipped, **self.stream.skipped}
        self._parent = weakref.ref(parent)
        self.is_timed = False

    def _refuse_parent(self, what: str) -> None:
        parent = None if self._parent is None else self._parent()
        if parent is not None:
            raise NodeAttachedError(
                f"{what}: {parent.name!r} already pulls from it", node=self.name, remedy="Use the top of the pipeline"
            )

    def _check_contract(self) -> None:
        cls = type(self)
        overridden = [name for name in _BASE_NODE_DOOR if getattr(cls, name) is not getattr(Node, name)]
        if overridden:
            raise ResumableModeRequiredError(
                f"{cls.__name__} overrides {', '.join(overridden)}, which the workers never call",
                remedy="Implement pull, run, mark and seek (see stateful_pipes.Node), or derive from torchdata's BaseNode",
            )
        if cls.run is Node.run:
            raise ResumableModeRequiredError(f"{cls.__name__} does not implement run(ticket)", remedy="See stateful_pipes.Node")

    def __repr__(self) -> str:
        return f"<{self.type_name} {self.name!r}>"

    def __copy__(self) -> NoReturn:
        raise TypeError("a node cannot be copied; make another one and load the state")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self.MAIN_ONLY}
