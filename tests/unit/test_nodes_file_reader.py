"""The file reader: its items, its resume at any cut, what its state refuses, and how a loader gives it a policy."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal

import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import default_collate

from stateful_pipes import (
    FileReader,
    LastBatchPolicy,
    Mixer,
    Node,
    ProcessPrefetcher,
    SamplerNode,
    SeededBatcher,
    SeededFlatMapper,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
    positions_of,
)
from stateful_pipes.errors import ResumableBatchConfigurationError, StateMismatchError
from tests.streams import same

EPOCHS = 3
WAYS = {
    "plain": {},
    "stick": {"stick_to_shard": True},
    "random": {"random_shuffle": True, "initial_fill": 4, "seed": 1},
    "random, stick": {"random_shuffle": True, "initial_fill": 2, "seed": 1, "stick_to_shard": True},
    "random, small": {"random_shuffle": True, "initial_fill": 1, "seed": 1},
    "random, whole": {"random_shuffle": True, "initial_fill": 100, "seed": 1},
    "shuffled": {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": 5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    for number in range(23):
        (path / f"{number:02}").write_bytes(bytes([number]) * (number % 3))
    return path


@pytest.fixture
def reader(folder):
    def make(count=11, **options):
        return FileReader(folder, [f"{number:02}" for number in range(count)], **options)

    return make


@pytest.fixture
def loader(reader):
    def make(batch_size=2, policy=None, workers=0, count=11, **options):
        batcher = SeededBatcher(reader(count, **options), batch_size, collate_fn=labels)
        return StatefulDataLoader(ProcessPrefetcher(batcher, workers), last_batch_policy=policy)

    return make


def labels(samples):
    return [label.item() for _, label in samples]


def epochs(loader, count=EPOCHS):
    return [list(loader) for _ in range(count)]


# The items.


def test_items_are_bytes_and_labels(folder):
    items = list(FileReader(folder, ["05", "03", "07"], [9, -1, 2**31 - 1]))
    expected = [(torch.tensor([5, 5], dtype=torch.uint8), 9), (torch.empty(0, dtype=torch.uint8), -1)]
    expected += [(torch.tensor([7], dtype=torch.uint8), 2**31 - 1)]
    assert same(items, [(data, torch.tensor([label], dtype=torch.int32)) for data, label in expected])


def test_items_are_the_caller_s_own(reader):
    first = list(reader(3))
    for data, label in first:
        data += 1
        label += 1
    assert [label.item() for _, label in reader(3)] == [0, 1, 2]


def test_a_ticket_is_small_and_plain(reader):
    node = reader(random_shuffle=True)
    SeededBatcher(node, 4)
    ticket = node.pull(4)
    assert [type(part) for part in ticket] == [int, tuple, bytes]
    assert len(pickle.dumps(ticket)) < 100
    assert same(node.run(ticket), node.run(ticket))
    assert same(pickle.loads(pickle.dumps(node)).run(ticket), node.run(ticket))


def test_a_file_that_is_gone_is_named(folder):
    node = FileReader(folder, ["00", "missing"])
    SeededBatcher(node, 2)
    with pytest.raises(FileNotFoundError) as caught:
        node.run(node.pull(2))
    assert caught.value.__notes__ == ["in node 'file_reader' at epoch 0, position 1, index 'missing'"]


def test_a_ticket_s_samples_are_the_paths(folder):
    node = FileReader(folder, ["05", folder / "03", "05"], num_shards=2, shard_id=1)
    SeededBatcher(node, 2)
    assert node.samples(node.pull(2)) == (0, [1, 3], [str(folder / "03"), "05"])


def fails_on_three(item, *_):
    if item[1] == 3:
        raise ValueError("bad")
    return [item[1], item[1]]


@pytest.mark.parametrize(
    "above",
    [
        lambda node: SeededMapper(node, fails_on_three, seed=0, name="bad"),
        lambda node: SeededMapper(node, fails_on_three, rng=(), name="bad"),
        lambda node: SeededMapper(SeededMapper(node, lambda item: item, seed=0), fails_on_three, seed=0, name="bad"),
        lambda node: SeededFlatMapper(node, fails_on_three, 2, seed=0, name="bad"),
        lambda node: SeededFlatMapper(node, fails_on_three, 2, rng=(), name="bad"),
    ],
)
def test_an_error_above_names_the_file(reader, above):
    batches = SeededBatcher(above(reader(7, num_shards=2, shard_id=1)), 2)  # from file 3 on
    with pytest.raises(ValueError, match="bad") as caught:
        batches.run(batches.pull(1))
    assert caught.value.__notes__[0] == "in node 'bad' at epoch 0, position 1, index '03'"


def test_an_error_above_batches_shows_the_batch(reader):
    def fail(batch):
        raise ValueError("bad")

    for size in (1, 2):
        node = SeededMapper(SeededBatcher(reader(7), size, collate_fn=labels), fail, seed=0)
        with pytest.raises(ValueError, match="bad") as caught:
            node.run(node.pull(1))
        shown = "'00'" if size == 1 else "[0, 1]"
        assert caught.value.__notes__ == [f"in node 'mapper' at epoch 0, position 0, index {shown}"]


# Files that cannot be read.


@pytest.fixture
def gone(folder):
    """A loader over the first files, of which two are gone."""

    def make(workers=0, max_skipped=2, batch_size=2, **options):
        names = ["00", "gone", "02", "03", "missing", "05"]
        node = SeededMapper(FileReader(folder, names, max_skipped=max_skipped, **options), label_alone, seed=0)
        return StatefulDataLoader(ProcessPrefetcher(SeededBatcher(node, batch_size, collate_fn=list), workers))

    return make


@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_cannot_be_read_are_left_out_up_to_a_budget(gone, workers, caplog):
    with gone(workers) as one:
        assert list(one) == [[0], [2, 3], [5]]
        assert one.state_dict()["nodes"]["file_reader"]["skipped"] == 2
        assert one.stats()["skipped"] == 2
        assert "file_reader: epoch 0, position 1, index 'gone' is left out (1 of 2): FileNotFoundError" in caplog.text
        with pytest.raises(FileNotFoundError) as caught:
            list(one)
        assert caught.value.__notes__ == [
            "in node 'file_reader' at epoch 1, position 1, index 'gone'",
            "max_skipped=2 samples have been left out by 'file_reader' already",
        ]


def test_a_resumed_reader_leaves_out_the_same_files(gone):
    whole, states = cuts(lambda: gone(max_skipped=9, **WAYS["random"]), 2)
    assert sorted(samples_in(whole)) == [0, 0, 2, 2, 3, 3, 5, 5]
    for read, state in states:
        resumed = gone(max_skipped=9, **WAYS["random"])
        resumed.load_state_dict(state)
        assert resumed.stats()["skipped"] == state["nodes"]["file_reader"]["skipped"]
        assert rest(resumed, len(whole) - read) == whole[read:]


def test_without_a_budget_nothing_is_left_out_and_none_may_be_lost_to_memory(gone, monkeypatch):
    with pytest.raises(FileNotFoundError):
        list(gone(max_skipped=0))
    assert "skipped" not in gone(max_skipped=0).state_dict()["nodes"]["file_reader"]
    with pytest.raises(ValueError, match="max_skipped must be at least 0, got -1"):
        gone(max_skipped=-1)

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("numpy.fromfile", fail)
    with pytest.raises(MemoryError):
        list(gone())


def test_no_two_samples_of_an_epoch_share_a_position(reader):
    positions = []
    for shard_id in range(3):
        node = reader(11, num_shards=3, shard_id=shard_id)
        batcher = SeededBatcher(node, 2)
        for _ in range(2):
            positions += positions_of(node.pull(2))
        assert batcher.length() == 2
    assert sorted(positions) == list(range(12))


# The order.


def test_without_a_batcher_an_epoch_is_a_pass(reader):
    one = StatefulDataLoader(reader(7))
    assert len(one) == 7
    assert [labels(one) for _ in range(2)] == [list(range(7))] * 2
    halves = StatefulDataLoader(reader(7, num_shards=2))
    assert [labels(halves) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6]]  # as all shards together go round


@pytest.mark.parametrize("way", ["random", "random, stick", "random, small", "random, whole", "shuffled"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_each_epoch_deals_out_every_file_once_in_another_order(loader, way, num_shards):
    loaders = [
        loader(2, "PARTIAL", pad_last_batch=True, num_shards=num_shards, shard_id=i, **WAYS[way]) for i in range(num_shards)
    ]
    for one in loaders:
        assert len(one) == {1: 6, 3: 2}[num_shards]
    orders = []
    for _ in range(4):
        read = [[label for batch in one for label in batch] for one in loaders]
        assert sorted(label for part in read for label in part) == list(range(11))
        orders.append(read)
    distinct = {str(order) for order in orders}
    # With a buffer of one, files keep the order in which they were dealt out.
    assert len(distinct) == (4 if way != "random, small" else 1 if num_shards == 1 else 3)
    assert sorted(orders[0]) != [list(range(11))]


def test_a_buffer_is_a_window(loader):
    one = loader(1, count=23, **{**WAYS["random"], "initial_fill": 1})
    order = [label for batch in one for label in batch]
    other = [label for batch in loader(1, count=23, **{**WAYS["random"], "initial_fill": 5}) for label in batch]
    assert sorted(other) == sorted(order) == list(range(23))
    assert other != order
    assert all(order.index(label) < place + 5 for place, label in enumerate(other))


def test_seeds_matter(loader):
    assert epochs(loader(**WAYS["random"])) != epochs(loader(**{**WAYS["random"], "seed": 2}))
    assert epochs(loader(**WAYS["shuffled"])) != epochs(loader(**{**WAYS["shuffled"], "shuffle_after_epoch_seed": 6}))
    torch.manual_seed(0)
    drawn = epochs(loader(random_shuffle=True))
    torch.manual_seed(0)
    assert epochs(loader(random_shuffle=True)) == drawn
    state = torch.get_rng_state()
    FileReader(files=["a"])
    assert torch.equal(torch.get_rng_state(), state)  # without a shuffle there is nothing to draw


def test_shuffled_shards_stick_and_are_disjoint_in_each_epoch(loader):
    parts = [epochs(loader(5, count=10, num_shards=2, shard_id=i, **WAYS["shuffled"])) for i in range(2)]
    for one, other in zip(*parts, strict=True):
        assert sorted(one[0] + other[0]) == list(range(10))


@pytest.mark.parametrize(("pad", "padded"), [(False, 11), (True, 12)])
def test_reader_meta(reader, pad, padded):
    assert reader(11, num_shards=3, shard_id=2, pad_last_batch=pad, shuffle_after_epoch=True).reader_meta() == {
        "epoch_size": 11,
        "epoch_size_padded": padded,
        "number_of_shards": 3,
        "shard_id": 2,
        "pad_last_batch": int(pad),
        "stick_to_shard": 1,
    }


# The resume.


def cuts(make, count=EPOCHS):
    """The whole stream, and (batches read before, state as JSON gave it back) at each step."""
    one, whole, states = make(), [], []
    for _ in range(count):
        states.append((len(whole), one.state_dict()))
        for batch in one:
            whole.append(batch)
            states.append((len(whole), one.state_dict()))
    one.close()
    return whole, [(read, json.loads(json.dumps(state))) for read, state in states]


def rest(loader, wanted):
    found = []
    while len(found) < wanted:
        found += list(loader)
    loader.close()
    return found[:wanted]


@pytest.mark.parametrize("policy", [None, *LastBatchPolicy.__members__])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_cut_resumes(loader, way, pad, policy):
    for batch_size, shard_id, num_shards in [(2, 0, 1), (3, 1, 2), (1, 0, 3), (2, 2, 3)]:
        options = {**WAYS[way], "pad_last_batch": pad, "num_shards": num_shards, "shard_id": shard_id}
        whole, states = cuts(lambda o=options, b=batch_size: loader(b, policy, **o))
        resumed = loader(batch_size, policy, **{**options, **({"seed": 9} if "seed" in options else {})})
        for read, state in states:
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            # A chain: two batches, and the rest by way of another loader.
            found = list(itertools.islice(resumed, min(2, len(whole) - read)))
            other = loader(batch_size, policy, **options)
            other.load_state_dict(resumed.state_dict())
            assert found + rest(other, len(whole) - read - len(found)) == whole[read:], (read, state)


@pytest.mark.parametrize("way", ["plain", "random", "shuffled"])
def test_every_cut_resumes_with_workers(loader, way):
    def make(workers):
        return loader(2, "PARTIAL", workers, count=9, num_shards=2, **WAYS[way])

    whole, states = cuts(lambda: make(2))
    assert whole == cuts(lambda: make(0))[0]
    assert [] in whole
    resumed = make(1)
    for read, state in states:
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        found: list = []
        while len(found) < len(whole) - read:
            found += list(resumed)
        assert found == whole[read:]
    resumed.close()


class KilledOnce:
    """The label; some samples kill the first process that gets to them."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, item):
        label = item[1].item()
        if label % 4 == 1:
            try:
                os.close(os.open(os.path.join(self.folder, str(label)), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return label
            os.kill(os.getpid(), signal.SIGKILL)
        return label


@pytest.mark.parametrize("way", ["random", "shuffled"])
def test_killed_workers_cost_no_sample(reader, tmp_path, way):
    options = {"num_shards": 2, "shard_id": 1, "pad_last_batch": True, **WAYS[way]}

    def make(batch_size, workers, killed):
        node = SeededMapper(reader(23, **options), KilledOnce(killed) if workers else label_alone, seed=0)
        batches = SeededBatcher(node, batch_size, collate_fn=list)
        return StatefulDataLoader(ProcessPrefetcher(batches, workers, max_restarts=9), last_batch_policy="PARTIAL")

    plain = epochs(make(2, 0, None))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with make(2, 2, tmp_path / "one") as killed:
        found = [list(itertools.islice(killed, 3))]
        state = json.loads(json.dumps(killed.state_dict()))
        assert [*found[0], *killed] == plain[0]
        assert killed.stats()["restarts"] > 0
    with make(3, 2, tmp_path / "two") as resumed:  # in another batch size
        resumed.load_state_dict(state, allow=("batch_size",))
        assert samples_in([*found[0], *resumed]) == samples_in(plain[0])
        other = make(3, 0, None)
        other.set_epoch(1)
        assert epochs(resumed, 2) == epochs(other, 2)
        assert resumed.stats()["restarts"] > 0


def label_alone(item):
    return item[1].item()


@pytest.mark.parametrize("policy", [None, "PARTIAL", "DROP"])
@pytest.mark.parametrize("way", WAYS)
def test_a_jump_to_an_epoch_is_what_walking_there_is(loader, way, policy):
    for options in ({"num_shards": 3, "shard_id": 1}, {"pad_last_batch": True}):
        walked, jumped = (loader(3, policy, **WAYS[way], **options) for _ in range(2))
        for epoch in range(6):
            jumped.set_epoch(epoch)
            assert jumped.state_dict()["nodes"]["file_reader"] == walked.state_dict()["nodes"]["file_reader"]
            assert len(jumped) == len(walked)
            batches = list(walked)
            assert list(jumped) == batches
            jumped.set_epoch(17)
            jumped.set_epoch(epoch)
            jumped.restart()
            assert len(jumped) == len(batches)
            assert list(jumped) == batches


def test_the_state_is_small_and_plain(loader):
    one = loader(2, count=23, **WAYS["random"])
    next(iter(one))
    entry = one.state_dict()["nodes"]["file_reader"]
    assert {type(value) for value in entry.values()} == {str, int, bool}
    assert entry["buffer"].startswith("0/0/2/")
    assert len(entry["buffer"].split(",")) == 4  # indices, and no more than initial_fill
    assert set(loader(2).state_dict()["nodes"]["file_reader"]) == {
        *("type", "length", "files", "num_shards", "stick_to_shard", "pad_last_batch", "random_shuffle"),
        *("shuffle_after_epoch", "batch_size", "last_batch_policy", "epoch", "consumed"),
    }


@pytest.mark.parametrize("way", WAYS)
def test_one_shard_s_state_serves_the_others(loader, way):
    options = {"num_shards": 3, **WAYS[way]}
    for at in range(4):
        expected, states = [], []
        for shard_id in range(3):
            one = loader(2, shard_id=shard_id, count=23, **options)
            it = iter(one)
            for _ in range(at):
                next(it)
            states.append(one.state_dict())
            expected.append([list(it), *epochs(one)])
        for shard_id in range(3):
            resumed = loader(2, shard_id=shard_id, count=23, **options)
            resumed.load_state_dict(states[(shard_id + 1) % 3])
            assert epochs(resumed, 4) == expected[shard_id]


# Another batch size.


def samples_in(batches):
    return [label for batch in batches for label in batch]


@pytest.mark.parametrize("policy", LastBatchPolicy.__members__)
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_another_batch_size_reads_on_from_the_same_sample(loader, way, pad, policy):
    for old, new, num_shards, shard_id in [(2, 3, 1, 0), (3, 2, 2, 1), (1, 3, 3, 2), (2, 5, 2, 0)]:
        options = {**WAYS[way], "pad_last_batch": pad, "num_shards": num_shards, "shard_id": shard_id}
        first, second, third, fresh = (loader(size, policy, **options) for size in (old, new, old, new))
        for epoch in range(2):
            first.set_epoch(epoch)
            batches = list(first)
            due = samples_in(batches)
            fresh.set_epoch(epoch + 1)
            following = list(fresh)
            for taken in range(len(batches)):
                first.set_epoch(epoch + 1)
                first.set_epoch(epoch)
                read = samples_in(itertools.islice(first, taken))
                state = json.loads(json.dumps(first.state_dict()))
                if taken == 0:  # nothing of the epoch is read: it is the new size's
                    fresh.set_epoch(epoch)
                    second.load_state_dict(state, allow=("batch_size",))
                    assert list(second) == list(fresh)
                    continue
                second.load_state_dict(state, allow=("batch_size",))
                assert second.state_dict()["nodes"]["file_reader"] == state["nodes"]["file_reader"]
                rest = list(second)
                check_rest(read + samples_in(rest), due, policy, options, 11)
                assert policy == "PARTIAL" or {len(batch) for batch in rest} <= {new}
                assert list(second) == following  # and from the next epoch on it is the new size's
                # A chain: a batch of the new size, and the rest in the old one.
                second.load_state_dict(state, allow=("batch_size",))
                read += samples_in(itertools.islice(second, 1))
                third.load_state_dict(second.state_dict(), allow=("batch_size",))
                check_rest(read + samples_in(third) if third.position.epoch == epoch else read, due, policy, options, 11)


def check_rest(found, due, policy, options, count):
    """Every sample of the epoch in its order, up to what is left out or filled up at the end."""
    if policy == "PARTIAL":
        assert found == due
    elif policy == "DROP":
        common = min(len(found), len(due))
        assert found[:common] == due[:common]
        assert len(found) <= count // options["num_shards"]
    elif options["pad_last_batch"]:
        longer = due + due[-1:] * len(found)
        assert found == longer[: len(found)]
        assert len(found) >= -(-count // options["num_shards"])
    else:
        assert found[: len(due)] == due[: len(found)]
        assert set(found) >= set(due) or len(found) < len(due)


@pytest.mark.parametrize(
    ("pad", "policy", "old", "new", "rest", "following"),
    [
        (False, "FILL", 2, 3, [[2, 3, 4], [5, 6, 0], [1, 2, 3]], [2, 3, 4]),  # on to where the new size has the next epoch begin
        (False, "FILL", 1, 4, [[1, 2, 3, 4], [5, 6, 0, 1]], [1, 2, 3, 4]),
        (True, "FILL", 2, 5, [[2, 3, 4, 5, 6]], [0, 1, 2, 3, 4]),
        (True, "FILL", 4, 5, [[4, 5, 6, 6, 6]], [0, 1, 2, 3, 4]),  # beyond what the old size pads to
        (False, "PARTIAL", 2, 4, [[2, 3, 4, 5], [6]], [1, 2, 3, 4]),
        (True, "PARTIAL", 4, 2, [[4, 5], [6]], [0, 1]),
        (False, "DROP", 2, 5, [[2, 3, 4, 5, 6]], [3, 4, 5, 6, 0]),  # samples that the old size would have dropped
        (True, "DROP", 2, 4, [[2, 3, 4, 5]], [0, 1, 2, 3]),
    ],
)
def test_seven_samples_in_another_batch_size(loader, pad, policy, old, new, rest, following):
    one = loader(old, policy, count=7, pad_last_batch=pad)
    next(iter(one))
    other = loader(new, policy, count=7, pad_last_batch=pad)
    other.load_state_dict(one.state_dict(), allow=("batch_size",))
    assert list(other) == rest
    assert next(iter(other)) == following


def test_the_batch_size_is_that_of_the_batcher_that_stands_above_now(reader):
    source = reader(7)
    node = SeededMapper(source, label_alone, rng=())
    assert source.batcher() is None
    for size, expected in [(2, [[0, 1], [2, 3], [4, 5], [6, 0]]), (3, [[0, 1, 2], [3, 4, 5], [6, 0, 1]])]:
        batches = SeededBatcher(node, size, collate_fn=list)
        assert source.batcher() is batches
        pulled = [batches.run(batches.pull(1)) for _ in expected]
        assert [batch for block in pulled for batch in block] == expected
        batches.seek(batches.start(0))
        del batches
        assert source.batcher() is None


class Doubled(Node):
    """Asks its source for as much as it is asked for."""

    def __init__(self, source):
        super().__init__(source)

    def run(self, ticket):
        return [2 * item for item in self.sources[0].run(ticket)]


class OneByOne(SeededMapper):
    """Asks its source otherwise than a mapper."""

    def pull(self, count):
        return super().pull(1)


def test_nodes_that_ask_as_they_are_asked_may_stand_between(reader):
    def decoded():
        return SeededMapper(reader(7), label_alone, seed=0)

    policy = "PARTIAL"
    one = StatefulDataLoader(SeededBatcher(Doubled(decoded()), 2, collate_fn=list), last_batch_policy=policy)
    assert list(one) == [[0, 2], [4, 6], [8, 10], [12]]
    with pytest.raises(ValueError, match="needs a SeededBatcher with a batch_size above the FileReader"):
        StatefulDataLoader(SeededBatcher(OneByOne(reader(7), label_alone), 2), last_batch_policy=policy)


def test_another_batch_size_is_to_be_allowed_and_then_is(loader):
    one = loader(2)
    next(iter(one))
    other = loader(3)
    with pytest.raises(StateMismatchError, match="batch_size: saved 2, here 3") as caught:
        other.load_state_dict(one.state_dict())
    assert len(caught.value.differences) == 1
    assert "allow=('batch_size',)" in caught.value.differences[0].remedy
    other.load_state_dict(one.state_dict(), allow=("batch_size",))
    assert next(iter(other)) == [2, 3, 4]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_was_read_from_goes_on_in_whole_batches(reader, way, pad):
    node = reader(7, pad_last_batch=pad, **WAYS[way])
    seen = labels(itertools.islice(node, 3))
    one = StatefulDataLoader(SeededBatcher(node, 2, collate_fn=labels))
    batches = list(one)
    assert {len(batch) for batch in batches} == {2}
    assert sorted((seen + samples_in(batches))[:7]) == list(range(7))
    fresh = StatefulDataLoader(SeededBatcher(reader(7, pad_last_batch=pad, **WAYS[way]), 2, collate_fn=labels))
    fresh.set_epoch(1)
    assert epochs(one) == epochs(fresh)


def test_an_absurd_position_is_the_end_of_its_epoch(loader):
    for pad in (False, True):
        one = loader(2, num_shards=2, pad_last_batch=pad, **WAYS["random"])
        state = one.state_dict()
        # The buffer is another shard's, so what this one holds is to be found out.
        state["nodes"]["file_reader"] |= {"consumed": 2**61, "batch_size": 2**62, "buffer": "1/"}
        one.load_state_dict(state)
        assert one.state_dict()["nodes"]["file_reader"]["consumed"] == 2**61
        assert list(one) == []
        assert one.position.epoch == 1


# What a state refuses.


@pytest.mark.parametrize(
    ("key", "saved", "now"),
    [
        ("length", {"count": 11}, {"count": 12}),
        ("num_shards", {"num_shards": 2}, {"num_shards": 3}),
        ("stick_to_shard", {"num_shards": 2}, {"num_shards": 2, "stick_to_shard": True}),
        ("pad_last_batch", {"pad_last_batch": True}, {}),
        ("random_shuffle", {"random_shuffle": True}, {}),
        ("random_shuffle", {}, {"random_shuffle": True}),
        ("initial_fill", WAYS["random"], {**WAYS["random"], "initial_fill": 5}),
        ("shuffle_after_epoch", {"shuffle_after_epoch": True}, {}),
        ("last_batch_policy", {}, {"policy": "PARTIAL"}),
        ("last_batch_policy", {"policy": "DROP"}, {"policy": "PARTIAL"}),
    ],
)
def test_changed_arguments_are_refused_by_name(loader, key, saved, now):
    state = loader(**saved).state_dict()
    other = loader(**now)
    before = other.state_dict()
    with pytest.raises(StateMismatchError, match=rf"file_reader\.{key}"):
        other.load_state_dict(state, allow=("batch_size",))
    assert other.state_dict() == before


def test_another_position_than_the_buffer_s_is_refused(loader):
    one = loader(**WAYS["random"])
    next(iter(one))
    state = one.state_dict()
    for consumed in (3, 4, 14):
        state["nodes"]["file_reader"]["consumed"] = consumed
        with pytest.raises(StateMismatchError, match=r"file_reader\.buffer"):
            loader(**WAYS["random"]).load_state_dict(state)


def test_other_files_are_refused(folder):
    state = FileReader(folder, ["00", "01"]).state_dict()
    for files, labels in [(["00", "02"], None), (["01", "00"], None), (["00", "01"], [0, 2])]:
        with pytest.raises(StateMismatchError, match=r"file_reader\.files"):
            FileReader(folder, files, labels).load_state_dict(state)
    FileReader(None, ["00", "01"], [0, 1]).load_state_dict(state)  # the same ones elsewhere


@pytest.mark.parametrize(
    ("key", "damaged"),
    [
        ("consumed", -2),
        ("consumed", "2"),
        ("batch_size", 0),
        ("batch_size", "2"),
        ("epoch", "1"),
        ("buffer", ""),
        ("buffer", "0/0/2"),
        ("buffer", "0/0/2/"),
        ("buffer", "0/0/2/1,2,x,4"),
        ("buffer", "0/0/2/1,2,3"),
        ("buffer", "0/0/2/1,2,3,4,5"),
        ("buffer", "0/0/2/1,2,3,3"),
        ("buffer", "0/0/2/1,2,3,11"),
        ("buffer", "0/0/2/-1,2,3,4"),
        ("buffer", f"0/0/2/1,2,3,{2**64}"),
        ("buffer", "0/0/4/1,2,3,4"),
        ("buffer", "0/1/2/1,2,3,4"),
        ("buffer", "1/0/2/1,2,3,4"),
        ("buffer", "x/0/2/1,2,3,4"),
        ("buffer", 5),
    ],
)
def test_a_damaged_position_is_refused(loader, key, damaged):
    one = loader(**WAYS["random"])
    it = iter(one)
    next(it)
    state = one.state_dict()
    assert state["nodes"]["file_reader"]["buffer"].startswith("0/0/2/")
    loader(**WAYS["random"]).load_state_dict(state)
    state["nodes"]["file_reader"][key] = damaged
    before = one.state_dict()
    with pytest.raises(StateMismatchError, match=rf"file_reader\.{key}"):
        one.load_state_dict(state)
    assert one.state_dict() == before
    assert list(it) == list(loader(**WAYS["random"]))[1:]


# The policy.


def test_an_empty_batch_is_collate_fn_of_nothing_or_default_collate_s_shapes(reader):
    def make(collate_fn):
        decoded = SeededMapper(reader(9, num_shards=2), decoded_as, seed=1)
        return StatefulDataLoader(SeededBatcher(decoded, 2, collate_fn=collate_fn), last_batch_policy="PARTIAL")

    assert list(make(list))[2] == []
    full, _, empty = make(None)
    assert same(
        empty,
        {
            "image": torch.empty(0, 2, 3),
            "pair": [torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int64)],
            "name": [],
        },
    )
    assert full.keys() == empty.keys()


def decoded_as(item):
    _, label = item
    return {"image": torch.ones(2, 3) * label, "pair": (label, int(label)), "name": str(label)}


def test_an_empty_batch_costs_no_skip_of_its_model(reader):
    def fails_on_the_first(item):
        if item[1] == 0:
            raise ValueError("bad")
        return item[1]

    node = SeededMapper(reader(9, num_shards=2), fails_on_the_first, seed=1, max_skipped=1)
    one = StatefulDataLoader(SeededBatcher(node, 2), last_batch_policy="PARTIAL")
    assert [batch.shape for batch in one] == [(1, 1), (2, 1), (0, 1)]
    assert one.stats()["skipped"] == 1


@pytest.mark.parametrize("bad", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_an_empty_batch_is_made_of_any_sample_that_is_left(reader, bad, more):
    ran = []

    def fails_on_the_first(item):
        ran.append(item[1].item())
        if item[1] < bad:
            raise ValueError("bad")
        return item[1]

    node = SeededMapper(reader(9, num_shards=2, max_skipped=more), fails_on_the_first, seed=1, max_skipped=bad)
    one = StatefulDataLoader(SeededBatcher(node, 2), last_batch_policy="PARTIAL")
    *_, empty = one
    assert ran[:4] == [0, 1, 2, 3]
    assert ran[4 : 5 + bad] == list(range(4))[: bad + 1]
    assert same(empty, torch.empty(0, 1, dtype=torch.int32) if bad < 4 else [])
    assert one.stats()["skipped"] == bad


def test_an_empty_batch_goes_through_the_nodes_above(reader):
    batches = SeededBatcher(reader(9, num_shards=2), 2, collate_fn=labels)
    one = StatefulDataLoader(SeededMapper(batches, tuple, seed=3), last_batch_policy="PARTIAL")
    assert list(one) == [(0, 1), (2, 3), ()]


def test_without_a_policy_batches_are_as_under_fill(loader):
    for options in ({}, {"pad_last_batch": True}, {"num_shards": 3, "shard_id": 1}):
        assert epochs(loader(3, None, **options)) == epochs(loader(3, "FILL", **options))
        assert all(len(batch) == 3 for epoch in epochs(loader(3, **options)) for batch in epoch)


def test_dropping_everything_is_refused(loader):
    with pytest.raises(ResumableBatchConfigurationError, match="every batch would be dropped"):
        loader(4, "DROP", num_shards=3)
    assert len(loader(4, "PARTIAL", num_shards=3)) == 1


def test_a_policy_needs_one_file_reader(reader):
    plain = SamplerNode(SequentialSampler(4))
    with pytest.raises(ValueError, match="belongs to a loader over one FileReader, here are 0"):
        StatefulDataLoader(SeededBatcher(plain, 2), last_batch_policy="FILL")
    with pytest.raises(ValueError, match="here are 0"):
        StatefulDataLoader([1, 2], last_batch_policy=LastBatchPolicy.DROP)
    with pytest.raises(ValueError, match="here are 2"):
        StatefulDataLoader(Mixer([SeededBatcher(reader(), 2), SeededBatcher(reader(), 2)], [1, 1]), last_batch_policy="DROP")
    with pytest.raises(ValueError, match="'MAYBE' is not a valid LastBatchPolicy"):
        StatefulDataLoader(SeededBatcher(reader(), 2), last_batch_policy="MAYBE")


def test_a_policy_needs_a_batcher_right_above(reader):
    above = [
        lambda node: node,
        lambda node: SeededBatcher(ProcessPrefetcher(node, 0), 2),
        lambda node: SeededBatcher(SeededFlatMapper(node, lambda item: [item, item], 2), 2),
        lambda node: tn.Batcher(node, 2),
        lambda node: SeededBatcher(tn.Prefetcher(node, 1), 2),
    ]
    for compose in above:
        with pytest.raises(ValueError, match="needs a SeededBatcher with a batch_size above the FileReader"):
            StatefulDataLoader(compose(reader()), last_batch_policy="PARTIAL")
    with pytest.raises(ValueError, match="excludes the SeededBatcher's drop_last=True"):
        StatefulDataLoader(SeededBatcher(reader(), 2, drop_last=True), last_batch_policy="DROP")


def test_the_caller_may_try_again_after_a_refusal(reader):
    node = SeededBatcher(reader(7), 2, collate_fn=labels)
    with pytest.raises(ValueError, match="MAYBE"):
        StatefulDataLoader(node, last_batch_policy="MAYBE")
    assert epochs(StatefulDataLoader(node, last_batch_policy="PARTIAL"), 1) == [[[0, 1], [2, 3], [4, 5], [6]]]


def test_the_policy_is_the_loader_s(reader):
    node = ProcessPrefetcher(SeededBatcher(reader(7, pad_last_batch=True), 2, collate_fn=labels), 1)
    with StatefulDataLoader(node, last_batch_policy="PARTIAL") as one:
        assert list(one)[-1] == [6]
    with StatefulDataLoader(node) as one:  # where the one before stopped
        assert list(one)[-1] == [6, 6]
        next(iter(one))
    with pytest.raises(ValueError, match="PARTIAL in the middle of an epoch that FILL began"):
        StatefulDataLoader(node, last_batch_policy="PARTIAL")
    with StatefulDataLoader(node, last_batch_policy="FILL") as one:
        assert list(one) == [[2, 3], [4, 5], [6, 6]]


def test_what_was_pulled_ahead_under_another_policy_is_dropped(reader):
    node = ProcessPrefetcher(SeededBatcher(reader(7), 2, collate_fn=labels), 2)
    assert list(node) == [[0, 1], [2, 3], [4, 5], [6, 0]]  # and workers have the next epoch's already
    with StatefulDataLoader(node, last_batch_policy="DROP") as one:
        assert list(one) == [[1, 2], [3, 4], [5, 6]]
        assert list(one) == [[2, 3], [4, 5], [6, 0]]


def test_a_policy_below_a_mixture(reader):
    both = [SeededBatcher(reader(7), 2, collate_fn=labels), SeededBatcher(SamplerNode(SequentialSampler(4)), 2, collate_fn=list)]
    mixture = Mixer(both, [1, 1], seed=0, stop_criteria="ALL_DATASETS_EXHAUSTED")
    one = StatefulDataLoader(mixture, last_batch_policy="PARTIAL")
    assert len(one) == 6
    for last in ([6], [0]):
        assert [last] == [batch for batch in one if len(batch) == 1]


def test_under_torchdata_s_loader(reader):
    one = tn.Loader(SeededBatcher(reader(7), 2, collate_fn=labels))
    assert [list(one) for _ in range(2)] == [[[0, 1], [2, 3], [4, 5], [6, 0]], [[1, 2], [3, 4], [5, 6]]]
    it = iter(one)
    next(it)
    state = json.loads(json.dumps(one.state_dict()))
    other = tn.Loader(SeededBatcher(reader(7), 2, collate_fn=labels))
    other.load_state_dict(state)
    assert list(other) == list(it)


def test_batches_of_samples_that_default_collate_takes(reader):
    batch = next(iter(StatefulDataLoader(SeededBatcher(SeededMapper(reader(7), label_of, rng=()), 3))))
    assert same(batch, default_collate([torch.tensor([i], dtype=torch.int32) for i in range(3)]))


def label_of(item):
    return item[1]


# The arguments.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 12}, "num_shards must be at most the number of files, 11, got 12"),
        ({"num_shards": 0}, "num_shards must be at least 1, got 0"),
        ({"num_shards": 2, "shard_id": 2}, "shard_id must be from 0 to num_shards - 1 = 1, got 2"),
        ({"shard_id": -1}, "shard_id must be from 0"),
        ({"initial_fill": 0}, "initial_fill must be at least 1, got 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"shuffle_after_epoch_seed": 2**64}, "shuffle_after_epoch_seed must be from 0"),
        ({"shuffle_after_epoch": True, "stick_to_shard": True}, "shuffle_after_epoch excludes stick_to_shard"),
        ({"shuffle_after_epoch": True, "random_shuffle": True}, "shuffle_after_epoch excludes random_shuffle"),
    ],
)
def test_arguments_that_are_wrong(reader, options, message):
    with pytest.raises(ValueError, match=message):
        reader(11, **options)


def test_it_makes_no_batches_of_its_own(reader):
    with pytest.raises(ResumableBatchConfigurationError, match="a FileReader makes no batches"):
        SeededBatcher(reader(), None)
