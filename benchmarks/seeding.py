"""What does the seeding of each sample cost in a worker, against the three calls that it cannot do without?

    python benchmarks/seeding.py [--json PATH] [--smoke]

Timed is `SeededMapper.run` over tickets of 64 samples with an identity as `map_fn`, in this process and outside the scope
that keeps the caller's generators: as a worker calls it. What `rng=("python", "numpy", "torch")` takes more than `rng=()`
is the seeding: deriving the 64 seeds, and seeding three generators for each. The bare cost is a loop over the same seeds,
ready as integers, of `random.seed(int)`, `np.random.seed(32 bits)` and `torch.default_generator.manual_seed(64 bits)`.
Before that it is checked that both leave the three generators in the same state after each sample.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                 unit  times  lower q.   median  upper q.       target  reached
    a sample with rng=()                   us     51   0.08253  0.08354   0.08489            -        -
    a sample with all three generators     us     51      8.98    8.993     9.007            -        -
    the three calls, bare                  us     51     8.863    8.871     8.879            -        -
    what seeding adds / the three calls     x     51     1.003    1.004     1.006  at most 1.3      yes
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import Figure, arguments, in_turn, ratios, report, require, timed

from stateful_pipes import RandomSampler, SamplerNode, SeededMapper, Ticket, positions_of
from stateful_pipes.rng import derive_each

BLOCK = 64
ALL = ("python", "numpy", "torch")

Seeds = list[tuple[int, int, int]]


def identity(item: int) -> int:
    return item


def draw(_: int) -> tuple[float, float, float]:
    """What tells one state of the generators from another."""
    return random.random(), np.random.random(), torch.rand(()).item()


def mapper(map_fn: Callable[[int], Any], rng: tuple[str, ...]) -> SeededMapper[Any]:
    return SeededMapper(SamplerNode(RandomSampler(10**6, seed=0)), map_fn, seed=1, rng=rng)  # type: ignore[arg-type]


def seeds_of(ticket: Ticket) -> Seeds:
    """For each sample what Python, NumPy and torch are seeded with."""
    return [(seed, seed >> 32, seed) for seed in derive_each(ticket[3], positions_of(ticket))]


def bare(blocks: list[Seeds]) -> None:
    seed_python, seed_numpy, seed_torch = random.seed, np.random.seed, torch.default_generator.manual_seed
    for block in blocks:
        for for_python, for_numpy, for_torch in block:
            seed_python(for_python)
            seed_numpy(for_numpy)
            seed_torch(for_torch)


def loop(blocks: list[Seeds]) -> None:
    """What the calls above stand in, which is none of their cost."""
    for block in blocks:
        for _for_python, _for_numpy, _for_torch in block:
            pass


def check() -> None:
    """Each sample finds the generators as the bare calls leave them."""
    node = mapper(draw, ALL)
    ticket = node.pull(BLOCK)
    drawn = node.run(ticket)
    for seeds, found in zip(seeds_of(ticket), drawn, strict=True):
        bare([[seeds]])
        require(draw(0) == found, "a sample was not under the seed that the bare calls give it")


def main() -> None:
    options = arguments(__doc__)
    rounds, blocks = (3, 5) if options.smoke else (51, 100)
    check()
    seeded, plain = mapper(identity, ALL), mapper(identity, ())
    seeded_tickets = [seeded.pull(BLOCK) for _ in range(blocks)]
    plain_tickets = [plain.pull(BLOCK) for _ in range(blocks)]
    seeds = [seeds_of(ticket) for ticket in seeded_tickets]

    def run(node: SeededMapper[int], tickets: list[Ticket]) -> None:
        for ticket in tickets:
            node.run(ticket)

    seconds = in_turn(
        {
            "seeded": lambda: timed(run, seeded, seeded_tickets),
            "plain": lambda: timed(run, plain, plain_tickets),
            "bare": lambda: timed(bare, seeds) - timed(loop, seeds),
        },
        rounds,
    )
    micros = {name: [1e6 * s / (blocks * BLOCK) for s in found] for name, found in seconds.items()}
    added = [with_seeds - without for with_seeds, without in zip(micros["seeded"], micros["plain"], strict=True)]
    report(
        "seeding",
        [
            Figure("a sample with rng=()", "us", micros["plain"]),
            Figure("a sample with all three generators", "us", micros["seeded"]),
            Figure("the three calls, bare", "us", micros["bare"]),
            Figure("what seeding adds / the three calls", "x", ratios(added, micros["bare"]), target=1.3, at_most=True),
        ],
        options,
    )


if __name__ == "__main__":
    main()
