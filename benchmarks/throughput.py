"""How fast is it, and how much of the main process's CPU time does it take, against torch's DataLoader?

    python benchmarks/throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, torch's DataLoader nothing; on tiny also ours with `rng=()`, which seeds nothing either. Beside it torch's
DataLoader with the allocator's settings in its workers, which ours makes as well: what they alone give. A ratio is to
the plain DataLoader in the same round: of samples a second, and of its CPU time a batch over ours. Before anything is
timed, all give the same bytes in the same order.

Latest, on two cores of an AMD EPYC, otherwise idle:

    what                                                  unit  times  lower q.  median  upper q.        target  reached
    tiny: DataLoader                                 samples/s     11    26,902  27,919    28,476             -        -
    tiny: DataLoader                              CPU us/batch     11     1,231   1,244     1,284             -        -
    tiny: throughput, DataLoader with settings               x     11     1.028    1.07     1.153             -        -
    tiny: throughput, ours                                   x     11     2.687   2.877     3.046  at least 1.8      yes
    tiny: throughput, ours, rng=()                           x     11     6.288    6.76     6.992  at least 3.5      yes
    tiny: main CPU, ours                                     x     11     5.644   6.283     6.631    at least 6      yes
    u8: DataLoader                                   samples/s     11     5,305   5,484     5,651             -        -
    u8: DataLoader                                CPU us/batch     11     3,452   3,681     3,825             -        -
    u8: throughput, DataLoader with settings                 x     11    0.9561   1.071     1.087             -        -
    u8: throughput, ours                                     x     11     2.946   3.091     3.121  at least 2.4      yes
    u8: main CPU, ours                                       x     11     8.023   8.593     9.148    at least 8      yes
    f32: DataLoader                                  samples/s     11     1,585   1,616     1,675             -        -
    f32: DataLoader                               CPU us/batch     11     9,554   9,707    10,149             -        -
    f32: throughput, DataLoader with settings                x     11     1.013   1.025     1.047             -        -
    f32: throughput, ours                                    x     11     3.072   3.154     3.239  at least 2.8      yes
    f32: main CPU, ours                                      x     11     17.67   18.77     21.05   at least 12      yes
    tokens: DataLoader                               samples/s     11     7,931   8,237     8,636             -        -
    tokens: DataLoader                            CPU us/batch     11     1,731   1,785     1,889             -        -
    tokens: throughput, DataLoader with settings             x     11    0.9407  0.9981     1.037             -        -
    tokens: throughput, ours                                 x     11     4.367   4.725     5.049    at least 3      yes
    tokens: main CPU, ours                                   x     11     7.201   7.415     8.444    at least 6      yes
    jpeg: DataLoader                                 samples/s     11       321   327.2     341.7             -        -
    jpeg: DataLoader                              CPU us/batch     11     2,657   2,783     2,947             -        -
    jpeg: throughput, DataLoader with settings               x     11    0.9914   1.006     1.036             -        -
    jpeg: throughput, ours                                   x     11    0.9965   1.057      1.09    at least 1      yes
    jpeg: main CPU, ours                                     x     11     4.917   5.248     5.615             -        -
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
