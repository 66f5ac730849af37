"""Hugging Face transformers' Trainer with this library's loader, resumed within an epoch.

By default its resume does not ask the loader: `skip_first_batches` makes a plain `DataLoader` of `loader.dataset` and
`loader.batch_sampler` for the rest of that epoch, which seeds nothing, and reads no pipeline that was composed:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/trainer.py#L1849-L1857
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py#L1395-L1471
With `ignore_data_skip=True` it takes what the loader gives, which is the rest of the epoch if the loader was resumed.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from stateful_pipes import StatefulDataLoader
from tests.frameworks.runs import Log, data, in_processes, killed

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


class SavesLoader(TrainerCallback):
    def __init__(self, loader):
        self.loader = loader

    def on_save(self, args, state, control, **given):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.loader.checkpoint(folder / FILE)


class ResumingTrainer(Trainer):
    """What a user writes: the loader is made with the checkpoint's state, and saved into the Trainer's checkpoints."""

    def __init__(self, *given, loader, **named):
        super().__init__(*given, callbacks=[SavesLoader(loader)], **named)
        self.loader = loader

    def get_train_dataloader(self):
        return self.loader


def train(log, output, *, resumes=None, dies_at=None, accumulated=1, workers=0, saves_every=1, length=LENGTH):
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=accumulated,
        save_strategy="steps",
        save_steps=saves_every,
        ignore_data_skip=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        learning_rate=0.1,
    )
    checkpoint = None if resumes is None else Path(resumes) / FILE
    with StatefulDataLoader(
        data(length), BATCH, shuffle=True, num_workers=workers, collate_fn=collate, seed=5, checkpoint=checkpoint
    ) as loader:
        model = Model(log, dies_at)
        trainer = ResumingTrainer(model, arguments, loader=loader)
        trainer.train(resume_from_checkpoint=None if resumes is None else str(resumes))
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


def test_killed_within_an_epoch_and_resumed(tmp_path):
    logs = reference, begun, resumed = [Log(tmp_path / f"{name}.log") for name in ("reference", "begun", "resumed")]
    assert in_processes(lambda _: train(reference, tmp_path / "other", saves_every=99)) == [0]
    assert in_processes(lambda _: train(begun, tmp_path / "kept", saves_every=4, dies_at=10, workers=2)) == [-signal.SIGKILL]
    last = get_last_checkpoint(str(tmp_path / "kept"))
    assert in_processes(lambda _: train(resumed, tmp_path / "kept", saves_every=4, resumes=last, workers=1)) == [0]
    expected, before, after = (log.read() for log in logs)
    assert before == expected[:10]
    assert before[:8] + after == expected
