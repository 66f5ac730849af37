"""How fast is it, and how much of the main process's CPU time does it take, against torch's DataLoader?

    python benchmarks/throughput.py [--workloads NAME ...] [--json PATH] [--smoke]

Two workers each, on the five workloads; the consumer only takes the batches. Ours seeds all three global generators for
every sample, torch's DataLoader nothing; on tiny also ours with `rng=()`, which seeds nothing either. Beside it torch's
DataLoader with the allocator's settings in its workers, which ours makes as well: what they alone give. A ratio is to
the plain DataLoader in the same round: of samples a second, and of its CPU time a batch over ours. Before anything is
timed, all give the same bytes in the same order.

Latest:

"""

from __future__ import annotations

from functools import partial

from harness import ROUNDS, Figure, arguments, in_turn, ratios, report
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
    report("throughput", figures, options)


if __name__ == "__main__":
    main()
