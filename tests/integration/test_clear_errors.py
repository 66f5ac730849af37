"""What users do wrong, or what the world does to them: the error comes at once, and says what it is and what to do."""

from __future__ import annotations

import multiprocessing
import pickle
import sqlite3
import threading

import pytest
import torch

from stateful_pipes import ProcessPrefetcher, SamplerNode, SeededBatcher, SeededMapper, SequentialSampler, StatefulDataLoader
from stateful_pipes.errors import IteratorInvalidError


class Samples:
    """Sample i is i."""

    def __init__(self, length=6, **attributes):
        self.length = length
        self.__dict__.update(attributes)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def identity(value):
    return value


# What cannot be pickled.


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": Samples(transform=lambda x: x)}, r"mapper\.map_fn\.__self__\.transform: .*lambda"),
        ({"dataset": Samples(lock=[threading.Lock()])}, r"mapper\.map_fn\.__self__\.lock\[0\]: cannot pickle '_thread\.lock'"),
        ({"dataset": Samples(), "collate_fn": lambda samples: samples}, r"batcher\.collate_fn: .*lambda"),
        ({"dataset": Samples(), "worker_init_fn": lambda _: None}, r"worker_init_fn: .*lambda"),
    ],
    ids=["dataset", "attribute", "collate_fn", "worker_init_fn"],
)
def test_at_construction_where_workers_are_spawned(method, arguments, said):
    with pytest.raises(TypeError, match=said):
        StatefulDataLoader(num_workers=1, multiprocessing_context=method, **arguments)


def test_forked_workers_take_what_cannot_be_pickled():
    dataset = Samples(transform=lambda x: x, lock=threading.Lock())
    with StatefulDataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork", collate_fn=lambda s: s) as loader:
        assert list(loader) == [[0, 1], [2, 3], [4, 5]]


def test_a_result_names_the_part_that_cannot_be_pickled():
    def collate(samples):
        return {"index": torch.tensor(samples), "meta": [{"callback": lambda: 0}]}

    with StatefulDataLoader(Samples(), 2, num_workers=1, multiprocessing_context="fork", collate_fn=collate) as loader:
        with pytest.raises(Exception, match="pickle") as caught:
            next(iter(loader))
        assert "the result['meta'][0]['callback']" in "".join(caught.value.__notes__)


# Datasets that do not keep their word.


@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_is_too_large(workers):
    class Lying(Samples):
        def __getitem__(self, index):
            return [10, 11, 12][index]

    with StatefulDataLoader(Lying(6), 2, num_workers=workers, collate_fn=list) as loader:
        iterator = iter(loader)
        assert next(iterator) == [10, 11]
        with pytest.raises(IndexError) as caught:
            next(iterator)
        assert "position 3, index 3, of a dataset that has 6 here" in caught.value.__notes__[0]


def test_a_dataset_that_shrinks():
    dataset = list(range(6))
    loader = StatefulDataLoader(dataset, 2, collate_fn=list)
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    del dataset[3:]
    with pytest.raises(IndexError) as caught:
        next(iterator)
    assert "index 3, of a dataset that has 3 here" in caught.value.__notes__[0]


def test_a_length_that_is_too_small_is_what_counts():
    assert list(StatefulDataLoader([0, 1, 2, 3], sampler=SequentialSampler(2), collate_fn=list)) == [[0], [1]]


# Where workers cannot be.


def in_daemon(workers, tell):
    try:
        with StatefulDataLoader(Samples(), 2, num_workers=workers, collate_fn=list) as loader:
            tell.send(list(loader))
    except Exception as error:
        tell.send(repr(error))


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_daemonic_process(workers):
    hear, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=in_daemon, args=(workers, tell), daemon=True)
    process.start()
    said = hear.recv()
    process.join()
    if workers:
        assert said.startswith("RuntimeError")
        assert "num_workers=0" in said
    else:
        assert said == [[0, 1], [2, 3], [4, 5]]


# Iterators that are over.


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_of_a_closed_loader(workers):
    loader = StatefulDataLoader(Samples(), 2, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(IteratorInvalidError, match=r"iter\(\)"):
        next(iterator)


def test_a_loader_that_was_closed_before_does_not_end_the_one_that_has_its_node_now():
    node = SeededBatcher(SeededMapper(SamplerNode(SequentialSampler(6)), identity, seed=1), 2, collate_fn=list, seed=1)
    node = ProcessPrefetcher(node, 1)
    first = StatefulDataLoader(node)
    first.close()
    with StatefulDataLoader(node) as second:
        iterator = iter(second)
        assert next(iterator) == [0, 1]
        first.close()
        for change in (lambda: first.load_state_dict(second.state_dict()), lambda: first.set_epoch(3), first.restart):
            with pytest.raises(Exception, match="belongs to another"):
                change()
        assert list(iterator) == [[2, 3], [4, 5]]


# Errors of samples.


class Several(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")
        self.both = one, other


@pytest.mark.parametrize(
    "make",
    [
        lambda: Several(1, 2),
        lambda: ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [KeyError("x"), Several(3, 4)])]),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        lambda: OSError(2, "No such file", "a.jpg"),
        lambda: KeyError("ü"),
    ],
    ids=lambda make: type(make()).__name__,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_comes_as_its_own_type_with_its_own_arguments(make, workers):
    error = make()

    def fail(index):
        raise make()

    node = SeededMapper(SamplerNode(SequentialSampler(3)), fail, seed=1)
    with StatefulDataLoader(ProcessPrefetcher(node, workers)) as loader:
        with pytest.raises(type(error)) as caught:
            next(iter(loader))
        assert same_error(caught.value, error)
        assert "epoch 0, position 0, index 0" in caught.value.__notes__[0]
        assert not workers or "in fail" in str(caught.value.__cause__)


def same_error(one, other):
    if isinstance(other, ExceptionGroup):
        return one.message == other.message and all(map(same_error, one.exceptions, other.exceptions))
    return (type(one), one.args, str(one)) == (type(other), other.args, str(other))


# Handles.


class Table:
    """Rows of a database, whose connection each process opens for itself when it first needs it."""

    def __init__(self, path):
        self.path = path
        self.connection = None

    def __len__(self):
        return 6

    def open(self):
        self.connection = sqlite3.connect(self.path)

    def __getitem__(self, index):
        if self.connection is None:
            self.open()
        return self.connection.execute("SELECT value FROM rows WHERE number = ?", (index,)).fetchone()[0]

    def __getstate__(self):
        return {"path": self.path, "connection": None}


def open_table(worker_id):
    """As worker_init_fn: what was opened before the fork belongs to the main process."""
    torch.utils.data.get_worker_info().dataset.open()


@pytest.fixture
def table(tmp_path):
    path = str(tmp_path / "rows.db")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (number INTEGER, value INTEGER)")
        connection.executemany("INSERT INTO rows VALUES (?, ?)", [(n, n * n) for n in range(6)])
    connection.close()
    return Table(path)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("init", [None, open_table])
def test_a_handle_is_opened_in_each_worker(table, method, init):
    if init is not None:
        assert table[2] == 4  # the main process has a connection of its own by now
    own = table.connection
    arguments = {"num_workers": 2, "multiprocessing_context": method, "worker_init_fn": init, "collate_fn": list}
    with StatefulDataLoader(table, 2, **arguments) as loader:
        assert list(loader) == [[0, 1], [4, 9], [16, 25]]
    assert table.connection is own
    pickle.dumps(table)
    if own is not None:
        own.close()
