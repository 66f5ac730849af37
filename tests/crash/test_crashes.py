"""Killed at random: trainings go on from their last checkpoint, and workers are replaced, with no difference in the stream.

The moments come from a seed that is printed; `pytest -m full` takes many more.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from stateful_pipes import CheckpointManager, StatefulDataLoader

LENGTH, BATCH, STEPS = 61, 4, 70
FORK = multiprocessing.get_context("fork")


class Drawing:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, torch.rand(1500), random.random()


def digest(batch):
    index, image, drawn = batch
    return hashlib.sha256(index.numpy().tobytes() + image.numpy().tobytes() + drawn.numpy().tobytes()).hexdigest()


def loader_of(workers, **kwargs):
    return StatefulDataLoader(Drawing(), BATCH, True, num_workers=workers, seed=11, **kwargs)


def endless():
    """The digests of the stream, epoch after epoch, read without workers."""
    with loader_of(0) as loader:
        while True:
            yield from map(digest, loader)


@pytest.fixture(scope="module")
def truth():
    return list(itertools.islice(endless(), STEPS))


def training(folder, workers, tell):
    """Consumes batches, logs each at once, saves now and then; says on the pipe what it is about to do."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: what waits for them would wait for ever
    manager = CheckpointManager(folder, every=3, keep=2)
    weights = torch.zeros(2**19)  # so that a save takes its time
    os.write(tell, b"L")
    found = manager.restore()
    step = 0
    loader = loader_of(workers, multiprocessing_context="fork" if workers else None)
    if found is not None:
        step = found.step
        loader.load_state_dict(found.state["loader"])
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"from {step}\n".encode())
    os.write(tell, b"W")
    while step < STEPS:
        for batch in loader:
            step += 1
            os.write(log, f"{digest(batch)}\n".encode())
            os.write(tell, b"S" if step % 3 else b"C")
            manager.save_if_due(step, lambda: {"loader": loader.state_dict(), "weights": weights})
            if step == STEPS:
                break
    loader.close()


def run_and_kill(folder, workers, draw):
    """One run, killed a random moment after it said that it begins a random thing; returns whether it came to its end."""
    hear, tell = os.pipe()
    process = FORK.Process(target=training, args=(folder, workers, tell))
    process.start()
    os.close(tell)
    kind, left = draw.choice([b"L", b"W", b"S", b"C"]), draw.randint(1, 12)
    left = 1 if kind in b"LW" else left
    while left and (said := os.read(hear, 1)):
        left -= said == kind
    for _ in range(int(10 ** draw.uniform(2, 5.7))):  # a moment, up to some tens of milliseconds: a save takes as long
        pass
    os.kill(process.pid, signal.SIGKILL)
    while os.read(hear, 100):  # until its workers, which hold the other end, are gone too
        pass
    process.join()
    os.close(hear)
    return process.exitcode == 0


def segments(folder):
    """What each run consumed: the step that it went on from, and the digests."""
    found = []
    log = folder / "log"
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("from "):
            found.append((int(line[5:]), []))
        else:
            found[-1][1].append(line)
    return found


def killed_trainings(folder, truth, kills, seed):
    draw = random.Random(seed)
    done = resumed = 0
    for number in itertools.count():
        run = folder / str(number)
        run.mkdir()
        manager = CheckpointManager(run, every=1)
        while done < kills and not run_and_kill(run, draw.choice([0, 1, 2]), draw):
            done += 1
            assert not manager.steps() or manager.restore().step == max(manager.steps()), f"seed {seed}: one is not whole"
        durable = 0
        for start, consumed in segments(run):
            resumed += start > 0
            # What was saved before the next step was logged is durable.
            assert start >= durable, f"seed {seed}, run {number}: a checkpoint was lost"
            durable = max(start, start + 3 * ((len(consumed) - 1) // 3))
            assert consumed == truth[start : start + len(consumed)], f"seed {seed}, run {number}, from step {start}"
        if done == kills:
            break
    assert resumed > 0


def replaced_workers(kills, seed):
    draw = random.Random(seed)
    expected = endless()
    done = 0
    with loader_of(3, max_restarts=50, multiprocessing_context="fork") as loader:
        while done < kills:
            for batch in loader:
                assert digest(batch) == next(expected), f"seed {seed}, after {done} kills"
                if loader.stats()["restarts"] == done < kills and draw.random() < 0.7:
                    workers = [one for one in multiprocessing.active_children() if one.name.startswith("stateful_pipes")]
                    os.kill(draw.choice(workers).pid, draw.choice([signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM]))
                    done += 1
        assert done - 1 <= loader.stats()["restarts"] <= done


@pytest.fixture
def seed(request, capsys):
    """Another one each time, and in the log."""
    seed = random.SystemRandom().randrange(2**32)
    with capsys.disabled():
        print(f"\n{request.node.name}: seed {seed} ", end="")
    return seed


def test_a_training_that_is_killed_at_random_moments(tmp_path, truth, seed):
    killed_trainings(tmp_path, truth, 20, seed)


def test_workers_that_are_killed_at_random_moments(seed):
    replaced_workers(100, seed)


@pytest.mark.full
def test_a_training_that_is_killed_at_very_many_moments(tmp_path, truth, seed):
    killed_trainings(tmp_path, truth, 100, seed)


@pytest.mark.full
def test_workers_that_are_killed_at_very_many_moments(seed):
    replaced_workers(1000, seed)
