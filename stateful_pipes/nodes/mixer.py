"""A mixture of pipelines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torchdata.nodes import BaseNode
from torchdata.nodes.samplers.stop_criteria import StopCriteria

from stateful_pipes.contract import walk
from stateful_pipes.errors import Difference, ResumableBatchConfigurationError, ResumableModeRequiredError, StateMismatchError
from stateful_pipes.fields import Rule, Scalar, adopted_seed, allowable, counter, text
from stateful_pipes.nodes.dealing import DealingNode, refuse_workers, take_over
from stateful_pipes.nodes.foreign import ForeignNode, as_node, walk_all
from stateful_pipes.nodes.schedule import Schedule
from stateful_pipes.rng import MIX, as_seed, derive, draw_seed
from stateful_pipes.ticket import Mark, Samples, Ticket, positions_of

__all__ = ["Mixer"]

T_co = TypeVar("T_co", covariant=True)
_CYCLES = (StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED, StopCriteria.CYCLE_FOREVER)
_RULES = (*_CYCLES, StopCriteria.ALL_DATASETS_EXHAUSTED, StopCriteria.FIRST_DATASET_EXHAUSTED)
_Piece = tuple[int, Ticket]
"""The number of a source, and a ticket there."""


class Mixer(DealingNode[T_co]):
    """Yields the items of several pipelines, each drawn from one that is chosen by weight.

    The choice is a hash of (seed, epoch, position) and depends on nothing else; with ALL_DATASETS_EXHAUSTED also on how many
    sources have come to their end. Sources with the same seeds draw alike, so give each seeds of its own. Nodes of different
    sources may have one name, and are then numbered.

    Of several ranks, r of W takes the positions p with p mod W == r of the one mixture; the SamplerNodes below then yield
    everything on each rank. Where the last round of ranks is padded, it is with the epoch's first items once more, which draw
    as they did. The sources' own epochs follow the mixture's; where sources are cycled, they count from epoch * 2**32.

    Args:
        sources: Pipelines, in a sequence or by name.
        weights: A number for each, in a sequence or by the same names, whatever their sum. Or a schedule: a mapping of
            positions in an epoch, from 0 on, to the weights from there on. 0 leaves a source out for so long.
        seed: From 0 to 2**64 - 1; drawn once from torch's CPU generator if left out. The state's replaces it at a load.
        stop_criteria: When an epoch of the mixture ends, one of torchdata's `StopCriteria`, which it means as there.
        name: The node's name in the state.

    Yields:
        The sources' items.

    State: sources (their names), weights, stop_criteria, seed, world_size, uneven, epoch, consumed (items over all ranks),
    exhausted (for each source a digit: whether it came to its end in this epoch). Cost in the main process: a pull for each
    source and block, with several ranks up to two for each item; for each item of all ranks where a source ends or is foreign.

    Raises:
        ResumableBatchConfigurationError: the sources' SamplerNodes disagree about the ranks; a source that is to be cycled
            has no item; or there are fewer items than ranks, and the rest is to be dropped.
        ValueError: a ProcessPrefetcher with workers stands below, where its workers would make what is then left.

    >>> from stateful_pipes import SamplerNode, SequentialSampler
    >>> sources = [SamplerNode(SequentialSampler(length)) for length in (2, 3)]
    >>> sorted(Mixer(sources, [0.9, 0.1], stop_criteria="ALL_DATASETS_EXHAUSTED"))
    [0, 0, 1, 1, 2]
    """

    kind = "mixer"
    MAIN_ONLY = (*DealingNode.MAIN_ONLY, "_schedule")

    def __init__(
        self,
        sources: Sequence[BaseNode[T_co]] | Mapping[str, BaseNode[T_co]],
        weights: Any,
        *,
        seed: int | None = None,
        stop_criteria: str = StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED,
        name: str | None = None,
    ) -> None:
        if stop_criteria not in _RULES:
            raise ValueError(f"stop_criteria must be one of {', '.join(map(repr, _RULES))}, got {stop_criteria!r}")
        self.stop_criteria = stop_criteria
        named = dict(sources) if isinstance(sources, Mapping) else dict(enumerate(sources))
        if isinstance(sources, Mapping) and not all(isinstance(key, str) for key in named):
            raise TypeError(f"the names of sources must be strings, got {list(named)}")
        if not named or len({id(source) for source in named.values()}) < len(named):
            raise ValueError(f"sources must be one or more, none of them twice, got {len(named)}")
        self.names = tuple(named)
        """Of the sources; numbers, if they have none."""
        self._schedule = Schedule(self.names, weights)
        if "ALL_DATASETS" in stop_criteria and self._schedule.has_zeros(at_last=stop_criteria in _CYCLES):
            raise ValueError(f"a source of weight 0 never comes to its end, which {stop_criteria} waits for")
        nodes = [as_node(source) for source in named.values()]
        below = [one for node in nodes for one in walk(node)]
        refuse_workers(below, "mixture")
        if any(node.ends_in_run for node in nodes):
            raise ValueError("a mixture has to know where its sources end, which an ExternalSource tells only when it is run")
        self._is_led_back = not any(isinstance(one, ForeignNode) for one in below)
        self._purpose = MIX + (sum(isinstance(one, Mixer) for node in nodes for one in walk_all(node)) << 8)
        given = None if seed is None else as_seed(seed)
        share = take_over(nodes)
        super().__init__(*nodes, name=name)
        self.deal(*share)
        self.seed = draw_seed() if given is None else given
        self._epoch, self._consumed, self._exhausted = 0, 0, "0" * len(nodes)

    def pull(self, count: int | None) -> Ticket:
        if count is None:
            self.no_batches()
        epoch, first = self._epoch, self._consumed + self.rank
        order, pieces = self._block(count) if self._is_led_back and count > 1 else ([], [])
        while len(order) < count and (drawn := self._round()):
            order.append(drawn[self.rank][0])
            pieces.append(drawn[self.rank])
        if not order:
            self.next_epoch(self.mark())
            raise StopIteration
        positions = (first, first + len(order) * self.world_size, self.world_size)
        return (epoch, positions, bytes(order) if len(self.sources) <= 256 else tuple(order), tuple(pieces))

    def _block(self, count: int) -> tuple[list[int], list[_Piece]]:
        """So many items, of each source at once; none where a source comes to its end meanwhile."""
        if self._is_over():
            return [], []
        before = self.mark()
        order = self._choices(self._consumed, count * self.world_size)
        is_own: dict[int, list[bool]] = {}  # for each source, which of its items this rank gets
        for offset, number in enumerate(order):
            is_own.setdefault(number, []).append(offset % self.world_size == self.rank)
        pieces: list[_Piece] = []
        for number, flags in is_own.items():
            for own, run in itertools.groupby(flags):
                wanted = len(list(run))
                with suppress(StopIteration):
                    ticket = self.sources[number].pull(wanted)
                    wanted -= len(positions_of(ticket))
                if wanted:
                    self.seek(before)
                    return [], []
                if own:
                    pieces.append((number, ticket))
        self._consumed += len(order)
        return order[self.rank :: self.world_size], pieces

    def _round(self) -> list[_Piece]:
        """The next item of each rank; none if there are too few for that, and these are to be dropped."""
        drawn: list[_Piece] = []
        while len(drawn) < self.world_size and (piece := self._draw(self._consumed + len(drawn))):
            drawn.append(piece)
        if 0 < len(drawn) < self.world_size:
            if self.uneven == "pad":
                self._pad(drawn)
            elif self._consumed == 0:
                self.leaves_none(f"{len(drawn)} items")
            else:
                return []
        self._consumed += len(drawn)
        return drawn

    def _draw(self, position: int) -> _Piece | None:
        """The item at a position; None where the epoch ends before it."""
        while not self._is_over():
            (number,) = self._choices(position, 1)
            source = self.sources[number]
            try:
                return number, source.pull(1)
            except StopIteration:
                self._exhausted = self._exhausted[:number] + "1" + self._exhausted[number + 1 :]
            if self.stop_criteria in _CYCLES and not self._is_over():
                with suppress(StopIteration):
                    return number, source.pull(1)
                raise ResumableBatchConfigurationError("a source has no item", node=source.name)
        return None

    def _choices(self, first: int, count: int) -> list[int]:
        left = self._exhausted if self.stop_criteria == StopCriteria.ALL_DATASETS_EXHAUSTED else "0" * len(self.sources)
        key = derive(self.seed, self._purpose, self._epoch, left.count("1"))
        return self._schedule.choices(key, first, count, left)

    def _is_over(self) -> bool:
        if self.stop_criteria == StopCriteria.CYCLE_FOREVER:
            return False
        ends_with_one = self.stop_criteria == StopCriteria.FIRST_DATASET_EXHAUSTED
        return "1" in self._exhausted if ends_with_one else "0" not in self._exhausted

    def _pad(self, drawn: list[_Piece]) -> None:
        """Fills the last round up from the epoch's start."""
        consumed = self._consumed
        while len(drawn) < self.world_size:
            self.seek(self.start(self._epoch))
            while len(drawn) < self.world_size and (piece := self._draw(self._consumed)):
                drawn.append(piece)
                self._consumed += 1
        self._consumed, self._exhausted = consumed, "1" * len(self.sources)  # over, whatever the sources have left

    def run(self, ticket: Ticket) -> list[Any]:
        return _in_turn(ticket[2], [(number, self.sources[number].run(below)) for number, below in ticket[3]])

    def samples(self, ticket: Ticket) -> Samples:
        """Its indices are pairs of a source's name and what is read of it."""
        parts, is_one_each = [], True
        for number, below in ticket[3]:
            indices = self.sources[number].samples(below).indices
            parts.append((number, [(self.names[number], index) for index in indices]))
            is_one_each &= len(indices) == len(positions_of(below))  # else an item is a batch
        found = _in_turn(ticket[2], parts) if is_one_each else [index for _, part in parts for index in part]
        return Samples(ticket[0], list(positions_of(ticket)), found)

    def mark(self) -> Mark:
        return (self._epoch, self._consumed, self._exhausted, tuple(source.mark() for source in self.sources))

    def seek(self, mark: Mark) -> None:
        for source, part in zip(self.sources, mark[3], strict=True):
            source.seek(part)
        self._epoch, self._consumed, self._exhausted, _ = mark

    def parts(self, mark: Mark) -> tuple[Mark, ...]:
        return tuple(mark[3])

    def settings(self) -> dict[str, Scalar]:
        return {
            "sources": json.dumps(self.names),
            "weights": str(self._schedule),
            "stop_criteria": self.stop_criteria,
            "seed": self.seed,
            "world_size": self.world_size,
            "uneven": self.uneven,
        }

    def values(self, mark: Mark) -> dict[str, Scalar]:
        return {"epoch": mark[0], "consumed": mark[1], "exhausted": mark[2]}

    def rules(self) -> Mapping[str, Rule]:
        return {"seed": adopted_seed, "world_size": allowable, "epoch": counter, "consumed": counter, "exhausted": text}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        exhausted = entry["exhausted"]
        if len(exhausted) != len(self.sources) or not set(exhausted) <= {"0", "1"}:
            wrong = f"a digit for each of {len(self.sources)} sources"
            raise StateMismatchError(differences=(Difference(self.name, "exhausted", exhausted, wrong, "the state is damaged"),))
        return (entry["epoch"], entry["consumed"], exhausted, parts)

    def adopt(self, entry: Mapping[str, Any]) -> None:
        self.seed = entry["seed"]

    def start(self, epoch: int) -> Mark:
        return (epoch, 0, "0" * len(self.sources), tuple(source.start(self._below(epoch)) for source in self.sources))

    def _below(self, epoch: int) -> int:
        """The sources' epoch at the start of the mixture's, with room for those that follow where they are cycled."""
        if self.stop_criteria not in _CYCLES:
            return epoch
        # Epochs beyond are those of a mixture that another one cycles.
        return epoch << 32 if epoch < 2**30 else 2**62 + (derive(0, MIX, epoch) >> 3)

    def at_start(self, mark: Mark) -> bool:
        return bool(mark[1] == 0 and all(source.at_start(part) for source, part in zip(self.sources, mark[3], strict=True)))

    def next_epoch(self, mark: Mark) -> None:
        epoch = mark[0] + 1
        below = self._below(epoch)
        for source, part in zip(self.sources, mark[3], strict=True):
            try:
                source.seek(source.start(below))
            except ResumableModeRequiredError:  # only the source itself knows where its next epoch starts
                if not source.at_start(part):
                    source.next_epoch(part)
                elif source.mark() != part:  # pulled ahead
                    source.seek(part)
        self._epoch, self._consumed, self._exhausted = epoch, 0, "0" * len(self.sources)

    def length(self) -> int | None:
        """Known only where all sources are read to their ends, once."""
        found = [source.length() for source in self.sources]
        if self.stop_criteria != StopCriteria.ALL_DATASETS_EXHAUSTED or None in found:
            return None
        items = sum(one or 0 for one in found)
        return -(-items // self.world_size) if self.uneven == "pad" else items // self.world_size

    def batches(self) -> int | None:
        self.no_batches()


def _in_turn(order: Sequence[int], parts: list[tuple[int, list[Any]]]) -> list[Any]:
    """What comes of each source, in the order in which the sources were chosen."""
    found: dict[int, list[Any]] = {}
    for number, some in parts:
        found.setdefault(number, []).extend(some)
    following = {number: iter(some) for number, some in found.items()}
    return [next(following[number]) for number in order]
