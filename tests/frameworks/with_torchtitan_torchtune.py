"""The calls that torchtitan's trainer and torchtune's recipes make to their loader, in their order; it is this library's.

The lines are those of
https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/torchtitan/trainer.py#L1016-L1046 (loop),
  trainer.py#L559-L565 (loader), #L651-L660 (iter and next), #L1083-L1085 (close), train.py#L66-L71,
  components/checkpointer/dcp.py#L172-L180 (the loader in the checkpoint), components/data/loader.py#L156-L158 (an empty state);
https://github.com/pytorch/torchtitan/blob/571662f007ef8257f6badf103fa196a2c8102ab7/torchtitan/components/dataloader.py#L149-L152
  (an empty state, before that loader was replaced);
https://github.com/pytorch/torchtune/blob/bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1/recipes/full_finetune_distributed.py#L470-L489
  (len), #L828-L847 (loader and load), #L917-L936 (state), #L970-L1057 (set_epoch, iter, next), and of
  full_finetune_single_device.py#L320-L340, #L577-L596.
Neither is installed: their own loaders are not what is tested, and they want accelerators.
"""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from stateful_pipes import InfiniteRandomSampler, SamplerNode, SeededBatcher, SeededMapper, StatefulDataLoader
from tests.frameworks.runs import BATCH, LENGTH, Log, data, in_ranks, killed, shown

# torchtitan.

STEPS = 14


def titan_loader(dp_rank, dp_world_size):
    """torchtitan gives its loaders their place among the ranks."""
    sampler = SamplerNode(InfiniteRandomSampler(LENGTH, seed=5), rank=dp_rank, world_size=dp_world_size)
    return StatefulDataLoader(SeededBatcher(SeededMapper(sampler, data().__getitem__, seed=5), BATCH, seed=5))


class TitanTrainer(Stateful):
    """What its Trainer and its checkpoint manager do with a loader."""

    def __init__(self, loader, log, folder):
        self.loader, self.log, self.folder, self.step = loader, log, folder, 0
        # checkpointer/dcp.py#L172-L180: the loader is one more stateful entry
        self.states = {"dataloader": loader, "train_state": self}

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]

    def train(self, load_step=None, dies_at=None):
        try:
            if load_step is not None:
                dcp.load(self.states, checkpoint_id=str(self.folder / str(load_step)))  # trainer.py#L1016
            data_iterator = self.batch_generator()  # L1028
            while self.step < STEPS:
                self.step += 1
                self.log.add(next(data_iterator))
                if self.step == dies_at:
                    killed()
                if self.step % 3 == 0:
                    dcp.save(self.states, checkpoint_id=str(self.folder / str(self.step)))  # L1042
        finally:
            self.loader.close()  # L1084-L1085, by train.py#L66-L71 with an error and without

    def batch_generator(self):
        data_iterator = iter(self.loader)  # L651
        while True:
            yield shown(next(data_iterator))  # L655-L660


def titan_rank(rank, folder, name, dp_world_size, **given):
    dist.init_process_group("gloo")
    loader = titan_loader(rank % dp_world_size, dp_world_size)
    TitanTrainer(loader, Log(folder / f"{name}.{rank}.log"), folder / ("other" if name == "reference" else "kept")).train(**given)
    dist.destroy_process_group()


@pytest.mark.parametrize("dp_world_size", [2, 1], ids=["data parallel", "tensor parallel"])
def test_torchtitan_killed_and_resumed(tmp_path, dp_world_size):
    """Each rank of the data parallel group has its share; the others' loaders are alike."""

    def run(name, **given):
        ended = in_ranks(partial(titan_rank, folder=tmp_path, name=name, dp_world_size=dp_world_size, **given))
        return ended, [Log(tmp_path / f"{name}.{rank}.log").read() for rank in range(2)]

    ended, begun = run("begun", dies_at=11)
    assert ended == [-signal.SIGKILL] * 2
    ended, resumed = run("resumed", load_step=9)
    assert ended == [0, 0]
    ended, expected = run("reference")
    assert ended == [0, 0]
    assert (expected[0] == expected[1]) == (dp_world_size == 1)
    for whole, before, after in zip(expected, begun, resumed, strict=True):
        assert (len(whole), before) == (STEPS, whole[:11])
        assert before[:9] + after == whole


def test_an_empty_state_does_nothing():
    """A checkpoint without the loader's: components/data/loader.py#L156-L158 of torchtitan."""
    loader = titan_loader(0, 1)
    iterator = iter(loader)
    expected = [shown(next(iterator)) for _ in range(4)]
    loader = titan_loader(0, 1)
    loader.load_state_dict({})
    iterator = iter(loader)
    found = [shown(next(iterator))]
    loader.load_state_dict({})
    found += [shown(next(iterator)) for _ in range(3)]
    assert found == expected
    assert not loader.is_restored_from_checkpoint
    loader.close()
    loader.close()


# torchtune.

EPOCHS = 3


class TuneRecipe:
    """What full_finetune_distributed.py does with a loader, and full_finetune_single_device.py alike."""

    def __init__(self, checkpoint=None, *, accumulation, max_steps_per_epoch, workers=0):
        checkpoint = checkpoint or {"epochs_run": 0, "steps_run": 0, "dataloader": None}
        self.epochs_run, self.global_step = checkpoint["epochs_run"], checkpoint["steps_run"]
        self.accumulation = accumulation
        # L828-L847
        self.loader = StatefulDataLoader(data(), BATCH, shuffle=True, drop_last=True, num_workers=workers, seed=5)
        if checkpoint["dataloader"] is not None:
            self.loader.load_state_dict(checkpoint["dataloader"])
        self.steps_per_epoch = len(self.loader) // accumulation  # L470-L477
        if max_steps_per_epoch is not None and max_steps_per_epoch < self.steps_per_epoch:
            self.steps_per_epoch = max_steps_per_epoch
        if checkpoint["dataloader"] is not None and self.global_step % self.steps_per_epoch == 0:
            list(self.loader)  # L485-L489: torchdata's loader is then at the end of an epoch; this one reads a whole one

    def train(self, see):
        """Shows each batch, and yields a checkpoint after each step."""
        for epoch in range(self.epochs_run, EPOCHS):
            done = self.global_step % self.steps_per_epoch  # L971
            self.loader.sampler.set_epoch(epoch)  # L979-L980
            iterator = iter(self.loader)
            count = 0
            while done < self.steps_per_epoch:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                see([epoch, shown(batch)])
                count += 1
                if count % self.accumulation == 0:  # L1027
                    self.global_step += 1
                    done += 1
                    yield {
                        "epochs_run": epoch + (self.global_step % self.steps_per_epoch == 0),  # L918-L920
                        "steps_run": self.global_step,
                        "dataloader": self.loader.state_dict(),  # L936
                    }


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_steps_per_epoch", [None, 2])
def test_every_checkpoint_of_torchtune_s_resumes(accumulation, max_steps_per_epoch, workers):
    given = {"accumulation": accumulation, "max_steps_per_epoch": max_steps_per_epoch}
    recipe, expected, checkpoints = TuneRecipe(**given), [], []
    for checkpoint in recipe.train(expected.append):
        checkpoints.append((len(expected), checkpoint))
    in_an_epoch = recipe.steps_per_epoch * accumulation
    assert [epoch for epoch, _ in expected] == [epoch for epoch in range(EPOCHS) for _ in range(in_an_epoch)]
    for read, checkpoint in checkpoints:
        recipe, found = TuneRecipe(checkpoint, **given, workers=workers), []
        for _ in recipe.train(found.append):
            pass
        recipe.loader.close()
        assert found == expected[read:], f"resumed after step {checkpoint['steps_run']}"


def tune_rank(rank, folder, name, accumulation, workers=0, resumes=None, dies_at=None):
    dist.init_process_group("gloo")
    dist.barrier()  # which nobody leaves, or dies, before all are there
    log = Log(folder / f"{name}.{rank}.log")

    def see(batch):
        log.add(batch)
        if len(log.read()) == dies_at:
            killed()

    checkpoint = None if resumes is None else torch.load(folder / f"begun.{resumes}.pt")
    recipe = TuneRecipe(checkpoint, accumulation=accumulation, max_steps_per_epoch=None, workers=workers)
    for checkpoint in recipe.train(see):
        if rank == 0:
            torch.save(checkpoint, folder / f"{name}.{recipe.global_step}.pt")
    recipe.loader.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "accumulation", "dies_at", "step"), [(1, 2, 10, 3), (2, 1, 6, 4)])
def test_torchtune_killed_and_resumed(tmp_path, ranks, accumulation, dies_at, step):
    """Within the second epoch, from the checkpoint before the last, which is the first rank's."""

    def run(name, **given):
        ended = in_ranks(partial(tune_rank, folder=tmp_path, name=name, accumulation=accumulation, **given), ranks)
        return ended, [Log(tmp_path / f"{name}.{rank}.log").read() for rank in range(ranks)]

    ended, begun = run("begun", workers=2, dies_at=dies_at)
    assert ended == [-signal.SIGKILL] * ranks
    ended, resumed = run("resumed", workers=1, resumes=step)
    assert ended == [0] * ranks
    ended, expected = run("reference")
    assert ended == [0] * ranks
    assert (expected[0] == expected[-1]) == (ranks == 1)
    for whole, before, after in zip(expected, begun, resumed, strict=True):
        assert before == whole[:dies_at]
        assert before[: step * accumulation] + after == whole
    assert [epoch for epoch, _ in expected[0]] == [epoch for epoch in range(EPOCHS) for _ in range(len(expected[0]) // EPOCHS)]
