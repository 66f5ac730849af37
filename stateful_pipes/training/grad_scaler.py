"""A GradScaler after a failed step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final

import torch

__all__ = ["check_grad_scaler_state", "restore_grad_scaler_state"]

_ENTRIES: Final[Mapping[str, tuple[type, float, float]]] = {
    "scale": (Real, 0, torch.finfo(torch.float32).max),
    "growth_factor": (Real, 0, sys.float_info.max),
    "backoff_factor": (Real, 0, sys.float_info.max),
    "growth_interval": (Integral, -(2**63), 2**63 - 1),
    "_growth_tracker": (Integral, 0, 2**31 - 1),
}
"""Of what type they are, and from what to what."""


def restore_grad_scaler_state(
    scaler: torch.amp.GradScaler, state: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Loads a scaler's state and clears what a step that failed between `unscale_` and `update` left behind.

    That is the scaler's record of each optimizer's stage, because of which the next `unscale_` or `step` would be refused,
    and the attributes `grad_scale` and `found_inf` that it lends a fused optimizer for its step, and which would scale the
    next one. `load_state_dict` alone leaves both.

    Args:
        scaler: Of torch.amp.
        state: Its `state_dict()`: empty if, and only if, it is not enabled.
        optimizers: All that it steps.

    Raises:
        ValueError: the state is not such a scaler's; nothing is changed.
    """
    optimizers = list(optimizers)
    check_grad_scaler_state(scaler, state)
    scaler.load_state_dict(dict(state))
    if scaler.is_enabled():  # else it has no records
        scaler._per_optimizer_states.clear()
    for optimizer in optimizers:
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)


def check_grad_scaler_state(scaler: torch.amp.GradScaler, state: Any) -> None:
    """Raises ValueError where `restore_grad_scaler_state` would: torch's load sets what it can before it comes upon the rest."""
    expected = _ENTRIES if scaler.is_enabled() else {}
    if not isinstance(state, Mapping) or not expected.keys() <= state.keys() or (state and not expected):
        raise ValueError(f"the state of a GradScaler must have the entries {sorted(expected)}, got {state!r:.200}")
    for name, (kind, least, most) in expected.items():
        value = state[name]
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not (is_kind and least <= value <= most):
            raise ValueError(f"the state of a GradScaler has {name} {value!r:.200}")
