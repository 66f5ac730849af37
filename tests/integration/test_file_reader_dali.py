"""The file reader against DALI's own: the same files, batches and epochs."""

from __future__ import annotations

import gc
import logging
import os
import random
from itertools import product

import pytest

from stateful_pipes import FileReader, LastBatchPolicy, SeededBatcher, StatefulDataLoader

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin import base_iterator
from nvidia.dali.plugin.pytorch import DALIGenericIterator

EPOCHS = 3
MOST = 11
MANY = 90
GRID = [
    (count, num_shards, shard_id, stick, pad, policy, batch_size)
    for count, num_shards, stick, pad, policy, batch_size in product(
        range(1, MOST + 1), range(1, 5), (False, True), (False, True), LastBatchPolicy, range(1, 5)
    )
    if num_shards <= count  # else DALI refuses
    for shard_id in range(num_shards)
]
# A pipeline of DALI's takes 10 ms to make, so not all of them every time; a prime step meets all values of all axes.
SPREAD = GRID[::11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    for number in range(MOST):
        (path / f"{number:02}").write_bytes(bytes([number, 255 - number]))
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many")
    for number in range(MANY):
        (path / f"{number:02}").write_bytes(bytes([number, 255 - number]))
    return path


@pipeline_def(num_threads=1, device_id=None, prefetch_queue_depth=1)
def read_files(files, labels, arguments):
    data, label = fn.readers.file(files=files, labels=labels, name="reader", **arguments)
    return data, label


def files_of(folder, count):
    return [str(folder / f"{number:02}") for number in range(count)], [100 + number for number in range(count)]


def of_dali(folder, case, by_hand=False, **way):
    count, num_shards, shard_id, stick, pad, policy, batch_size = case
    arguments = {"num_shards": num_shards, "shard_id": shard_id, "stick_to_shard": stick, "pad_last_batch": pad, **way}
    pipeline = read_files(*files_of(folder, count), arguments, batch_size=batch_size)
    iterator = DALIGenericIterator(
        pipeline,
        ["data", "label"],
        reader_name="reader",
        last_batch_policy=base_iterator.LastBatchPolicy[policy.name],
        auto_reset=not by_hand,
    )
    lengths, epochs = [], []
    for _ in range(EPOCHS):
        lengths.append(len(iterator))
        epochs.append([(one["data"].tolist(), one["label"].tolist()) for (one,) in iterator])
        if by_hand:
            iterator.reset()
    return lengths, epochs, pipeline.reader_meta("reader")


def of_ours(folder, case, policy, **way):
    count, num_shards, shard_id, stick, pad, _, batch_size = case
    files, labels = files_of(folder, count)
    cut = {"num_shards": num_shards, "shard_id": shard_id, "stick_to_shard": stick, "pad_last_batch": pad}
    reader = FileReader(None, files, labels, **cut, **way)
    loader = StatefulDataLoader(SeededBatcher(reader, batch_size, seed=0), last_batch_policy=policy)
    lengths, epochs = [], []
    for _ in range(EPOCHS):
        lengths.append(len(loader))
        epochs.append([(data.tolist(), label.tolist()) for data, label in loader])
    return lengths, epochs, reader.reader_meta()


def check(folder, cases, by_hand=False):
    seen = set()
    for case in cases:
        count, num_shards, *_, policy, batch_size = case
        if policy is LastBatchPolicy.DROP and count // num_shards < batch_size:
            with pytest.raises(RuntimeError, match="no data in the pipeline"):
                of_dali(folder, case)
            with pytest.raises(Exception, match="every batch would be dropped"):
                of_ours(folder, case, policy)
            seen.add("refused")
            continue
        found = of_ours(folder, case, base_iterator.LastBatchPolicy[policy.name])
        expected = of_dali(folder, case, by_hand)
        assert found == expected, case
        if policy is LastBatchPolicy.FILL:
            assert of_ours(folder, case, None) == expected, case  # without a policy
        seen |= {"empty" for epoch in found[1] for data, _ in epoch if not data}
        seen |= {"longer" for lengths in [found[0]] if len(set(lengths)) > 1}
    assert seen == {"refused", "empty", "longer"}  # the odd ones are among them


@pytest.fixture(autouse=True)
def quiet():
    # DALI warns when an epoch begins with samples that the one before has read ahead.
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    gc.collect()  # in a process forked while a pipeline lives, as other tests' workers are, its end would hang


def test_batches_are_dali_s(folder):
    check(folder, SPREAD)


def test_batches_are_dali_s_if_it_is_reset_by_hand(folder):
    check(folder, GRID[5::61], by_hand=True)


@pytest.mark.full
@pytest.mark.parametrize("num_shards", range(1, 5))
def test_all_batches_are_dali_s(folder, num_shards):
    cases = [case for case in GRID if case[1] == num_shards]
    for case in cases:
        if case[5] is not LastBatchPolicy.DROP or case[0] // num_shards >= case[6]:
            expected = of_dali(folder, case)
            assert of_ours(folder, case, case[5]) == expected, case
            if case[5] is LastBatchPolicy.FILL:
                assert of_ours(folder, case, None) == expected, case


def drawn(seed, cases):
    """Cases beyond the grid: more files, more shards, larger batches, some of them larger than a shard."""
    rng = random.Random(seed)
    while cases:
        count = rng.randint(1, rng.choice([20, MANY]))
        num_shards = rng.randint(1, min(count, rng.choice([4, 30])))
        batch_size = rng.randint(1, rng.choice([8, 2 * MANY]))
        stick, pad = rng.random() < 0.5, rng.random() < 0.5
        policy = rng.choice(list(LastBatchPolicy))
        if policy is not LastBatchPolicy.DROP or count // num_shards >= batch_size:
            cases -= 1
            yield count, num_shards, rng.randrange(num_shards), stick, pad, policy, batch_size


def test_larger_batches_are_dali_s(many):
    for case in drawn(0, 60):
        assert of_ours(many, case, case[5]) == of_dali(many, case), case


SHUFFLES = [{"shuffle_after_epoch": True}] + [{"random_shuffle": True, "initial_fill": fill} for fill in (1, 3, 2 * MANY)]


@pytest.mark.parametrize("way", SHUFFLES)
def test_shuffled_batches_are_as_many_and_as_large_as_dali_s(many, way):
    for count, num_shards, shard_id, stick, pad, policy, batch_size in drawn(1, 25):
        case = (count, num_shards, shard_id, stick and "random_shuffle" in way, pad, policy, batch_size)
        found, expected = of_ours(many, case, policy, **way), of_dali(many, case, **way)
        for theirs, ours in zip(expected[1], found[1], strict=True):
            assert [len(labels) for _, labels in ours] == [len(labels) for _, labels in theirs], case
        assert (found[0], found[2]) == (expected[0], expected[2]), case  # lengths and reader_meta


# What it reads.

TREE = ["a/x.JPG", "a/y.png", "b/no.txt", "c/z.jpg", ".h/q.jpg", "c/.hid.jpg", "top.jpg", "B/é.jpg", "B/z.jpg", "c/a b.jpg"]


@pytest.fixture
def tree(tmp_path):
    for name in TREE:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "c/folder.jpg").mkdir()
    (tmp_path / "c/folder.jpg/deep.jpg").write_text("deep")
    (tmp_path / "none").mkdir()
    (tmp_path / "z").symlink_to(tmp_path / "a")
    (tmp_path / "c/link.jpg").symlink_to(tmp_path / "top.jpg")
    (tmp_path / "list.txt").write_text("top.jpg 3\nc/a b.jpg  007\t\n\nc/z.jpg\t0")
    (tmp_path / "a/list.txt").write_text("z.jpg 1\n")
    return tmp_path


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def read_tree(arguments):
    data, label = fn.readers.file(name="reader", **arguments)
    return data, label


def read_by_dali(arguments):
    pipeline = read_tree(arguments)
    pipeline.build()
    meta = pipeline.reader_meta("reader")
    read = []
    for _ in range(meta["epoch_size"]):
        data, label = pipeline.run()
        read.append((bytes(data.as_array()[0]), label.as_array()[0].tolist()))
    return read, meta


def read_by_us(arguments):
    reader = FileReader(**arguments)
    read = [(bytes(data.tolist()), label.tolist()) for data, label in StatefulDataLoader(reader)]
    return read, reader.reader_meta()


LISTINGS = {
    "folders": {"file_root": ""},
    "case": {"file_root": "", "case_sensitive_filter": True},
    "other files": {"file_root": "", "file_filters": ["*.txt", "*.PNG"]},
    "one filter": {"file_root": "", "file_filters": "*.png"},
    "some folders": {"file_root": "", "dir_filters": ["C", "a"]},
    "some folders, case": {"file_root": "", "dir_filters": ["C", "a"], "case_sensitive_filter": True},
    "classes": {"file_root": "", "file_filters": ["[[:alpha:]].png", "[^z].jpg", r"\q*"]},
    "list": {"file_list": "list.txt"},
    "list and root": {"file_list": "a/list.txt", "file_root": "c"},
    "files": {"files": ["a/y.png", "top.jpg", "a/y.png"], "file_root": ""},
    "files and labels": {"files": ["y.png", "x.JPG"], "labels": [5, -4], "file_root": "a"},
    "files and filters": {"files": ["y.png"], "file_root": "a", "file_filters": ["*.jpg"], "dir_filters": ["c"]},
}


@pytest.mark.parametrize("name", LISTINGS)
def test_files_and_labels_are_dali_s(tree, name):
    arguments = {
        key: os.path.join(tree, value) if key in ("file_root", "file_list") else value for key, value in LISTINGS[name].items()
    }
    assert read_by_us(arguments) == read_by_dali(arguments)


LINES = {
    "carriage returns": b"top.jpg 3\r\nc/z.jpg 4\r\n",
    "no last newline": b"top.jpg 3\nc/z.jpg 4",
    "tabs": b"top.jpg\t3\nc/z.jpg \t\t4 \t\n",
    "other white space": b"top.jpg\x0b3\nc/z.jpg\x0c4\x0b\n",
    "spaces in names": b"c/a b.jpg 3\nc/a b.jpg  4\n",
    "blank lines": b"\n \n\ntop.jpg 3\n\t\r\n\n",
    "beyond ASCII": "B/é.jpg 2\n".encode(),
    "zeros": b"top.jpg 007\nc/z.jpg 00000000000000000000003\n",
    "largest": b"top.jpg 2147483647\n",
    "digits in names": b"7 5\n5 5 7\n",
    "twice": b"top.jpg 1\n./top.jpg 2\ntop.jpg 1\n",
    "a link": b"z/y.png 4\n",
}


REFUSED_LINES = [
    *(b"top.jpg", b"top.jpg -3", b"top.jpg +3", b"top.jpg 3.5", b"top.jpg 0x3", b"top.jpg 1_0", b"top.jpg, 1 #", b" 3", b"7"),
    *(b"top.jpg 3 4", b"  top.jpg 3", b"\ttop.jpg 3", b"'top.jpg' 3", b"\xef\xbb\xbftop.jpg 3", b"# top.jpg 3", b"top.jpg3"),
    *(b"top.jpg 3\rc/z.jpg 4", b"c/z.jpg\x005", b"top.jpg\xc2\xa03", "top.jpg \u0663".encode(), b"missing 3", b"", b" \r"),
]
GLOBS = [
    *("*", "?.jpg", "[xz].jpg", "[!z].*", "[a-c]*", "*.Jpg", "z.jpg", "*z*", ".*", "*.jp[eg]", "[[:upper:]]*", "[z-a]*", "[x"),
    *("É.jpg", "?.jp?", "??.jpg", "x.{JPG,png}", "@(x|z).jpg", "a/*", "*/*", "", ".", "*\\", "\\*.jpg", "[.]hid.jpg", "* *"),
]


def test_lines_are_dali_s(tree):
    (tree / "7").write_text("seven")
    (tree / "5 5").write_text("five")
    for name, lines in LINES.items():
        (tree / "lines").write_bytes(lines)
        arguments = {"file_list": str(tree / "lines")}
        assert read_by_us(arguments) == read_by_dali(arguments), name


def test_lines_that_dali_refuses_are_refused(tree):
    """Some when the list is read, some when the file is not there."""
    for line in REFUSED_LINES:
        (tree / "lines").write_bytes(line + b"\n")
        for read, errors in [(read_by_us, (ValueError, OSError)), (read_by_dali, RuntimeError)]:
            with pytest.raises(errors):
                print(read({"file_list": str(tree / "lines")}), line)


@pytest.mark.parametrize("is_sensitive", [False, True])
@pytest.mark.parametrize(("key", "other"), [("file_filters", "y.*"), ("dir_filters", "c")])
def test_globs_are_dali_s(tree, key, other, is_sensitive):
    for glob in GLOBS:
        arguments = {"file_root": str(tree), key: [glob, other], "case_sensitive_filter": is_sensitive}
        assert read_by_us(arguments) == read_by_dali(arguments), glob


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"files": ["a"], "file_list": "list.txt"},
        {"file_root": ".", "labels": [1]},
        {"files": ["a", "b"], "labels": [1]},
        {"file_root": ".", "file_filters": []},
        {"file_root": ".", "dir_filters": []},
        {"files": ["a"], "file_filters": []},
        {"files": ["a"], "dir_filters": []},
        {"file_root": ".", "file_filters": ["*.gif"]},
        {"file_root": "missing"},
        {"file_root": "broken"},
        {"file_root": "broken", "dir_filters": ["good"]},
        {"file_list": "missing"},
        {"file_list": "bad.txt"},
        {"files": ["a"], "num_shards": 2},
        {"files": ["a", "b"], "num_shards": 2, "shard_id": 2},
        {"files": ["a"], "shuffle_after_epoch": True, "stick_to_shard": True},
        {"files": ["a"], "shuffle_after_epoch": True, "random_shuffle": True},
    ],
)
def test_what_dali_refuses_is_refused(tree, monkeypatch, arguments):
    (tree / "bad.txt").write_text("top.jpg\n")
    (tree / "broken/good").mkdir(parents=True)
    (tree / "broken/good/a.jpg").write_text("a")
    (tree / "broken/bad").symlink_to("nowhere")
    monkeypatch.chdir(tree)
    with pytest.raises((ValueError, OSError)):
        FileReader(**arguments)
    with pytest.raises(RuntimeError):
        read_by_dali(arguments)


@pytest.mark.parametrize("pad", [False, True])
def test_a_shuffled_reader_tells_what_dali_s_does(folder, pad):
    files, _ = files_of(folder, 7)
    arguments = {"files": files, "num_shards": 2, "shard_id": 1, "pad_last_batch": pad, "shuffle_after_epoch": True}
    assert FileReader(**arguments).reader_meta() == read_by_dali(arguments)[1]


@pytest.mark.parametrize(
    "way", [{"shuffle_after_epoch": True}, {"random_shuffle": True, "initial_fill": 4, "stick_to_shard": True}]
)
def test_shuffled_epochs_hold_the_files_that_dali_s_do(folder, way):
    """Another order, but each epoch and shard the same number of files, and every file once over all shards."""

    def labels_of_dali(shard_id):
        pipeline = read_files(
            *files_of(folder, 11), {"num_shards": 3, "shard_id": shard_id, "pad_last_batch": True, **way}, batch_size=2
        )
        policy = base_iterator.LastBatchPolicy.PARTIAL
        iterator = DALIGenericIterator(
            pipeline, ["data", "label"], reader_name="reader", last_batch_policy=policy, auto_reset=True
        )
        return [[label for (one,) in iterator for label in one["label"].flatten().tolist()] for _ in range(EPOCHS)]

    def labels_of_ours(shard_id):
        files, labels = files_of(folder, 11)
        reader = FileReader(None, files, labels, num_shards=3, shard_id=shard_id, pad_last_batch=True, **way)
        loader = StatefulDataLoader(SeededBatcher(reader, 2), last_batch_policy="PARTIAL")
        return [[label for _, batch in loader for label in batch.flatten().tolist()] for _ in range(EPOCHS)]

    theirs, ours = ([labels(shard_id) for shard_id in range(3)] for labels in (labels_of_dali, labels_of_ours))
    assert [[len(epoch) for epoch in shard] for shard in ours] == [[len(epoch) for epoch in shard] for shard in theirs]
    for shards in (theirs, ours):
        for epoch in zip(*shards, strict=True):
            assert sorted(label for part in epoch for label in part) == list(range(100, 111))
    assert ours != theirs  # no promise, but then the test would show less
