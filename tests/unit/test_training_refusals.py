"""What a resume refuses, with nothing changed."""

from __future__ import annotations

import pytest
import torch

from stateful_pipes import RandomSampler, StatefulDataLoader
from stateful_pipes.errors import (
    NodeAttachedError,
    ResumableSamplerGeneratorError,
    StatefulPipesError,
    StateMismatchError,
    StateVersionError,
    TrainingPausedError,
    TrainingResumeAMPMismatchError,
    TrainingResumeCheckpointFormatError,
    TrainingResumeConfigMismatchError,
    TrainingResumeDeviceMismatchError,
    TrainingResumeObjectsMismatchError,
    TrainingResumeVersionMismatchError,
)
from tests.unit.trainers import (
    Planned,
    Trainer,
    drawing,
    look,
    paused,
    raising,
    run,
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


def refused(trainer, path, error, code, text=None):
    """Nothing at all is changed, whatever the hooks draw, and whether steps are taken or the trainer is paused."""
    trainer.on_reach = drawing()
    before = look(trainer)
    with pytest.raises(error, match=text) as caught:
        trainer.resume(path)
    assert type(caught.value) is error
    assert getattr(caught.value, "code", None) == code
    assert look(trainer) == before
    trainer.on_reach = lambda place: None


def refused_by_both(path, error, code, text=None, **options):
    """Of a trainer that trains and of a paused one; both go on afterwards as they would have."""
    expected = run(trained(2, **options), 3)
    trainer = trained(2, **options)
    refused(trainer, path, error, code, text)
    assert run(trainer, 3) == expected
    one = path.with_name("one")
    trainer = paused(one, 2, **options)
    refused(trainer, path, error, code, text)
    with pytest.raises(TrainingPausedError):
        trainer.step()
    trainer.resume(one)
    assert run(trainer, 3) == expected


def edited(path, change):
    """What the file holds, changed, and saved again by torch alone."""
    whole = torch.load(path, weights_only=True)
    change(whole["training_state"])
    torch.save(whole, path)


class Strange:
    pass


FORMAT = TrainingResumeCheckpointFormatError, 321


def test_a_file_that_was_edited_and_saved_again_is_taken(path, truth):
    edited(path, lambda state: None)
    trainer = Trainer()
    trainer.resume(path)
    rest_is_right(trainer, truth)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 5000, b"not a file of ours", b"PK\x03\x04", "{'training_state': {}}".encode("utf-16")]
)
def test_bytes_that_are_no_checkpoint_are_refused(path, content):
    path.write_bytes(content)
    refused_by_both(path, *FORMAT)


@pytest.mark.parametrize(
    "whole", [{"model": {}}, {"training_state": 3}, {"training_state": {}}, {"training_state": {"format": "another"}}, [1], None]
)
def test_files_of_others_are_refused(path, whole):
    torch.save(whole, path)
    refused_by_both(path, *FORMAT, "has no resume part under 'training_state'")


def test_a_file_that_is_not_there_or_is_none_is_an_oserror(path):
    refused_by_both(path.with_name("nowhere"), FileNotFoundError, None)
    refused_by_both(path.parent, IsADirectoryError, None)


def test_code_in_a_file_is_not_run(path):
    edited(path, lambda state: state.update(extra=Strange()))
    refused_by_both(path, *FORMAT, r"(?s)test_training_refusals\.Strange")


def test_a_truncated_file_is_refused(path):
    data = path.read_bytes()
    whole = data.rindex(b"\nstateful_pipes sha256 ")  # what follows says only that this is
    trainer = trained(1)
    for size in [*range(0, whole, 97), *range(whole - 40, whole)]:
        path.write_bytes(data[:size])
        refused(trainer, path, *FORMAT)


def test_a_file_with_a_truncated_seal_is_whole_or_refused(path, truth):
    data = path.read_bytes()
    for size in range(data.rindex(b"\nstateful_pipes sha256 "), len(data), 5):
        path.write_bytes(data[:size])
        trainer = Trainer()
        try:
            trainer.resume(path)
        except TrainingResumeCheckpointFormatError:
            continue
        rest_is_right(trainer, truth)


def test_a_file_with_a_flipped_bit_is_refused(path):
    data = path.read_bytes()
    trainer = trained(1)
    for place in [*range(0, len(data) - 87, 61), *range(len(data) - 64, len(data))]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        refused(trainer, path, *FORMAT)


def test_zeros_in_a_file_are_refused(path):
    data = path.read_bytes()
    trainer = trained(1)
    for place in range(0, len(data) - 4096, 1024):
        path.write_bytes(data[:place] + bytes(4096) + data[place + 4096 :])
        refused(trainer, path, *FORMAT)


ENTRIES = ["format", "format_version", "version", "config", "device", "amp", "objects", "loaders", "extra", "random"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_resume_part_with_a_damaged_entry_is_refused(path, entry):
    whole = path.read_bytes()
    assert sorted(torch.load(path, weights_only=True)["training_state"]) == sorted(ENTRIES)
    trainer = trained(1)
    for change in (lambda state: state.pop(entry), lambda state: state.update({entry: [0]})):
        path.write_bytes(whole)
        edited(path, change)
        if torch.load(path, weights_only=True)["training_state"].get(entry) == [0] and entry == "extra":
            continue  # what is in there is the trainer's own
        refused(trainer, path, *FORMAT, None if entry == "format" else entry)


def test_a_newer_structure_is_of_another_version(path):
    edited(path, lambda state: state.update(format_version=2))
    refused_by_both(path, TrainingResumeVersionMismatchError, 329, "expected 'at most 1', found 2")


@pytest.mark.parametrize("other", [2, "1", "one"])
def test_another_version(path, other):
    refused_by_both(path, TrainingResumeVersionMismatchError, 329, "found 1", version=other)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rate": 0.1, "layers": [3, 1]}, r"config\.rate: saved 0\.01, here 0\.1"),
        ({"rate": 0.01, "layers": [3, 2]}, r"config\.layers\[1\]"),
        ({"layers": [3, 1], "rate": 0.01}, "keep the order of the keys"),
        ({"rate": 0.01, "layers": [3, 1], "more": 1}, r"config\.more"),
    ],
)
def test_another_config(path, config, text):
    refused_by_both(path, TrainingResumeConfigMismatchError, 325, text, config=config)


def test_what_was_loaded_is_no_part_of_the_config(path, truth):
    trainer = Trainer(config={"rate": 0.01, "layers": [3, 1]})
    trainer.resume(path)
    rest_is_right(trainer, truth)


def test_another_kind_of_device(path):
    edited(path, lambda state: state.update(device="cuda"))
    refused_by_both(path, TrainingResumeDeviceMismatchError, 326, "expected 'cpu', found 'cuda'")


@pytest.mark.parametrize("amp", [True, {"enabled": False}, torch.bfloat16])
def test_another_amp_setting(path, amp):
    refused_by_both(path, TrainingResumeAMPMismatchError, 327, "amp", amp=amp)


@pytest.mark.parametrize("part", ["objects", "loaders"])
def test_other_objects_or_loaders(path, part):
    whole = path.read_bytes()
    edited(path, lambda state: state[part].pop(next(iter(state[part]))))
    refused_by_both(path, TrainingResumeObjectsMismatchError, 328, part)
    path.write_bytes(whole)
    edited(path, lambda state: state[part].update(another={}))
    refused_by_both(path, TrainingResumeObjectsMismatchError, 328, part)


def leaves(state, above=()):
    for name, value in state.items():
        if isinstance(value, dict):
            yield (*above, name)
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name)


def at(state, place):
    for name in place[:-1]:
        state = state[name]
    return state


DAMAGES = [
    lambda inner, name: inner.pop(name),
    lambda inner, name: inner.update({name: [1]}),
    lambda inner, name: inner.update({name: -1}),
    lambda inner, name: inner.update(another=1),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_field_of_a_loader_is_refused(path, damage):
    trainer, whole = trained(1), path.read_bytes()
    places = list(leaves(torch.load(path, weights_only=True)["training_state"]["loaders"]["ours"]))
    assert len(places) > 15
    for place in places:
        if damage is DAMAGES[0] and place[-1] == "batch":  # which older states lack
            continue
        path.write_bytes(whole)
        edited(path, lambda state, place=place: damage(at(state["loaders"]["ours"], place), place[-1]))
        refused(trainer, path, StateMismatchError, 302)


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_field_of_a_sampler_is_refused(path, damage):
    trainer, whole = trained(1), path.read_bytes()
    for name in ("type", "length", "seed", "epoch", "consumed"):
        path.write_bytes(whole)
        edited(path, lambda state, name=name: damage(state["objects"]["sampler"], name))
        is_seed = name == "seed" and damage in DAMAGES[1:3]
        refused(trainer, path, *((ResumableSamplerGeneratorError, 351) if is_seed else (StateMismatchError, 302)))


@pytest.mark.parametrize(
    ("part", "name", "state", "error", "code"),
    [
        ("loaders", "ours", {}, *FORMAT),
        ("objects", "sampler", {"type": "RandomSampler"}, StateMismatchError, 302),
        ("loaders", "ours", None, StateMismatchError, 302),
        ("objects", "sampler", [1], StateMismatchError, 302),
        ("loaders", "ours", {"_num_yielded": 3}, StateMismatchError, 302),
    ],
)
def test_a_loader_or_sampler_without_a_state_is_refused(path, part, name, state, error, code):
    edited(path, lambda whole: whole[part].update({name: state}))
    refused_by_both(path, error, code)


def test_an_empty_state_of_a_sampler_is_refused(path):
    edited(path, lambda state: state["objects"].update(sampler={}))
    trainer = trained(1)
    before = look(trainer)
    with pytest.raises(StatefulPipesError):
        trainer.resume(path)
    assert look(trainer) == before


def test_a_loader_of_a_newer_library_is_refused(path):
    edited(path, lambda state: state["loaders"]["ours"].update(version=2))
    refused_by_both(path, StateVersionError, 301)


def damages_of_generators(state):
    words = state["torch"].clone()
    yield "python", {**state["python"], "version": 7}
    yield "python", {**state["python"], "words": state["python"]["words"][:-1]}
    yield "python", {**state["python"], "words": state["python"]["words"] + 2**32}
    yield "python", {**state["python"], "gauss": "a"}
    yield "python", {**state["python"], "gauss": [1]}
    yield "numpy", {**state["numpy"], "words": state["numpy"]["words"].to(torch.int32)}
    yield "numpy", {**state["numpy"], "words": 3}
    yield "numpy", {**state["numpy"], "position": 625}
    yield "numpy", {**state["numpy"], "position": True}
    yield "numpy", {**state["numpy"], "has_gauss": 2}
    yield "numpy", {**state["numpy"], "gauss": None}
    yield "torch", words[:-8]
    yield "torch", words.to(torch.int64)
    yield "torch", torch.full_like(words, 255)
    yield "torch", "text"
    yield "cuda", words
    for name in ("python", "numpy"):
        yield name, state[name]["words"]
        yield name, None
        for entry in state[name]:
            yield name, {key: value for key, value in state[name].items() if key != entry}
            yield name, {**state[name], "more": 1}


def test_damaged_states_of_generators_are_refused(path):
    trainer, whole = trained(1), path.read_bytes()
    state = torch.load(path, weights_only=True)["training_state"]["random"]
    for name, damaged in damages_of_generators(state):
        path.write_bytes(whole)
        edited(path, lambda found, name=name, damaged=damaged: found["random"].update({name: damaged}))
        refused(trainer, path, *FORMAT)
    for name in state:
        path.write_bytes(whole)
        edited(path, lambda found, name=name: found["random"].pop(name))
        refused(trainer, path, *FORMAT)


def test_what_the_trainer_itself_refuses(path):
    trainer = trained(1)
    trainer._validate_resume = lambda: raising("here")("here")
    refused(trainer, path, Planned, None)
    with pytest.raises(Planned):
        trainer.pause(path.with_name("new"))
    assert not path.with_name("new").exists()


def test_what_a_resume_would_refuse_is_refused_at_the_pause(tmp_path):
    class Attached(Trainer):
        """A sampler among the objects that is its loader's already."""

        def _resume_objects(self):
            return {"sampler": self.mine}

    trainer = trained(1, Attached)
    trainer.mine = RandomSampler(8, seed=1)
    with StatefulDataLoader(range(8), sampler=trainer.mine, seed=1), pytest.raises(NodeAttachedError):
        trainer.pause(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    trainer.pause(tmp_path / "file")
