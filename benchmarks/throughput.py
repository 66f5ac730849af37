"""How fast is it, and how much of the main process's CPU time does it take, against torch's DataLoader?

    python benchmarks/throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, torch's DataLoader nothing; on tiny also ours with `rng=()`, which seeds nothing either. Beside it torch's
DataLoader with the allocator's settings in its workers, which ours makes as well: what they alone give. A ratio is to
the plain DataLoader in the same round: of samples a second, and of its CPU time a batch over ours. Before anything is
timed, all give the same bytes in the same order.

Latest, on two cores of an Intel Xeon (Ice Lake):

    what                                                  unit  times  lower q.  median  upper q.        target  reached
    tiny: DataLoader                                 samples/s     11    42,055  48,119    55,495             -        -
    tiny: DataLoader                              CPU us/batch     11     603.6   666.7     786.4             -        -
    tiny: throughput, DataLoader with settings               x     11    0.9957   1.106     1.155             -        -
    tiny: throughput, ours                                   x     11     2.039   2.296      2.54  at least 1.8      yes
    tiny: throughput, ours, rng=()                           x     11     5.647   6.105     6.903  at least 3.5      yes
    tiny: main CPU, ours                                     x     11     5.302   5.535     6.108    at least 6       no
    u8: DataLoader                                   samples/s     11     9,909  10,362    11,412             -        -
    u8: DataLoader                                CPU us/batch     11     1,475   1,575     1,717             -        -
    u8: throughput, DataLoader with settings                 x     11     0.938    1.03     1.078             -        -
    u8: throughput, ours                                     x     11     1.997   2.108     2.242  at least 2.4       no
    u8: main CPU, ours                                       x     11      6.37   6.727      6.85    at least 8       no
    f32: DataLoader                                  samples/s     11     3,025   3,167     3,240             -        -
    f32: DataLoader                               CPU us/batch     11     3,414   3,549     3,707             -        -
    f32: throughput, DataLoader with settings                x     11    0.9526  0.9793     1.017             -        -
    f32: throughput, ours                                    x     11      2.03   2.068     2.111  at least 2.8       no
    f32: main CPU, ours                                      x     11     13.78   14.18     14.46   at least 12      yes
    tokens: DataLoader                               samples/s     11    14,645  17,087    19,343             -        -
    tokens: DataLoader                            CPU us/batch     11     686.5   860.2     980.3             -        -
    tokens: throughput, DataLoader with settings             x     11    0.9685   1.077     1.122             -        -
    tokens: throughput, ours                                 x     11     3.548   3.761     3.857    at least 3      yes
    tokens: main CPU, ours                                   x     11     5.927   6.121     6.577    at least 6      yes
    jpeg: DataLoader                                 samples/s     11     337.9   379.9     444.3             -        -
    jpeg: DataLoader                              CPU us/batch     11     1,281   1,554     1,624             -        -
    jpeg: throughput, DataLoader with settings               x     11    0.9892   1.028     1.087             -        -
    jpeg: throughput, ours                                   x     11    0.9672  0.9918     1.079    at least 1      yes
    jpeg: main CPU, ours                                     x     11     3.876   4.241     4.433             -        -
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
