"""`stateful-pipes inspect` and `diff`: every kind of file, damaged ones, and that nothing in a file is executed."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import sys

import numpy as np
import pytest
import torch
import torchdata.nodes as tn

from stateful_pipes import (
    CheckpointManager,
    MultiPipelineLoader,
    SamplerNode,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.checkpoint import dumps
from stateful_pipes.cli.diff import differences
from stateful_pipes.cli.main import main
from tests.unit.trainers import paused

VERSIONS = {"python": "3.11.7", "numpy": "2.0.0", "torch": "2.6.0"}


def loader_after(batches, length=10, seed=1):
    """A loader after so many batches of 2, its versions the same everywhere."""
    loader = StatefulDataLoader(range(length), batch_size=2, shuffle=True, seed=seed)
    for _ in range(batches):
        next(iter(loader), None)
    return loader


def state_after(batches, **kwargs):
    return {**loader_after(batches, **kwargs).state_dict(), "library": "0.1.0", "versions": VERSIONS}


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


@pytest.fixture
def run(capsys):
    """Runs a command and returns its exit code and what it printed."""

    def of(*arguments):
        code = main(list(map(str, arguments)))
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err

    return of


# Inspect.


def test_a_checkpoint_of_a_loader(run, tmp_path):
    path = write(tmp_path / "a.ckpt", dumps(state_after(2), user={"run": "größe", "lr": [0.1, 0.2]}))
    assert run("inspect", path) == (
        0,
        [
            f"{path}: checkpoint of a StatefulDataLoader, {path.stat().st_size} bytes, checksum right",
            "epoch 0, 2 batches, 4 of 10 samples (sampler)",
            "state",
            "├─ written by stateful_pipes 0.1.0 (format 1) with numpy 2.0.0, python 3.11.7, torch 2.6.0",
            "├─ batcher: SeededBatcher",
            "│  ├─ batch_size: 2",
            "│  ├─ drop_last: False",
            "│  └─ seed: 1",
            "├─ mapper: SeededMapper",
            "│  ├─ rng: 'python,numpy,torch'",
            "│  └─ seed: 1",
            "├─ sampler: SamplerNode",
            "│  ├─ consumed: 4",
            "│  ├─ epoch: 0",
            "│  ├─ length: 10",
            "│  ├─ order: 'RandomSampler'",
            "│  ├─ seed: 1",
            "│  ├─ uneven: 'pad'",
            "│  └─ world_size: 1",
            "└─ user: 2 keys",
            "   ├─ lr: list of 2: 0.1, 0.2",
            "   └─ run: 'größe'",
        ],
        "",
    )


def test_a_checkpoint_as_a_loader_writes_it(run, tmp_path):
    path = tmp_path / "a.ckpt"
    loader_after(6).checkpoint(path)
    code, shown, _ = run("inspect", path)
    assert code == 0
    assert shown[0].endswith("checksum right")
    assert shown[1] == "epoch 1, 1 batch, 2 of 10 samples (sampler)"


def test_a_checkpoint_of_several_pipelines(run, tmp_path):
    path = tmp_path / "a.ckpt"
    loader = MultiPipelineLoader([SamplerNode(SequentialSampler(6), rank=rank, world_size=2) for rank in range(2)])
    next(iter(loader))
    loader.checkpoint(path)
    code, shown, _ = run("inspect", path)
    assert code == 0
    assert "checkpoint of a MultiPipelineLoader" in shown[0]
    progress = "epoch 0, 1 batch, 2 of 6 samples over all ranks (sampler)"
    assert shown[1:5] == [f"pipelines['0']: {progress}", f"pipelines['1']: {progress}", "dict of 1", "└─ pipelines: 2 keys"]
    assert shown[5] == f"   ├─ 0: state of a loader, {progress}"


def test_a_file_of_a_checkpoint_manager(run, tmp_path):
    state = {"model": {"conv.weight": torch.full((2, 3), 123.0), "flag": torch.tensor(True)}, "loader": state_after(2), "step": 2}
    path = CheckpointManager(tmp_path, every=1).save(2, state)
    code, shown, _ = run("inspect", path)
    assert code == 0
    assert shown[0] == f"{path}: checkpoint of a CheckpointManager, {path.stat().st_size:,} bytes, checksum right"
    assert shown[1:6] == [
        "loader: epoch 0, 2 batches, 4 of 10 samples (sampler)",
        "dict of 3",
        "├─ model: 2 keys",
        "│  ├─ conv.weight: tensor float32 (2, 3), 24 bytes",
        "│  └─ flag: tensor bool (), 1 byte",
    ]
    assert shown[-1] == "└─ step: 2"
    assert not any("123" in line for line in shown[1:])


def test_a_paused_training(run, tmp_path):
    path = tmp_path / "paused.pt"
    paused(path, 3)
    code, shown, _ = run("inspect", path)
    assert code == 0
    assert "paused training of stateful_pipes.training" in shown[0]
    assert shown[0].endswith("checksum right")
    assert shown[1].startswith("training_state.loaders.ours: epoch 0, 3 batches, 6 of 10 samples (sampler)")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_torch_save(run, tmp_path, legacy):
    torch.save(state_after(2), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    code, shown, _ = run("inspect", tmp_path / "a.pt")
    assert code == 0
    assert "file of torch.save with a loader's state" in shown[0]
    assert shown[0].endswith("no checksum")
    assert shown[1:3] == ["epoch 0, 2 batches, 4 of 10 samples (sampler)", "state"]


def test_a_state_within_another_loader_s(run, tmp_path):
    path = write(tmp_path / "a.json", {"fetcher_state": {"dataset_iter_state": state_after(1), "ended": False}, "yielded": 1})
    code, shown, _ = run("inspect", path)
    assert code == 0
    assert shown[1] == "fetcher_state.dataset_iter_state: epoch 0, 1 batch, 2 of 10 samples (sampler)"


class Counting(tn.BaseNode):
    """Its state holds what JSON lacks."""

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.at = 0 if initial_state is None else initial_state["at"]

    def next(self):
        self.at += 1
        return self.at

    def get_state(self):
        buffer = np.zeros((2, 0), np.int16)
        return {"at": self.at, "seen": torch.arange(3), "raw": b"123", 5: (1.5, None), "buffer": buffer}


def test_a_foreign_node_s_state_is_gone_into(run, tmp_path):
    loader = StatefulDataLoader(Counting())
    next(iter(loader))
    code, shown, _ = run("inspect", write(tmp_path / "a.json", loader.state_dict()))
    assert code == 0
    assert shown[1] == "epoch 0, 1 batch, 1 item (counting)"
    assert [line.strip("│├─└ ") for line in shown[-8:]] == [
        "state: 5 keys",
        "at: 1",
        "seen: tensor int64 (3,), 24 bytes",
        "raw: b'123'",
        "5: tuple of 2",
        "0: 1.5",
        "1: None",
        "buffer: array int16 (2, 0), 0 bytes",
    ]


def test_a_file_without_a_state(run, tmp_path):
    code, shown, _ = run("inspect", write(tmp_path / "a.json", {"a": []}))
    assert (code, shown[1:]) == (0, ["no state of a loader in it", "dict of 1", "└─ a: empty list"])


def test_thousands_of_entries_are_cut_with_a_count(run, tmp_path):
    state = state_after(0)
    state["nodes"] |= {f"node_{number}": {"type": "Mine", "x": number} for number in range(5000)}
    state["nodes"]["sampler"] |= {f"field_{number}": number for number in range(3000)}
    many = {"states": [state] * 10, "deep": [[0] * 10_000]}
    code, shown, _ = run("inspect", write(tmp_path / "a.json", many), "--limit", "3")
    assert code == 0
    assert "and 7 more states" in shown
    told = "\n".join(shown)
    assert "... and 7 more" in told
    assert "... and 5,000 more" in told
    assert "... and 3,004 more" in told
    assert "0: list of 10,000: 0, 0, 0, 0, 0, 0, 0, 0, ..." in told
    assert len(shown) < 200


def test_long_huge_and_odd_values(run, tmp_path):
    digits = "9" * 10_000
    odd = "\u202e\x1b[31m\ud800"
    text = json.dumps({"long": "ä" * 5000, "huge": "HUGE", "big": 2**300, "neg": -5, odd: odd, " x": 1, "": 2, "数": "größe"})
    write(tmp_path / "a.json", text.replace('"HUGE"', digits).encode())
    code, shown, _ = run("inspect", tmp_path / "a.json")
    assert code == 0
    assert [line.strip("│├─└ ") for line in shown[3:]] == [
        f"long: '{'ä' * 60}'... (5,000 characters)",
        "huge: integer of 10,000 digits",
        "big: integer of 301 bits",
        "neg: -5",
        f"{odd!r}: {odd!r}",
        "' x': 1",
        "'': 2",
        "数: 'größe'",
    ]


def test_files_made_to_have_no_end(run, tmp_path):
    """Lists that hold themselves, and lists of lists of the same."""
    own: list = []
    own.append(own)
    twice: list = ["leaf"]
    for _ in range(60):
        twice = [twice, twice]
    torch.save({"own": own, "twice": twice}, tmp_path / "a.pt")
    code, shown, _ = run("inspect", tmp_path / "a.pt")
    assert code == 0
    assert len(shown) == 10_003
    assert shown[-1] == "cut after 10,000 lines"
    assert run("diff", tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0


@pytest.fixture
def odd(tmp_path):
    return write(tmp_path / "a.json", {"数": "größe", **{str(number): number for number in range(5000)}})


def test_a_terminal_that_shows_ascii_only(odd, monkeypatch):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, "ascii"))
    assert main(["inspect", str(odd)]) == 0
    assert rb"\u251c\u2500 \u6570: 'gr\xf6\xdfe'" in file.getvalue().splitlines()


def test_a_reader_that_goes_before_it_has_read_all(odd, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main(["inspect", str(odd), "--limit", "10000"]) == 0
        file.write("and Python's own flush at its end meets no error")


# Damage.


class Evil:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def changed(data):
    return data.replace(b'"consumed":4', b'"consumed":6')


def good():
    return dumps(state_after(2))


def sealed(tmp_path):
    folder = tmp_path / "manager"
    return CheckpointManager(folder, every=1).save(1, {"loader": state_after(2), "weights": torch.arange(100)}).read_bytes()


def of_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


DAMAGED = {
    "checkpoint cut off": lambda _: good()[:200],
    "checkpoint doubled": lambda _: good() * 2,
    "checkpoint with another character": lambda _: changed(good()),
    "checkpoint with a space": lambda _: good().replace(b":", b": ", 1),
    "checkpoint with a byte that is no text": lambda _: good()[:50] + b"\xff" + good()[51:],
    "sealed with another byte": lambda tmp_path: sealed(tmp_path).replace(b"consumed", b"consumes", 1),
    "sealed and cut off": lambda tmp_path: sealed(tmp_path)[:-1],
    "sealed and cut in the middle": lambda tmp_path: sealed(tmp_path)[:900],
    "file of torch.save cut off": lambda _: of_torch(state_after(1))[:-100],
    "pickle cut off": lambda _: pickle.dumps(state_after(1))[:-10],
    "empty": lambda _: b"",
    "text": lambda _: b"hello",
    "zeros": lambda _: bytes(1000),
    "JSON that nests without end": lambda _: b"[" * 100_000,
    "only the beginning of an archive": lambda _: b"PK\x03\x04",
    "code in a pickle": lambda tmp_path: pickle.dumps(Evil(tmp_path / "made")),
    "code in a file of torch.save": lambda tmp_path: of_torch({"a": Evil(tmp_path / "made")}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file(run, tmp_path, damage):
    path = write(tmp_path / "a.ckpt", DAMAGED[damage](tmp_path))
    code, shown, error = run("inspect", path)
    assert code == 1
    told = error if not shown else shown[0]
    assert told.startswith(f"{path}: ")
    assert "This is not a valid checkpoint: " in told or "checksum WRONG" in told
    assert len(told.splitlines()) == 1
    other = write(tmp_path / "b.ckpt", good())
    for files in ((path, other), (other, path)):
        code, shown, error = run("diff", *files)
        assert (code, shown) == (2, [])
        assert error.startswith(f"{path}: ")
    assert not (tmp_path / "made").exists()


def test_a_changed_checkpoint_is_shown_all_the_same(run, tmp_path):
    code, shown, _ = run("inspect", write(tmp_path / "a.ckpt", changed(good())))
    assert code == 1
    assert shown[1] == "epoch 0, 2 batches, 6 of 10 samples (sampler)"


def test_a_file_that_is_not_there(run, tmp_path):
    assert run("inspect", tmp_path / "a") == (1, [], f"{tmp_path}/a: No such file or directory\n")
    assert run("inspect", tmp_path) == (1, [], f"{tmp_path}: Is a directory\n")
    code, shown, error = run("diff", tmp_path / "a", tmp_path / "b")
    assert (code, shown) == (2, [])
    assert len(error.splitlines()) == 2


@pytest.mark.parametrize("field", ["versions", "library", "version", "batch", "nodes"])
@pytest.mark.parametrize("wrong", [None, 5, "x", [], [1], {}, {"a": None}, {"a": {"type": 5, "state": "{"}}])
def test_a_state_with_damaged_fields_is_printed(run, tmp_path, field, wrong):
    path = write(tmp_path / "a.json", {**state_after(1), field: wrong})
    assert run("inspect", path)[0] == 0
    assert run("diff", path, write(tmp_path / "b.json", state_after(1)))[0] == 1


# Diff.


def test_equal_files_of_different_kinds(run, tmp_path):
    one = write(tmp_path / "a.ckpt", dumps(state_after(2)))
    other = tmp_path / "b.pt"
    torch.save(state_after(2), other)
    code, shown, error = run("diff", one, other)
    assert (code, error) == (0, "")
    place = "epoch 0, 2 batches, 4 of 10 samples (sampler)"
    assert shown == [
        f"A: {one}: checkpoint of a StatefulDataLoader, {one.stat().st_size} bytes, checksum right",
        f"B: {other}: file of torch.save with a loader's state, {other.stat().st_size:,} bytes, no checksum",
        f"A: {place}. B: {place}. Both stand at the same place",
        "equal",
    ]


def test_differences_by_node_and_field(run, tmp_path):
    one = state_after(2)
    other = state_after(8, seed=2)
    del other["nodes"]["batcher"]
    other["nodes"]["mine"] = {"type": "Mine", "x": 1}
    other["nodes"]["mapper"]["new"] = True
    code, shown, _ = run("diff", write(tmp_path / "a.json", one), write(tmp_path / "b.json", other))
    assert code == 1
    assert shown[2:] == [
        "A: epoch 0, 2 batches, 4 of 10 samples (sampler). B: epoch 1, 3 batches, 6 of 10 samples (sampler). "
        "B is 1 epoch ahead of A (12 samples)",
        "epoch: A 0, B 1",
        "batch: A 2, B 3",
        "node sampler, seed: A 1, B 2",
        "node sampler, epoch: A 0, B 1",
        "node sampler, consumed: A 4, B 6",
        "node mapper, seed: A 1, B 2",
        "node mapper, new: only in B (True)",
        "node batcher: only in A (SeededBatcher)",
        "node mine: only in B (Mine)",
    ]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (1, 4, "B is 3 batches and 6 samples ahead of A"),
        (4, 1, "B is 3 batches and 6 samples behind A"),
        (0, 25, "B is 5 epochs ahead of A (50 samples)"),
        (6, 4, "B is 1 epoch behind A (4 samples)"),
        (3, 3, "Both stand at the same place"),
    ],
)
def test_how_far_apart(run, tmp_path, one, other, told):
    paths = [write(tmp_path / name, state_after(batches)) for name, batches in (("a", one), ("b", other))]
    assert run("diff", *paths)[1][2].endswith(f". {told}")


def test_more_batches_and_fewer_samples(run, tmp_path):
    one, other = state_after(2), {**state_after(1), "batch": 3}
    paths = write(tmp_path / "a", one), write(tmp_path / "b", other)
    assert run("diff", *paths)[1][2].endswith("B is 1 batch ahead of A, 2 samples behind A")


def test_a_state_against_a_whole_training_s_file(run, tmp_path):
    one = write(tmp_path / "a.ckpt", dumps(state_after(2)))
    other = CheckpointManager(tmp_path, every=1).save(3, {"loader": state_after(3), "step": 3})
    code, shown, _ = run("diff", one, other)
    assert code == 1
    assert shown[2].endswith("B is 1 batch and 2 samples ahead of A")
    assert shown[3:] == [
        "only the loaders' states are compared",
        "batch: A 2, B 3",
        "node sampler, consumed: A 4, B 6",
    ]


def test_pipelines_and_users_are_told_apart(run, tmp_path):
    files = []
    for number in range(2):
        state = {"pipelines": {"0": state_after(1), "1": state_after(1 + number)}}
        files.append(write(tmp_path / f"{number}.ckpt", dumps(state, user={"a": {"b": [number]}})))
    code, shown, _ = run("diff", *files)
    assert code == 1
    assert shown[4:] == [
        "pipelines['1'].batch: A 1, B 2",
        "pipelines['1'], node sampler, consumed: A 2, B 4",
        "user.a.b[0]: A 0, B 1",
    ]
    assert shown[3].startswith("pipelines['1']: A: epoch 0, 1 batch")
    assert run("diff", files[0], write(tmp_path / "c", dumps(state_after(1))))[0] == 1


def test_many_differences_are_cut_with_a_count(run, tmp_path):
    paths = [write(tmp_path / name, {str(key): key + number for key in range(3000)}) for number, name in enumerate("ab")]
    code, shown, _ = run("diff", *paths, "--limit", "2")
    assert code == 1
    assert shown[2:] == ["no state of a loader in either", "['0']: A 0, B 1", "['1']: A 1, B 2", "and 2,998 more differences"]


NAN = float("nan")
UNEQUAL = {
    "number": (1, 2, "the whole: A 1, B 2"),
    "type": (1, True, "the whole: A 1 (int), B True (bool)"),
    "float and int": ([1.0], [1], "[0]: A 1.0 (float), B 1 (int)"),
    "zeros": (0.0, -0.0, "the whole: A 0.0, B -0.0"),
    "length": ([1, 2], [1], "the whole: A 2 items, B 1"),
    "containers": ([1], (1,), "the whole: A list of 1 (list), B tuple of 1 (tuple)"),
    "huge": ({"n": 2**9999}, {"n": 2**9999 + 1}, "n: A integer of 10,000 bits, B another"),
    "text": ({"t": "x" * 50 + "a" + "x" * 50}, {"t": "x" * 50 + "b" + "x" * 50}, "t: A 'xx"),
    "long text": (
        {"t": "x" * 500 + "a" + "y" * 500},
        {"t": "x" * 500 + "b" + "y" * 500},
        f"t: from character 500 on, A ...'{'x' * 20}a{'y' * 19}'..., B ...'{'x' * 20}b{'y' * 19}'...",
    ),
    "dtype": (torch.zeros(2), torch.zeros(2).long(), "the whole: A tensor float32 (2,), 8 bytes; B tensor int64 (2,), 16 bytes"),
    "values": (torch.arange(5), torch.tensor([0, 1, 2, 9, 9]), "the whole: tensor int64 (5,), 40 bytes, differ in 2 of 5 values"),
    "a NaN": (
        torch.tensor([NAN, 0.0]),
        torch.tensor([NAN, -0.0]),
        "the whole: tensor float32 (2,), 8 bytes, differ in 1 of 2 values",
    ),
    "scalar": (torch.tensor(1), torch.tensor(2), "the whole: tensor int64 (), 8 bytes, differ in 1 of 1 value"),
    "complex": (torch.zeros(2) * 1j, torch.ones(2) * 1j, "the whole: tensor complex64 (2,), 16 bytes, differ in 2 of 2 values"),
    "array": (np.array(["a", "b"]), np.array(["a", "c"]), "the whole: array <U1 (2,), 8 bytes, differ in 1 of 2 values"),
    "odd key": ({"a.b": {"\u202e": 1}}, {"a.b": {"\u202e": 2}}, "['a.b']['\\u202e']: A 1, B 2"),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_values(name):
    one, other, told = UNEQUAL[name]
    (found,) = differences(one, other)
    assert found == told or (name == "text" and found.startswith(told))
    assert len(list(differences(other, one))) == 1
    for each in (one, other):
        assert list(differences(each, copy.deepcopy(each))) == []


@pytest.mark.parametrize(
    "value",
    [
        NAN,
        [NAN],
        torch.tensor([NAN]),
        np.array([NAN]),
        np.float32("nan"),
        torch.zeros(0, 3),
        {},
        torch.eye(2).to_sparse(),
        b"x",
        None,
    ],
    ids=str,
)
def test_equal_values(value):
    assert list(differences(value, copy.deepcopy(value))) == []
    assert list(differences({"a": value}, {"a": "else"})) != []


def test_sparse_tensors_that_differ():
    one, other = torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()
    (told,) = differences(one, other)
    assert told.startswith("the whole: tensor float32 (2, 2)")


def test_the_order_of_keys_is_no_difference():
    assert list(differences({"a": 1, "b": 2}, {"b": 2, "a": 1})) == []


def test_a_foreign_node_s_state_is_compared_within(run, tmp_path):
    paths = []
    for batches in (1, 2):
        loader = StatefulDataLoader(Counting())
        for _ in range(batches):
            next(iter(loader))
        paths.append(write(tmp_path / str(batches), {**loader.state_dict(), "versions": VERSIONS}))
    code, shown, _ = run("diff", *paths)
    assert code == 1
    assert shown[3:] == [
        "batch: A 1, B 2",
        "node counting, position: A 1, B 2",
        "node counting, state.at: A 1, B 2",
    ]


def test_nodes_that_differ_in_all(run, tmp_path):
    """The whole list of a thousand nodes, and none twice."""
    one, other = state_after(0), state_after(0)
    one["nodes"] = {f"a{number}": {"type": "A"} for number in range(1000)}
    other["nodes"] = {f"b{number}": {"type": "B"} for number in range(1000)}
    paths = write(tmp_path / "a", one), write(tmp_path / "b", other)
    code, shown, _ = run("diff", *paths, "--limit", "5000")
    assert code == 1
    assert shown[2].endswith("Nothing tells how far apart they are") or shown[2].endswith("Both stand at the same place")
    assert shown[3:] == [
        *(f"node a{number}: only in A (A)" for number in range(1000)),
        *(f"node b{number}: only in B (B)" for number in range(1000)),
    ]
