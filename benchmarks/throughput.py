"""How fast is it, and how much of the main process's CPU time does it take, against torch's DataLoader?

    python benchmarks/throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, torch's DataLoader nothing; on tiny also ours with `rng=()`, which seeds nothing either. Beside it torch's
DataLoader with the allocator's settings in its workers, which ours makes as well: what they alone give. A ratio is to
the plain DataLoader in the same round: of samples a second, and of its CPU time a batch over ours. Before anything is
timed, all give the same bytes in the same order.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                                                  unit  times  lower q.  median  upper q.        target  reached
    tiny: DataLoader                                 samples/s     11    29,131  31,060    33,515             -        -
    tiny: DataLoader                              CPU us/batch     11     1,060   1,100     1,161             -        -
    tiny: throughput, DataLoader with settings               x     11    0.9321  0.9613     1.066             -        -
    tiny: throughput, ours                                   x     11      2.63   2.753     2.871  at least 1.8      yes
    tiny: throughput, ours, rng=()                           x     11     5.699   6.352      7.27  at least 3.5      yes
    tiny: main CPU, ours                                     x     11     4.816   5.298     5.449    at least 6       no
    u8: DataLoader                                   samples/s     11     5,432   5,720     5,948             -        -
    u8: DataLoader                                CPU us/batch     11     3,337   3,549     3,698             -        -
    u8: throughput, DataLoader with settings                 x     11    0.9269   1.043     1.047             -        -
    u8: throughput, ours                                     x     11     2.725   3.011     3.215  at least 2.4      yes
    u8: main CPU, ours                                       x     11      7.22   7.903     8.426    at least 8       no
    f32: DataLoader                                  samples/s     11     1,779   1,838     1,907             -        -
    f32: DataLoader                               CPU us/batch     11     8,414   8,529     9,076             -        -
    f32: throughput, DataLoader with settings                x     11    0.9261  0.9639     1.024             -        -
    f32: throughput, ours                                    x     11     2.853   3.066     3.127  at least 2.8      yes
    f32: main CPU, ours                                      x     11     17.34   17.78     18.64   at least 12      yes
    tokens: DataLoader                               samples/s     11     8,665   9,129     9,520             -        -
    tokens: DataLoader                            CPU us/batch     11     1,544   1,636     1,687             -        -
    tokens: throughput, DataLoader with settings             x     11    0.9791   1.055     1.157             -        -
    tokens: throughput, ours                                 x     11     4.576   4.919     5.257    at least 3      yes
    tokens: main CPU, ours                                   x     11      7.04   7.462     8.228    at least 6      yes
    jpeg: DataLoader                                 samples/s     11     312.9   322.5     330.4             -        -
    jpeg: DataLoader                              CPU us/batch     11     2,582   2,748     2,784             -        -
    jpeg: throughput, DataLoader with settings               x     11    0.9666   0.981     1.028             -        -
    jpeg: throughput, ours                                   x     11     1.015   1.049     1.142    at least 1      yes
    jpeg: main CPU, ours                                     x     11     4.384   4.708     5.165             -        -
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
