"""The demo: the same training straight through and killed at random, compared bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sklearn.datasets import load_digits
from tqdm import tqdm

from stateful_pipes.cli.demo_training import (
    CHECKPOINT,
    DATA,
    LOG,
    AugmentedDigits,
    Options,
    build_model,
    count_steps,
    normalize,
)

__all__ = ["Comparison", "Life", "choose_kills", "compare", "demo"]


class Life(NamedTuple):
    """One training process: where it started, how long that took, and after which step it was killed."""

    resumed: int
    start_seconds: float
    load_seconds: float
    killed: int | None


class Comparison(NamedTuple):
    """One thing that was compared; `difference` is empty if it is identical."""

    name: str
    extent: str
    difference: str


def demo(options: Options, kills: int) -> int:
    """Runs both trainings and prints what came of it; 0 if all is identical, else 1."""
    console = Console(highlight=False)
    steps = count_steps(options)
    console.print(
        f"Training a small network on 1,797 handwritten digits (epochs: {options.epochs}, steps: {steps}):\n"
        f"once straight through, then with SIGKILL at random steps (kills: {kills}), started\n"
        "anew each time from the last checkpoint on disk. A start takes some seconds.\n"
    )
    with tempfile.TemporaryDirectory(prefix="stateful_pipes-demo-") as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        digits = load_digits()
        np.savez(Path(name, DATA), images=digits.images, labels=digits.target)
        train(whole, options, [], "straight through")
        lives = train(killed, options, choose_kills(steps, kills, options.seed), "killed at random")
        comparisons = compare(whole, killed, steps)
        accuracy = _accuracy(killed)
    console.print()
    console.print(_table_of_lives(lives))
    console.print(_table_of_comparisons(comparisons))
    if any(one.difference for one in comparisons):
        console.print("DIFFERENT: the killed training did not resume exactly.", style="bold red")
        return 1
    console.print(f"Killed {len(lives) - 1} x, and bit for bit the training that ran straight through.", style="bold green")
    console.print(f"The network names {accuracy:.1%} of the digits correctly.")
    return 0


def choose_kills(steps: int, kills: int, seed: int) -> list[int]:
    """The steps after which to kill, in order; there may be at most `(steps - 1) // 2`.

    A process gets at most one step further before the signal. So they are at least 2 apart, and none is the last step
    or the one before: each process then has a batch of its own to begin with, and is still at work when it is killed.
    """
    chosen = random.Random(seed).sample(range(1, steps - kills), kills)
    return [step + earlier for earlier, step in enumerate(sorted(chosen))]


def train(folder: Path, options: Options, kills: list[int], title: str) -> list[Life]:
    """Trains to the end in as many processes as that takes."""
    folder.mkdir()
    lives = []
    # disable=None: no bar where there is no terminal.
    with tqdm(total=count_steps(options), desc=title, unit="step", disable=None) as bar:
        for kill in [*kills, None]:
            lives.append(live(folder, options, kill, bar))
            what = "trained to the end" if kill is None else f"SIGKILL after step {kill}"
            bar.write(f"{title}: {what}")
    return lives


def live(folder: Path, options: Options, kill: int | None, bar: tqdm[Any]) -> Life:
    """One process of a training, from its start to its end, or to its kill after the given step."""
    command = [sys.executable, "-m", "stateful_pipes.cli.demo_training", str(folder), json.dumps(options._asdict())]
    started = time.monotonic()
    # In a session of its own it does not get Ctrl-C; it ends with this process all the same.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # One answer in advance, so that the process is at work on the next step, and not waiting, when it is killed.
        _answer(process.stdin)
        first = process.stdout.readline()
        start_seconds = time.monotonic() - started
        for line in process.stdout:
            step = json.loads(line)["step"]
            bar.update(step - bar.n)
            if step == kill:
                process.kill()
                break
            _answer(process.stdin)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    if code != (0 if kill is None else -signal.SIGKILL):
        raise SystemExit(f"The training process ended with exit code {code}, before it should.")
    said = json.loads(first)
    return Life(said["resumed"], start_seconds, said["load_seconds"], kill)


def _answer(to: IO[bytes]) -> None:
    with suppress(BrokenPipeError):  # the process has ended, and its exit code tells how
        os.write(to.fileno(), b"\n")


def compare(one: Path, other: Path, steps: int) -> list[Comparison]:
    """What two trainings saw, in order, and the weights that came out."""
    log, other_log = _read_log(one), _read_log(other)
    samples = sum(len(line["ids"]) for line in log)
    found = [
        Comparison("sample order", f"{samples:,} samples", _first_difference(log, other_log, "ids", steps)),
        Comparison("batch bytes", f"{len(log):,} batches", _first_difference(log, other_log, "batch", steps)),
        Comparison("augmentation draws", f"{samples:,} samples", _first_difference(log, other_log, "draws", steps)),
    ]
    weights, other_weights = _read_weights(one), _read_weights(other)
    differing = [name for name in weights if _bytes(weights[name]) != _bytes(other_weights[name])]
    numbers = sum(tensor.numel() for tensor in weights.values())
    difference = f"in {len(differing)} of {len(weights)} tensors" if differing else ""
    return [*found, Comparison("final weights", f"{numbers:,} numbers", difference)]


def _accuracy(folder: Path) -> float:
    digits = AugmentedDigits(folder.parent / DATA)
    model = build_model().eval()
    model.load_state_dict(_read_weights(folder))
    with torch.no_grad():
        right = model(normalize(digits.images)).argmax(1) == digits.labels
    return float(right.double().mean())


def _read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / CHECKPOINT)["model"]
    return weights


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _first_difference(log: list[dict[str, Any]], other: list[dict[str, Any]], key: str, steps: int) -> str:
    for number, (line, other_line) in enumerate(zip(log, other, strict=False), 1):
        if line[key] != other_line[key]:
            return f"from step {number} on"
    lengths = {len(log), len(other), steps}
    return f"{len(log)} and {len(other)} of {steps} steps" if len(lengths) > 1 else ""


def _table_of_lives(lives: list[Life]) -> Table:
    table = Table(title="Each resume, in a new process", title_justify="left", caption_justify="left")
    table.caption = "A process start is mostly Python importing torch."
    for heading in (
        "killed after step",
        "resumed after step",
        "process start\nto first batch",
        "checkpoint load\nto first batch",
    ):
        table.add_column(heading, justify="right")
    for before, life in pairwise(lives):
        resumed = str(life.resumed) if life.resumed else "0 (no checkpoint yet)"
        table.add_row(str(before.killed), resumed, f"{life.start_seconds:.2f} s", f"{life.load_seconds * 1000:.0f} ms")
    return table


def _table_of_comparisons(comparisons: list[Comparison]) -> Table:
    table = Table(title="Killed and resumed, against straight through", title_justify="left")
    for heading in ("compared", "over", "result"):
        table.add_column(heading)
    for one in comparisons:
        result = Text(f"DIFFERENT {one.difference}", "bold red") if one.difference else Text("identical", "green")
        table.add_row(one.name, one.extent, result)
    return table
