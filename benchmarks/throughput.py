"""How fast is it, and how much of the main process's CPU time does it take, against torch's DataLoader?

    python benchmarks/throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, torch's DataLoader nothing; on tiny also ours with `rng=()`, which seeds nothing either. Beside it torch's
DataLoader with the allocator's settings in its workers, which ours makes as well: what they alone give. A ratio is to
the plain DataLoader in the same round: of samples a second, and of its CPU time a batch over ours. Before anything is
timed, all give the same bytes in the same order.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                                                  unit  times  lower q.  median  upper q.        target  reached
    tiny: DataLoader                                 samples/s     11    31,174  33,174    33,683             -        -
    tiny: DataLoader                              CPU us/batch     11     1,047   1,086     1,122             -        -
    tiny: throughput, DataLoader with settings               x     11    0.9263   1.017     1.055             -        -
    tiny: throughput, ours                                   x     11     2.665    2.81     2.949  at least 1.8      yes
    tiny: throughput, ours, rng=()                           x     11     5.832   6.533     7.205  at least 3.5      yes
    tiny: main CPU, ours                                     x     11     5.424   5.709     5.916    at least 6       no
    u8: DataLoader                                   samples/s     11     5,241   6,021     6,095             -        -
    u8: DataLoader                                CPU us/batch     11     3,282   3,365     3,855             -        -
    u8: throughput, DataLoader with settings                 x     11    0.9707   1.033     1.096             -        -
    u8: throughput, ours                                     x     11     2.938   3.225     3.387  at least 2.4      yes
    u8: main CPU, ours                                       x     11     7.678     8.1     10.71    at least 8      yes
    f32: DataLoader                                  samples/s     11     1,656   1,807     1,926             -        -
    f32: DataLoader                               CPU us/batch     11     8,607   9,034     9,417             -        -
    f32: throughput, DataLoader with settings                x     11     1.021   1.081      1.11             -        -
    f32: throughput, ours                                    x     11     2.823   2.925     2.957  at least 2.8      yes
    f32: main CPU, ours                                      x     11     16.85   18.12      18.7   at least 12      yes
    tokens: DataLoader                               samples/s     11     8,584   8,996     9,301             -        -
    tokens: DataLoader                            CPU us/batch     11     1,588   1,647     1,723             -        -
    tokens: throughput, DataLoader with settings             x     11    0.9821   1.018     1.097             -        -
    tokens: throughput, ours                                 x     11     4.773   5.493     5.621    at least 3      yes
    tokens: main CPU, ours                                   x     11     7.236   7.993     8.805    at least 6      yes
    jpeg: DataLoader                                 samples/s     11     314.8   330.1     348.9             -        -
    jpeg: DataLoader                              CPU us/batch     11     2,491   2,632     2,886             -        -
    jpeg: throughput, DataLoader with settings               x     11    0.9036  0.9574     1.012             -        -
    jpeg: throughput, ours                                   x     11    0.9992   1.049      1.14    at least 1      yes
    jpeg: main CPU, ours                                     x     11     4.426   4.689     5.165             -        -
"""

from __future__ import annotations

from functools import partial

from harness import ROUNDS, Figure, arguments, in_turn, keep, ratios, report
from peers import Contestant, cost, ours, ours_unseeded, require_equal, torch_loader, torch_loader_keeping
from workloads import Workload, add_workloads, workload

THROUGHPUT = {"tiny": 1.8, "u8": 2.4, "f32": 2.8, "tokens": 3.0, "jpeg": 1.0}
CPU = {"tiny": 6.0, "u8": 8.0, "f32": 12.0, "tokens": 6.0}
UNSEEDED = {"tiny": 3.5}
SLACK = {"jpeg": 0.03}
"""Decoding takes nearly all of the time, so that a ratio of 1 is all there is to reach."""


def compare(workload: Workload, rounds: int) -> list[Figure]:
    """The figures of one workload."""
    contestants: dict[str, Contestant] = {"ours": ours, "torch": torch_loader, "keeping": torch_loader_keeping}
    if workload.name in UNSEEDED:
        contestants["unseeded"] = ours_unseeded
    require_equal(contestants, workload)
    costs = in_turn({name: partial(cost, contestant, workload) for name, contestant in contestants.items()}, rounds)
    wall = {name: [one.wall_s for one in found] for name, found in costs.items()}
    cpu = {name: [one.cpu_s for one in found] for name, found in costs.items()}
    name = workload.name
    figures = [
        Figure(f"{name}: DataLoader", "samples/s", [workload.batch_size / one for one in wall["torch"]]),
        Figure(f"{name}: DataLoader", "CPU us/batch", [1e6 * one for one in cpu["torch"]]),
        Figure(f"{name}: throughput, DataLoader with settings", "x", ratios(wall["torch"], wall["keeping"])),
        Figure(
            f"{name}: throughput, ours",
            "x",
            ratios(wall["torch"], wall["ours"]),
            THROUGHPUT[name],
            slack=SLACK.get(name, 0),
        ),
    ]
    if name in UNSEEDED:
        unseeded = ratios(wall["torch"], wall["unseeded"])
        figures.append(Figure(f"{name}: throughput, ours, rng=()", "x", unseeded, UNSEEDED[name]))
    return [*figures, Figure(f"{name}: main CPU, ours", "x", ratios(cpu["torch"], cpu["ours"]), CPU.get(name))]


def main() -> None:
    options = arguments(__doc__, add_workloads)
    figures = []
    for name in options.workloads:
        figures += compare(workload(name, options.smoke), 1 if options.smoke else ROUNDS)
        keep("throughput", figures, options)
    report("throughput", figures, options)


if __name__ == "__main__":
    main()
