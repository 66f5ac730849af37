"""`stateful-pipes profile`: whatever the pipeline, all of the time is told, and the verdict is the one that the figures give."""

from __future__ import annotations

import os
import sys

import pytest
import torchdata.nodes as tn

from stateful_pipes import ProcessPrefetcher, SamplerNode, SeededBatcher, SeededMapper, SequentialSampler, StatefulDataLoader
from stateful_pipes.cli import profile_run
from stateful_pipes.cli.main import main
from stateful_pipes.cli.profile_run import (
    LOADER,
    MAIN,
    PACKING,
    STEP,
    WORKERS,
    Part,
    Profile,
    Step,
    measure,
    step_of,
    table,
    verdict,
)
from stateful_pipes.cli.profile_timeline import draw
from tests.streams import DrawingDataset

CORES = len(os.sched_getaffinity(0))
WAITS = "prefetcher (waits for workers)"


def inline():
    return StatefulDataLoader(DrawingDataset(10), batch_size=3)


def pooled():
    return StatefulDataLoader(DrawingDataset(10), batch_size=3, num_workers=2, multiprocessing_context="fork")


def node():
    mapped = SeededMapper(SamplerNode(SequentialSampler(9)), DrawingDataset(9).__getitem__, seed=1)
    return ProcessPrefetcher(SeededBatcher(mapped, 2), 1, multiprocessing_context="fork")


def foreign():
    return tn.Batcher(tn.IterableWrapper(range(10)), 2)


def nothing():
    return tn.IterableWrapper([])


def seven():
    return 7


FOUR = {"sampler", "mapper", "batcher"}
EXPECTED = {
    "inline": (set(), {*FOUR, "prefetcher"}),
    "pooled": ({*FOUR, PACKING}, {"sampler", WAITS}),
    "node": ({*FOUR, PACKING}, {"sampler", WAITS}),
    "foreign": (set(), {"batcher"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_prints_a_table_and_a_verdict_and_draws(name, tmp_path, capsys):
    out = tmp_path / "picture.png"
    options = ["--batches", "9", "--out", str(out), "--seconds-per-step", "0.0001", *(["--busy"] if name == "node" else [])]
    assert main(["profile", f"{__name__}:{name}", *options]) == 0
    shown = capsys.readouterr().out
    head, *rows = [line.split() for line in shown.splitlines() if line.startswith(("where", "workers ", "main "))]
    assert head == ["where", "node", "seconds", "share", "ms/batch"]
    assert all(row[-2].endswith("%") for row in rows)
    assert shown.startswith("9 batches in ")
    assert ("workers: " in shown) is bool(EXPECTED[name][0])
    assert "\nThe loop " in shown
    assert f"Who did what when: {out}" in shown
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", EXPECTED)
def test_all_of_the_time_is_somebody_s(name):
    made = globals()[name]()
    with made if isinstance(made, StatefulDataLoader) else StatefulDataLoader(made) as loader:
        found = measure(loader, 9, step_of(0, False))
        there, here = ({part.name: part for part in found.parts if part.place == place} for place in (WORKERS, MAIN))
        assert (set(there) | {PACKING} if there else set()) == EXPECTED[name][0]
        assert set(here) - {LOADER} == {*EXPECTED[name][1], STEP}
        assert sum(part.seconds for part in here.values()) == pytest.approx(found.seconds)
        assert sum(part.share for part in here.values()) == pytest.approx(1)
        assert 0 < found.waiting < found.seconds
        assert 0 <= found.worker_use <= 1
        assert (found.batches, len(found.spans), found.restarts) == (9, found.workers, 0)
        assert loader.stats()["delivered"] == 10
        moments = [moment for step in found.steps for moment in step]
        assert moments == sorted(moments)


def test_the_batches_of_the_first_one_on_are_those_that_count(monkeypatch):
    """With a clock that is looked at, each step takes ten of its ticks, and the first one a thousand."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(profile_run, "monotonic_ns", lambda: next(ticks))
    taken = iter([1000, *[10] * 4])

    def step():
        for _ in range(next(taken)):
            next(ticks)

    found = measure(inline(), 4, step)
    assert [step.done - step.got for step in found.steps] == [1001, 11, 11, 11, 11]
    assert round(1e9 * found.first) == 1
    assert round(1e9 * found.seconds) == found.steps[-1].done - found.steps[0].done  # both counters are read a tick later


def test_a_pipeline_without_workers_has_one_lane(tmp_path):
    with inline() as one, pooled() as other:
        for loader, lanes in ((one, ["main process"]), (other, ["main process", "worker 0", "worker 1"])):
            figure = draw(measure(loader, 3, step_of(0, False)), tmp_path / "picture.png")
            (axes,) = figure.axes
            assert [label.get_text() for label in axes.get_yticklabels()] == lanes
            assert axes.get_xlabel().endswith("[s]")


def profile_with(**changes):
    parts = [
        Part(WORKERS, "sampler", 0.1, 0.05),
        Part(WORKERS, "mapper", 1.5, 0.75),
        Part(WORKERS, PACKING, 0.4, 0.2),
        Part(MAIN, "sampler", 0.1, 0.1),
        Part(MAIN, WAITS, 0.5, 0.5),
        Part(MAIN, STEP, 0.4, 0.4),
    ]
    steps = [Step(0, 1, 2), Step(2, 3, 4), Step(4, 5, 6)]
    made = Profile(parts, ("sampler", 0.1), 1.0, 0.6, 0.25, 2, 0.95, 4_000_000, 0, steps, [[(2, 3)], [(4, 5)]])
    return made._replace(**changes)


VERDICTS = [
    ({}, 0.1, "The loop waits for data 60% of the time: the workers are busy 95% of the time, 75% of that in 'mapper'; try"),
    ({}, 0.0, "No training step was made (--seconds-per-step), so the loop only waited, 300 ms a batch: the workers are busy 9"),
    ({"spans": [[(2, 3)], []]}, 0.1, "60% of the time: 1 of 2 workers made no batch, as they were still starting, perhaps"),
    ({"worker_use": 0.3}, 0.1, "60% of the time: yet the workers are idle 70% of it; try a larger prefetch_factor"),
    ({"waiting": 0.04}, 0.1, "The loop does not wait for data (4.0% of the time)."),
    ({"waiting": 0.04, "worker_use": 0.3}, 0.1, "The loop does not wait for data (4.0% of the time); fewer workers would do."),
    ({"pulled": ("reader", 0.45)}, 0.1, "'reader' is pulled in the main process, 75% of the wait; workers do not help there."),
    (
        {"workers": 0, "parts": [Part(MAIN, "mapper", 0.3, 0.3), Part(MAIN, LOADER, 0.2, 0.2), Part(MAIN, STEP, 0.4, 0.4)]},
        0.1,
        f"'mapper' takes 50% of that, in this process; try num_workers=1 or more ({CORES} cores here).",
    ),
    ({"workers": CORES}, 0.1, f"in 'mapper'; try to make it cheaper (the {CORES} cores are taken)."),
]


@pytest.mark.parametrize(("changes", "seconds_per_step", "expected"), VERDICTS)
def test_the_verdict_is_what_the_figures_give(changes, seconds_per_step, expected):
    said = verdict(profile_with(**changes), seconds_per_step)
    assert expected in said
    assert "\n" not in said


def test_more_workers_than_now_are_recommended_while_there_are_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert verdict(profile_with(), 0.1).endswith("in 'mapper'; try num_workers=3 or more.")


def test_the_table():
    assert table(profile_with(restarts=3)).splitlines() == [
        "2 batches in 1.000 s, after a first one that took 0.250 s to come",
        "workers: 2, busy 95% of the time, 3 replaced; they send 2.000 MB a batch",
        "",
        "where    node                            seconds  share  ms/batch",
        "workers  sampler                           0.100   5.0%    50.000",
        "workers  mapper                            1.500  75.0%   750.000",
        "workers  (packing)                         0.400  20.0%   200.000",
        "main     sampler                           0.100  10.0%    50.000",
        "main     prefetcher (waits for workers)    0.500  50.0%   250.000",
        "main     (step)                            0.400  40.0%   200.000",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seven"], "module:factory: factory must return a StatefulDataLoader or a torchdata node, got int"),
        (["nothing"], "module:factory: the pipeline gives no batch"),
        (["missing"], "module:factory: 'tests.integration.test_profile' has no 'missing'"),
        (["inline", "--batches", "0"], "--batches: must be at least 1, got 0"),
        (["inline", "--seconds-per-step", "-1"], "--seconds-per-step: must be a number of seconds, got '-1'"),
        (["inline", "--seconds-per-step", "nan"], "--seconds-per-step: must be a number of seconds, got 'nan'"),
        (["inline", "--out", "no/such/folder/x.png"], "--out: there is no folder 'no/such/folder'"),
    ],
)
def test_a_mistake_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["profile", f"{__name__}:{arguments[0]}", *arguments[1:]])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_it_prints_and_names_the_extra(capsys, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("matplotlib") or name.endswith("cli.profile_timeline")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "picture.png"
    assert main(["profile", f"{__name__}:inline", "--batches", "2", "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert "No training step was made" in printed.out
    assert "The picture needs matplotlib. Install it with: pip install 'stateful_pipes[profile]'" in printed.err
    assert not out.exists()
