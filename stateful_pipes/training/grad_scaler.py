"""A GradScaler after a failed step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

__all__ = ["restore_grad_scaler_state"]

_ENTRIES: Final = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})


def restore_grad_scaler_state(
    scaler: torch.amp.GradScaler, state: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Loads a scaler's state and clears what a step that failed between `unscale_` and `update` left behind.

    That is the scaler's record of each optimizer's stage, because of which the next `unscale_` or `step` would be refused,
    and the attributes `grad_scale` and `found_inf` that it lends a fused optimizer for its step, and which would scale the
    next one. `load_state_dict` alone leaves both.

    Args:
        scaler: Of torch.amp.
        state: Its `state_dict()`: empty if it is not enabled.
        optimizers: All that it steps.

    Raises:
        ValueError: the state is not such a scaler's; nothing is changed.
    """
    optimizers = list(optimizers)
    expected = _ENTRIES if scaler.is_enabled() else frozenset()
    if not isinstance(state, Mapping) or not expected <= set(state):
        raise ValueError(f"the state of a GradScaler must have the entries {sorted(expected)}, got {state!r:.200}")
    scaler.load_state_dict(dict(state))
    scaler._per_optimizer_states.clear()
    for optimizer in optimizers:
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)
