"""How fast is it against the other loaders?

    python -m pip install -e '.[bench]'
    python benchmarks/peers_throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, the others nothing. A ratio is of our samples a second to the peer's in the same round.

* StatefulDataLoader: torchdata's.
* ParallelMapper: torchdata's nodes with `method="process"`; per sample, with the batch collated in the main process, and
  per batch, read and collated in a worker. Per sample, a twentieth to a third of the batches.
* Grain: `mp_prefetch` over NumPy arrays, its own currency, without threads in its workers, as it recommends for data in memory.
* DALI: a pipeline on the CPU with two threads, on jpeg only; it decodes and resizes its own way, so its batches are of the
  same shape and type but not the same.

Beside Grain the limit of `limit.py`: two processes that read under the same seeds as ours and deliver to nobody. Where that
is not twice as fast as Grain, nothing is that seeds all three generators for every sample.

Before anything is timed, all others give the same bytes in the same order. Peers that are not installed are left out.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                    unit  times  lower q.  median  upper q.        target  reached
    tiny: ours                         samples/s     11    81,666  95,578   115,190             -        -
    tiny: StatefulDataLoader                   x     11     2.604   2.902     3.224  at least 1.8      yes
    tiny: ParallelMapper per sample            x     11     68.41    76.6     82.44   at least 15      yes
    tiny: ParallelMapper per batch             x     11       2.7   3.133     3.258             -        -
    tiny: Grain                                x     11     2.258   2.718     3.023    at least 2      yes
    tiny: the limit / Grain                    x     11     3.175   3.575     3.898             -        -
    u8: ours                           samples/s     11    21,201  21,948    22,116             -        -
    u8: StatefulDataLoader                     x     11     2.213   2.561      2.65  at least 2.4      yes
    u8: ParallelMapper per sample              x     11     20.55   23.42     25.78             -        -
    u8: ParallelMapper per batch               x     11     2.629   2.797     3.098             -        -
    u8: Grain                                  x     11     2.372    2.58     2.659    at least 2      yes
    u8: the limit / Grain                      x     11      2.67   2.814     2.955             -        -
    f32: ours                          samples/s     11     5,893   6,186     6,598             -        -
    f32: StatefulDataLoader                    x     11     2.144   2.222     2.358  at least 2.8       no
    f32: ParallelMapper per sample             x     11     9.398   9.749     10.77             -        -
    f32: ParallelMapper per batch              x     11     3.599   3.813     3.862             -        -
    f32: Grain                                 x     11     3.122   3.164      3.57    at least 2      yes
    f32: the limit / Grain                     x     11     3.552   3.793     3.864             -        -
    tokens: ours                       samples/s     11    48,474  55,041    64,023             -        -
    tokens: StatefulDataLoader                 x     11     4.026   4.295     4.682    at least 3      yes
    tokens: ParallelMapper per sample          x     11     41.44   49.79     50.79   at least 15      yes
    tokens: ParallelMapper per batch           x     11     4.198   4.523     4.927             -        -
    tokens: Grain                              x     11     3.164   3.462      3.76    at least 2      yes
    tokens: the limit / Grain                  x     11     5.412   5.857     6.091             -        -
    jpeg: ours                         samples/s     11     437.7   467.8     496.4             -        -
    jpeg: StatefulDataLoader                   x     11    0.9816   1.017     1.069    at least 1      yes
    jpeg: ParallelMapper per sample            x     11     1.331   1.405     1.544             -        -
    jpeg: ParallelMapper per batch             x     11    0.9919   1.032     1.046             -        -
    jpeg: Grain                                x     11    0.9862   1.008     1.063  at least 1.2       no
    jpeg: DALI                                 x     11    0.7857  0.8379    0.8666             -        -
    jpeg: the limit / Grain                    x     11     1.016   1.063     1.088             -        -
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from harness import ROUNDS, Figure, arguments, in_turn, keep, ratios, report, require
from limit import limit
from peers import (
    Contestant,
    alike,
    cost,
    dali,
    grain,
    installed,
    mapper_per_batch,
    mapper_per_sample,
    ours,
    require_equal,
    stateful_loader,
    torch_loader,
)
from throughput import SLACK, THROUGHPUT
from workloads import Workload, add_workloads, workload

T = TypeVar("T")

PER_SAMPLE = {"tiny": 15.0, "tokens": 15.0}
GRAIN = {"tiny": 2.0, "u8": 2.0, "f32": 2.0, "tokens": 2.0, "jpeg": 1.2}
LIMIT = "the limit"
SHARE = {"ParallelMapper per sample": {"tiny": 0.05, "u8": 0.1, "f32": 0.35, "tokens": 0.05, "jpeg": 0.35}}
"""Of a workload's batches, for whom all would take minutes: 20 at least."""


def compare(workload: Workload, rounds: int) -> list[Figure]:
    """The figures of one workload."""
    name = workload.name
    targets = {"StatefulDataLoader": THROUGHPUT[name], "ParallelMapper per sample": PER_SAMPLE.get(name), "Grain": GRAIN[name]}
    contestants: dict[str, Contestant] = {
        "ours": ours,
        "StatefulDataLoader": stateful_loader,
        "ParallelMapper per sample": mapper_per_sample,
        "ParallelMapper per batch": mapper_per_batch,
    }
    if installed("grain"):
        contestants["Grain"] = grain
    require_equal(contestants, workload)
    runs = {
        peer: partial(cost, contestant, workload, SHARE.get(peer, {}).get(name, 1)) for peer, contestant in contestants.items()
    }
    if name == "jpeg" and installed("nvidia.dali"):
        require(apart(dali_is_alike, workload), "jpeg: DALI gives another kind of batches than DataLoader")
        runs["DALI"] = partial(apart, cost, dali, workload)
    runs[LIMIT] = partial(limit, workload)
    costs = in_turn(runs, rounds)
    wall = {peer: [one.wall_s for one in found] for peer, found in costs.items()}
    figures = [Figure(f"{name}: ours", "samples/s", [workload.batch_size / one for one in wall["ours"]])]
    for peer in [one for one in wall if one not in ("ours", LIMIT)]:
        slack = SLACK.get(name, 0) if peer == "StatefulDataLoader" else 0
        figures.append(Figure(f"{name}: {peer}", "x", ratios(wall[peer], wall["ours"]), targets.get(peer), slack=slack))
    if "Grain" in wall:
        figures.append(Figure(f"{name}: {LIMIT} / Grain", "x", ratios(wall["Grain"], wall[LIMIT])))
    return figures


def dali_is_alike(workload: Workload) -> bool:
    """Its batches are of the same shape and type, if not the same."""
    with closing(dali(workload)) as batches, closing(torch_loader(workload)) as others:
        return alike(next(batches), next(others))


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Calls it in a process of its own, which DALI's import may change."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def main() -> None:
    options = arguments(__doc__, add_workloads)
    figures = []
    for name in options.workloads[:1] if options.smoke else options.workloads:
        figures += compare(workload(name, options.smoke), 1 if options.smoke else ROUNDS)
        keep("peers_throughput", figures, options)
    report("peers_throughput", figures, options)


if __name__ == "__main__":
    main()
