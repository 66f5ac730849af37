"""How long does a resume take, from `load_state_dict` to the first batch, and does it depend on the position?

    python benchmarks/resume.py [--json PATH] [--smoke]

Each loader goes to its positions in turn, again and again in one run, so that whatever else the machine does falls on
all of them alike. Before anything is timed, the batch at each position is compared with the one that should be there:
for ours what the order says when asked directly, for torchdata's what its loader gave when it was not stopped. Then
the cost of `state_dict()` while two workers run, and the size of the state as JSON.

Latest, on 2 cores with other work beside (Python 3.11.7, NumPy 2.4.6, torch 2.13.0 CPU, torchdata 0.11.0):

    what                                position  times  median ms   p10 ms   p90 ms   ratio
    stateful_pipes                             0    200      1.359    1.214    2.084    1.00
    stateful_pipes                     1,000,000    200      1.370    1.213    2.092    1.01
    stateful_pipes                 1,000,000,000    200      1.407    1.209    2.072    1.04
    stateful_pipes             1,000,000,000,000    200      1.378    1.210    2.079    1.01
    torchdata                                  0     10   1086.575  739.863 1277.152    1.00
    torchdata                              9,984     10   1121.229  806.092 1197.943    1.03
    torchdata                             99,968     10   1159.102  763.698 1217.195    1.07
    torchdata                          1,000,000     10   1514.709  974.527 1640.182    1.39
    state_dict(), 2 workers    1,000,000,000,000    200      0.053    0.028    0.098       -
    state as JSON: 494 bytes

Ours does not depend on the position. torchdata's makes the whole permutation of its dataset at each start, here of 2 million
samples, and walks to the position: its cost grows with both, which is why it is not asked for more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torchdata.stateful_dataloader
from torch.utils.data import Dataset

import stateful_pipes
from stateful_pipes import RandomSampler, StatefulDataLoader

BATCH = 64
SEED = 0
LENGTH = 2 * 10**12
POSITIONS = (0, 10**6, 10**9, 10**12)
# torchdata's sampler makes the whole permutation at each start, so its dataset is a millionth of ours.
PEER_POSITIONS = (0, 10**4, 10**5, 10**6)

Loader = StatefulDataLoader[torch.Tensor]


class Indices(Dataset[int]):
    """Sample i is i: what is left to time is the loader."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Row(NamedTuple):
    """Seconds of some repetitions of one thing."""

    what: str
    position: int
    seconds: list[float]

    def quantiles(self) -> tuple[float, float, float]:
        """The tenth, the median and the ninetieth percentile, in ms."""
        tenths = statistics.quantiles(self.seconds, n=10, method="inclusive")
        return 1e3 * tenths[0], 1e3 * statistics.median(self.seconds), 1e3 * tenths[-1]


def ours() -> tuple[Any, dict[int, Any], dict[int, torch.Tensor]]:
    """The loader, a state for each position, and the batch that belongs there."""
    loader: Loader = StatefulDataLoader(Indices(LENGTH), batch_size=BATCH, shuffle=True, seed=SEED)
    order = RandomSampler(LENGTH, seed=SEED)
    states, expected = {}, {}
    for position in POSITIONS:
        state = loader.state_dict()
        state["nodes"]["sampler"]["consumed"] = position  # nobody can wait until the loader is there
        states[position] = state
        expected[position] = torch.from_numpy(order.indices(0, range(position, position + BATCH)))
    return loader, states, expected


def peer(positions: Sequence[int]) -> tuple[Any, dict[int, Any], dict[int, torch.Tensor]]:
    """The same for torchdata's loader, at the last whole batch up to each position."""
    generator = torch.Generator().manual_seed(SEED)
    dataset = Indices(2 * positions[-1])
    make = torchdata.stateful_dataloader.StatefulDataLoader
    loader = make(dataset, batch_size=BATCH, shuffle=True, generator=generator)
    wanted = [position // BATCH for position in positions]
    states, expected = {}, {}
    batches = iter(loader)
    for number in range(wanted[-1] + 1):
        if number in wanted:
            states[number * BATCH] = loader.state_dict()
        batch = next(batches)
        if number in wanted:
            expected[number * BATCH] = batch
    return make(dataset, batch_size=BATCH, shuffle=True, generator=torch.Generator()), states, expected


def load(loader: Any, state: Any) -> torch.Tensor:
    """What is timed."""
    loader.load_state_dict(state)
    batch: torch.Tensor = next(iter(loader))
    return batch


def time_loads(what: str, made: tuple[Any, Mapping[int, Any], Mapping[int, torch.Tensor]], repetitions: int) -> list[Row]:
    """Checks every position, then times them in turn."""
    loader, states, expected = made
    for position, state in states.items():
        if not torch.equal(load(loader, state), expected[position]):
            raise SystemExit(f"{what} gives another batch at position {position:,} than belongs there")
    rows = [Row(what, position, []) for position in states]
    for _ in range(repetitions):
        for row in rows:
            row.seconds.append(timed(load, loader, states[row.position]))
    return rows


def time_states(repetitions: int) -> tuple[Row, int]:
    """`state_dict()` after each of some batches while two workers run, and the bytes of the largest state."""
    size = 0
    loader: Loader
    with StatefulDataLoader(Indices(LENGTH), batch_size=BATCH, shuffle=True, seed=SEED, num_workers=2) as loader:
        state = loader.state_dict()
        state["nodes"]["sampler"]["consumed"] = POSITIONS[-1]
        loader.load_state_dict(state)
        row = Row("state_dict(), 2 workers", POSITIONS[-1], [])
        for _, _batch in zip(range(repetitions), loader, strict=False):
            row.seconds.append(timed(loader.state_dict))
            size = max(size, len(json.dumps(loader.state_dict())))
    return row, size


def timed(function: Callable[..., Any], *arguments: Any) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def circumstances() -> dict[str, Any]:
    """What the numbers depend on."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torchdata": version("torchdata"),
        "stateful_pipes": stateful_pipes.__version__,
    }
    return {"versions": versions, "cores": len(os.sched_getaffinity(0)), "commit": commit}


def table(rows: Iterable[Row]) -> str:
    """Plain text; the ratio is to the same loader's position 0."""
    lines = [f"{'what':<26}{'position':>18}{'times':>7}{'median ms':>11}{'p10 ms':>9}{'p90 ms':>9}{'ratio':>8}"]
    first: dict[str, float] = {}
    for row in rows:
        low, median, high = row.quantiles()
        if row.position == 0:
            first[row.what] = median
        ratio = f"{median / first[row.what]:.2f}" if row.what in first else "-"
        position, times = f"{row.position:,}", len(row.seconds)
        lines.append(f"{row.what:<26}{position:>18}{times:>7}{median:>11.3f}{low:>9.3f}{high:>9.3f}{ratio:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few repetitions and a small peer, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all times there, with versions, cores and commit")
    options = parser.parse_args()
    repetitions, peer_repetitions = (5, 2) if options.smoke else (200, 10)
    rows = time_loads("stateful_pipes", ours(), repetitions)
    rows += time_loads("torchdata", peer(PEER_POSITIONS[:-1] if options.smoke else PEER_POSITIONS), peer_repetitions)
    states, size = time_states(repetitions)
    rows.append(states)
    print(table(rows))
    print(f"state as JSON: {size} bytes")
    if options.json is not None:
        found = {**circumstances(), "smoke": options.smoke, "state_bytes": size, "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
