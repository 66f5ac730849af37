"""A whole training's checkpoints: the newest valid one is there, whatever happened while it was written."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from datetime import timedelta

import numpy as np
import pytest
import torch

from stateful_pipes import CheckpointManager, StatefulDataLoader
from stateful_pipes.errors import CheckpointFileError
from tests.unit.files import FAULTS, failing


def state_of(step):
    return {"step": step, "weights": torch.full((3,), float(step)), "nested": {"list": [step, "ü", (1.5, None)]}}


def equal(one, other):
    return torch.equal(one.pop("weights"), other.pop("weights")) and one == other


def manager_of(folder, every=1, keep=3):
    return CheckpointManager(folder, every=every, keep=keep)


def test_there_and_back(tmp_path):
    manager = manager_of(tmp_path / "new" / "folder")
    assert manager.restore() is None
    path = manager.save(7, state_of(7))
    assert path.name == "checkpoint-000000000007.pt"
    found = manager_of(tmp_path / "new" / "folder").restore()
    assert found.step == 7
    assert equal(found.state, state_of(7))
    assert equal(torch.load(path, weights_only=True), state_of(7)), "torch.load reads it as well"


def test_a_whole_training(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = StatefulDataLoader(torch.rand(10, 2), 2, shuffle=True)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        break
    manager = manager_of(tmp_path)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    manager.save(1, {name: part.state_dict() for name, part in parts.items()})
    rest = list(loader)
    for name, state in manager.restore(map_location="cpu").state.items():
        parts[name].load_state_dict(state)
    assert all(map(torch.equal, loader, rest))


def test_the_newest_few_stay(tmp_path):
    manager = manager_of(tmp_path, keep=2)
    for step in (1, 5, 10, 9, 11):
        manager.save(step, state_of(step))
    assert manager.steps() == [10, 11]
    (tmp_path / "checkpoint-000000000003.txt").write_text("another's")
    (tmp_path / ".checkpoint-000000000003.pt.bak").write_text("another's")
    manager.save(12, state_of(12))
    assert len(os.listdir(tmp_path)) == 4


def test_steps_of_more_digits_are_newer(tmp_path):
    manager = manager_of(tmp_path, keep=2)
    for step in (10**12 - 1, 10**12, 10**13):
        manager.save(step, state_of(step))
    assert manager.restore().step == 10**13
    assert manager.steps() == [10**12, 10**13]


def test_every_so_many_steps(tmp_path):
    manager = manager_of(tmp_path, every=100, keep=9)
    saved = [step for step in range(1, 401, 3) if manager.save_if_due(step, lambda: {})]
    assert saved == [100, 202, 304] == manager.steps()
    again = manager_of(tmp_path, every=100)
    assert again.restore().step == 304
    assert not again.save_if_due(403, dict)
    assert again.save_if_due(404, dict)


def test_every_so_much_time(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    manager = manager_of(tmp_path, every=timedelta(minutes=10))
    made = []
    for seconds in (0, 599, 1, 300, 299, 2):
        now += seconds
        made.append(manager.save_if_due(len(made), dict))
    assert made == [False, False, True, False, False, True]


def test_a_state_is_only_made_when_it_is_due(tmp_path):
    def fail():
        raise AssertionError

    assert not manager_of(tmp_path, every=5).save_if_due(4, fail)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "longer", "foreign", "unsealed", "a folder"])
def test_the_newest_valid_one_is_restored(tmp_path, damage, caplog):
    manager = manager_of(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    path = tmp_path / "checkpoint-000000000003.pt"
    data = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    else:
        path.write_bytes(
            {
                "truncated": data[:-100],
                "empty": b"",
                "flipped": data[:50] + bytes([data[50] ^ 4]) + data[51:],
                "longer": data + b"x",
                "foreign": pickle.dumps({"step": 3}),
                "unsealed": data[: data.rindex(b"\nstateful_pipes sha256 ")],
            }[damage]
        )
    found = manager.restore()
    assert found.step == 2
    assert equal(found.state, state_of(2))
    assert "000000000003.pt is passed over" in caplog.text


def test_every_byte_counts(tmp_path):
    manager = manager_of(tmp_path)
    path = manager.save(1, {"n": 1})
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointFileError):
            manager.restore()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointFileError, match="none of the 1"):
            manager.restore()


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_no_code_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = manager_of(tmp_path / "folder")
    manager.save(1, {"n": 1})
    with pytest.raises(ValueError, match="Harmful"):
        manager.save(2, {"n": Harmful()})
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "get_unsafe_globals_in_checkpoint", lambda path: [])
        manager.save(2, {"n": Harmful()})
    with pytest.raises(pickle.UnpicklingError):  # whole, so not to be passed over in silence
        manager.restore(weights_only=False)
    assert os.listdir(tmp_path) == ["folder"]


def test_what_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    manager = manager_of(tmp_path)
    for state in (np.random.get_state(), {"best": np.float64(0.5)}, tmp_path):
        with pytest.raises(ValueError, match="weights_only"):
            manager.save(1, {"part": state})
    assert os.listdir(tmp_path) == []
    manager.save(2, {"random": torch.get_rng_state()})
    assert manager.restore().step == 2


def test_a_wrong_argument_is_not_taken_for_damage(tmp_path):
    manager = manager_of(tmp_path)
    manager.save(1, state_of(1))
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        manager.restore(map_location="nowhere")
    assert manager.restore(map_location="cpu").step == 1


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, {"b": np.float64(3)}]}, r"state\['a'\]\[1\]\['b'\] is a numpy.float64"),
        ({"a": torch.zeros(1), "b": (lambda: 1,)}, r"state\['b'\]\[0\] is a builtins.function"),
        ({"a": 10**5000}, r"state\['a'\] is a builtins.int"),
        ({"a": {(1, frozenset()): 2}}, r"a key of state\['a'\]\[1\] is a builtins.frozenset"),
    ],
    ids=["deep", "function", "digits", "key"],
)
def test_what_cannot_be_saved_is_named_by_its_place(tmp_path, state, place):
    with pytest.raises(ValueError, match=place):
        manager_of(tmp_path).save(1, state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_leaves_the_ones_before(tmp_path, monkeypatch, fault):
    manager = manager_of(tmp_path, keep=1)
    manager.save(1, state_of(1))
    for at in range(1000):
        with failing(monkeypatch, fault, at) as failed:
            try:
                manager.save(2, state_of(2))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        if not failed():
            break
        if fault == "fsync" and at == 1:  # that of the folder: the new one is in its place, if not yet for sure
            break
        assert manager.restore().step == 1
        assert os.listdir(tmp_path) == ["checkpoint-000000000001.pt"]
    assert at > 0
    assert manager.restore().step == 2


def test_what_a_killed_save_leaves_is_removed_by_the_next(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal
        from stateful_pipes import CheckpointManager
        manager = CheckpointManager({str(tmp_path)!r}, every=1)
        manager.save(1, {{"n": 1}})
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        manager.save(2, {{"n": 2}})
    """)
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    manager = manager_of(tmp_path)
    assert manager.restore().step == 1
    manager.save(2, {"n": 2})
    assert len(os.listdir(tmp_path)) == 2


def test_sigterm_ends_the_program_after_the_step_under_way_and_its_save(tmp_path):
    manager = manager_of(tmp_path, every=1000)
    before = signal.getsignal(signal.SIGTERM)
    steps = []

    def train():
        with manager:
            for step in range(1, 100):
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                steps.append(step)
                manager.save_if_due(step, lambda step=step: state_of(step))

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    assert steps == [1, 2, 3, 4, 5]
    assert signal.getsignal(signal.SIGTERM) is before
    assert manager.restore().step == 5


def test_a_sigterm_after_the_last_save_is_not_swallowed(tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with manager_of(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == []
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_was_there_before_is_called_after_the_save(tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append((number, manager.steps())))
    try:
        manager = manager_of(tmp_path, every=1000)
        with manager:
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.is_terminated
            assert manager.save_if_due(3, dict)
            assert not manager.save_if_due(4, dict)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [(signal.SIGTERM, [3])]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"every": None}, "every"),
        ({"every": timedelta(0)}, "every"),
        ({"every": 1, "keep": 0}, "keep"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, said):
    with pytest.raises((TypeError, ValueError), match=said):
        CheckpointManager(tmp_path, **arguments)


def test_a_wrong_step(tmp_path):
    with pytest.raises(ValueError, match="step"):
        manager_of(tmp_path).save(-1, {})
