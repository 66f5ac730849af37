"""Pausing and resuming a whole training: model, optimizer, loaders and generators of one instant, a completed step.

snapshot  random_state  grad_scaler      the parts of a state
config                                   what a training was started with, compared
checkpoint                               the file
gate                                     one step at a time, none while paused
mixin                                    the trainer's pause and resume
"""

from stateful_pipes.training.checkpoint import TrainingCheckpoint, TrainingState
from stateful_pipes.training.gate import serialized_training, training_step
from stateful_pipes.training.grad_scaler import restore_grad_scaler_state
from stateful_pipes.training.mixin import TrainingResumeMixin
from stateful_pipes.training.random_state import RandomState, random_state, restore_random_state
from stateful_pipes.training.snapshot import cpu_state

__all__ = [
    "RandomState",
    "TrainingCheckpoint",
    "TrainingResumeMixin",
    "TrainingState",
    "cpu_state",
    "random_state",
    "restore_grad_scaler_state",
    "restore_random_state",
    "serialized_training",
    "training_step",
]
