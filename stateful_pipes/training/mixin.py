"""Pause and resume for a trainer of any class."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from os import PathLike
from typing import Any, Final

import torch

from stateful_pipes.agreement import check_agreement, failing_together
from stateful_pipes.training.checkpoint import (
    TRAINING_STATE,
    Identity,
    check_identity,
    identity_of,
    read_checkpoint,
    write_checkpoint,
)
from stateful_pipes.training.gate import Gate, gate_of
from stateful_pipes.training.objects import (
    Stateful,
    check_states,
    damage_told,
    loaders_in,
    named_objects,
    restore_objects,
    states_in,
    while_loading,
)
from stateful_pipes.training.random_state import (
    check_device,
    check_generators,
    check_random_state,
    generators_kept,
    random_state,
    restore_random_state,
)
from stateful_pipes.training.snapshot import cpu_state

__all__ = ["TrainingResumeMixin"]


class TrainingResumeMixin:
    """Adds `pause` and `resume` to a trainer: what it goes on with after them is bit for bit what it would have done anyway.

    The trainer calls `_initialize_training_resume` in its constructor, decorates its outermost step with `@training_step` and
    every other method that changes what is saved with `@serialized_training`, and defines six hooks: `_resume_objects()`,
    `_resume_loaders()`, `_resume_extra_state()`, `_load_resume_extra_state(state)`, `_rebuild_resume_iterators()` and
    `_validate_resume()`; and if it has an ordinary checkpoint, `_ordinary_checkpoint()` and `_resume_shared_keys()`.

    * To save every so often and go on: `trainer.pause(path)`, then `trainer.resume(path)`.
    * A step reads its batch itself, or the loop hands it in and pauses only after the step: no batch may be consumed and not
      yet trained with. On a thread that is not the main one, a loader needs workers for that.
    * A validation loader is one of the loaders, too; what is validated between two steps must not be paused within.
    * With an epoch's last batch the loader's state is the next epoch's start. What is done at an epoch's end belongs into
      that step: `if self.epoch < self.loader.position.epoch: ...`.
    * What is saved: `_ordinary_checkpoint()`, and under the key "training_state" the states of objects and loaders, the extra
      state, and the generators of Python, NumPy, torch and the trainer's CUDA device (see `TrainingCheckpoint`).
    * What is not: gradients, which a resume clears; `train()` or `eval()`, `requires_grad` and buffers that are not persistent,
      where a training changes them. Those belong to the extra state; gradients, too, where steps accumulate them, or where
      `zero_grad(set_to_none=False)` makes a difference.
    * Objects are loaded in their order: one that adds parameter groups to an optimizer comes before it.
    * Hooks run while all other threads wait: one that waits for a thread that calls such a method waits for ever.
    * A signal may come in the middle of a serialized method: let its handler set a flag, and pause after the step.

    Under torch.distributed each rank pauses to a file of its own, since their generators differ, and by itself: pause to a new
    folder each time, and keep the one before until all ranks have. All ranks that share a loader resume together: where one
    refuses its file, all do.
    """

    _training_identity: Identity
    _training_device: torch.device | None
    _training_gate: Gate

    def _initialize_training_resume(self, config: object, *, version: int | str, device: torch.device | str, amp: object) -> None:
        """Records what a resume compares; the configuration is looked at now, and never again.

        Args:
            config: What the training is shaped by: a mapping, a dataclass, a namespace... Numbers and strings are compared with
                their types, mappings with the order of their keys, tensors and arrays by content, generators by state,
                functions and classes by name, objects by class and public attributes. Leave out what may change: the
                number of workers, folders, how long to train. An entry "load" at its first level, which says where to
                resume from, is not looked at.
            version: Of the trainer; to be changed when what it saves changes its meaning.
            device: What it trains on. The kind is compared. Of a CUDA device the generator is saved, too.
            amp: Its setting of automatic mixed precision: a bool, a dtype, a mapping...

        Raises:
            ValueError: a kind of device whose generator is not known here.
        """
        self._training_device = check_device(device)
        self._training_identity = identity_of(config, version, device, amp)
        self._training_gate = Gate()

    # The hooks.

    def _resume_objects(self) -> Mapping[str, Stateful]:
        """Model, optimizer, scheduler, GradScaler, samplers...: all that has `state_dict` and `load_state_dict`, by name.

        One that has `validate_state_dict(state_dict)`, too, is asked by it before anything is loaded.
        """
        raise _missing(self, "_resume_objects")

    def _resume_loaders(self) -> Mapping[str, Stateful]:
        """All loaders, by name; as the objects, but loaded after them."""
        raise _missing(self, "_resume_loaders")

    def _resume_extra_state(self) -> Any:
        """What no object and no loader knows: counters, an image pool, which loader is read, accumulated gradients...

        Of tensors, numbers, strings and containers of these, as `torch.load(weights_only=True)` takes.
        """
        raise _missing(self, "_resume_extra_state")

    def _load_resume_extra_state(self, state: Any) -> None:
        """Takes it back; its tensors are on the CPU."""
        raise _missing(self, "_load_resume_extra_state")

    def _rebuild_resume_iterators(self) -> None:
        """Makes the iterators over the loaders anew, which have just been loaded."""
        raise _missing(self, "_rebuild_resume_iterators")

    def _validate_resume(self) -> None:
        """Raises if the trainer, as it is set up, cannot be paused or resumed. Called before anything is saved or changed."""
        raise _missing(self, "_validate_resume")

    def _resume_shared_keys(self) -> Collection[str]:
        """Names under which the ordinary checkpoint and the objects hold the same state: it is taken and stored once.

        Not for one that the ordinary checkpoint holds in part only, or in another form. Equal names alone share nothing.
        """
        return ()

    def _ordinary_checkpoint(self) -> Mapping[str, Any]:
        """The checkpoint that the trainer writes anyway: its entries stand in the file as they are. By default there are none."""
        return {}

    # What it gives.

    def pause(self, path: str | PathLike[str]) -> None:
        """Saves the training as it stands after a completed step, in one file; from then on steps raise TrainingPausedError.

        A step that is under way in another thread is waited for. The file is written beside `path` and takes its place when it
        is whole. Where anything fails, the old file is still there, the trainer is not paused, and goes on as if
        nothing had been asked. The generators are left as they were.

        Cost: a copy of all states on the CPU, and the writing.

        Raises:
            TrainingStepIncompleteError: no step was completed yet, the last one failed, or one is under way in this thread.
            TrainingPausedError: it is paused already.
            TrainingResumeIncompleteError: a resume failed halfway.
            NotImplementedError: a hook is missing.
            NodeAttachedError: a sampler among the objects is a loader's, whose state holds it already.
            ValueError: a shared key is not in both, "training_state" is taken, or `torch.load(weights_only=True)` would
                refuse the state.
            OSError: it could not be written.
        """
        _require_hooks(self)
        with gate_of(self).pausing(), generators_kept(self._training_device):
            random = random_state(self._training_device)
            self._validate_resume()
            ordinary = _ordinary_of(self)
            objects = named_objects("_resume_objects", self._resume_objects())
            loaders = named_objects("_resume_loaders", self._resume_loaders())
            shared = _shared_of(self, ordinary, objects)
            parts = {
                "objects": {name: one.state_dict() for name, one in objects.items() if name not in shared},
                "loaders": {name: one.state_dict() for name, one in loaders.items()},
                "extra": self._resume_extra_state(),
            }
            ordinary, parts = cpu_state(ordinary), cpu_state(parts)  # two copies: what is not declared is not shared
            parts["objects"] = {name: ordinary[name] if name in shared else parts["objects"][name] for name in objects}
            check_states("objects", parts["objects"], objects)  # a file that no resume would take is no use
            check_states("loaders", parts["loaders"], loaders)
            write_checkpoint(path, ordinary, self._training_identity, random=random, **parts)

    def resume(self, path: str | PathLike[str]) -> None:
        """Puts the training back to where `pause` saved it, and unlocks it.

        All that can be is validated before anything is changed; torch's models and optimizers tell only as they load whether
        a state is theirs. Then objects, loaders and extra state are loaded, iterators made anew, and the generators set last.
        Gradients, and what a failed AMP step left in a GradScaler and its optimizers, are cleared. Where that fails, the
        trainer is locked until a resume succeeds.

        Raises:
            OSError: the file is not there, or cannot be read.
            TrainingResumeCheckpointFormatError: it is not what `pause` wrote, or it is damaged.
            TrainingResumeVersionMismatchError: another version of the trainer, or a newer one of this library, wrote it.
            TrainingResumeConfigMismatchError, TrainingResumeDeviceMismatchError, TrainingResumeAMPMismatchError,
            TrainingResumeObjectsMismatchError: it is of another training.
            StateMismatchError, StateVersionError, ResumableSamplerGeneratorError: a loader or sampler refuses its state, or
                one on another rank does.
            TrainingStepIncompleteError: called within a step.
            NotImplementedError: a hook is missing.
        """
        _require_hooks(self)
        gate = gate_of(self)
        with gate.resuming():
            # Of a device that is not there nothing can be kept; that it is not there is told below.
            with generators_kept(self._training_device if torch.cuda.is_available() else None):
                loaders = named_objects("_resume_loaders", self._resume_loaders())
                held = [one for loader in loaders.values() for one in loaders_in(loader)]
                together = partial(failing_together, [one.pipeline for one in held])
                with together():
                    objects = named_objects("_resume_objects", self._resume_objects())
                    state = read_checkpoint(path)
                    check_identity(state, self._training_identity)
                    check_generators(self._training_device)
                    with damage_told("the generators"):
                        check_random_state(state["random"], self._training_device)
                    self._validate_resume()
                    check_states("objects", state["objects"], objects)
                    check_states("loaders", state["loaders"], loaders)
                for name, loader in loaders.items():
                    for one, part in zip(loaders_in(loader), states_in(loader, state["loaders"][name]), strict=True):
                        check_agreement(one.pipeline, part)
            # Not in inference mode: what is made in that cannot be trained with.
            with gate.restoring(), torch.inference_mode(False):
                with together():
                    restore_objects(state["objects"], objects)
                for name, loader in loaders.items():
                    # Each alone, since the ranks meet in its load.
                    with together(), while_loading(f"_resume_loaders()[{name!r}]"):
                        loader.load_state_dict(state["loaders"][name])
                with together(), while_loading("the extra state or making iterators"):
                    self._load_resume_extra_state(state["extra"])
                    self._rebuild_resume_iterators()
                restore_random_state(state["random"], self._training_device)


_HOOKS: Final = (
    "_resume_objects",
    "_resume_loaders",
    "_resume_extra_state",
    "_load_resume_extra_state",
    "_rebuild_resume_iterators",
    "_validate_resume",
)


def _require_hooks(trainer: TrainingResumeMixin) -> None:
    for hook in _HOOKS:
        if getattr(type(trainer), hook) is getattr(TrainingResumeMixin, hook) and hook not in vars(trainer):
            raise _missing(trainer, hook)


def _missing(trainer: TrainingResumeMixin, hook: str) -> NotImplementedError:
    return NotImplementedError(f"{type(trainer).__name__} has to define {hook}()")


def _ordinary_of(trainer: TrainingResumeMixin) -> dict[str, Any]:
    found = trainer._ordinary_checkpoint()
    if not isinstance(found, Mapping):
        raise TypeError(f"_ordinary_checkpoint() must return a mapping, got {found!r:.200}")
    if TRAINING_STATE in found:
        raise ValueError(f"_ordinary_checkpoint() must not have the key {TRAINING_STATE!r}: the resume part stands there")
    return dict(found)


def _shared_of(trainer: TrainingResumeMixin, ordinary: Mapping[str, Any], objects: Mapping[str, Any]) -> frozenset[str]:
    declared = trainer._resume_shared_keys()
    shared = frozenset((declared,) if isinstance(declared, str) else declared)
    for name in sorted(shared, key=str):
        for hook, found in (("_ordinary_checkpoint", ordinary), ("_resume_objects", objects)):
            if name not in found:
                raise ValueError(f"_resume_shared_keys() declares {name!r}, which {hook}() does not have")
    return shared
