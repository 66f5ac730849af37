"""Broken pipelines of each kind are caught with their cause; exact ones never are; and the command says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stateful_pipes.cli.main import main
from stateful_pipes.testing import verify
from stateful_pipes.testing.laboratory import clean_processes_kept
from tests.integration import broken_pipelines as broken

ONE_OF_EACH = [
    (broken.new_generator_each_time, "unseeded generator", "np.random.default_rng()"),
    (broken.new_python_generator_each_time, "unseeded generator", "random.Random()"),
    (broken.torch_generator_of_its_own, "unseeded generator", "self.generator.seed()"),
    (broken.generator_of_the_module, "unseeded generator", "MODULE_RNG"),
    (broken.global_generator_left_out, "global generator", "global generator of numpy"),
    (broken.global_generator_beside_the_given_one, "global generator", "global generator of python"),
    (broken.seeded_numpy_generator, "private generator", "mapper.generator, a numpy.random.Generator,"),
    (broken.seeded_torch_generator_in_a_partial, "private generator", "mapper_2.map_fn.args[0], a torch.Generator,"),
    (broken.global_counter, "global counter", "broken_pipelines.READ, now "),
    (broken.counter_of_the_class, "global counter", "CountingClass.calls, now "),
    (broken.counter_of_the_dataset, "state between samples", "mapper.calls, now "),
    (broken.first_sample_remembered, "state between samples", "mapper.seen"),
    (broken.stamped, "time", "time.time()"),
    (broken.seeded_by_the_date, "time", "datetime.date.today()"),
    (broken.labelled_by_a_set, "unordered listing", "PYTHONHASHSEED"),
    (broken.split_by_hash, "unordered listing", "PYTHONHASHSEED"),
    (broken.listed, "unordered listing", "os.listdir(folder())"),
    (broken.grown, "dataset changed", "sampler.length: saved 7, here "),
    (broken.rewritten, "dataset changed", "whenever factory is called"),
    (broken.rewritten_once, "dataset changed", "than it was at first"),
    (broken.drawn_when_made, "dataset changed", "global generator of torch"),
    (broken.marked_by_the_process, "process", "os.getpid()"),
    (broken.from_a_device, "unknown", "whenever it is read"),
]
MORE = [
    (broken.globbed, "unordered listing", "glob.glob("),
    (broken.from_the_system, "unseeded generator", "secrets.randbelow"),
    (broken.named_by_uuid, "unseeded generator", "uuid.uuid4()"),
    (broken.shuffled_by_an_unseeded_generator, "unseeded generator", "np.random.default_rng()"),
    (broken.generator_in_collate, "unseeded generator", "np.random.RandomState()"),
    (broken.seeded_python_generator, "private generator", "mapper.generator, a random.Random,"),
    (broken.node_with_half_a_state, "state between samples", "smoothing.mean, now "),
    (broken.stamped_by_the_day, "time", "datetime.datetime.now()"),
    (broken.walked, "unordered listing", "os.walk(folder())"),
    (broken.other_fingerprint, "dataset changed", "mapper.fingerprint: saved 'data of 5', here 'data of 9'"),
    (broken.marked_by_the_worker, "process", "get_worker_info()"),
]
EXACT = [broken.exact, broken.exact_with_workers, broken.exact_nodes, broken.exact_without_prefetcher]


@pytest.fixture(scope="module", autouse=True)
def _clean_processes():
    """One of each hash seed for all tests: a start takes seconds."""
    with clean_processes_kept():
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BROKEN_PIPELINES", str(tmp_path))
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / "list.csv").write_text("\n".join("abcdefg"))
    (tmp_path / "value.csv").write_text("5")
    return tmp_path


def check_cause(factory, kind, told, **options):
    found = verify(factory, cuts=3, workers=(0, 1), kills=0, **options).difference
    assert found is not None, "it is taken for exact"
    assert (found.cause.kind, found.cause.told) == (kind, found.cause.told), found
    assert told in found.cause.told


@pytest.mark.parametrize(("factory", "kind", "told"), ONE_OF_EACH, ids=lambda value: getattr(value, "__name__", None))
def test_cause_is_named(factory, kind, told):
    check_cause(factory, kind, told)


@pytest.mark.full
@pytest.mark.parametrize(("factory", "kind", "told"), MORE, ids=lambda value: getattr(value, "__name__", None))
def test_cause_is_named_in_other_forms(factory, kind, told):
    check_cause(factory, kind, told)


@pytest.mark.parametrize(
    ("factory", "kind", "told"),
    [row for row in ONE_OF_EACH if row[1] in ("unseeded generator", "private generator", "global counter", "dataset changed")][
        ::2
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_cause_is_named_without_a_new_process(factory, kind, told):
    check_cause(factory, kind, told, new_process=False)


@pytest.mark.parametrize("seed", range(50))
def test_no_false_alarm_inline(seed):
    verdict = verify(EXACT[seed % len(EXACT)], seed=seed, cuts=4, workers=(0,), new_process=seed % 3 == 0)
    assert verdict.is_exact, verdict
    assert ("in a new process" in verdict.tried[-1]) == (seed % 3 == 0)


@pytest.mark.parametrize("seed", range(5))
def test_no_false_alarm_with_workers_and_kills(seed):
    verdict = verify(EXACT[seed % 3], seed=seed, cuts=4, workers=(0, 2, 1), kills=2)
    assert verdict.is_exact, verdict
    assert len(verdict.tried) == 6
    assert not verdict.notes


# The command.


def test_command_says_exact(capsys):
    assert main(["verify", "tests.integration.broken_pipelines:exact", "--workers", "0,1", "--cuts", "2", "--kills", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "reading it straight through"
    assert [line.startswith("trying: ") for line in shown[1:]] == [True] * 6 + [False]
    assert shown[-1] == "exact"


def test_command_names_what_differs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the file's folder is added
    assert main(["verify", f"{broken.__file__}:stamped", "--workers", "0", "--batches", "2"]) == 1
    shown = capsys.readouterr().out
    assert "NOT exact: the first batch that differs: epoch 0, batch 0 (2 batches from the first state" in shown
    assert "sample: number 0 of the batch: epoch 0, position 0, index " in shown
    assert "at batch[1]: expected " in shown
    assert "likeliest cause: time: the batch depends on the clock (broken_pipelines.py:" in shown


def test_command_of_a_pipeline_without_a_state(capsys):
    assert main(["verify", "tests.integration.broken_pipelines:without_resume"]) == 1
    assert "NOT exact: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests.integration.broken_pipelines:not_a_pipeline"], "factory must return a StatefulDataLoader or a torchdata node"),
        (["tests.integration.broken_pipelines:nothing"], "has no 'nothing'"),
        (["tests.integration.broken_pipelines"], "must be module:factory"),
        (["tests.integration.broken_pipelines:exact", "--workers", "0,x"], "--workers: must be an integer, got 'x'"),
        (["tests.integration.broken_pipelines:exact", "--workers", "-1"], "--workers: must be at least 0, got -1"),
        (["tests.integration.broken_pipelines:exact", "--batches", "0"], "--batches: must be at least 1, got 0"),
        (["tests.integration.broken_pipelines:exact", "--cuts", "-1"], "--cuts: must be at least 0, got -1"),
        (["tests.integration.broken_pipelines:exact", "--kills", "-1"], "--kills: must be at least 0, got -1"),
        (["tests.integration.broken_pipelines:exact", "--seed", "-1"], "--seed: must be at least 0, got -1"),
        ([], "required: module:factory"),
    ],
)
def test_wrong_usage_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_pipeline_that_raises_says_nothing_of_its_resume(capsys):
    assert main(["verify", "tests.integration.broken_pipelines:raising", "--workers", "0"]) == 2
    assert "this one cannot be read" in capsys.readouterr().err


def test_the_place_is_named_whatever_the_user_s_module_is_called(tmp_path):
    """As one of the standard library, here; in a process of its own, for in this one that may have been imported."""
    (tmp_path / "profile.py").write_text(STAMPED)
    command = ["verify", "profile.py:factory", "--workers", "0", "--batches", "2", "--kills", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "stateful_pipes", *command], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "time: " in done.stdout
    assert "profile.py:10" in done.stdout


STAMPED = """\
import time

import torch

from stateful_pipes import StatefulDataLoader


class Stamped(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index, time.time()

    def __len__(self):
        return 8


def factory():
    return StatefulDataLoader(Stamped(), batch_size=4, seed=0)
"""


@pytest.mark.parametrize(
    ("made", "hint"), [(None, "does it lack a return"), (torch.utils.data.DataLoader([1]), "stateful_pipes.StatefulDataLoader")]
)
def test_what_is_no_pipeline_is_told_what_to_do(made, hint):
    with pytest.raises(TypeError, match=hint):
        verify(lambda: made)
