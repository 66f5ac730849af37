"""What is left of a pause or a resume that fails: in a hook, at the disk, on another rank."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stateful_pipes.errors import StatefulPipesError, TrainingPausedError, TrainingResumeIncompleteError
from tests.unit.files import FAULTS, failing
from tests.unit.trainers import Planned, Trainer, drawing, look, paused, raising, run, trained

STEPS = 3
IN_PAUSE = [
    "_validate_resume",
    "_ordinary_checkpoint",
    "model.state_dict",
    "_resume_objects",
    "_resume_loaders",
    "_resume_shared_keys",
    "momentum.state_dict",
    "sampler.state_dict",
    "ours.state_dict",
    "theirs.state_dict",
    "_resume_extra_state",
    "sampler.validate_state_dict",
    "ours.validate_state_dict",
]
BEFORE_TOUCHING = [
    "_resume_objects",
    "_resume_loaders",
    "_validate_resume",
    "sampler.validate_state_dict",
    "ours.validate_state_dict",
]
HALFWAY = [
    "model.load_state_dict",
    "momentum.load_state_dict",
    "sampler.load_state_dict",
    "ours.load_state_dict",
    "theirs.load_state_dict",
    "_load_resume_extra_state",
    "_rebuild_resume_iterators",
]
each_error = pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])


@pytest.fixture(scope="module")
def truth():
    return run(Trainer(), 12)


@pytest.fixture
def path(tmp_path):
    paused(tmp_path / "file", STEPS)
    return tmp_path / "file"


def holds(path, steps, truth):
    """The file is whole, of a pause after so many steps, and alone."""
    assert list(path.parent.iterdir()) == [path]
    trainer = Trainer()
    trainer.resume(path)
    assert run(trainer, 12 - steps) == truth[steps:]


def test_no_place_is_left_out(tmp_path):
    trainer = trained(1)
    trainer.reached.clear()
    trainer.pause(tmp_path / "file")
    assert sorted(set(trainer.reached)) == sorted(IN_PAUSE)
    trainer.reached.clear()
    trainer.resume(tmp_path / "file")
    assert sorted(trainer.reached) == sorted(BEFORE_TOUCHING + HALFWAY)
    assert set(trainer.reached[: len(BEFORE_TOUCHING)]) == set(BEFORE_TOUCHING), "before anything is changed"


@each_error
@pytest.mark.parametrize("place", IN_PAUSE)
def test_a_pause_that_fails_in_a_hook_has_not_been(path, truth, place, error):
    trainer, old = trained(STEPS + 1), path.read_bytes()
    before = look(trainer)
    trainer.on_reach = raising(place, error)
    with pytest.raises(error, match=place):
        trainer.pause(path)
    trainer.on_reach = lambda place: None
    assert look(trainer) == before
    assert path.read_bytes() == old
    assert trainer.step() == truth[STEPS + 1], "it is not paused"
    trainer.pause(path)
    with pytest.raises(TrainingPausedError):
        trainer.step()
    holds(path, STEPS + 2, truth)


@each_error
@pytest.mark.parametrize("place", BEFORE_TOUCHING)
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_resume_that_fails_in_a_hook_before_it_changes_anything_has_not_been(path, truth, place, error, is_paused):
    trainer = trained(1)
    if is_paused:
        trainer.pause(path.with_name("other"))
    before = look(trainer)

    def on_reach(reached):
        drawing()(reached)
        raising(place, error)(reached)

    trainer.on_reach = on_reach
    with pytest.raises(error, match=place):
        trainer.resume(path)
    trainer.on_reach = lambda place: None
    assert look(trainer) == before
    if is_paused:
        with pytest.raises(TrainingPausedError):
            trainer.step()
    else:
        assert trainer.step() == truth[1]
    trainer.resume(path)
    assert run(trainer, 3) == truth[STEPS : STEPS + 3]


def is_locked(trainer, path, cause):
    before = look(trainer)
    for method in (trainer.step, lambda: trainer.pause(path)):
        with pytest.raises(TrainingResumeIncompleteError, match=f"(?s)it failed with .*{cause}") as caught:
            method()
        assert caught.value.code == 323
    assert look(trainer) == before
    assert not path.exists()


@each_error
@pytest.mark.parametrize("place", HALFWAY)
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_resume_that_fails_halfway_locks_the_trainer(path, truth, place, error, is_paused):
    trainer = trained(1)
    if is_paused:
        trainer.pause(path.with_name("other"))
    trainer.on_reach = raising(place, error)
    for _ in range(2):
        with pytest.raises(error, match=place):
            trainer.resume(path)
        is_locked(trainer, path.with_name("new"), f"{error.__name__}: {place}")
    trainer.on_reach = lambda place: None
    trainer.add()  # a serialized method is not refused
    with pytest.raises(FileNotFoundError):
        trainer.resume(path.with_name("nowhere"))
    is_locked(trainer, path.with_name("new"), f"{error.__name__}: {place}")
    trainer.resume(path)
    assert run(trainer, 3) == truth[STEPS : STEPS + 3]
    trainer.pause(path)


def test_an_object_that_refuses_its_own_state_locks_the_trainer(path, truth):
    whole, data = torch.load(path, weights_only=True), path.read_bytes()
    whole["training_state"]["objects"]["model"]["weight"] = torch.zeros(2, 2)
    torch.save(whole, path)
    trainer = trained(1)
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        trainer.resume(path)
    assert caught.value.__notes__ == ["while loading _resume_objects()['model']; the trainer is locked until a resume succeeds"]
    is_locked(trainer, path.with_name("new"), "size mismatch")
    path.write_bytes(data)
    trainer.resume(path)
    assert run(trainer, 3) == truth[STEPS : STEPS + 3]


# The disk.


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pause_that_the_disk_fails_has_not_been(path, truth, monkeypatch, caplog, fault):
    trainer, old = trained(STEPS + 1), path.read_bytes()
    before = look(trainer)
    for at in itertools.count():
        with failing(monkeypatch, fault, at) as failed:
            try:
                trainer.pause(path)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                assert failed()
            else:
                break
        assert look(trainer) == before
        assert path.read_bytes() == old
        assert list(path.parent.iterdir()) == [path]
    # The one fault that is none is that of the folder's fsync, when the new file is in its place.
    assert ("cannot be synced" in caplog.text) == failed() == (fault == "fsync")
    assert at == 1 if fault in ("fsync", "replace") else at > 0
    with pytest.raises(TrainingPausedError):
        trainer.step()
    holds(path, STEPS + 1, truth)


def test_a_second_pause_succeeds_after_one_that_the_disk_failed(path, truth, monkeypatch):
    trainer = trained(STEPS + 1)
    for fault in FAULTS:
        with failing(monkeypatch, fault, 0), pytest.raises(OSError, match="No space left"):
            trainer.pause(path)
    assert trainer.step() == truth[STEPS + 1]
    trainer.pause(path)
    holds(path, STEPS + 2, truth)


def test_a_folder_that_is_not_there(tmp_path, truth):
    trainer = trained(STEPS)
    with pytest.raises(FileNotFoundError):
        trainer.pause(tmp_path / "no" / "file")
    assert list(tmp_path.iterdir()) == []
    trainer.pause(tmp_path / "file")
    holds(tmp_path / "file", STEPS, truth)


# Ranks.

FORK = multiprocessing.get_context("fork")
PATIENCE = 60  # seconds, after which a rank that is waited for in vain is given up


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2000])


def other_config(path):
    whole = torch.load(path, weights_only=True)
    whole["training_state"]["config"]["config.rate"] = "0.5"
    torch.save(whole, path)


def other_model(path):
    whole = torch.load(path, weights_only=True)
    whole["training_state"]["objects"]["model"]["weight"] = torch.zeros(2, 2)
    torch.save(whole, path)


def as_it_is(path):
    pass


# What is done to the file of rank 1, and where it fails by itself.
REFUSED = {
    "truncated": (truncate, ""),
    "not there": (os.unlink, ""),
    "other config": (other_config, ""),
    "a hook": (as_it_is, "_validate_resume"),
    "its objects": (as_it_is, "_resume_objects"),
}
HALF = {"other model": (other_model, ""), **{place: (as_it_is, place) for place in HALFWAY}}


def rank_of(rank, folder, tell):
    """One of two ranks that share a loader; tells what became of each resume."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it asks for the machine's name
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    path = folder / str(rank)
    trainer = paused(path, STEPS)
    data = path.read_bytes()
    expected = run(trained(STEPS), 3)
    for name, (damage, place) in {**REFUSED, **HALF}.items():
        if rank == 1:
            damage(path)
            trainer.on_reach = raising(place)
        before = look(trainer)
        try:
            trainer.resume(path)
        except Exception as error:
            after = look(trainer)
            locked = after["gate"]["_resume_failure"] != ""
            tell.send((name, getattr(error, "code", type(error).__name__), str(error), after == before, locked))
        trainer.on_reach = lambda place: None
        path.write_bytes(data)
        trainer.resume(path)
        tell.send((name, run(trainer, 3) == expected))
        trainer.resume(path)
        trainer.pause(path.with_name(f"other{rank}"))
    # Files that are whole, but of other positions.
    moved = paused(path.with_name(f"moved{rank}"), STEPS + 1)
    before = look(moved)
    try:
        moved.resume(path if rank else path.with_name("moved0"))
    except StatefulPipesError as error:
        tell.send(("moved", error.code, str(error), look(moved) == before))
    tell.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two ranks has told, up to where one of them was waited for in vain."""
    folder = tmp_path_factory.mktemp("ranks")
    pipes = [FORK.Pipe(duplex=False) for _ in range(2)]
    ranks = [FORK.Process(target=rank_of, args=(rank, folder, pipes[rank][1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for _, tell in pipes:
        tell.close()
    found = [{}, {}]
    for rank, (hear, _) in enumerate(pipes):
        try:
            while hear.poll(2 * PATIENCE):
                name, *what = hear.recv()
                found[rank].setdefault(name, []).append(tuple(what))
        except EOFError:
            pass
    for rank in ranks:
        rank.kill()
        rank.join()
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_where_one_rank_refuses_its_file_all_do(told, name):
    (ours, went_on), (theirs, also) = told[0][name], told[1][name]
    assert ours[0] == 302
    assert "another rank refused its own\n  rank 1: " in ours[1]
    codes = {
        "truncated": 321,
        "not there": "FileNotFoundError",
        "other config": 325,
        "a hook": "Planned",
        "its objects": "Planned",
    }
    assert theirs[0] == codes[name]
    assert (ours[2:], theirs[2:]) == ((True, False), (True, False)), "nothing is changed"
    assert (went_on, also) == ((True,), (True,))


@pytest.mark.parametrize("name", HALF)
def test_where_one_rank_fails_halfway_nobody_waits(told, name):
    (ours, went_on), (theirs, also) = told[0][name], told[1][name]
    assert ours[0] == 302
    assert "another rank" in ours[1]
    assert theirs[0] == ("RuntimeError" if name == "other model" else "Planned")
    assert (ours[3], theirs[3]) == (True, True), "both are locked"
    assert (went_on, also) == ((True,), (True,))


def test_files_of_other_positions_are_refused_on_all_ranks(told):
    for one in told:
        ((code, text, unchanged),) = one["moved"]
        assert (code, unchanged) == (302, True)
        assert "rank 1: sampler.consumed 0 instead of 4" in text
