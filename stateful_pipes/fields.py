"""The entries of a node's state: a value, and the rule for what a saved one may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["Field", "Rule", "Scalar", "adopted_seed", "allowable", "counter", "fixed", "identity", "ruled", "tally", "text"]

Scalar = int | float | str | bool

_MAX_COUNT = 2**63 - 1


class Field(NamedTuple):
    """One named value in a node's entry, and the rule for what a saved one may be.

    Attributes:
        kind: "fixed" values must be equal; "allowable" counts too, unless the caller names them in `allow=`. "seed",
            "counter" and "text" are taken from the state, the first into the node's settings, the others into its position;
            so is a "tally", which may be missing on either side. An "identity" is fixed, but may be missing likewise
            (empty, here): it says what the data are.
        value: What the pipeline has now.
        below: For a counter, the first integer that is too large.
    """

    kind: Literal["fixed", "allowable", "seed", "counter", "text", "tally", "identity"]
    value: Scalar
    below: int = _MAX_COUNT

    def accepts(self, saved: object) -> bool:
        """Whether a saved value is right in itself."""
        if self.kind == "fixed" or (self.kind == "identity" and self.value):
            return type(saved) is type(self.value) and saved == self.value
        if self.kind in ("text", "identity"):
            return isinstance(saved, str)
        least, below = {"allowable": (1, _MAX_COUNT), "seed": (0, 2**64), "counter": (0, self.below), "tally": (0, _MAX_COUNT)}[
            self.kind
        ]
        return isinstance(saved, int) and not isinstance(saved, bool) and least <= saved < below

    @property
    def may_be_missing(self) -> bool:
        """Whether a state, or a pipeline, without it is right."""
        return self.kind in ("tally", "identity")

    @property
    def remedy(self) -> str:
        """What to do where a saved value is not accepted."""
        if self.kind == "identity":
            return "the data are others than when the state was saved: bring those back, or start anew"
        return "set it as it was when the state was saved" if self.kind == "fixed" else f"it should be {self.expects}"

    @property
    def expects(self) -> str:
        """What is right, in words."""
        return {
            "fixed": repr(self.value),
            "identity": repr(self.value),
            "text": "a string",
            "allowable": "an integer of at least 1",
            "seed": "an integer from 0 to 2**64 - 1",
            "counter": f"an integer from 0 to {self.below - 1}",
            "tally": f"an integer from 0 to {_MAX_COUNT - 1}",
        }[self.kind]


Rule = Callable[[Any], Field]
"""What makes a value a field: `fixed`, `allowable`, `adopted_seed`, `counter`, `tally`, `identity` or `text`."""


def ruled(values: Mapping[str, Scalar], rules: Mapping[str, Rule]) -> dict[str, Field]:
    """Fields with these values, each under the rule that is named for it, and fixed if none is; and those that may be missing."""
    missing: dict[str, Scalar] = {key: 0 for key, rule in rules.items() if rule is tally}
    missing |= {key: "" for key, rule in rules.items() if rule is identity}
    return {key: rules.get(key, fixed)(value) for key, value in {**missing, **values}.items()}


def fixed(value: Scalar) -> Field:
    """An argument that shapes the stream: a state with another value is refused."""
    return Field("fixed", value)


def allowable(value: int) -> Field:
    """A positive integer argument that may differ at a load if the caller names it in `allow=`."""
    return Field("allowable", value)


def adopted_seed(value: int) -> Field:
    """A seed: the state's replaces the pipeline's."""
    return Field("seed", value)


def counter(value: int, below: int | None = None) -> Field:
    """A part of the position: an integer from 0, and below `below` if that is given."""
    return Field("counter", value, _MAX_COUNT if below is None else below)


def tally(value: int) -> Field:
    """A count of what has happened. Where a state has none it begins at 0, where a pipeline has none it is dropped."""
    return Field("tally", value)


def identity(value: str) -> Field:
    """What the data are: a state that has another is refused, one that has none is not."""
    return Field("identity", value)


def text(value: str) -> Field:
    """A part of the position that is a string, such as a foreign node's state."""
    return Field("text", value)
