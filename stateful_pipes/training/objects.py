"""A trainer's objects and loaders: named, validated, restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from stateful_pipes.caught import add_note
from stateful_pipes.errors import TrainingResumeCheckpointFormatError, TrainingResumeObjectsMismatchError
from stateful_pipes.loader import StatefulDataLoader
from stateful_pipes.multi_pipeline import MultiPipelineLoader
from stateful_pipes.training.grad_scaler import check_grad_scaler_state, restore_grad_scaler_state

__all__ = [
    "Stateful",
    "check_states",
    "damage_told",
    "loaders_in",
    "named_objects",
    "restore_objects",
    "states_in",
    "while_loading",
]


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a scaler, a loader...

    One that has a method `validate_state_dict(state_dict)` as well, which raises where `load_state_dict` would and changes
    nothing, is asked before anything is loaded.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def named_objects(hook: str, found: Any) -> dict[str, Any]:
    """What a hook returned, by name; those of a sequence are called by their numbers.

    Raises:
        TypeError: something in it is no object with a state.
    """
    if not isinstance(found, (Mapping, Sequence)):
        raise TypeError(f"{hook}() must return a mapping, got {type(found).__name__}")
    result = dict(found) if isinstance(found, Mapping) else {str(number): one for number, one in enumerate(found)}
    for name, one in result.items():
        if not isinstance(name, str):
            raise TypeError(f"{hook}() must name each with a string, got {name!r}")
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(f"{hook}()[{name!r}] must have state_dict and load_state_dict, got {type(one).__name__}")
    return result


def loaders_in(loader: Any) -> list[StatefulDataLoader[Any]]:
    """The loaders of this library that one of a trainer's is, or is made of; none if it is somebody else's."""
    if isinstance(loader, MultiPipelineLoader):
        return loader.loaders
    return [loader] if isinstance(loader, StatefulDataLoader) else []


def states_in(loader: Any, state: Any) -> list[Any]:
    """Their states within its state."""
    return loader.states_of(state) if isinstance(loader, MultiPipelineLoader) else [state] * len(loaders_in(loader))


def check_states(what: str, states: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises if states are not these objects', or not whole, as far as can be told without loading them."""
    if states.keys() != current.keys():
        raise TrainingResumeObjectsMismatchError(what, expected=sorted(current), found=sorted(map(str, states)))
    for name, one in current.items():
        state = states[name]
        if loaders_in(one) and isinstance(state, Mapping) and not state:  # at which a load does nothing
            raise TrainingResumeCheckpointFormatError(f"the state of {name!r} in {what} is empty")
        if isinstance(one, torch.amp.GradScaler):
            with damage_told(f"{name!r} in {what}"):
                check_grad_scaler_state(one, state)
        elif hasattr(one, "validate_state_dict"):
            one.validate_state_dict(state)


@contextmanager
def damage_told(place: str) -> Iterator[None]:
    """Where a part's own check finds it damaged, so is the checkpoint."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise TrainingResumeCheckpointFormatError(f"{place}: {error}") from error


@contextmanager
def while_loading(place: str) -> Iterator[None]:
    """An error that comes from within says where, and what has come of it."""
    try:
        yield
    except Exception as error:
        add_note(error, f"while loading {place}; the trainer is locked until a resume succeeds")
        raise


def restore_objects(states: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Loads each, in their order, after it has cleared all gradients: an object may bring its own."""
    optimizers = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
    modules = [one for one in objects.values() if isinstance(one, torch.nn.Module)]
    parameters = [one for optimizer in optimizers for one in _parameters(optimizer)]
    for parameter in [*parameters, *(one for module in modules for one in module.parameters())]:
        parameter.grad = None
    for name, one in objects.items():
        state = states[name]
        with while_loading(f"_resume_objects()[{name!r}]"):
            if isinstance(one, torch.amp.GradScaler):
                restore_grad_scaler_state(one, state, optimizers)
            else:
                one.load_state_dict(state)
            if isinstance(one, torch.optim.Optimizer) and isinstance(state, Mapping):
                _restore_dtypes(one, state)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Puts back what torch's load has cast to the dtype of its parameter, which it need not have had."""
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        pairs = list(zip(_parameters(optimizer), numbers, strict=True))
    except (KeyError, TypeError, ValueError):  # of a class with another structure, which has taken it
        return
    for parameter, number in pairs:
        held = optimizer.state.get(parameter, {})
        for key, saved in state["state"].get(number, {}).items():
            found = held.get(key)
            if isinstance(saved, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype != saved.dtype:
                held[key] = saved.to(found.device, copy=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
