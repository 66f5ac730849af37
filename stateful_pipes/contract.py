"""What a node promises: a cursor that pulls tickets, and a pure function that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from stateful_pipes.errors import ResumableBatchConfigurationError
from stateful_pipes.fields import Rule, Scalar
from stateful_pipes.rng import GlobalGenerator
from stateful_pipes.stream import Stream
from stateful_pipes.ticket import Mark, Samples, Ticket, positions_of

__all__ = ["NodeContract", "walk"]


class NodeContract:
    """The contract of a node; by default everything passes through to the one source.

    `stateful_pipes.Node` says in words what one implements.
    """

    sources: Sequence[NodeContract]
    name: str
    stream: Stream
    max_skipped: int = 0
    """How many samples the node may leave out of the stream, in all."""

    @property
    def runs_on(self) -> bool:
        """Whether the next epoch may be pulled ahead before it is asked for."""
        return all(source.runs_on for source in self.sources)

    @cached_property
    def ends_in_run(self) -> bool:
        """Whether an epoch's end shows only when a ticket is run, as `EpochEnd`; `pull` never tells it then."""
        return any(source.ends_in_run for source in self.sources)

    @property
    def pulls_freely(self) -> bool:
        """Whether `pull` reads nothing, searches nothing and asks nobody, so that some tickets more than are wanted may be pulled
        at once; a `pull` of one's own that does not may say so."""
        return type(self).pull is NodeContract.pull and all(source.pulls_freely for source in self.sources)

    @property
    def asks_as_asked(self) -> bool:
        """Whether `pull` asks the source for just what it is asked for itself; a `pull` of one's own that does may say so."""
        return type(self).pull is NodeContract.pull

    _settings: dict[str, Scalar] | None = None
    _ended = False  # the epoch's end is told at the next pull, though the cursor stands in the next epoch already

    def pull(self, count: int | None) -> Ticket:
        """Advances by up to `count` items, with None by a batch as the source makes it; StopIteration ends the epoch."""
        return self._source.pull(count)

    def run(self, ticket: Ticket) -> list[Any]:
        """The items of a ticket."""
        raise NotImplementedError(f"{type(self).__name__} does not implement run(ticket)")

    def samples(self, ticket: Ticket) -> Samples:
        """The samples that a ticket is made of, for errors; a node above one source whose ticket is not that one's has to say."""
        if len(self.sources) == 1:
            return self.sources[0].samples(ticket)
        return Samples(ticket[0], list(positions_of(ticket)), [])

    def mark(self) -> Mark:
        """The cursor after the last pull."""
        return self._source.mark()

    def seek(self, mark: Mark) -> None:
        """Puts the cursor to a mark."""
        self._source.seek(mark)

    def settings(self) -> dict[str, Scalar]:
        """The arguments in the node's entry of the state: what shapes the stream. Only `adopt` changes them."""
        return {}

    def values(self, mark: Mark) -> dict[str, Scalar]:
        """The rest of the entry: the node's own part of the cursor at `mark`."""
        return {}

    def rules(self) -> Mapping[str, Rule]:
        """The rules for those of both that are not fixed."""
        return {}

    def entry(self, mark: Mark) -> dict[str, Scalar]:
        """The node's entry in the state at `mark`."""
        # Asked for once: a state is taken after every batch, by when the workers have emptied the caches.
        if self._settings is None:
            self._settings = self.settings()
        return {"type": self.type_name, **self._settings, **self.values(mark)}

    def adopt_entry(self, entry: Mapping[str, Any]) -> None:
        """Takes over what a saved entry replaces, and forgets what was asked before."""
        self.adopt(entry)
        self._settings = None

    @property
    def type_name(self) -> str:
        """What the state calls the type of this node."""
        return type(self).__name__

    def reader(self) -> Stream:
        """The stream through which this node's items are consumed."""
        return self.stream

    def parts(self, mark: Mark) -> tuple[Mark, ...]:
        """The sources' marks within `mark`."""
        return (mark,) if self.sources else ()

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        """The mark of a saved entry, given the sources' marks: the inverse of `values` and `parts`."""
        return parts[0]

    def adopt(self, entry: Mapping[str, Any]) -> None:
        """Takes over what a saved entry replaces, such as the seed."""

    def start(self, epoch: int) -> Mark:
        """The mark at the start of an epoch; ResumableModeRequiredError where a foreign source makes that unknowable."""
        return self._source.start(epoch)

    def at_start(self, mark: Mark) -> bool:
        """Whether `mark` is the start of an epoch."""
        if not self.sources:
            return mark == self.start(mark[0])
        return all(source.at_start(part) for source, part in zip(self.sources, self.parts(mark), strict=True))

    def next_epoch(self, mark: Mark) -> None:
        """Leaves the epoch of `mark` for the start of the next one."""
        self._source.next_epoch(mark)

    def length(self) -> int | None:
        """Items in a full epoch on this rank; None if that is unknown or endless."""
        return self._source.length() if self.sources else None

    def batches(self) -> int | None:
        """Batches of the source's own making in a full epoch on this rank, None if endless.

        Raises:
            ResumableBatchConfigurationError: it makes none.
        """
        return self.sources[0].batches() if len(self.sources) == 1 else self.no_batches()

    def no_batches(self) -> NoReturn:
        """Refuses to be asked for batches of the source's own making."""
        raise ResumableBatchConfigurationError(
            f"a {self.type_name} makes no batches for SeededBatcher(batch_size=None) to keep",
            node=self.name,
            remedy="Give a batch_size, or use a batch sampler with nothing but maps between",
        )

    def global_generators(self) -> frozenset[GlobalGenerator]:
        """The global generators that `run` seeds in the process that calls it."""
        return frozenset().union(*(source.global_generators() for source in self.sources))

    def release(self) -> None:
        """Ends workers and gives samplers free, here and below; idempotent. The node can be used again."""
        for source in self.sources:
            source.release()

    def open(self) -> None:
        """Takes samplers back after `release`; NodeAttachedError if another pipeline has them now."""
        for source in self.sources:
            source.open()

    @cached_property
    def _source(self) -> NodeContract:
        if len(self.sources) != 1:
            raise NotImplementedError(
                f"{type(self).__name__} has {len(self.sources)} sources, so it must implement the whole contract of a node"
            )
        return self.sources[0]


def walk(node: NodeContract) -> Iterator[NodeContract]:
    """The nodes of a pipeline, from the sources up."""
    for source in node.sources:
        yield from walk(source)
    yield node
