"""Pause and resume for a trainer of any class."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any, Final, Protocol

import torch

from stateful_pipes.agreement import check_agreement, failing_together
from stateful_pipes.errors import TrainingResumeCheckpointFormatError, TrainingResumeObjectsMismatchError
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.training.checkpoint import TRAINING_STATE, Identity, TrainingState, check, identity_of, read, write
from stateful_pipes.training.gate import GATE, Gate, gate_of
from stateful_pipes.training.grad_scaler import restore_grad_scaler_state
from stateful_pipes.training.random_state import check_device, random_state, restore_random_state
from stateful_pipes.training.snapshot import cpu_state

__all__ = ["TrainingResumeMixin"]


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a scaler, a loader..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class TrainingResumeMixin:
    """Adds `pause` and `resume` to a trainer: what it goes on with after them is bit for bit what it would have done anyway.

    The trainer calls `_initialize_training_resume` in its constructor, decorates its outermost step with `@training_step` and
    every other method that changes what is saved with `@serialized_training`, and defines the hooks below. A step is to read
    its batch itself, so that no batch is consumed and not yet trained with between two steps.

    What is saved: `_ordinary_checkpoint()`, and under the key "training_state" the states of the objects and loaders, the
    extra state, and the generators of Python, NumPy, torch and the trainer's CUDA device (see `TrainingCheckpoint`).
    Gradients are not: a resume clears them, and a trainer that accumulates some over steps has them in its extra state.

    Under torch.distributed each rank pauses to a file of its own, since their generators differ, and all ranks that share a
    loader resume together: where one refuses its file, all do.
    """

    _training_identity: Identity
    _training_device: torch.device | None

    def _initialize_training_resume(self, config: object, *, version: int | str, device: torch.device | str, amp: object) -> None:
        """Records what a resume compares; the configuration is looked at now, and never again.

        Args:
            config: What the training is shaped by: see `signature_of` for what is compared. An entry "load" at its first level
                is left out. A generator in it is compared by its state.
            version: Of the trainer; to be changed when what it saves changes its meaning.
            device: What it trains on. The kind is compared. Of a CUDA device the generator is saved, too.
            amp: Its setting of automatic mixed precision: a bool, a dtype, a mapping...

        Raises:
            ValueError: a kind of device whose generator is not known here.
        """
        self._training_device = check_device(device)
        self._training_identity = identity_of(config, version, device, amp)
        setattr(self, GATE, Gate())

    # The hooks.

    def _resume_objects(self) -> Mapping[str, Stateful]:
        """Model, optimizer, scheduler, GradScaler, samplers of your own...: all that has a `state_dict`, by name."""
        raise _missing(self, "_resume_objects")

    def _resume_loaders(self) -> Mapping[str, Stateful]:
        """All loaders, by name."""
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
        with gate_of(self).pausing(), _generators_kept(self._training_device):
            random = random_state(self._training_device)
            self._validate_resume()
            ordinary = _ordinary_of(self)
            objects = _named("_resume_objects", self._resume_objects())
            loaders = _named("_resume_loaders", self._resume_loaders())
            shared = _shared_of(self, ordinary, objects)
            parts = {
                "objects": {name: one.state_dict() for name, one in objects.items() if name not in shared},
                "loaders": {name: one.state_dict() for name, one in loaders.items()},
                "extra": self._resume_extra_state(),
            }
            ordinary, parts = cpu_state(ordinary), cpu_state(parts)  # two copies: what is not declared is not shared
            parts["objects"] = {name: ordinary[name] if name in shared else parts["objects"][name] for name in objects}
            _check_states("objects", parts["objects"], objects)  # a file that no resume would take is no use
            _check_states("loaders", parts["loaders"], loaders)
            write(path, ordinary, self._training_identity, random=random, **parts)

    def resume(self, path: str | PathLike[str]) -> None:
        """Puts the training back to where `pause` saved it, and unlocks it.

        All is validated before anything is changed, but for what only an object of another library can tell of its own
        state. Then objects, loaders and extra state are loaded, iterators made anew, and the generators set last. Gradients, and
        what a failed AMP step left in a GradScaler and its optimizers, are cleared. Where that fails, the trainer is
        locked until a resume succeeds.

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
            with _generators_kept(self._training_device):
                loaders = _named("_resume_loaders", self._resume_loaders())
                pipelines = {name: one.pipeline for name, one in loaders.items() if isinstance(one, StatefulDataLoader)}
                with failing_together(pipelines.values()):
                    objects = _named("_resume_objects", self._resume_objects())
                    state = read(path)
                    check(state, self._training_identity, self._training_device)
                    self._validate_resume()
                    _check_states("objects", state["objects"], objects)
                    _check_states("loaders", state["loaders"], loaders)
                for name, pipeline in pipelines.items():
                    check_agreement(pipeline, state["loaders"][name])
            parts = [partial(_restore_objects, objects, state)]
            parts += [partial(loader.load_state_dict, state["loaders"][name]) for name, loader in loaders.items()]
            parts += [partial(self._load_resume_extra_state, state["extra"]), partial(self._rebuild_resume_iterators)]
            with gate.restoring():
                for restore in parts:  # one by one: loaders of several ranks meet in between
                    with failing_together(pipelines.values()):
                        restore()
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


@contextmanager
def _generators_kept(device: torch.device | None) -> Iterator[None]:
    """Hooks may draw: that is not to be seen in the training."""
    before = random_state(device)
    try:
        yield
    finally:
        restore_random_state(before, device)


def _named(hook: str, found: Any) -> dict[str, Any]:
    named = dict(found) if isinstance(found, Mapping) else {str(number): one for number, one in enumerate(found)}
    for name, one in named.items():
        if not isinstance(name, str):
            raise TypeError(f"{hook}() must name each with a string, got {name!r}")
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(f"{hook}()[{name!r}] must have state_dict and load_state_dict, got {one!r}")
    return named


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


def _check_states(what: str, states: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    if states.keys() != current.keys():
        raise TrainingResumeObjectsMismatchError(what, expected=sorted(current), found=sorted(map(str, states)))
    for name, one in current.items():
        validate = getattr(one, "validate_state_dict", None)
        if validate is None:
            continue
        if isinstance(states[name], Mapping) and not states[name]:
            raise TrainingResumeCheckpointFormatError(f"the state of {name!r} in {what} is empty")
        validate(states[name])


def _restore_objects(objects: Mapping[str, Any], state: TrainingState) -> None:
    optimizers = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
    for name, one in objects.items():
        if isinstance(one, torch.amp.GradScaler):
            restore_grad_scaler_state(one, state["objects"][name], optimizers)
        else:
            one.load_state_dict(state["objects"][name])
    parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    for module in objects.values():
        if isinstance(module, torch.nn.Module):
            parameters += module.parameters()
    for parameter in parameters:
        parameter.grad = None
