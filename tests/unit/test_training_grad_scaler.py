"""A GradScaler that is restored after a failed step goes on as a fresh one would."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training import restore_grad_scaler_state


class Failure(Exception):
    pass


class Setup:
    """A model of which the loss is scaled."""

    def __init__(self, *, fused=False, enabled=True, device="cpu", optimizers=1):
        self.enabled, self.device = enabled, device
        self.models = [self.model(seed) for seed in range(optimizers)]
        make = torch.optim.Adam if fused else torch.optim.SGD
        self.optimizers = [make(model.parameters(), lr=0.1, fused=fused) for model in self.models]
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3, enabled=enabled)

    def model(self, seed):
        model = torch.nn.Linear(3, 2).to(self.device)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
        return model

    def backward(self, number):
        batch = torch.rand(4, 3, generator=torch.Generator().manual_seed(number)).to(self.device)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(self.device, torch.bfloat16, enabled=self.enabled):
                loss = model(batch).float().square().mean()
            self.scaler.scale(loss * (math.inf if number == 4 else 1)).backward()

    def step(self, number, fail=""):
        self.backward(number)
        for optimizer in self.optimizers:
            if fail != "in step before unscale_":
                self.scaler.unscale_(optimizer)
                raise_if(fail == "after unscale_")
            with failing(optimizer, fail.startswith("in step")):
                self.scaler.step(optimizer)
            raise_if(fail == "after step")
        raise_if(fail == "before update")
        self.scaler.update()

    def state(self):
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state):
        for name in ("models", "optimizers"):
            for one, its_own in zip(getattr(self, name), state[name], strict=True):
                one.load_state_dict(its_own)
        restore_grad_scaler_state(self.scaler, state["scaler"], self.optimizers)


class failing:
    """An optimizer whose step fails before it has done anything."""

    def __init__(self, optimizer, wanted):
        self.optimizer, self.wanted = optimizer, wanted

    def __enter__(self):
        if self.wanted:
            self.handle = self.optimizer.register_step_pre_hook(lambda *_: raise_if(True))

    def __exit__(self, *_):
        if self.wanted:
            self.handle.remove()


def raise_if(wanted):
    if wanted:
        raise Failure


def copied(state):
    return torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, state)


def equal(one, other):
    mismatch = first_mismatch(one.state(), other.state())
    assert mismatch is None, str(mismatch)


STAGES = ["after unscale_", "in step", "in step before unscale_", "after step", "before update"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_after_a_failure_at_each_stage(stage, fused, optimizers):
    failed, fresh = (Setup(fused=fused, optimizers=optimizers) for _ in range(2))
    for number in range(2):
        failed.step(number)
    state = copied(failed.state())
    with pytest.raises(Failure):
        failed.step(2, stage)
    failed.restore(copied(state))
    fresh.restore(copied(state))
    equal(failed, fresh)
    for number in range(2, 8):
        failed.step(number)
        fresh.step(number)
        equal(failed, fresh)
    assert len({failed.scaler.get_scale(), 2.0**10}) == 2, "it has grown and backed off"


@pytest.mark.parametrize("stage", ["after unscale_", "before update"])
def test_load_state_dict_alone_does_not_do(stage):
    setup = Setup()
    setup.step(0)
    state = setup.state()["scaler"]
    with pytest.raises(Failure):
        setup.step(1, stage)
    setup.scaler.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) (has already been called|is being called after step)"):
        setup.step(1)


def test_what_a_fused_step_leaves_behind():
    setup = Setup(fused=True)
    setup.step(0)
    state = setup.state()["scaler"]
    with pytest.raises(Failure):
        setup.step(1, "in step before unscale_")
    assert {"grad_scale", "found_inf"} <= vars(setup.optimizers[0]).keys()
    restore_grad_scaler_state(setup.scaler, state, setup.optimizers)
    assert not {"grad_scale", "found_inf"} & vars(setup.optimizers[0]).keys()


def test_only_these_attributes_are_cleared():
    setup = Setup(optimizers=2)
    first, second = setup.optimizers
    first.grad_scale, first.found_inf, first.mine = torch.tensor(8.0), torch.tensor(1.0), "kept"
    second.found_inf = None
    before = [set(vars(optimizer)) for optimizer in setup.optimizers]
    restore_grad_scaler_state(setup.scaler, setup.scaler.state_dict(), iter(setup.optimizers))
    after = [set(vars(optimizer)) for optimizer in setup.optimizers]
    assert after == [before[0] - {"grad_scale", "found_inf"}, before[1] - {"found_inf"}]
    assert first.mine == "kept"
    assert first.param_groups[0]["lr"] == 0.1


def test_records_are_cleared_and_made_again():
    setup = Setup()
    setup.backward(0)
    setup.scaler.unscale_(setup.optimizers[0])
    restore_grad_scaler_state(setup.scaler, setup.scaler.state_dict(), [])
    assert not setup.scaler._per_optimizer_states
    setup.step(0)


@pytest.mark.parametrize("used", [False, True], ids=["not used yet", "used"])
def test_the_state_is_loaded(used):
    setup = Setup()
    if used:
        setup.step(0)
    state = {"scale": 32.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
    restore_grad_scaler_state(setup.scaler, state, setup.optimizers)
    assert setup.scaler.state_dict() == state
    setup.step(1)
    assert setup.scaler.state_dict() == {**state, "_growth_tracker": 6}


def test_entries_of_a_newer_torch_are_passed_on():
    setup = Setup()
    restore_grad_scaler_state(setup.scaler, {**setup.scaler.state_dict(), "more": 1}, setup.optimizers)


def test_a_scaler_that_is_not_enabled():
    setup = Setup(enabled=False)
    setup.step(0)
    setup.optimizers[0].found_inf = torch.tensor(1.0)
    restore_grad_scaler_state(setup.scaler, setup.scaler.state_dict(), setup.optimizers)
    assert not hasattr(setup.optimizers[0], "found_inf")
    setup.step(1)


def used(enabled=True):
    """With a record and attributes, which a refusal leaves."""
    setup = Setup(enabled=enabled)
    setup.step(0)
    setup.backward(1)
    setup.scaler.unscale_(setup.optimizers[0])
    setup.optimizers[0].grad_scale = torch.tensor(8.0)
    return setup


def refused(setup, state):
    attributes = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval", "_init_growth_tracker")

    def seen():
        records = {key: str(one) for key, one in getattr(setup.scaler, "_per_optimizer_states", {}).items()}
        return setup.scaler.state_dict(), [getattr(setup.scaler, name, None) for name in attributes], records

    before = seen()
    with pytest.raises(ValueError, match="the state of a GradScaler") as raised:
        restore_grad_scaler_state(setup.scaler, state, setup.optimizers)
    assert seen() == before
    assert setup.optimizers[0].grad_scale.item() == 8
    return str(raised.value)


NAMES = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_entries(name):
    setup = used()
    state = {"scale": 32.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
    for wrong in (None, "2.0", [], {}, True, float("nan"), 2j, object(), torch.ones(2), 10**400):
        assert name in refused(setup, {**state, name: wrong})
    assert name in refused(setup, {key: one for key, one in state.items() if key != name})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scale", 1e300),
        ("scale", math.inf),
        ("scale", -1.0),
        ("_growth_tracker", 2**31),
        ("_growth_tracker", 1.0),
        ("growth_interval", 2.5),
    ],
)
def test_numbers_that_do_not_fit(name, wrong):
    setup = used()
    assert name in refused(setup, {**setup.scaler.state_dict(), name: wrong})


@pytest.mark.parametrize("wrong", [None, [], "abc", 3, {}, {"scale": 1.0}])
def test_something_else(wrong):
    refused(used(), wrong)


def test_another_setting():
    refused(used(enabled=False), used().scaler.state_dict())
    refused(used(), used(enabled=False).scaler.state_dict())


def test_settings_that_torch_takes():
    for settings in ({"growth_interval": -1}, {"growth_interval": 10**10}, {"init_scale": 1}, {"init_scale": np.float64(2)}):
        scaler = torch.amp.GradScaler("cpu", **settings)
        restore_grad_scaler_state(scaler, scaler.state_dict(), [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fused_step_that_fails_on_a_cuda_device():
    failed, fresh = (Setup(fused=True, device="cuda") for _ in range(2))
    failed.step(0)
    state = copied(failed.state())
    failed.backward(1)
    moments = failed.optimizers[0].state[failed.models[0].weight]
    moments["exp_avg"] = moments["exp_avg"].double()  # which the kernel refuses
    with pytest.raises(RuntimeError):
        failed.scaler.step(failed.optimizers[0])
    assert hasattr(failed.optimizers[0], "grad_scale")
    failed.restore(copied(state))
    fresh.restore(copied(state))
    assert not hasattr(failed.optimizers[0], "grad_scale")
    for number in range(1, 6):
        failed.step(number)
        fresh.step(number)
        equal(failed, fresh)
