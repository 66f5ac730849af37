"""A function that makes a fixed number of items of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from stateful_pipes.contract import walk
from stateful_pipes.errors import Difference, ResumableBatchConfigurationError, StateMismatchError
from stateful_pipes.fields import Rule, Scalar, counter
from stateful_pipes.integers import as_integer
from stateful_pipes.nodes.dealing import DealingNode, refuse_workers
from stateful_pipes.nodes.foreign import as_node
from stateful_pipes.nodes.mapper import SeededMapper
from stateful_pipes.rng import GLOBAL_GENERATORS, Rng
from stateful_pipes.skips import LEFT_OUT, noting
from stateful_pipes.ticket import Mark, Samples, Ticket, packed, positions_of

__all__ = ["SeededFlatMapper"]

T_co = TypeVar("T_co", covariant=True)


class _AllAtOnce:
    """Makes a list of what a function returns while the sample's seed is in force, which a generator would outlive."""

    def __init__(self, map_fn: Callable[..., Iterable[Any]], fan_out: int) -> None:
        self.map_fn = map_fn
        self.fan_out = fan_out

    def __call__(self, *arguments: Any) -> Any:
        made = self.map_fn(*arguments)
        if isinstance(made, (Mapping, str, bytes)):
            raise TypeError(f"map_fn must return a sequence of {self.fan_out} items, got a {type(made).__name__}")
        items = list(made)
        if len(items) != self.fan_out:
            raise ValueError(f"map_fn returned {len(items)} items, where fan_out is {self.fan_out}")
        return items

    def __repr__(self) -> str:
        return repr(self.map_fn)

    @property
    def __self__(self) -> object:
        """What `map_fn` is a method of, else `map_fn` itself."""
        return getattr(self.map_fn, "__self__", self.map_fn)


class SeededFlatMapper(SeededMapper[T_co]):
    """Calls `map_fn(item)` as `SeededMapper` does and yields each of the `fan_out` items that it returns.

    The items of the sample at position p have the positions p * fan_out to p * fan_out + fan_out - 1. A batch, or a state,
    may end between the items of a sample, which is then mapped again for each batch that has a part of it. With several ranks it
    may not: the batch size has to be a multiple of `fan_out`.

    Args:
        source: The node below.
        map_fn: Any callable of one item, with `rng="generator"` of (item, numpy.random.Generator); returns an iterable.
        fan_out: How many items that always has, at least 1.
        seed, rng, reseed, max_skipped, fingerprint, name: As of `SeededMapper`. Of a sample that is left out all items are,
            and it counts as one.

    Yields:
        The items that `map_fn` returns.

    State: as `SeededMapper`; fan_out; and offset, the items handed out of the sample under way.

    Raises:
        ValueError (when run): `map_fn` returned another number of items.
        ResumableBatchConfigurationError: several ranks, and a block that ends between the items of a sample.

    >>> from stateful_pipes import SamplerNode, SequentialSampler
    >>> list(SeededFlatMapper(SamplerNode(SequentialSampler(2)), lambda index: (index, -index), 2))
    [0, 0, 1, -1]
    """

    kind = "flat_mapper"
    MAIN_ONLY = (*SeededMapper.MAIN_ONLY, "_under_way")

    def __init__(
        self,
        source: BaseNode[Any],
        map_fn: Callable[..., Iterable[T_co]],
        fan_out: int,
        *,
        seed: int | None = None,
        rng: Rng = GLOBAL_GENERATORS,
        reseed: Callable[[Any, int], object] | None = None,
        max_skipped: int = 0,
        fingerprint: str | Callable[[], str] | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(map_fn):
            raise TypeError(f"map_fn must be callable, got {map_fn!r}")
        self.fan_out = as_integer("fan_out", fan_out, 1)
        if self.fan_out > 1:
            refuse_workers(walk(as_node(source)), "flat mapper")
        super().__init__(
            source,
            _AllAtOnce(map_fn, self.fan_out),
            seed=seed,
            rng=rng,
            reseed=reseed,
            max_skipped=max_skipped,
            fingerprint=fingerprint,
            name=name,
        )
        self._offset = 0
        self._under_way: tuple[Mark, Ticket] | None = None  # the sample of which `_offset` items are handed out
        self._ended = False

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        if self._ended:
            self._ended = False
            raise StopIteration
        if count % self.fan_out and self._is_dealt():
            raise ResumableBatchConfigurationError(
                "with several ranks no block may end between the items of a sample",
                node=self.name,
                expected=f"a multiple of fan_out={self.fan_out}",
                found=count,
                remedy="Choose such a batch size",
            )
        first, under_way = self._offset, self._under_way
        tickets = [] if under_way is None else [under_way[1]]
        whole, part = divmod(first + count, self.fan_out)
        if whole:
            under_way = None
            have = self._pull_more(tickets, whole - len(tickets))
            if part and have == whole and not self._ended:
                before = self._source.mark()
                self._pull_more(tickets, 1)
                under_way = None if self._ended else (before, tickets[-1])
        elif under_way is None:
            before = self._source.mark()
            self._pull_more(tickets, 1)
            under_way = (before, tickets[0])
        self._offset, self._under_way = (0, None) if under_way is None else (part, under_way)
        positions = [self.fan_out * p + i for ticket in tickets for p in positions_of(ticket) for i in range(self.fan_out)]
        positions = positions[first : first + count]
        return (tickets[0][0], packed(positions), tuple(tickets), first, len(positions))

    def _pull_more(self, tickets: list[Ticket], count: int) -> int:
        """Adds a ticket of so many samples; returns how many there are in all. What there is comes before the epoch's end."""
        try:
            if count:
                tickets.append(super().pull(count))
        except StopIteration:
            if not tickets:
                raise
            self._ended = True
        return sum(len(positions_of(ticket)) for ticket in tickets)

    def run(self, ticket: Ticket) -> list[Any]:
        _, _, tickets, first, count = ticket
        out: list[Any] = []
        for below in tickets:
            # What the ticket before has told of a sample is not told again with the rest of its items.
            with noting() if first and not out else nullcontext():
                made = super().run(below)
            for items in made:
                out += [LEFT_OUT] * self.fan_out if items is LEFT_OUT else items
        return out[first : first + count]

    def samples(self, ticket: Ticket) -> Samples:
        below = [super(SeededFlatMapper, self).samples(one) for one in ticket[2]]
        positions = [position for one in below for position in one.positions]
        return Samples(ticket[0], positions, [index for one in below for index in one.indices])

    def mark(self) -> Mark:
        return self._mark(self._offset, self._source.mark() if self._under_way is None else self._under_way[0])

    def _mark(self, offset: int, part: Mark) -> Mark:
        return (part[0], self.fan_out * part[1] + offset, part)

    def _offset_of(self, mark: Mark) -> int:
        return int(mark[1] - self.fan_out * mark[2][1])

    def seek(self, mark: Mark) -> None:
        offset, part = self._offset_of(mark), mark[2]
        self._source.seek(part)
        self._ended = False
        self._offset, self._under_way = offset, (part, self._sample(offset)) if offset else None

    def _sample(self, offset: int) -> Ticket:
        """The next sample, of which so many items are handed out already."""
        try:
            return super().pull(1)
        except StopIteration:
            wrong = Difference(self.name, "offset", offset, 0, "the epoch has no sample there: the state is damaged")
            raise StateMismatchError(differences=(wrong,)) from None

    def parts(self, mark: Mark) -> tuple[Mark, ...]:
        return (mark[2],)

    def settings(self) -> dict[str, Scalar]:
        return {**super().settings(), "fan_out": self.fan_out}

    def values(self, mark: Mark) -> dict[str, Scalar]:
        return {"offset": self._offset_of(mark)}

    def rules(self) -> Mapping[str, Rule]:
        return {**super().rules(), "offset": partial(counter, below=self.fan_out)}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        if entry["offset"] and self._is_dealt():
            wrong = Difference(self.name, "offset", entry["offset"], 0, "save where a sample ends, to go on with several ranks")
            raise StateMismatchError(differences=(wrong,))
        return self._mark(entry["offset"], parts[0])

    def start(self, epoch: int) -> Mark:
        return (epoch, 0, self._source.start(epoch))

    def at_start(self, mark: Mark) -> bool:
        return mark[1] == 0 and self._source.at_start(mark[2])

    def next_epoch(self, mark: Mark) -> None:
        self._source.next_epoch(mark[2])
        self._offset, self._under_way, self._ended = 0, None, False

    def length(self) -> int | None:
        samples = self._source.length()
        return None if samples is None else samples * self.fan_out

    def batches(self) -> int | None:
        self.no_batches()

    def _is_dealt(self) -> bool:
        return any(isinstance(node, DealingNode) and node.world_size > 1 for node in walk(self))
