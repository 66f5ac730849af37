"""PyTorch Lightning's Trainer with this library's loader handed over as it is.

Lightning takes the loader's state with the fit loop's and loads it before its first iter:
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/loops/fit_loop.py#L521-L556
Where the number of batches is known its fetcher does not read ahead, so that the state is that of the batch in hand:
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/loops/fetchers.py#L100-L117
"""

from __future__ import annotations

import logging
import signal
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy

from stateful_pipes import InfiniteRandomSampler, StatefulDataLoader
from stateful_pipes.errors import ResumableBatchConfigurationError
from tests.frameworks.runs import BATCH, LENGTH, STEPS, Log, data, in_processes, in_ranks, killed, shown

# Lightning's advice, and torch's own deprecation under its hands.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\). is deprecated:FutureWarning"),
]
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

EPOCHS = 3
RANK_STEPS = 3


class Model(pl.LightningModule):
    """Its weights depend on every draw. It logs each batch before it steps, and dies where it is told to."""

    def __init__(self, log, dies_at=None, loaders=None):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.zeros_(self.layer.bias)
        self.lines, self.dies_at, self.loaders = log, dies_at, loaders

    def train_dataloader(self):
        return self.loaders()

    def training_step(self, batch, batch_idx):
        self.lines.add(["train", self.current_epoch, batch_idx, *shown(batch)])
        if self.global_step == self.dies_at:
            killed()
        return (self.layer(batch[3]).squeeze(-1) - batch[1].float()).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self):
        self.lines.add(["weights", self.layer.weight.tolist(), self.layer.bias.tolist()])


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.lines.add(["val", self.current_epoch, self.global_step, batch_idx, *shown(batch)])


class Fetching(Model):
    """Reads its batches itself, which Lightning offers to those that read ahead."""

    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, None)  # the fetcher counts anew after a resume


def train_loader(workers=0, seed=5):
    return StatefulDataLoader(data(), BATCH, shuffle=True, num_workers=workers, seed=seed)


def endless_loader():
    return StatefulDataLoader(data(), BATCH, sampler=InfiniteRandomSampler(LENGTH, seed=6), seed=5)


def val_loader():
    """Whoever looks into it, the next validation is whole."""
    return StatefulDataLoader(data(5), BATCH, resumable=False, rng=())


def fit(folder, name, loader, *, model=Model, dies_at=None, saves_every=1, resumes=None, val=None, saving=None, **given):
    """One training, logged and with its checkpoints in the folder; it goes on from checkpoint number `resumes`."""
    log = Log(folder / f"{name}.log")
    saving = saving or ModelCheckpoint(
        folder / name, filename="{step}", every_n_train_steps=saves_every, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
        **{"max_epochs": EPOCHS, "devices": 1, **given},
    )
    checkpoint = None if resumes is None else folder / "whole" / f"step={resumes}.ckpt"
    trainer.fit(model(log, dies_at), loader, val, ckpt_path=checkpoint, weights_only=False)
    return trainer


def test_saved_at_an_epoch_s_end_as_lightning_does_by_default(tmp_path):
    """From such a checkpoint it takes the epoch alone, not the loaders' states: FitLoop.restarting is False then."""

    def saving(name):
        return ModelCheckpoint(tmp_path / name, filename="{step}", save_top_k=-1)

    fit(tmp_path, "whole", train_loader(), saving=saving("whole"))
    expected = Log(tmp_path / "whole.log").read()
    for epochs in range(1, EPOCHS):
        fit(tmp_path, f"from{epochs}", train_loader(), saving=saving(f"from{epochs}"), resumes=epochs * STEPS)
        assert Log(tmp_path / f"from{epochs}.log").read() == from_step(expected, epochs * STEPS)
    fit(tmp_path, "reseeded", train_loader(seed=6), saving=saving("reseeded"), resumes=STEPS)
    assert Log(tmp_path / "reseeded.log").read()[0] != from_step(expected, STEPS)[0]


def from_step(lines, steps, accumulated=1):
    """What a training that was resumed after so many steps has to log."""
    ends = [number for number, line in enumerate(lines, 1) if line[0] == "train"]
    return lines[ends[steps * accumulated - 1] if steps else 0 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_within_an_epoch_and_resumed(tmp_path, workers):
    assert in_processes(lambda _: fit(tmp_path, "reference", train_loader())) == [0]
    begun, resumed = train_loader(workers), train_loader(workers, seed=99)  # which comes from the checkpoint
    assert in_processes(lambda _: fit(tmp_path, "whole", begun, saves_every=4, dies_at=10)) == [-signal.SIGKILL]
    assert in_processes(lambda _: fit(tmp_path, "resumed", resumed, saves_every=4, resumes=8)) == [0]
    expected, begun, resumed = (Log(tmp_path / f"{name}.log").read() for name in ("reference", "whole", "resumed"))
    assert len(expected) == EPOCHS * STEPS + 1
    assert begun == expected[:11]
    assert begun[:8] + resumed == expected
    assert resumed[0][:3] == ["train", 1, 2]  # Lightning's own counts


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"limit_train_batches": 4},
        {"loader": endless_loader, "limit_train_batches": 4},
        {"model": Fetching},
        {"loader": endless_loader, "model": Fetching, "max_epochs": -1, "max_steps": 9},
    ],
    ids=["whole", "accumulating", "limited", "endless", "fetching", "endless fetching"],
)
def test_every_checkpoint_resumes(tmp_path, given):
    given = {"loader": train_loader, **given}
    make = given.pop("loader")
    whole = fit(tmp_path, "whole", make(), **given)
    expected = Log(tmp_path / "whole.log").read()
    steps = whole.global_step
    assert steps >= 9
    for step in range(1, steps + (whole.max_steps < 0)):  # at its last step such a training has nothing to do, and says nothing
        fit(tmp_path, f"from{step}", make(), resumes=step, **given)
        found = Log(tmp_path / f"from{step}.log").read()
        assert found == from_step(expected, step, given.get("accumulate_grad_batches", 1)), f"resumed after step {step}"


def test_without_a_length_lightning_reads_a_batch_ahead(tmp_path):
    """Its checkpoint is then one batch late, whatever the loader; `limit_train_batches` or `dataloader_iter` are the way out."""
    given = {"max_epochs": -1, "max_steps": 4}
    fit(tmp_path, "whole", endless_loader(), **given)
    fit(tmp_path, "resumed", endless_loader(), resumes=2, **given)
    expected, found = (Log(tmp_path / f"{name}.log").read() for name in ("whole", "resumed"))
    assert found[0][3:] == expected[3][3:]
    assert found[0][3:] != expected[2][3:]


@pytest.mark.parametrize(("every", "times"), [(2, 3), (0.5, 2), (1.0, 1)], ids=["batches", "fraction", "epoch"])
def test_validation_moves_nothing(tmp_path, every, times):
    """Each validation is whole, although the sanity check has looked into it; training goes on as it would have."""
    given = {"model": Validated, "val_check_interval": every}
    fit(tmp_path, "whole", train_loader(), val=val_loader(), **given)
    expected = Log(tmp_path / "whole.log").read()
    assert [line[4] for line in expected if line[0] == "val"] == [[0, 1], [2, 3], [4]] * EPOCHS * times
    for step in range(1, EPOCHS * STEPS + 1):
        fit(tmp_path, f"from{step}", train_loader(), val=val_loader(), resumes=step, **given)
        found = Log(tmp_path / f"from{step}.log").read()
        runs = [line[4] for line in found if line[0] == "val"]
        assert runs == [[0, 1], [2, 3], [4]] * (len(runs) // 3)
        assert [line for line in found if line[0] != "val"] == [line for line in from_step(expected, step) if line[0] != "val"]


def test_with_resume_the_first_validation_is_what_the_sanity_check_has_left(tmp_path):
    fit(tmp_path, "whole", train_loader(), val=StatefulDataLoader(data(5), BATCH), model=Validated, max_epochs=2)
    validated = [line[4] for line in Log(tmp_path / "whole.log").read() if line[0] == "val"]
    assert validated == [[4], [0, 1], [2, 3], [4]]


def test_a_second_fit_begins_anew(tmp_path):
    loader = train_loader()
    for name in ("first", "second"):
        fit(tmp_path, name, loader)
    assert Log(tmp_path / "second.log").read() == Log(tmp_path / "first.log").read()


class DataParallel(Model):
    """Its loader is made in the hook, where the ranks are known."""

    def train_dataloader(self):
        self.loader = train_loader()
        return self.loader

    def on_train_start(self):
        assert self.trainer.train_dataloader is self.loader  # neither wrapped nor made anew


def fit_rank(rank, folder, name, *, dies_at=None, resumes=None, loader=None):
    checkpoint = None if resumes is None else folder / "begun" / f"step={resumes}.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
    )
    trainer.fit(DataParallel(Log(folder / f"{name}.{rank}.log"), dies_at), loader, ckpt_path=checkpoint, weights_only=False)


def test_data_parallel_killed_and_resumed(tmp_path):
    """Every rank's batches, and what is averaged over the ranks, are those of a training that was not killed."""

    def run(name, **given):
        ended = in_ranks(partial(fit_rank, folder=tmp_path, name=name, **given))
        return ended, [Log(tmp_path / f"{name}.{rank}.log").read() for rank in range(2)]

    ended, expected = run("reference")
    assert ended == [0, 0]
    ended, begun = run("begun", dies_at=5)
    assert ended == [-signal.SIGKILL] * 2
    ended, resumed = run("resumed", resumes=4)
    assert ended == [0, 0]
    for whole, before, after in zip(expected, begun, resumed, strict=True):
        assert len(whole) == EPOCHS * RANK_STEPS + 1
        assert before == whole[:6]
        assert before[:4] + after == whole
    assert expected[0][-1] == expected[1][-1]
    for epoch in range(EPOCHS):
        ids = [i for whole in expected for line in whole if line[:2] == ["train", epoch] for i in line[3]]
        assert set(ids) == set(range(LENGTH))
        assert len(ids) == LENGTH + 1  # the ranks are padded to equally many


def fit_early(rank, folder):
    with pytest.raises(ResumableBatchConfigurationError, match="with Lightning in train_dataloader"):
        fit_rank(rank, folder, "early", loader=train_loader())


def test_a_loader_made_before_the_ranks_are_known_is_refused(tmp_path):
    assert in_ranks(partial(fit_early, folder=tmp_path)) == [0, 0]
