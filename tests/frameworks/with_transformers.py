"""Hugging Face transformers' Trainer with this library's loader, resumed within an epoch.

By default its resume does not ask the loader: `skip_first_batches` makes a plain `DataLoader` of `loader.dataset` and
`loader.batch_sampler` for the rest of that epoch, which seeds nothing, and reads no pipeline that was composed:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/trainer.py#L1849-L1857
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py#L1395-L1471
With `ignore_data_skip=True` it takes what the loader gives, which is the rest of the epoch if the loader was resumed.
On several ranks it takes it, too: what `get_train_dataloader` returns is neither prepared nor dealt out by anybody else:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/trainer.py#L1597, #L1769-L1773
Its checkpoint is a folder that is filled file by file; the loader's is the last, so that what a kill has cut short has none.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from stateful_pipes import StatefulDataLoader
from tests.frameworks.runs import Log, data, dealt, in_processes, in_ranks, killed

EPOCHS, LENGTH, BATCH = 2, 12, 2
STEPS = LENGTH // BATCH
FILE = "loader.json"


class Model(torch.nn.Module):
    """It logs what it gets, and has dropout, whose draws the Trainer resumes."""

    def __init__(self, log, dies_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.zeros_(self.layer.bias)
        self.lines, self.dies_at = log, dies_at

    def forward(self, ids, draws, features):
        self.lines.add([ids.tolist(), draws.tolist(), features.tolist()])
        self.dies_at = None if self.dies_at is None else self.dies_at - 1
        if self.dies_at == 0:
            killed()
        found = self.layer(torch.nn.functional.dropout(features, 0.5)).squeeze(-1)
        return {"loss": (found - draws.float()).pow(2).mean()}


def collate(samples):
    batch = torch.utils.data.default_collate(samples)
    return {"ids": batch[0], "draws": batch[1], "features": batch[3]}


class DiesSaving(TrainerCallback):
    """When the Trainer's own part of a checkpoint is written."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **given):
        if state.global_step == self.step:
            killed()


class SavesLoader(TrainerCallback):
    def on_save(self, args, state, control, train_dataloader, **given):
        args.distributed_state.wait_for_everyone()  # each rank writes files of its own
        if args.should_save:  # the loader's state is the same on all
            train_dataloader.checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)


class ResumingTrainer(Trainer):
    """What a user writes: the loader is made with the checkpoint's state, and saved into the Trainer's checkpoints."""

    def __init__(self, model, args, loader, dies_saving):
        super().__init__(model, args, callbacks=[DiesSaving(dies_saving), SavesLoader()])
        self.loader = loader

    def get_train_dataloader(self):
        return self.loader


def newest(output):
    """The newest whole checkpoint."""
    return max(output.glob(f"checkpoint-*/{FILE}"), key=lambda file: file.stat().st_mtime_ns).parent


def train(
    log, output, *, resumes=None, dies_at=None, dies_saving=None, accumulated=1, workers=0, saves_every=1, length=LENGTH, **given
):
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=accumulated,
        save_strategy="steps",
        save_steps=saves_every,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        learning_rate=0.1,
        **{"ignore_data_skip": True, **given},
    )
    checkpoint = None if resumes is None else resumes / FILE
    with StatefulDataLoader(
        data(length), BATCH, shuffle=True, num_workers=workers, collate_fn=collate, seed=5, checkpoint=checkpoint
    ) as loader:
        model = Model(log, dies_at)
        trainer = ResumingTrainer(model, arguments, loader, dies_saving)
        trainer.train(resume_from_checkpoint=None if resumes is None else str(resumes))
        assert trainer.callback_handler.train_dataloader is loader
    log.add([model.layer.weight.tolist(), model.layer.bias.tolist(), trainer.state.global_step])


@pytest.mark.parametrize(("accumulated", "steps"), [(1, [1, 5, 6, 8]), (2, [1, 3, 5])])
def test_checkpoints_resume(tmp_path, accumulated, steps):
    """Within the epochs, and with the last batch of one. An epoch is whole accumulations, for a resumed one counts from 0."""
    whole = Log(tmp_path / "whole.log")
    train(whole, tmp_path / "whole", accumulated=accumulated)
    expected = whole.read()
    assert len(expected) == EPOCHS * STEPS + 1
    assert expected[-1][-1] == EPOCHS * STEPS // accumulated
    for step in steps:
        log = Log(tmp_path / f"{step}.log")
        train(
            log, tmp_path / "others", resumes=tmp_path / "whole" / f"checkpoint-{step}", accumulated=accumulated, saves_every=99
        )
        assert log.read() == expected[step * accumulated :], f"resumed after step {step}"


def whole_and_resumed(folder, *, accumulated=1, **given):
    """What is logged after the first step, without a stop and after a resume."""
    whole, resumed = Log(folder / "whole.log"), Log(folder / "resumed.log")
    train(whole, folder / "whole", accumulated=accumulated)
    train(resumed, folder / "other", resumes=folder / "whole" / "checkpoint-1", accumulated=accumulated, saves_every=99, **given)
    return whole.read()[accumulated:], resumed.read()


def test_batches_that_the_trainer_skips_itself_are_not_followed_by_the_same_ones(tmp_path):
    expected, found = whole_and_resumed(tmp_path, workers=1, ignore_data_skip=False)
    assert found[0] != expected[0]


def test_an_epoch_that_ends_within_an_accumulation_loses_its_last_step_after_a_resume(tmp_path):
    expected, found = whole_and_resumed(tmp_path, accumulated=4)
    assert found[:-1] == expected[:-1]
    assert (expected[-1][-1], found[-1][-1]) == (4, 3)


def train_rank(rank, ranks, folder, name, **given):
    output = folder / ("other" if name == "reference" else "kept")
    train(Log(folder / f"{name}.{rank}.log"), output, saves_every=4, length=ranks * LENGTH, **given)
    assert torch.distributed.is_initialized() == (ranks > 1)


@pytest.mark.parametrize(
    ("ranks", "dies", "batches", "step"),
    [(1, {"dies_at": 10}, 10, 8), (1, {"dies_saving": 8}, 8, 4), (2, {"dies_saving": 8}, 8, 4)],
    ids=["in a step", "saving", "two saving"],
)
def test_killed_within_an_epoch_and_resumed(tmp_path, ranks, dies, batches, step):
    """In a step, or before the loader's part of a checkpoint is written, which is then none."""
    kept = tmp_path / "kept"

    def run(name, **given):
        work = partial(train_rank, ranks=ranks, folder=tmp_path, name=name, **given)
        ended = in_processes(work) if ranks == 1 else in_ranks(partial(work, ddp_backend="gloo"), ranks)
        return ended, [Log(tmp_path / f"{name}.{rank}.log").read() for rank in range(ranks)]

    ended, expected = run("reference")
    assert ended == [0] * ranks
    ended, begun = run("begun", workers=2 // ranks, **dies)
    assert ended == [-signal.SIGKILL] * ranks
    assert newest(kept).name == f"checkpoint-{step}"
    ended, resumed = run("resumed", workers=ranks - 1, resumes=newest(kept))
    assert ended == [0] * ranks
    for whole, before, after in zip(expected, begun, resumed, strict=True):
        assert len(whole) == EPOCHS * STEPS + 1
        assert before == whole[:batches]
        assert before[:step] + after == whole
        assert whole[-1] == expected[0][-1]
    alone = StatefulDataLoader(data(ranks * LENGTH), BATCH, shuffle=True, collate_fn=collate, seed=5)
    for first in range(0, EPOCHS * STEPS, STEPS):
        batches_of_it = [[part.tolist() for part in batch.values()] for batch in alone]
        assert dealt([whole[first : first + STEPS] for whole in expected]) == dealt([batches_of_it])
