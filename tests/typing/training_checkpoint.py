"""What a type checker is to see of a training checkpoint; mypy reads this, nothing runs it.

Each `type: ignore` is itself an error where the checker finds nothing to ignore.
"""

from __future__ import annotations

from typing import assert_type

import torch

from stateful_pipes.training import RandomState, TrainingCheckpoint, cpu_state, random_state, training_step


def keys(checkpoint: TrainingCheckpoint) -> None:
    state = checkpoint["training_state"]
    assert_type(state["version"], int | str)
    assert_type(state["config"], dict[str, str])
    assert_type(state["random"], RandomState)
    assert_type(state["random"]["torch"], torch.Tensor)
    assert_type(state["random"]["python"]["gauss"], float | None)
    checkpoint["model"]  # type: ignore[typeddict-item]
    state["optimizer"]  # type: ignore[typeddict-item]
    state["random"]["jax"]  # type: ignore[typeddict-item]
    state["device"] = torch.device("cpu")  # type: ignore[typeddict-item]


def functions() -> None:
    assert_type(random_state(), RandomState)
    assert_type(cpu_state({"step": 1}), dict[str, int])


class Trainer:
    @training_step
    def step(self, rate: float, *, is_last: bool = False) -> int:
        return 1


def decorated(trainer: Trainer) -> None:
    assert_type(trainer.step(0.1, is_last=True), int)
    trainer.step("fast")  # type: ignore[arg-type]
