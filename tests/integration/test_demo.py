"""The demo: its verdict can be either, and it says what it needs."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stateful_pipes.cli.demo_run import choose_kills, compare
from stateful_pipes.cli.demo_training import CHECKPOINT, LOG
from stateful_pipes.cli.main import main

SMALL = ["demo", "--epochs", "1", "--batch-size", "128"]  # 15 steps


def run_small(kills: list[int], seed: int, *options: str) -> int:
    assert choose_kills(15, len(kills), seed) == kills
    return main([*SMALL, "--kills", str(len(kills)), "--seed", str(seed), *options])


def test_killed_training_is_the_one_that_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_small([3, 9], 54) == 0  # before the first checkpoint, and after it
    shown = capsys.readouterr().out
    assert shown.count("identical") == 4
    assert "DIFFERENT" not in shown
    assert shown.count("no checkpoint yet") == 1


def test_resume_that_forgets_the_loader_is_found_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_small([8], 9, "--break-resume") == 1
    shown = capsys.readouterr().out
    assert "identical" not in shown
    assert shown.count("DIFFERENT from step 6 on") == 3
    assert "DIFFERENT in 6 of 6 tensors" in shown


def test_training_that_fails_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ended with exit code 7"):
        main(SMALL)


@pytest.mark.parametrize("package", ["rich", "sklearn", "tqdm"])
def test_missing_package_is_named_with_the_extra(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == "stateful_pipes.cli.demo_run"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 2
    assert f"The demo needs {package}. Install what it needs with: pip install 'stateful_pipes[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kills", "8"], "--kills: must be less than half of the 15 steps, got 8"),
        (["--kills", "0"], "--kills: must be at least 1, got 0"),
        (["--epochs", "0"], "--epochs: must be at least 1, got 0"),
        (["--workers", "-1"], "--workers: must be at least 0, got -1"),
        (["--batch-size", "x"], "--batch-size: must be an integer, got 'x'"),
        (["--seed", str(2**32)], f"--seed: must be at least 0 and below {2**32}, got {2**32}"),
    ],
)
def test_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "kills"), [(3, 1), (15, 7), (16, 7), (285, 3)])
def test_kills_leave_each_process_work_on_both_sides(steps: int, kills: int) -> None:
    drawn = [choose_kills(steps, kills, seed) for seed in range(50)]
    for chosen in drawn:
        assert len(chosen) == kills
        assert chosen[0] >= 1
        assert chosen[-1] <= steps - 2
        assert all(later - earlier >= 2 for earlier, later in pairwise(chosen))
    assert drawn == [choose_kills(steps, kills, seed) for seed in range(50)]


def write_training(folder: Path, lines: list[dict[str, object]], weight: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.save({"model": {"weight": weight, "bias": torch.zeros(1)}}, folder / CHECKPOINT)
    return folder


LINES: list[dict[str, object]] = [{"ids": [1, 2], "batch": "a", "draws": "b"}, {"ids": [3, 4], "batch": "c", "draws": "d"}]


@pytest.mark.parametrize(
    ("lines", "weight", "expected"),
    [
        (LINES, 0.0, ["", "", "", ""]),
        ([LINES[0], {**LINES[1], "ids": [4, 3]}], 0.0, ["from step 2 on", "", "", ""]),
        ([{**LINES[0], "batch": "x"}, LINES[1]], 0.0, ["", "from step 1 on", "", ""]),
        ([LINES[0], {**LINES[1], "draws": "x"}], 0.0, ["", "", "from step 2 on", ""]),
        (LINES[:1], 0.0, ["2 and 1 of 2 steps"] * 3 + [""]),
        ([*LINES, LINES[0]], 0.0, ["2 and 3 of 2 steps"] * 3 + [""]),
        (LINES, -0.0, ["", "", "", "in 1 of 2 tensors"]),
    ],
)
def test_each_comparison_finds_its_own_difference(
    lines: list[dict[str, object]], weight: float, expected: list[str], tmp_path: Path
) -> None:
    one = write_training(tmp_path / "one", LINES, torch.tensor([0.0]))
    other = write_training(tmp_path / "other", lines, torch.tensor([weight]))
    assert [found.difference for found in compare(one, other, 2)] == expected


def test_two_logs_that_lack_the_same_steps_are_not_identical(tmp_path: Path) -> None:
    one = write_training(tmp_path / "one", LINES, torch.zeros(1))
    other = write_training(tmp_path / "other", LINES, torch.zeros(1))
    assert compare(one, other, 3)[0].difference == "2 and 2 of 3 steps"
