"""What a pause saves, and what a resume checks before it changes anything."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch

from stateful_pipes.training import TrainingResumeMixin, training_step
from stateful_pipes.training.mixin import _HOOKS
from tests.unit.trainers import (
    Planned,
    Sharing,
    Trainer,
    bits,
    drawing,
    generators,
    look,
    paused,
    raising,
    run,
    seed_all,
    trained,
)

STEPS = 3


@pytest.fixture(scope="module")
def truth():
    """The steps of a training without a break, and where it stands after them."""
    trainer = Trainer()
    return run(trainer, 12), look(trainer)


@pytest.fixture
def path(tmp_path):
    """Of a training that was paused after some steps."""
    paused(tmp_path / "file", STEPS)
    return tmp_path / "file"


def rest_is_right(trainer, truth):
    steps, end = truth
    assert run(trainer, 12 - STEPS) == steps[STEPS:]
    assert {**look(trainer), "iterators": None} == {**end, "iterators": None}


@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_resumed_trainer_goes_on_as_if_it_had_not_been_paused(path, truth, before):
    trainer = trained(before)
    seed_all(77)
    trainer.resume(path)
    rest_is_right(trainer, truth)


def test_a_pause_changes_nothing_but_that_steps_are_refused(tmp_path, truth):
    trainer = trained(STEPS)
    before = look(trainer)
    trainer.pause(tmp_path / "file")
    before["gate"]["paused"] = True
    assert look(trainer) == before
    trainer.resume(tmp_path / "file")
    rest_is_right(trainer, truth)


def test_a_resumed_trainer_may_be_paused_before_its_first_step(path, truth):
    trainer = Trainer()
    trainer.resume(path)
    trainer.pause(path)
    trainer = Trainer()
    trainer.resume(path)
    rest_is_right(trainer, truth)


def test_many_pauses(tmp_path, truth):
    trainer = Trainer()
    for expected in truth[0]:
        assert trainer.step() == expected
        trainer.pause(tmp_path / "file")
        trainer = Trainer()
        trainer.resume(tmp_path / "file")


# Hooks.


@pytest.mark.parametrize("method", ["pause", "resume"])
@pytest.mark.parametrize("hook", _HOOKS)
def test_a_missing_hook_is_named_and_nothing_is_changed(path, hook, method):
    kind = type("Lacking", (Trainer,), {hook: getattr(TrainingResumeMixin, hook)})
    trainer = trained(1, kind)
    trainer.reached.clear()
    before, data = look(trainer), path.read_bytes()
    with pytest.raises(NotImplementedError, match=rf"Lacking has to define {hook}\(\)") as caught:
        getattr(trainer, method)(path)
    assert not hasattr(caught.value, "code")
    assert (look(trainer), path.read_bytes()) == (before, data)
    assert trainer.reached == []
    setattr(trainer, hook, getattr(Trainer, hook).__get__(trainer))  # one of the trainer itself will do
    getattr(trainer, method)(path)


class Bare(TrainingResumeMixin):
    def __init__(self):
        self._initialize_training_resume(None, version="a", device="cpu", amp=None)

    @training_step
    def step(self):
        pass


def test_every_hook_that_has_no_default_is_asked_for():
    trainer = Bare()
    for name in vars(TrainingResumeMixin):
        if name.startswith("_") and "resume" in name and name not in ("_initialize_training_resume", "_resume_shared_keys"):
            with pytest.raises(NotImplementedError, match=rf"Bare has to define {name}\(\)"):
                getattr(trainer, name)(*[{}] * (name == "_load_resume_extra_state"))
    assert trainer._resume_shared_keys() == ()
    assert trainer._ordinary_checkpoint() == {}


@pytest.mark.parametrize(
    ("hook", "returned", "text"),
    [
        ("_resume_objects", {"model": 3}, r"_resume_objects\(\)\['model'\] must have state_dict and load_state_dict, got int"),
        ("_resume_loaders", [iter(())], r"_resume_loaders\(\)\['0'\] must have state_dict"),
        ("_resume_objects", {1: torch.nn.Linear(1, 1)}, r"_resume_objects\(\) must name each with a string, got 1"),
        ("_ordinary_checkpoint", [1], r"_ordinary_checkpoint\(\) must return a mapping, got \[1\]"),
    ],
)
def test_what_a_hook_must_not_return(tmp_path, hook, returned, text):
    trainer = trained(1)
    setattr(trainer, hook, lambda: returned)
    before = look(trainer)
    with pytest.raises(TypeError, match=text):
        trainer.pause(tmp_path / "file")
    assert look(trainer) == before
    assert list(tmp_path.iterdir()) == []


def test_loaders_may_be_a_list(tmp_path, truth):
    class Listing(Trainer):
        def _resume_loaders(self):
            return [self.ours, self.theirs]

    paused(tmp_path / "file", STEPS, Listing)
    trainer = Listing()
    trainer.resume(tmp_path / "file")
    rest_is_right(trainer, truth)


# The file.


def test_the_ordinary_checkpoint_stands_in_the_file_as_it_was(tmp_path):
    trainer = trained(STEPS)
    state = torch.nn.Linear.state_dict(trainer.model)
    trainer._ordinary_checkpoint = lambda: {"model": state, "epoch": 3, "nested": {"names": ["a", ("b", 1.5)]}}
    trainer.pause(tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True)
    assert list(found) == ["model", "epoch", "nested", "training_state"]
    assert (found["epoch"], found["nested"]) == (3, {"names": ["a", ("b", 1.5)]})
    assert type(found["model"]) is type(state)
    assert {name: bits(one) for name, one in found["model"].items()} == {name: bits(one) for name, one in state.items()}
    assert found["model"]._metadata == state._metadata
    torch.nn.Linear(3, 1).load_state_dict(found["model"])


class Strange:
    pass


@pytest.mark.parametrize(
    ("strange", "named"),
    [
        (Strange(), r"tests\.unit\.test_training_mixin\.Strange"),
        (np.float64(1), r"numpy\.float64"),
        (timedelta(1), r"datetime\.timedelta"),
    ],
)
@pytest.mark.parametrize("where", ["extra", "ordinary", "object"])
def test_what_could_not_be_loaded_is_refused_at_the_pause(path, strange, named, where):
    trainer, old = trained(STEPS + 1), path.read_bytes()
    before = look(trainer)
    with pytest.MonkeyPatch.context() as patched:
        if where == "extra":
            patched.setattr(trainer, "_resume_extra_state", lambda: {"deep": [strange]})
        elif where == "ordinary":
            patched.setattr(trainer, "_ordinary_checkpoint", lambda: {"deep": [strange]})
        else:
            patched.setattr(trainer.momentum, "state_dict", lambda: {"deep": [strange]})
        with pytest.raises(ValueError, match=rf"weights_only=True\) would refuse this state: .*{named}"):
            trainer.pause(path)
    assert (look(trainer), path.read_bytes()) == (before, old)
    assert len(list(path.parent.iterdir())) == 1
    trainer.pause(path)


# Shared keys.


def test_a_shared_state_is_taken_once_and_stored_once(tmp_path, truth):
    trainer = trained(STEPS, Sharing)
    trainer.reached.clear()
    trainer.pause(tmp_path / "file")
    assert trainer.reached.count("model.state_dict") == 1, "by the ordinary checkpoint"
    found = torch.load(tmp_path / "file", weights_only=True)
    assert found["model"] is found["training_state"]["objects"]["model"]
    assert list(found["training_state"]["objects"]) == ["model", "momentum", "sampler"]
    trainer = Sharing()
    trainer.resume(tmp_path / "file")
    rest_is_right(trainer, truth)


def test_an_equal_name_alone_shares_nothing(tmp_path):
    trainer = trained(STEPS)
    trainer.reached.clear()
    trainer.pause(tmp_path / "file")
    assert trainer.reached.count("model.state_dict") == 2
    found = torch.load(tmp_path / "file", weights_only=True)
    one, other = found["model"], found["training_state"]["objects"]["model"]
    for name in ("weight", "bias"):
        assert torch.equal(one[name], other[name])
        assert one[name].data_ptr() != other[name].data_ptr()


@pytest.mark.parametrize(("saves", "loads"), [(Trainer, Sharing), (Sharing, Trainer)])
def test_shared_or_apart_a_checkpoint_is_loaded(tmp_path, truth, saves, loads):
    paused(tmp_path / "file", STEPS, saves)
    trainer = loads()
    trainer.resume(tmp_path / "file")
    rest_is_right(trainer, truth)


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (("model", "epoch"), r"declares 'epoch', which _resume_objects\(\) does not have"),
        (["momentum"], r"declares 'momentum', which _ordinary_checkpoint\(\) does not have"),
        ({"nowhere"}, r"declares 'nowhere', which _ordinary_checkpoint\(\) does not have"),
        (("training_state",), r"declares 'training_state', which _ordinary_checkpoint\(\) does not have"),
        ("models", r"declares 'models'"),
        ((1,), "declares 1"),
    ],
)
def test_a_shared_key_that_is_not_in_both_is_refused(tmp_path, declared, text):
    trainer = trained(1)
    trainer.shared = declared
    before = look(trainer)
    with pytest.raises(ValueError, match=text):
        trainer.pause(tmp_path / "file")
    assert look(trainer) == before
    assert list(tmp_path.iterdir()) == []
    trainer.shared = "model"
    trainer.pause(tmp_path / "file")


@pytest.mark.parametrize("declared", [(), ("training_state",)])
def test_the_key_of_the_resume_part_is_taken(tmp_path, declared):
    trainer = trained(1)
    trainer.shared = declared
    trainer._ordinary_checkpoint = lambda: {"training_state": {}}
    trainer._resume_objects = lambda: {"training_state": trainer.model}
    with pytest.raises(ValueError, match="must not have the key 'training_state'"):
        trainer.pause(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


# Generators, gradients, and what a failed AMP step leaves.


def test_hooks_that_draw_are_not_seen(tmp_path, truth):
    trainer = trained(STEPS)
    before = generators()
    trainer.on_reach = drawing()
    trainer.pause(tmp_path / "file")
    assert generators() == before
    assert {"_validate_resume", "model.state_dict", "ours.state_dict", "_resume_extra_state"} <= set(trainer.reached)
    trainer.resume(tmp_path / "file")
    assert generators() == before, "they are set last"
    assert {"model.load_state_dict", "_load_resume_extra_state", "_rebuild_resume_iterators"} <= set(trainer.reached)
    rest_is_right(trainer, truth)


def test_hooks_that_draw_in_a_pause_that_fails_are_not_seen(tmp_path, truth):
    trainer = trained(STEPS)
    before = look(trainer)
    trainer.on_reach = drawing()
    trainer._ordinary_checkpoint = lambda: {"strange": Strange()}
    with pytest.raises(ValueError, match="Strange"):
        trainer.pause(tmp_path / "file")
    assert look(trainer) == before
    rest_is_right(trainer, truth)


def test_gradients_are_cleared(path):
    trainer = trained(2)
    assert None not in look(trainer)["gradients"]
    trainer.resume(path)
    assert look(trainer)["gradients"] == [None, None]


class Scaled(Trainer):
    """With an optimizer and a scaler of torch's, and a parameter that no module has."""

    def __init__(self):
        super().__init__(amp=True)
        self.lone = torch.ones(3, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.lone, *self.model.parameters()], lr=0.01, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    @training_step
    def scaled_step(self):
        self.optimizer.zero_grad()
        loss = self.model(self.lone * next(self.numbers)).square().sum()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.reach("unscaled")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item().hex(), bits(self.lone), self.scaler.get_scale()

    def _resume_objects(self):
        return {"optimizer": self.optimizer, "scaler": self.scaler, "lone": Lone(self.lone), "model": self.model}


class Lone:
    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor.detach()}

    def load_state_dict(self, state):
        with torch.no_grad():
            self.tensor.copy_(state["tensor"])


def test_a_failed_amp_step_leaves_nothing_on_the_same_trainer(tmp_path):
    expected = [Scaled.scaled_step(one) for one in [Scaled()] for _ in range(8)]
    trainer = Scaled()
    assert [trainer.scaled_step() for _ in range(4)] == expected[:4]
    trainer.pause(tmp_path / "file")
    trainer.resume(tmp_path / "file")
    trainer.on_reach = raising("unscaled")
    with pytest.raises(Planned):
        trainer.scaled_step()
    trainer.on_reach = lambda place: None
    trainer.optimizer.grad_scale = trainer.optimizer.found_inf = torch.tensor(0.5)  # as lent to a fused one
    with pytest.raises(RuntimeError, match="already been called"):
        trainer.scaled_step()
    assert trainer.lone.grad is not None
    trainer.resume(tmp_path / "file")
    assert not {"grad_scale", "found_inf"} & vars(trainer.optimizer).keys()
    assert [one.grad for one in (trainer.lone, *trainer.model.parameters())] == [None] * 3
    assert [trainer.scaled_step() for _ in range(4)] == expected[4:]
