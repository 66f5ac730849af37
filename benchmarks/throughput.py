"""How fast is it, and how much of the main process's CPU time does it take, against torch's DataLoader?

    python benchmarks/throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, torch's DataLoader nothing; on tiny also ours with `rng=()`, which seeds nothing either. Beside it torch's
DataLoader with the allocator's settings in its workers, which ours makes as well: what they alone give. A ratio is to
the plain DataLoader in the same round: of samples a second, and of its CPU time a batch over ours. Before anything is
timed, all give the same bytes in the same order.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                                                  unit  times  lower q.  median  upper q.        target  reached
    tiny: DataLoader                                 samples/s     11    31,194  32,431    32,881             -        -
    tiny: DataLoader                              CPU us/batch     11     1,061   1,098     1,124             -        -
    tiny: throughput, DataLoader with settings               x     11     1.013   1.114     1.143             -        -
    tiny: throughput, ours                                   x     11     2.831   3.189     3.249  at least 1.8      yes
    tiny: throughput, ours, rng=()                           x     11     5.896   6.715     7.729  at least 3.5      yes
    tiny: main CPU, ours                                     x     11     5.412   6.073     6.696    at least 6      yes
    u8: DataLoader                                   samples/s     11     5,536   5,658     5,747             -        -
    u8: DataLoader                                CPU us/batch     11     3,525   3,657     3,715             -        -
    u8: throughput, DataLoader with settings                 x     11     1.012   1.029     1.053             -        -
    u8: throughput, ours                                     x     11     3.212   3.361      3.54  at least 2.4      yes
    u8: main CPU, ours                                       x     11      7.82   8.812     9.624    at least 8      yes
    f32: DataLoader                                  samples/s     11     1,722   1,751     1,829             -        -
    f32: DataLoader                               CPU us/batch     11     8,502   9,308     9,903             -        -
    f32: throughput, DataLoader with settings                x     11    0.9834   1.007     1.052             -        -
    f32: throughput, ours                                    x     11     2.807   3.045     3.278  at least 2.8      yes
    f32: main CPU, ours                                      x     11      16.7   18.42     19.66   at least 12      yes
    tokens: DataLoader                               samples/s     11     9,433   9,941    11,285             -        -
    tokens: DataLoader                            CPU us/batch     11     1,322   1,461     1,578             -        -
    tokens: throughput, DataLoader with settings             x     11     0.996    1.04     1.111             -        -
    tokens: throughput, ours                                 x     11     5.069   5.204     5.307    at least 3      yes
    tokens: main CPU, ours                                   x     11     7.677   7.859     8.152    at least 6      yes
    jpeg: DataLoader                                 samples/s     11     386.2   400.6     409.7             -        -
    jpeg: DataLoader                              CPU us/batch     11     2,008   2,047     2,237             -        -
    jpeg: throughput, DataLoader with settings               x     11    0.9835   1.039     1.069             -        -
    jpeg: throughput, ours                                   x     11     1.082   1.113     1.141    at least 1      yes
    jpeg: main CPU, ours                                     x     11     4.629   4.683     5.059             -        -
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
