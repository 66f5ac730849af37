"""What the benchmarks share: turns, ratios, figures with their targets, the table and the JSON.

A question is answered by `Figure`s. Contestants run `in_turn`, so that what else the machine does falls on all alike,
and what is compared with a target is the `ratios` of the pairs of one round, never an absolute time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

PACKAGES = (
    *("stateful_pipes", "torch", "numpy", "torchdata", "grain", "nvidia-dali-cuda120"),
    *("pillow", "scikit-learn"),
)
ROUNDS = 11
TOLERANCE = 0.1


class Figure(NamedTuple):
    """One thing measured some times, with what it is to reach, if anything.

    Attributes:
        what: Its name in the table.
        unit: "ms", "1/s", "x" for a ratio.
        values: All of them, in the order in which they were measured.
        target: What the median has to reach; the weaker quartile may miss it by a tenth.
        at_most: The target is an upper bound.
        slack: How far the median may miss the target, as a part of it.
    """

    what: str
    unit: str
    values: list[float]
    target: float | None = None
    at_most: bool = False
    slack: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def lower(self) -> float:
        """The lower quartile."""
        return self._quartile(0)

    @property
    def upper(self) -> float:
        """The upper quartile."""
        return self._quartile(2)

    @property
    def reached(self) -> bool | None:
        """None where nothing is to be reached."""
        if self.target is None:
            return None
        if self.at_most:
            return self.median <= self.target * (1 + self.slack) and self.upper <= self.target * (1 + TOLERANCE)
        return self.median >= self.target * (1 - self.slack) and self.lower >= self.target * (1 - TOLERANCE)

    def _quartile(self, number: int) -> float:
        if len(self.values) == 1:
            return self.values[0]
        return statistics.quantiles(self.values, n=4, method="inclusive")[number]


class Cost(NamedTuple):
    """Seconds a batch: of the clock, and of the main process's own CPU time."""

    wall_s: float
    cpu_s: float


def arguments(doc: str | None, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """`--smoke` and `--json`, and what `add` adds to the parser; `doc` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few repetitions, to see that it runs: its figures mean nothing")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write all single values there, with versions, cores and commit"
    )
    if add is not None:
        add(parser)
    return parser.parse_args()


def require(condition: bool, message: str) -> None:
    """Ends the benchmark: what is not equal need not be timed."""
    if not condition:
        raise SystemExit(message)


def timed(function: Callable[..., Any], *arguments: Any) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measure(iterator: Iterator[Any], batches: int, warmup: int) -> Cost:
    """What each of `batches` costs a consumer that only takes them, after `warmup` others."""
    for _ in range(warmup):
        next(iterator)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(batches):
        next(iterator)
    return Cost((time.perf_counter() - wall) / batches, (time.process_time() - cpu) / batches)


def in_turn(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Calls each once a round; another one begins each round, so that none always follows the same."""
    names = list(contestants)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contestants[name]())
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs, round by round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def circumstances() -> dict[str, Any]:
    """What figures depend on; of the packages those that are installed."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "cores": len(os.sched_getaffinity(0)), "commit": commit}


def table(figures: Iterable[Figure]) -> str:
    """Plain text, a line for each figure."""
    lines = [("what", "unit", "times", "lower q.", "median", "upper q.", "target", "reached")]
    for figure in figures:
        bound = "at most" if figure.at_most else "at least"
        target = "-" if figure.target is None else f"{bound} {figure.target:g}"
        reached = {None: "-", True: "yes", False: "no"}[figure.reached]
        quartiles = (_number(figure.lower), _number(figure.median), _number(figure.upper))
        lines.append((figure.what, figure.unit, str(len(figure.values)), *quartiles, target, reached))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def report(name: str, figures: Sequence[Figure], options: argparse.Namespace, **more: Any) -> None:
    """Prints the table, and writes the JSON if asked to; the arguments are those of `keep`."""
    print(table(figures))
    keep(name, figures, options, **more)


def keep(name: str, figures: Sequence[Figure], options: argparse.Namespace, **more: Any) -> None:
    """Writes the JSON if asked to; also what there is so far, so that a long run that is cut short leaves that.

    Args:
        name: The benchmark's, by which the plots find their file.
        figures: What was found.
        options: What `arguments` returned.
        more: Further entries of the JSON.
    """
    if options.json is None:
        return
    rows = [
        {**figure._asdict(), "lower": figure.lower, "median": figure.median, "upper": figure.upper, "reached": figure.reached}
        for figure in figures
    ]
    found = {"benchmark": name, **circumstances(), "smoke": options.smoke, **more, "figures": rows}
    options.json.write_text(json.dumps(found, indent=1) + "\n")


def _number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
