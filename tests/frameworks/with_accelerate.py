"""Hugging Face Accelerate: torchdata's loader over `as_dataset`, prepared, and this library's loader, registered.

A prepared loader is one batch ahead and takes its state before it reads that one:
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py#L577-L616
"""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from stateful_pipes import (
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    StatefulDataLoader,
    as_dataset,
)
from stateful_pipes.errors import ResumableBatchConfigurationError
from tests.frameworks.runs import BATCH, LENGTH, STEPS, Log, data, dealt, in_processes, in_ranks, killed, shown

# torchdata 0.11 still calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
EPOCHS = 3


def pipeline(workers, length=LENGTH):
    node = SeededMapper(SamplerNode(RandomSampler(length, seed=5)), data(length).__getitem__, seed=5)
    return ProcessPrefetcher(SeededBatcher(node, BATCH, seed=5), workers)


class Training:
    """A model whose weights depend on every draw, and the loader, in one of the two ways."""

    def __init__(self, way, workers=0, length=LENGTH):
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        layer = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(layer.weight, 0.1)
        torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        self.layer, self.optimizer = self.accelerator.prepare(layer, optimizer)
        self.step, self.last = 0, EPOCHS * -(-length // (BATCH * self.accelerator.num_processes))
        self.accelerator.register_for_checkpointing(self)
        if way == "prepared":
            self.loader = self.accelerator.prepare(TorchdataLoader(as_dataset(pipeline(workers, length)), batch_size=None))
        else:
            self.loader = StatefulDataLoader(data(length), BATCH, shuffle=True, num_workers=workers, seed=5)
            self.accelerator.register_for_checkpointing(self.loader)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def run(self, log, folder, saves_every=1, dies_at=None):
        while self.step < self.last:
            for batch in self.loader:
                log.add(shown(batch))
                if self.step == dies_at:
                    killed()
                loss = (self.layer(batch[3]).squeeze(-1) - batch[1].float()).pow(2).mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                if self.step % saves_every == 0:
                    self.accelerator.save_state(folder / str(self.step))
        log.add([parameter.tolist() for parameter in self.layer.parameters()])


each_way = pytest.mark.parametrize("way", ["prepared", "registered"])


def resume(way, workers, saved, log, **given):
    training = Training(way, workers)
    training.accelerator.load_state(str(saved))
    training.run(log, **given)


@each_way
def test_every_saved_state_resumes(tmp_path, way):
    """Those taken with the last batch of an epoch, too."""
    whole = Log(tmp_path / "whole.log")
    Training(way).run(whole, tmp_path)
    expected = whole.read()
    assert len(expected) == EPOCHS * STEPS + 1
    for step in range(1, EPOCHS * STEPS + 1):
        log = Log(tmp_path / f"{step}.log")
        resume(way, 0, tmp_path / str(step), log, folder=tmp_path, saves_every=EPOCHS * STEPS + 1)
        assert log.read() == expected[step:], f"resumed after step {step}"


def test_both_ways_give_one_stream(tmp_path):
    logs = [Log(tmp_path / way) for way in ("prepared", "registered")]
    for log in logs:
        Training(log.path.name).run(log, tmp_path, saves_every=100)
    assert logs[0].read() == logs[1].read()


def test_this_library_s_loader_is_handed_back_as_it_is():
    """Accelerate takes it for no loader: it neither deals it out nor moves its batches to a device."""
    training = Training("registered")
    assert training.accelerator.prepare(training.loader) is training.loader


@each_way
def test_killed_within_an_epoch_and_resumed(tmp_path, way):
    """With worker processes, which end with the training, and other ones after the resume."""
    logs = reference, begun, resumed = [Log(tmp_path / f"{name}.log") for name in ("reference", "begun", "resumed")]
    given = {"folder": tmp_path, "saves_every": 4}
    assert in_processes(lambda _: Training(way).run(reference, tmp_path / "other", saves_every=100)) == [0]
    assert in_processes(lambda _: Training(way, 2).run(begun, dies_at=10, **given)) == [-signal.SIGKILL]
    assert in_processes(lambda _: resume(way, 1, tmp_path / "8", resumed, **given)) == [0]
    expected, before, after = (log.read() for log in logs)
    assert before == expected[:11]
    assert before[:8] + after == expected


# Several processes.

SHARED = 12  # samples, which two ranks share evenly
RANK_STEPS = SHARED // (2 * BATCH)


def train_rank(rank, folder, name, workers=0, resumes=None, dies_at=None):
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the tests before
    training = Training("registered", workers, SHARED)
    assert training.accelerator.num_processes == 2
    if resumes is not None:
        training.accelerator.load_state(str(resumes))
    training.run(Log(folder / f"{name}.{rank}.log"), folder / name, 2, dies_at)


def test_two_processes_killed_and_resumed(tmp_path):
    def run(name, **given):
        ended = in_ranks(partial(train_rank, folder=tmp_path, name=name, **given))
        return ended, [Log(tmp_path / f"{name}.{rank}.log").read() for rank in range(2)]

    ended, expected = run("reference")
    assert ended == [0, 0]
    ended, begun = run("begun", workers=1, dies_at=5)
    assert ended == [-signal.SIGKILL] * 2
    ended, resumed = run("resumed", resumes=tmp_path / "begun" / "4")  # one step into the second epoch
    assert ended == [0, 0]
    for whole, before, after in zip(expected, begun, resumed, strict=True):
        assert len(whole) == EPOCHS * RANK_STEPS + 1
        assert before == whole[:6]
        assert before[:4] + after == whole
    assert expected[0][-1] == expected[1][-1]
    alone = StatefulDataLoader(data(SHARED), BATCH, shuffle=True, seed=5)
    for first in range(0, EPOCHS * RANK_STEPS, RANK_STEPS):
        shares = [whole[first : first + RANK_STEPS] for whole in expected]
        assert dealt(shares) == dealt([map(shown, alone)])


def in_wrong_order(rank):
    """Made before the Accelerator; and prepared, which deals out again what each rank was dealt."""
    AcceleratorState._reset_state(reset_partial_state=True)
    early = StatefulDataLoader(data(SHARED), BATCH)
    training = Training("prepared", length=SHARED)
    with pytest.raises(ResumableBatchConfigurationError, match="made before"):
        next(iter(early))
    found = [i for batch in training.loader for i in batch[0].tolist()]
    assert len(found) == SHARED // 4


def test_two_processes_in_the_wrong_order():
    """A loader made before the Accelerator refuses; a prepared one gives each rank half of the share that it has."""
    assert in_ranks(in_wrong_order) == [0, 0]
