"""The file of a paused training: the trainer's ordinary checkpoint, and under one more key what a resume needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any, Final, TypedDict, cast

import torch

from stateful_pipes.checkpoint import write_atomically
from stateful_pipes.errors import (
    CheckpointFileError,
    TrainingResumeAMPMismatchError,
    TrainingResumeCheckpointFormatError,
    TrainingResumeConfigMismatchError,
    TrainingResumeDeviceMismatchError,
    TrainingResumeVersionMismatchError,
)
from stateful_pipes.sealed_file import read_sealed, why_unreadable, write_sealed
from stateful_pipes.training.config import Signature, differences, signature_of
from stateful_pipes.training.random_state import RandomState

__all__ = [
    "TRAINING_STATE",
    "Identity",
    "TrainingCheckpoint",
    "TrainingState",
    "check_identity",
    "identity_of",
    "read_checkpoint",
    "write_checkpoint",
]

TRAINING_STATE: Final = "training_state"
_FORMAT: Final = "stateful_pipes.training"
_FORMAT_VERSION: Final = 1
_FIELDS: Final[Mapping[str, Any]] = {
    "version": (int, str),
    "config": dict,
    "device": str,
    "amp": dict,
    "objects": dict,
    "loaders": dict,
    "extra": object,
    "random": dict,
}


class Identity(TypedDict):
    """What a trainer says of itself when it is made, and a resume compares.

    Attributes:
        version: Of the trainer.
        config: What its configuration holds at each path.
        device: Kind of device: "cpu", "cuda".
        amp: Its setting of automatic mixed precision, at each path.
    """

    version: int | str
    config: Signature
    device: str
    amp: Signature


class TrainingState(Identity):
    """The resume part.

    Attributes:
        format, format_version: Of this structure.
        objects: The state of each of the trainer's objects, by name.
        loaders: The state of each of its loaders, by name.
        extra: What the trainer's own hook returned.
        random: The main process's generators.
    """

    format: str
    format_version: int
    objects: dict[str, Any]
    loaders: dict[str, Any]
    extra: Any
    random: RandomState


class TrainingCheckpoint(TypedDict):
    """The whole file; the entries of the trainer's ordinary checkpoint stand beside this one.

    Attributes:
        training_state: The resume part.
    """

    training_state: TrainingState


def identity_of(config: object, version: int | str, device: torch.device | str, amp: object) -> Identity:
    """What is compared, of what a trainer was made with."""
    if type(version) not in (int, str):
        raise TypeError(f"version must be an int or a str, got {version!r}")
    return {
        "version": version,
        "config": signature_of(config, "config", frozenset({"load"})),
        "device": torch.device(device).type,
        "amp": signature_of(amp, "amp"),
    }


def write_checkpoint(
    path: str | PathLike[str],
    ordinary: Mapping[str, Any],
    identity: Identity,
    *,
    objects: dict[str, Any],
    loaders: dict[str, Any],
    extra: object,
    random: RandomState,
) -> None:
    """Writes the file atomically; the old one is there until the new one is whole."""
    state: TrainingState = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        **identity,
        "objects": objects,
        "loaders": loaders,
        "extra": extra,
        "random": random,
    }
    whole = {**ordinary, TRAINING_STATE: state}
    write_atomically(path, lambda file: write_sealed(file, whole))


def read_checkpoint(path: str | PathLike[str]) -> TrainingState:
    """The resume part of a file, whole, on the CPU. No code in the file is run.

    Raises:
        OSError: it is not there, or cannot be read.
        TrainingResumeCheckpointFormatError: it is not such a file, or it is damaged.
        TrainingResumeVersionMismatchError: a newer version of this library wrote it.
    """
    path = os.fspath(path)
    remedy = "Resume from what pause() wrote"
    try:
        whole = read_sealed(path, unsealed=True, map_location="cpu")
    except (OSError, MemoryError):
        raise
    except CheckpointFileError as error:
        raise TrainingResumeCheckpointFormatError(f"{path}: {error.detail}", remedy=error.remedy) from error
    except Exception as error:  # whatever torch and pickle make of other bytes
        detail = f"{path}: torch.load(weights_only=True) cannot read it ({why_unreadable(error)})"
        raise TrainingResumeCheckpointFormatError(detail, remedy=remedy) from error
    state = whole.get(TRAINING_STATE) if isinstance(whole, Mapping) else None
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise TrainingResumeCheckpointFormatError(f"{path} has no resume part under {TRAINING_STATE!r}", remedy=remedy)
    version = state.get("format_version")
    if type(version) is int and version > _FORMAT_VERSION:
        raise TrainingResumeVersionMismatchError(
            "its structure is newer", expected=f"at most {_FORMAT_VERSION}", found=version, remedy="Update stateful_pipes"
        )
    wrong = [name for name, kind in _FIELDS.items() if name not in state or not isinstance(state[name], kind)]
    wrong += [name for name in ("config", "amp") if name not in wrong and not _is_signature(state[name])]
    if type(version) is not int or version != _FORMAT_VERSION or wrong:
        raise TrainingResumeCheckpointFormatError(f"damaged entries in the resume part: {', '.join(wrong) or 'format_version'}")
    return cast(TrainingState, state)


def check_identity(state: TrainingState, identity: Identity) -> None:
    """Compares who saved with who resumes.

    Raises:
        TrainingResumeVersionMismatchError, TrainingResumeConfigMismatchError, TrainingResumeDeviceMismatchError,
        TrainingResumeAMPMismatchError: another one saved.
    """
    if state["version"] != identity["version"]:
        raise TrainingResumeVersionMismatchError(
            expected=identity["version"], found=state["version"], remedy="Resume it with the trainer that paused it"
        )
    if wrong := differences(state["config"], identity["config"]):
        raise TrainingResumeConfigMismatchError(differences=wrong)
    if state["device"] != identity["device"]:
        raise TrainingResumeDeviceMismatchError(expected=identity["device"], found=state["device"])
    if wrong := differences(state["amp"], identity["amp"]):
        raise TrainingResumeAMPMismatchError(differences=wrong)


def _is_signature(value: Mapping[Any, object]) -> bool:
    return all(isinstance(path, str) and isinstance(text, str) for path, text in value.items())
