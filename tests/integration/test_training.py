"""A real training, paused after each of its steps, is the one that was not paused: here, in a new process, with other workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stateful_pipes.testing import assert_training_resume
from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training import cpu_state
from tests.integration import cnn_training
from tests.integration.cnn_training import STEPS, Trainer

WORKERS = (0, 2)


@pytest.fixture(autouse=True)
def one_thread():
    """As many as in the process that resumes: the order of a sum depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("pause_after", range(1, STEPS + 1))
def test_in_the_same_process(tmp_path, pause_after):
    assert_training_resume(Trainer, Trainer.step, tmp_path / "paused.pt", pause_after, STEPS, Trainer.snapshot)


@pytest.mark.parametrize("pause_after", [1, 6, STEPS - 1])
@pytest.mark.parametrize("workers", [(0, 1, 2), (2, 1, 0)])
def test_with_other_numbers_of_workers(tmp_path, pause_after, workers):
    """One for each of the three trainers: without a break, paused, resumed."""
    factory = map(Trainer, workers).__next__
    assert_training_resume(factory, Trainer.step, tmp_path / "paused.pt", pause_after, STEPS, Trainer.snapshot)


def test_in_a_new_process(tmp_path):
    trainer = Trainer()
    results = []
    for step in range(1, STEPS):
        results.append(cpu_state(trainer.step()))
        trainer.pause(tmp_path / f"{step}.pt")
        trainer.resume(tmp_path / f"{step}.pt")
    results.append(cpu_state(trainer.step()))
    trainer.close()
    whole = Trainer()
    assert first_mismatch([cpu_state(whole.step()) for _ in range(STEPS)], results) is None
    end = cpu_state(whole.snapshot())
    whole.close()

    command = [sys.executable, cnn_training.__file__, str(tmp_path), *map(str, WORKERS)]
    subprocess.run(command, check=True, cwd=Path(__file__).parent)
    for workers in WORKERS:
        resumed = torch.load(tmp_path / f"resumed-{workers}.pt", weights_only=False)
        for pause_after in range(1, STEPS):
            expected = {"results": results[pause_after:], "end": end}
            assert first_mismatch(expected, resumed[pause_after]) is None, f"paused after step {pause_after}, {workers} workers"


def test_what_the_test_can_see(tmp_path):
    """A forgotten gradient, in the middle of an accumulation."""

    class Forgetful(Trainer):
        def _load_resume_extra_state(self, state):
            super()._load_resume_extra_state({**state, "gradients": [None for _ in state["gradients"]]})

    with pytest.raises(AssertionError, match=r"right after the resume: snapshot\['gradients'\]\[0\]"):
        assert_training_resume(Forgetful, Trainer.step, tmp_path / "paused.pt", 3, STEPS, Trainer.snapshot)
    assert_training_resume(Forgetful, Trainer.step, tmp_path / "paused.pt", 4, STEPS, Trainer.snapshot)
