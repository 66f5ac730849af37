"""Hugging Face Accelerate: torchdata's loader over `as_dataset`, prepared, and this library's loader, registered.

A prepared loader is one batch ahead and takes its state before it reads that one:
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py#L577-L616
"""

from __future__ import annotations

import signal

import pytest
import torch
from accelerate import Accelerator
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
from tests.frameworks.runs import BATCH, LENGTH, STEPS, Log, data, in_processes, killed, shown

# torchdata 0.11 still calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
EPOCHS = 3


def pipeline(workers):
    node = SeededMapper(SamplerNode(RandomSampler(LENGTH, seed=5)), data().__getitem__, seed=5)
    return ProcessPrefetcher(SeededBatcher(node, BATCH, seed=5), workers)


class Training:
    """A model whose weights depend on every draw, and the loader, in one of the two ways."""

    def __init__(self, way, workers=0):
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        layer = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(layer.weight, 0.1)
        torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        self.layer, self.optimizer = self.accelerator.prepare(layer, optimizer)
        self.step = 0
        self.accelerator.register_for_checkpointing(self)
        if way == "prepared":
            self.loader = self.accelerator.prepare(TorchdataLoader(as_dataset(pipeline(workers)), batch_size=None))
        else:
            self.loader = StatefulDataLoader(data(), BATCH, shuffle=True, num_workers=workers, seed=5)
            self.accelerator.register_for_checkpointing(self.loader)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def run(self, log, folder, saves_every=1, dies_at=None):
        while self.step < EPOCHS * STEPS:
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
        log.add([self.layer.weight.tolist(), self.layer.bias.tolist()])


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
