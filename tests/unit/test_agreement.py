"""All ranks load the same state, or none does; the ranks are threads here."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torchdata.nodes import BaseNode, IterableWrapper

from stateful_pipes import (
    CheckpointManager,
    FileReader,
    IndexFilter,
    Mixer,
    Node,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.agreement import check_agreement
from stateful_pipes.errors import StateMismatchError


class Ranks:
    """A process group of threads; a thread that is not one of its ranks finds no group at all."""

    def __init__(self, world_size, monkeypatch):
        self.world_size = world_size
        self.gathers = 0
        self._here = threading.local()
        self._told = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=20)
        monkeypatch.setattr(dist, "is_initialized", lambda: hasattr(self._here, "rank"))
        monkeypatch.setattr(dist, "get_rank", lambda: self._here.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: self.world_size)
        monkeypatch.setattr(dist, "all_gather_object", self._gather)

    def _gather(self, found, value):
        self._told[self._here.rank] = value
        if self._barrier.wait() == 0:
            self.gathers += 1
        found[:] = self._told
        self._barrier.wait()

    def run(self, function):
        """What `function` of the rank returned on each."""

        def one(rank):
            self._here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(one, range(self.world_size)))

    def load(self, make, states, allow=()):
        """The errors of loading `states[rank]` on each rank, which change nothing; None where there was none."""

        def one(rank):
            loader = make(rank)
            before = loader.state_dict()
            try:
                loader.load_state_dict(states[rank], allow=allow)
            except StateMismatchError as error:
                assert loader.state_dict() == before
                assert not loader.is_restored_from_checkpoint
                return str(error)
            if states[rank]:
                assert loader.position.epoch == states[rank]["epoch"]
            return None

        return self.run(one)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(4, monkeypatch)


def dealt(rank=None, **kwargs):
    return StatefulDataLoader(list(range(40)), 2, shuffle=True, seed=5, rng=(), **kwargs)


def state_of(loader, read=3):
    iterator = iter(loader)
    for _ in range(read):
        next(iterator)
    return loader.state_dict()


@pytest.fixture
def state(ranks):
    return ranks.run(lambda rank: state_of(dealt()))[0]


def changed(state, node, **fields):
    state = copy.deepcopy(state)
    state["nodes"][node].update(fields)
    return state


def test_equal_states_are_loaded(ranks, state):
    assert state["nodes"]["sampler"]["consumed"] == 24
    assert ranks.load(dealt, [copy.deepcopy(state) for _ in range(4)]) == [None] * 4
    assert ranks.gathers == 1


def test_the_order_of_keys_is_no_difference(ranks, state):
    backwards = {**{key: state[key] for key in reversed(state)}, "nodes": dict(reversed(state["nodes"].items()))}
    assert ranks.load(dealt, [state, backwards, state, state]) == [None] * 4


@pytest.mark.parametrize("odd", range(4))
def test_a_rank_that_differs_is_named_on_all(ranks, state, odd):
    states = [state] * 4
    states[odd] = changed(state, "sampler", consumed=32)
    alike = [rank for rank in range(4) if rank != odd]
    expected = (
        f"The state does not fit this pipeline: ranks [{odd}] were given another one than ranks {alike}; load the same on all\n"
        f"  rank {odd}: sampler.consumed 32 instead of 24"
    )
    assert ranks.load(dealt, states) == [expected] * 4


def test_a_rank_that_cannot_read_its_checkpoint_keeps_nobody_waiting(ranks, state, tmp_path):
    loader = dealt()
    loader.load_state_dict({**state, "nodes": changed(state, "sampler", world_size=1)["nodes"]})
    data = loader.checkpoint()

    def one(rank):
        try:
            dealt(checkpoint=tmp_path / "not there" if rank == 2 else data)
        except (FileNotFoundError, StateMismatchError) as error:
            return error

    told = ranks.run(one)
    assert type(told[2]) is FileNotFoundError
    assert all("ranks [2] were given another one than ranks [0, 1, 3]" in str(told[rank]) for rank in (0, 1, 3))


def test_several_ranks_that_differ_are_named(ranks, state):
    states = [state, changed(state, "sampler", seed=6), state, {**state, "epoch": 1}]
    (told, *others) = ranks.load(dealt, states)
    assert others == [told] * 3
    assert "ranks [1, 3] were given another one than ranks [0, 2]" in told
    assert told.splitlines()[1:] == ["  rank 1: sampler.seed 6 instead of 5", "  rank 3: epoch 1 instead of 0"]


def test_without_a_majority_it_is_the_first_rank_that_others_differ_from(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    state = ranks.run(lambda rank: state_of(dealt()))[0]
    told = ranks.load(dealt, [state, changed(state, "sampler", consumed=4)])
    assert "ranks [1] were given another one than ranks [0]" in told[0]
    assert told[1] == told[0]


def test_many_ranks_are_not_all_listed(monkeypatch):
    ranks = Ranks(24, monkeypatch)
    state = ranks.run(lambda rank: state_of(dealt(), 0))[0]
    states = [changed(state, "sampler", consumed=rank + 1) if rank < 10 else state for rank in range(24)]
    told = ranks.load(dealt, states)[0]
    assert "ranks [0, 1, 2, 3, 4, 5, 6, 7, ...] were given another one than ranks [10, 11, 12, 13, 14, 15, 16, 17, ...]" in told
    assert len(told.splitlines()) == 9


@pytest.mark.parametrize(
    ("damaged", "shown"),
    [
        ({}, "rank 2: an empty state"),
        (None, "rank 2: a damaged state"),
        ({"nodes": 3}, "rank 2: a damaged state"),
        ({"nodes": {"sampler": {"consumed": object()}}}, "rank 2: a damaged state"),
        ({"nodes": {"sampler": {"consumed": 10**5000}}}, "rank 2: a damaged state"),
        ({1: 2, "nodes": {}, "a": 3}, "rank 2: a damaged state"),
        ({"nodes": {"sampler": {"consumed": 8}}}, "format (missing) instead of 'stateful_pipes'"),
        ({"nodes": {"sampler": {1: 2, "a": "b" * 100}}}, f"sampler.a '{'b' * 79} instead of (missing)"),
    ],
)
def test_a_rank_without_a_whole_state_keeps_nobody_waiting(ranks, state, damaged, shown):
    told = ranks.load(dealt, [state, state, damaged, state])
    assert told == [told[0]] * 4
    assert "ranks [2] were given another one than ranks [0, 1, 3]" in told[0]
    assert shown in told[0]


def test_what_is_wrong_on_all_ranks_is_left_to_validation(ranks, state):
    told = ranks.load(dealt, [changed(state, "sampler", consumed=-1)] * 4)
    assert [one and "sampler.consumed: saved -1, here 0" in one for one in told] == [True] * 4
    told = ranks.load(dealt, [None] * 4)
    assert [one and "a state is a mapping, got NoneType" in one for one in told] == [True] * 4


def test_an_empty_state_on_all_ranks_does_nothing(ranks):
    assert ranks.load(dealt, [{}] * 4) == [None] * 4


def test_what_says_nothing_of_the_position_may_differ(ranks, state):
    other = {**state, "library": "0.0.9", "batch": state["batch"] + 1}
    assert ranks.load(dealt, [state, other, state, other]) == [None] * 4


class Failing:
    """Sample 4 cannot be read."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 4:
            raise OSError("gone")
        return index


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_rank_counts_the_samples_that_it_left_out_for_itself(ranks):
    def make(rank):
        return StatefulDataLoader(Failing(), 2, rng=(), seed=1, max_skipped=2)

    states = ranks.run(lambda rank: state_of(make(rank), 1))
    assert [one["nodes"]["mapper"]["skipped"] for one in states] == [1, 0, 0, 0]
    assert ranks.load(make, states) == [None] * 4


def test_another_number_of_ranks_is_compared_too(ranks, state):
    saved = changed(state, "sampler", world_size=6)
    assert ranks.load(dealt, [saved] * 4, allow=("world_size",)) == [None] * 4
    told = ranks.load(dealt, [saved, saved, state, saved], allow=("world_size",))
    assert [one and "rank 2: sampler.world_size 4 instead of 6" in one for one in told] == [True] * 4


def test_a_checkpoint_at_construction_is_compared(ranks, state, tmp_path):
    other = changed(state, "sampler", consumed=16)

    def one(rank):
        manager = CheckpointManager(tmp_path / str(rank), every=1)
        manager.save(1, {"loader": other if rank == 3 else state})
        with pytest.raises(StateMismatchError, match=r"rank 3: sampler.consumed 16 instead of 24"):
            dealt(checkpoint=manager.restore().state["loader"])
        return dealt(checkpoint=state).position.consumed

    assert ranks.run(one) == [24] * 4


# What each rank has for itself.


def drawn(item, rng):
    """Threads cannot seed global generators."""
    return item, rng.random()


def test_without_a_process_group_ranks_by_hand_ask_nobody(ranks):
    node = SamplerNode(RandomSampler(9, seed=1), rank=1, world_size=4)
    loader = StatefulDataLoader(node)
    loader.load_state_dict(loader.state_dict())
    assert ranks.gathers == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_their_own_ask_nobody(ranks, world_size):
    def one(rank):
        node = SamplerNode(SequentialSampler(9 + rank), rank=rank % world_size, world_size=world_size)
        loader = StatefulDataLoader(node)
        loader.load_state_dict(state_of(loader, rank))
        return loader.position.consumed

    assert ranks.run(one) == [world_size * rank for rank in range(4)]
    assert ranks.gathers == 0


def test_a_group_of_one_asks_nobody(monkeypatch):
    ranks = Ranks(1, monkeypatch)
    state = ranks.run(lambda rank: state_of(dealt()))[0]
    assert ranks.load(dealt, [state]) == [None]
    assert ranks.gathers == 0


def test_foreign_sources_stand_elsewhere_on_each_rank(ranks):
    def make(rank):
        source = SeededMapper(IterableWrapper(range(9 + rank)), drawn, seed=rank, rng="generator")
        return StatefulDataLoader(SeededBatcher(source, 2, seed=rank))

    states = ranks.run(lambda rank: state_of(make(rank), rank))
    assert ranks.load(make, states) == [None] * 4
    assert ranks.gathers == 0


class Pairs(Node):
    """Of an index that is dealt out and an item of the rank's own."""

    def __init__(self, *sources):
        super().__init__(*sources)

    def pull(self, count):
        below = [source.pull(count) for source in self.sources]
        return (*below[0][:2], below)

    def run(self, ticket):
        made = [source.run(below) for source, below in zip(self.sources, ticket[2], strict=True)]
        return list(zip(*made, strict=True))

    def mark(self):
        return (self.sources[0].mark()[0], *(source.mark() for source in self.sources))

    def seek(self, mark):
        for source, part in zip(self.sources, mark[1:], strict=True):
            source.seek(part)

    def parts(self, mark):
        return mark[1:]

    def locate(self, entry, parts):
        return (parts[0][0], *parts)


@pytest.mark.parametrize("own", ["foreign", "sampler"])
def test_beside_a_source_of_the_rank_itself_what_is_dealt_out_is_compared(ranks, own):
    def make(rank):
        other = SamplerNode(SequentialSampler(90 + rank), rank=0, world_size=1, name="own")
        if own == "foreign":
            other = IterableWrapper(range(90 + rank))
            other = SeededMapper(other, drawn, seed=rank, rng="generator", name="own")
        dealt = SeededMapper(SamplerNode(RandomSampler(40, seed=1)), drawn, seed=1, rng="generator")
        return StatefulDataLoader(SeededMapper(Pairs(dealt, other), drawn, seed=rank, rng="generator", name="both"))

    states = ranks.run(lambda rank: state_of(make(rank), 2))
    assert states[0]["nodes"]["own"] != states[1]["nodes"]["own"]
    assert ranks.load(make, states) == [None] * 4
    assert ranks.gathers == 1
    states[1] = changed(changed(states[1], "sampler", consumed=4), "both", seed=77)
    told = ranks.load(make, states)
    assert told == [told[0]] * 4
    assert told[0].splitlines()[1:] == ["  rank 1: sampler.consumed 4 instead of 8"]
    states = ranks.run(lambda rank: state_of(make(rank), 2))
    states[2] = changed(states[2], "mapper", seed=2)
    assert ranks.load(make, states)[0].splitlines()[1:] == ["  rank 2: mapper.seed 2 instead of 1"]


def mixture(rank):
    names = ("one", "two")
    return StatefulDataLoader(Mixer([SamplerNode(RandomSampler(30, seed=1), name=name) for name in names], [1, 2], seed=3))


def filtered(rank):
    return StatefulDataLoader(IndexFilter(SamplerNode(RandomSampler(30, seed=1), name="one"), lambda index: index % 2 == 0))


@pytest.mark.parametrize("make", [mixture, filtered])
def test_what_lies_below_the_node_that_deals_is_compared(ranks, make):
    states = ranks.run(lambda rank: state_of(make(rank), 2))
    assert ranks.load(make, states) == [None] * 4
    states[0] = changed(states[0], "one", consumed=29)
    told = ranks.load(make, states)
    assert told == [told[0]] * 4
    assert "rank 0: one.consumed 29 instead of" in told[0]


# Shards.


@pytest.fixture
def sharded(tmp_path):
    """Makes each rank's loader over its shard of the files; each has seeds of its own."""
    for number in range(21):
        (tmp_path / f"{number:02}").write_bytes(b"")

    def make(rank, batch_size=2, **options):
        options = {"random_shuffle": True, "initial_fill": 3, "seed": rank, "num_shards": 4, "shard_id": rank} | options
        reader = FileReader(tmp_path, [f"{number:02}" for number in range(21)], **options)
        return StatefulDataLoader(
            SeededBatcher(SeededMapper(reader, label_of, seed=rank, rng="generator"), batch_size, seed=rank)
        )

    return make


def label_of(item, rng):
    return item[1].item()


def test_shards_that_stand_at_the_same_step_are_loaded(ranks, sharded):
    states = ranks.run(lambda rank: state_of(sharded(rank), 2))
    assert len({one["nodes"]["file_reader"]["buffer"] for one in states}) == 4
    assert ranks.load(sharded, states) == [None] * 4
    assert ranks.load(sharded, [states[0]] * 4) == [None] * 4  # one serves all
    assert ranks.gathers == 2


@pytest.mark.parametrize(("read", "shown"), [(1, "consumed 2 instead of 4"), (3, "epoch 1 instead of 0")])
def test_a_shard_at_another_step_is_named_on_all_ranks(ranks, sharded, read, shown):
    states = ranks.run(lambda rank: state_of(sharded(rank), read if rank == 2 else 2))
    told = ranks.load(sharded, states)
    assert told == [told[0]] * 4
    assert "ranks [2] were given another one than ranks [0, 1, 3]" in told[0]
    assert f"file_reader.{shown}" in told[0]
    assert "seed" not in told[0]
    assert "buffer" not in told[0]


def test_shards_that_are_shuffled_under_different_seeds_would_overlap(ranks, sharded):
    def make(rank):
        return sharded(rank, random_shuffle=False, shuffle_after_epoch=True, shuffle_after_epoch_seed=int(rank == 1))

    told = ranks.load(make, ranks.run(lambda rank: state_of(make(rank), 1)))
    assert [one and one.splitlines()[1] for one in told] == ["  rank 1: file_reader.shuffle_after_epoch_seed 1 instead of 0"] * 4


def test_shards_that_are_not_the_ranks_ask_nobody(ranks, sharded):
    def make(rank):
        return sharded(rank % 2, num_shards=2)

    assert ranks.load(make, ranks.run(lambda rank: state_of(make(rank), 1 + rank))) == [None] * 4
    assert ranks.gathers == 0


def test_a_mixture_of_shards_reads_from_each_as_it_will(ranks, tmp_path):
    for number in range(9):
        (tmp_path / f"{number:02}").write_bytes(b"")

    def make(rank):
        readers = [FileReader(tmp_path, [f"{i:02}" for i in range(9)], num_shards=4, shard_id=rank, name=name) for name in "ab"]
        return StatefulDataLoader(SeededMapper(Mixer(readers, [1, 1], seed=rank), label_of, seed=rank, rng="generator"))

    states = ranks.run(lambda rank: state_of(make(rank), 3))
    assert len({one["nodes"]["a"]["consumed"] for one in states}) > 1
    assert ranks.load(make, states) == [None] * 4
    assert ranks.gathers == 0


class Reader(BaseNode):
    """Stands for a pipeline of DALI's: its state says more than where it stands."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.at = 0 if initial_state is None else initial_state["at"]

    def next(self):
        self.at += 1
        return self.at

    def get_state(self):
        return {"at": self.at, "rank": self.rank}

    def reader_meta(self):
        return {"number_of_shards": 4}


def test_pipelines_of_dali_s_are_compared_by_their_step(ranks):
    def make(rank):
        return StatefulDataLoader(SeededMapper(Reader(rank), drawn, seed=rank, rng="generator"))

    states = ranks.run(lambda rank: state_of(make(rank)))
    assert len({one["nodes"]["reader"]["state"] for one in states}) == 4
    assert ranks.load(make, states) == [None] * 4
    states[3] = ranks.run(lambda rank: state_of(make(rank), 1))[3]
    told = ranks.load(make, states)
    assert [one and one.splitlines()[1] for one in told] == ["  rank 3: reader.position 1 instead of 3"] * 4


# Where one refuses its state.


def refusals(ranks, make, states, allow=()):
    """What `check_agreement` raised on each rank."""

    def one(rank):
        try:
            check_agreement(make(rank).pipeline, states[rank], allow)
        except StateMismatchError as error:
            return str(error)

    return ranks.run(one)


def test_where_one_rank_will_refuse_its_state_the_others_do_not_load(ranks, sharded):
    states = ranks.run(lambda rank: state_of(sharded(rank), 2))
    assert refusals(ranks, sharded, states) == [None] * 4
    assert ranks.gathers == 1
    states[1] = changed(states[1], "file_reader", buffer="1/damaged")
    told = refusals(ranks, sharded, states)
    assert told == [told[0], None, told[0], told[0]]  # rank 1 will raise it itself
    assert "another rank refused its own\n  rank 1: stateful_pipes.errors.StateMismatchError" in told[0]
    assert "file_reader.buffer" in told[0]


def test_a_rank_whose_pipeline_is_another_keeps_nobody_waiting(ranks, sharded):
    states = [ranks.run(lambda rank: state_of(sharded(rank), 2))[0]] * 4

    def make(rank):
        return sharded(rank, 3 if rank == 3 else 2)

    told = refusals(ranks, make, states)
    assert told == [told[0]] * 3 + [None]
    assert "batch_size: saved 2, here 3" in told[0]
    assert refusals(ranks, make, states, allow=("batch_size",)) == [None] * 4
    assert refusals(ranks, make, [{}] * 4) == [None] * 4
    assert refusals(ranks, make, [None] * 4) == [None] * 4  # all will
