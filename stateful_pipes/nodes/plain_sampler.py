"""A source without resume: any iterable of indices, started anew for each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stateful_pipes.errors import ResumableBatchConfigurationError, ResumableModeRequiredError
from stateful_pipes.fields import Rule, Scalar, counter
from stateful_pipes.node import Node
from stateful_pipes.nodes.onwards import Pass
from stateful_pipes.nodes.user_error import raise_noted
from stateful_pipes.ticket import Mark, Samples, Ticket, positions_of

__all__ = ["PlainSamplerNode"]


class PlainSamplerNode(Node[Any]):
    """Yields what a sampler of any kind yields; with `makes_batches`, what each of its batches holds.

    `iter(sampler)` is called when an epoch's first item is wanted, never ahead of that. Epochs count the passes that were
    begun. There is no way back to where a pass stood.

    Raises:
        ResumableBatchConfigurationError (when pulled): a batch of the sampler's is empty, and so has no position.
    """

    kind = "sampler"
    MAIN_ONLY = (*Node.MAIN_ONLY, "sampler", "_pass")

    def __init__(self, sampler: Iterable[Any], makes_batches: bool) -> None:
        self.sampler = sampler
        self._makes_batches = makes_batches
        super().__init__()
        self._epoch, self._position = 0, 0
        self._pass = Pass(sampler)

    @property
    def runs_on(self) -> bool:
        return False

    def pull(self, count: int | None) -> Ticket:
        try:
            found = self._pass.read(1 if count is None else count)
            items = found if count is not None or not found else list(found[0])
        except Exception as error:
            raise_noted(error, self.sampler, f"in node {self.name!r} at epoch {self._epoch}, position {self._position}")
        if not found:
            self.next_epoch(self.mark())
            raise StopIteration
        if not items:
            raise ResumableBatchConfigurationError(f"the {type(self.sampler).__name__} gave an empty batch", node=self.name)
        start = self._position
        self._position += len(items)
        return (self._epoch, (start, self._position, 1), items)

    def run(self, ticket: Ticket) -> list[Any]:
        return list(ticket[2])

    def samples(self, ticket: Ticket) -> Samples:
        return Samples(ticket[0], list(positions_of(ticket)), ticket[2])

    def mark(self) -> Mark:
        return (self._epoch, self._position)

    def seek(self, mark: Mark) -> None:
        if mark[1] != 0 and mark != self.mark():
            raise ResumableModeRequiredError(
                f"a {type(self.sampler).__name__} cannot be led back to where it stood",
                remedy="Call iter() again, which starts anew, or use resumable=True",
            )
        if mark[1] == 0:
            self._pass.begin()
        self._epoch, self._position = mark

    def values(self, mark: Mark) -> dict[str, Scalar]:
        return {"epoch": mark[0], "position": mark[1]}

    def rules(self) -> Mapping[str, Rule]:
        return {"epoch": counter, "position": counter}

    def locate(self, entry: Mapping[str, Any], parts: tuple[Mark, ...]) -> Mark:
        return (entry["epoch"], entry["position"])

    def start(self, epoch: int) -> Mark:
        return (epoch, 0)

    def next_epoch(self, mark: Mark) -> None:
        self._pass.begin()
        self._epoch, self._position = mark[0] + 1, 0

    def set_sampler_epoch(self, epoch: int) -> None:
        """Hands an epoch on to the sampler, or to the one in a batch sampler, where that takes any."""
        takers = [one for one in (self.sampler, getattr(self.sampler, "sampler", None)) if hasattr(one, "set_epoch")]
        if takers:
            takers[0].set_epoch(epoch)  # type: ignore[union-attr]  # it has that

    def length(self) -> int | None:
        return None if self._makes_batches else self._length()

    def batches(self) -> int | None:
        return self._length() if self._makes_batches else self.no_batches()

    def _length(self) -> int | None:
        try:
            return len(self.sampler)  # type: ignore[arg-type]  # not all have it, and endless ones may refuse
        except (TypeError, NotImplementedError):
            return None
