"""A trainer's objects: what torch's own loads would lose, and in which order they are loaded."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from stateful_pipes import RandomSampler, StatefulDataLoader
from stateful_pipes.errors import (
    StateMismatchError,
    TrainingResumeCheckpointFormatError,
    TrainingResumeDeviceMismatchError,
    TrainingResumeObjectsMismatchError,
)
from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training.objects import check_states, named_objects, restore_objects
from tests.unit.trainers import Trainer, look, paused


class Held:
    """An object with any state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Gradients(Held):
    """An object that brings gradients."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return [one.grad.clone() for one in self.model.parameters()]

    def load_state_dict(self, state):
        for one, gradient in zip(self.model.parameters(), state, strict=True):
            one.grad = gradient


class Masters(torch.optim.SGD):
    """Keeps a copy in full precision of parameters that have less."""

    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                master = self.state[one].setdefault("master", one.detach().float())
                master.sub_(group["lr"] * one.grad.float())
                one.data.copy_(master)


OPTIMIZERS = {
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 1e-3),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-3, amsgrad=True),
    "Masters": lambda parameters: Masters(parameters, 1e-3),
}


def stepped(make, dtype, steps):
    """A model and its optimizer after some steps."""
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(3, 2).to(dtype)
    for one in model.parameters():
        one.data.copy_(torch.randn(one.shape, generator=generator))
    optimizer = make(model.parameters())
    for _ in range(steps):
        for one in model.parameters():
            one.grad = torch.randn(one.shape, generator=generator).to(dtype)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def states_of(objects):
    return copy.deepcopy({name: one.state_dict() for name, one in objects.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_an_optimizer_holds_keeps_its_dtype(kind, dtype):
    saved = states_of(stepped(OPTIMIZERS[kind], dtype, 4))
    resumed = stepped(OPTIMIZERS[kind], dtype, 1)
    restore_objects(saved, resumed)
    assert first_mismatch(saved, states_of(resumed)) is None


def test_what_is_put_back_is_the_optimizer_s_own():
    saved = states_of(stepped(OPTIMIZERS["Masters"], torch.bfloat16, 1))
    resumed = stepped(OPTIMIZERS["Masters"], torch.bfloat16, 1)
    restore_objects(saved, resumed)
    before = copy.deepcopy(saved)
    for one in resumed["model"].parameters():
        one.grad = torch.ones_like(one)
    resumed["optimizer"].step()
    assert first_mismatch(before, saved) is None


def test_an_optimizer_with_a_structure_of_its_own():
    class Own(torch.optim.SGD):
        def state_dict(self):
            return {"lr": self.param_groups[0]["lr"]}

        def load_state_dict(self, state):
            self.param_groups[0]["lr"] = state["lr"]

    optimizer = Own([torch.zeros(1, requires_grad=True)], 1.0)
    restore_objects({"optimizer": {"lr": 0.5}}, {"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("order", [["model", "optimizer", "gradients"], ["gradients", "optimizer", "model"]])
def test_gradients_are_cleared_and_an_object_may_bring_its_own(order):
    objects = stepped(OPTIMIZERS["Adam"], torch.float32, 1)
    saved = states_of(objects)
    restore_objects(saved, objects)
    assert all(one.grad is None for one in objects["model"].parameters())
    objects["gradients"] = Gradients(objects["model"])
    saved["gradients"] = [torch.full_like(one, 7) for one in objects["model"].parameters()]
    restore_objects(saved, {name: objects[name] for name in order})
    assert all((one.grad == 7).all() for one in objects["model"].parameters())


def test_they_are_loaded_in_their_order():
    """One that unfreezes, say, comes before the optimizer to which it adds parameters."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], 0.1, momentum=0.9)

    class Unfrozen(Held):
        def load_state_dict(self, state):
            if state and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [model.bias]})

    grown = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], 0.1, momentum=0.9)
    restore_objects({"unfrozen": True, "optimizer": grown.state_dict()}, {"unfrozen": Unfrozen(), "optimizer": optimizer})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("state", [{}, {"scale": 1.0}, {"scale": "1"}, None])
def test_a_damaged_scaler_is_found_before_anything_is_changed(state):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(TrainingResumeCheckpointFormatError, match=r"'scaler' in objects: the state of a GradScaler"):
        check_states("objects", {"scaler": state}, {"scaler": scaler})
    assert scaler.get_scale() == 8


def test_whose_state_may_be_empty():
    """Not that of a loader of this library, whose load would do nothing; others may mean something by it."""
    check_states("objects", {"a": {}}, {"a": Held()})
    with pytest.raises(TrainingResumeCheckpointFormatError, match="the state of 'a' in loaders is empty"):
        check_states("loaders", {"a": {}}, {"a": StatefulDataLoader(range(3))})
    with pytest.raises(StateMismatchError):
        check_states("objects", {"a": {}}, {"a": RandomSampler(3)})


def test_other_names():
    with pytest.raises(TrainingResumeObjectsMismatchError, match=re.escape("objects; expected ['a'], found ['b']")):
        check_states("objects", {"b": {}}, {"a": Held()})


@pytest.mark.parametrize("found", [{"a": 3}, [torch.zeros(1)], {1: Held()}])
def test_what_has_no_state_is_refused(found):
    with pytest.raises(TypeError, match=r"_hook\(\)"):
        named_objects("_hook", found)


def test_those_of_a_sequence_are_called_by_their_numbers():
    one, other = Held(), Held()
    assert named_objects("_hook", [one, other]) == {"0": one, "1": other}


def test_a_file_of_the_cpu_for_a_trainer_of_a_gpu(tmp_path):
    """Refused for that reason, also where there is no such device."""
    paused(tmp_path / "file", 1)
    trainer = Trainer()
    trainer._initialize_training_resume({"rate": 0.01, "layers": [3, 1]}, version=1, device="cuda", amp=False)
    before = look(trainer)
    with pytest.raises(TrainingResumeDeviceMismatchError, match="expected 'cuda', found 'cpu'"):
        trainer.resume(tmp_path / "file")
    assert look(trainer) == before


def test_a_resume_in_inference_mode(tmp_path):
    """What is made in that mode could not be trained with."""
    paused(tmp_path / "file", 2)
    trainer = Trainer()
    seen = {}
    trainer.on_reach = lambda place: seen.update({place: torch.is_inference_mode_enabled()})
    with torch.inference_mode():
        trainer.resume(tmp_path / "file")
    assert not any(seen[place] for place in ("model.load_state_dict", "_load_resume_extra_state", "_rebuild_resume_iterators"))
