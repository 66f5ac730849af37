"""Draws what the benchmarks found, from their JSON files.

    python benchmarks/plot.py [--results FOLDER]

For each of throughput.json, peers_throughput.json and limit.json in the folder, by default benchmarks/results/, one or two
PNG files beside it: bars are medians, whiskers quartiles, dashes what is to be reached.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


class Chart(NamedTuple):
    """Which figures of which file, and what they say.

    Attributes:
        source: The benchmark.
        prefix: Of the figures' names after the workload; what follows it names the bars.
        title: Its {low} and {high} are the outermost medians of the bars named "ours", or of all where none is.
    """

    target: str
    source: str
    prefix: str
    title: str
    axis: str
    log: bool = False


BESIDE = "the limit / Grain"
"""Stands in the table of the peers, and is none of them."""

CHARTS = (
    Chart(
        "throughput",
        "throughput",
        "throughput, ",
        "All three generators seeded: {low:.2g} to {high:.2g} times DataLoader's throughput",
        "samples/s, ratio to DataLoader",
    ),
    Chart(
        "cpu",
        "throughput",
        "main CPU, ",
        "The main process spends {low:.2g} to {high:.2g} times less CPU time a batch",
        "CPU time a batch, DataLoader / ours",
    ),
    Chart(
        "peers",
        "peers_throughput",
        "",
        "Ours has {low:.2g} to {high:.2g} times the throughput of other loaders",
        "samples/s, ours / peer",
        log=True,
    ),
    Chart("limit", "limit", "", "{low:.0%} to {high:.0%} of what two processes make for nobody", "batches/s, ours / limit"),
)


def draw(chart: Chart, found: dict[str, Any], folder: Path) -> None:
    """One PNG file: a group of bars for each workload."""
    groups: dict[str, dict[str, Any]] = {}
    for figure in found["figures"]:
        workload, _, label = figure["what"].partition(": ")
        if figure["unit"] == "x" and label.startswith(chart.prefix) and label != BESIDE:
            groups.setdefault(workload, {})[label.removeprefix(chart.prefix)] = figure
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    plot, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        bars = [(place + number * width, group[label]) for place, group in enumerate(groups.values()) if label in group]
        places, medians = [place for place, _ in bars], [one["median"] for _, one in bars]
        below = [one["median"] - one["lower"] for _, one in bars]
        above = [one["upper"] - one["median"] for _, one in bars]
        axes.bar(places, medians, width, yerr=[below, above], capsize=2, label=label)
        for place, one in bars:
            if one["target"] is not None:
                axes.hlines(one["target"], place - width / 2, place + width / 2, "black", "dashed")
    ours = [group["ours"]["median"] for group in groups.values() if "ours" in group]
    medians = ours or [one["median"] for group in groups.values() for one in group.values()]
    versions = found["versions"]
    axes.set_title(chart.title.format(low=min(medians), high=max(medians)))
    axes.set_xlabel(f"{found['cores']} cores, 2 workers, torch {versions['torch']}; dashes: to reach", fontsize="small")
    axes.set_ylabel(chart.axis)
    axes.set_xticks([place + (len(labels) - 1) * width / 2 for place in range(len(groups))], list(groups))
    axes.axhline(1, color="gray", linewidth=0.8)
    if chart.log:
        axes.set_yscale("log")
    axes.legend(fontsize="small")
    plot.savefig(folder / f"{chart.target}.png", dpi=120)
    plt.close(plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=Path(__file__).parent / "results")
    folder = parser.parse_args().results
    for chart in CHARTS:
        source = folder / f"{chart.source}.json"
        if source.exists():
            draw(chart, json.loads(source.read_text()), folder)
            print(folder / f"{chart.target}.png")


if __name__ == "__main__":
    main()
