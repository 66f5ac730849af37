"""DALI pipelines as nodes: every cut of two epochs, whatever stands above them; forks."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchdata.nodes import Loader

from stateful_pipes import (
    MultiPipelineLoader,
    ProcessPrefetcher,
    SeededMapper,
    StatefulDataLoader,
)
from stateful_pipes.errors import ResumableModeRequiredError, StateMismatchError
from tests.integration.pipelines import check_resumes, epochs, shut, states, take
from tests.streams import same

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")

from nvidia.dali import Pipeline, fn, pipeline_def

from stateful_pipes.integrations.dali import DALIPipelineNode
from tests.integration.dali_pipelines import (
    ABOVE,
    BATCH_SIZE,
    DEVICES,
    FILES,
    READERS,
    draw,
    factory,
    make_folder,
    node,
    rest_digests,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


LOADERS = ["loader", "torchdata's loader", "torchdata's prefetcher"]
POLICIES = ["PARTIAL", "FILL", "DROP"]


@pytest.mark.parametrize("above", [one for one in ABOVE if one not in LOADERS])
def test_every_cut_below_everything(folder, above):
    check_resumes(lambda: ABOVE[above](node(folder, "random_shuffle")), 2)


@pytest.mark.parametrize("above", LOADERS)
@pytest.mark.parametrize("reader", READERS)
def test_every_cut_of_every_reader(folder, reader, above):
    """Each reader, and each loader, with each policy."""
    policy = POLICIES[(LOADERS.index(above) + list(READERS).index(reader)) % 3]
    whole = check_resumes(lambda: ABOVE[above](node(folder, reader, last_batch_policy=policy)), 2)
    assert not same(whole[0], whole[1])  # else an epoch could stand for the other


OPTIONS = [
    {"prefetch_queue_depth": 5, "num_threads": 1},
    {"exec_dynamic": False},
    {"exec_dynamic": False, "prefetch_queue_depth": 1},
    {"exec_pipelined": False, "exec_async": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_however_far_it_reads_ahead_and_with_another_executor(folder, options):
    make, remake = (lambda: Loader(node(folder, "random_shuffle", **options))), (lambda: Loader(node(folder, "random_shuffle")))
    assert same(check_resumes(make, 2, remake), epochs(remake(), 2))
    source, other = remake(), make()
    take(iter(source), 1)
    other.load_state_dict(source.state_dict())
    assert same(list(other), epochs(remake(), 1)[0][1:])


def test_through_files_and_in_a_new_process(folder, tmp_path):
    paths = []
    loader = StatefulDataLoader(node(folder, "random_shuffle"))
    for _ in range(2):
        for _ in loader:
            paths.append(str(tmp_path / f"{len(paths)}.json"))
            loader.checkpoint(paths[-1])
    (whole,) = rest_digests(folder, [None])
    here = rest_digests(folder, paths)
    assert here[2][0] == whole[1]  # the state after an epoch's last batch is the next one's start
    script = (
        "import json, sys; from tests.integration.dali_pipelines import rest_digests as r; "
        "print(json.dumps(r(*json.load(sys.stdin))))"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=json.dumps([folder, paths]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert json.loads(ran.stdout or ran.stderr) == here
    assert len({one for pair in here for one in pair}) == len(paths) + 1  # each cut leaves something else


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("read", [0, 2, 3, 4])
def test_through_a_distributed_checkpoint(folder, read, tmp_path):
    def make():
        return StatefulDataLoader(SeededMapper(node(folder, "random_shuffle"), draw, seed=1))

    stream = itertools.chain.from_iterable(epochs(make(), 3))
    loader = make()
    for _ in range(read // 3):
        take(iter(loader), 3)
    take(iter(loader), read % 3)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path)
    other = make()
    take(iter(other), 1)
    dcp.load({"loader": other}, checkpoint_id=tmp_path)
    expected = list(itertools.islice(stream, read, None))
    left = []
    while other.position.epoch < 3:
        left += other
    assert same(left, expected)


@pytest.mark.parametrize("policy", ["FILL", "PARTIAL", "DROP"])
def test_a_chain_of_resumes_within_and_across_epochs(folder, policy):
    def make():
        return StatefulDataLoader(SeededMapper(node(folder, "random_shuffle", last_batch_policy=policy), draw, seed=1))

    expected = list(itertools.chain.from_iterable(epochs(make(), 6)))
    found, state = [], make().state_dict()
    for count in (1, 1, 2, 1, 3, 2):
        loader = make()
        loader.load_state_dict(json.loads(json.dumps(state)))
        endless = itertools.chain.from_iterable(iter(lambda loader=loader: iter(loader), None))
        found += take(endless, count)
        state = loader.state_dict()
    assert same(found, expected[: len(found)])


def test_a_load_into_a_node_that_has_read_already(folder):
    whole = epochs(Loader(node(folder, "random_shuffle")), 2)
    source, other = node(folder, "random_shuffle"), node(folder, "random_shuffle")
    take(source, 2)
    state = source.state_dict()
    take(other, 1)
    for read in (1, 0):  # in the middle of an epoch, and at its end
        other.reset(state)
        assert same(take(other, read), whole[0][2 : 2 + read])
    assert same(list(other), whole[0][2:])
    other.reset(state)
    assert same(list(other), whole[0][2:])
    other.reset()
    assert same(list(other), whole[1])
    assert same(list(source), whole[0][2:])  # two at once don't disturb each other


@pytest.mark.parametrize("name", ["one", "another"])
@pytest.mark.parametrize("policy", ["FILL", "PARTIAL", "DROP"])
def test_several_readers_in_one_pipeline(folder, name, policy):
    def make():
        return Loader(
            DALIPipelineNode(
                factory(folder, make=two_readers),
                output_names=["label", "encoded"],
                reader_name=name,
                last_batch_policy=policy,
            )
        )

    check_resumes(make, 2)


@pipeline_def
def two_readers(folder, reader):
    label = fn.readers.file(file_root=folder, name="one", random_shuffle=True, initial_fill=3)[1]
    return label, fn.readers.file(files=[f"{folder}/0/0.jpg", f"{folder}/0/2.jpg"], name="another", shuffle_after_epoch=True)[0]


def test_conditionals_and_no_reader(folder):
    def make():
        return DALIPipelineNode(factory(folder, make=conditional), output_names=["number", "shifted"])

    source = make()
    whole = take(source, 5)
    for read in range(5):
        source, resumed = make(), make()
        take(source, read)
        resumed.reset(source.state_dict())
        assert same(take(resumed, 5 - read), whole[read:])


@pipeline_def(enable_conditionals=True)
def conditional(folder, reader):
    number = fn.random.uniform()
    if fn.random.coin_flip():  # noqa: SIM108  # this, and no ternary operator, is DALI's own
        shifted = number + 10.0
    else:
        shifted = number - 10.0
    return number, shifted


def test_epochs_cannot_be_left_and_the_error_tells_what_can(folder):
    loader = StatefulDataLoader(node(folder))
    read = take(iter(loader), 1)
    for move in (loader.restart, lambda: loader.set_epoch(3)):
        with pytest.raises(ResumableModeRequiredError, match=r"only DALIPipelineNode itself.*Read .* to its end, load"):
            move()
    assert same(read + list(loader), list(node(folder)))


def test_a_validation_loop_that_leaves_early_loads_the_start_each_time(folder):
    loader = StatefulDataLoader(node(folder, "random_shuffle"))
    start = loader.state_dict()
    passes = []
    for _ in range(2):
        loader.load_state_dict(start)
        passes.append(take(iter(loader), 1))
    assert same(passes[0], passes[1])


def test_torch_saves_the_state(folder, tmp_path):
    source, other = node(folder, "random_shuffle"), node(folder, "random_shuffle")
    take(source, 1)
    torch.save(source.state_dict(), tmp_path / "state")
    other.reset(torch.load(tmp_path / "state", weights_only=True))
    assert same(list(other), list(source))


def test_a_dropped_node_needs_no_garbage_collector(folder):
    loader = StatefulDataLoader(SeededMapper(node(folder), draw, seed=1))
    source = node(folder)
    next(iter(loader))
    next(source)
    gc.collect()
    gc.disable()
    try:
        count = alive()
        del source, loader
        assert alive() == count - 2
    finally:
        gc.enable()


def alive():
    return sum(pipeline() is not None for pipeline in Pipeline._pipes)


def test_the_state_is_plain_and_shares_nothing(folder):
    found = [state for _, _, state in states(lambda: Loader(node(folder)), 2)]
    texts = [json.dumps(state) for state in found]
    assert [json.loads(text) for text in texts] == found
    shapes = {tuple((key, type(value)) for key, value in state["root"].items()) for state in found}
    assert len(shapes) == 1
    source = node(folder)
    state = source.state_dict()
    kept = json.loads(json.dumps(state))
    state["output_names"].append("more")
    assert source.state_dict() == kept
    other = node(folder)
    other.reset(kept)
    kept["output_names"].clear()
    assert other.state_dict() == source.state_dict()  # just restored, too


def test_a_pipeline_without_a_seed_takes_the_state_s(folder):
    source, other = node(folder, "random_shuffle", seed=None), node(folder, "random_shuffle", seed=None)
    other.reset(source.state_dict())
    assert same(list(source), list(other))


def test_reset_in_the_middle_of_an_epoch_goes_on_with_it(folder):
    whole = epochs(Loader(node(folder)), 2)
    source = node(folder)
    source.reset()
    read = take(source, 1)
    source.reset(None)
    assert same(read + list(source), whole[0])
    assert list(source) == []  # ended until it is reset
    source.reset(None)
    source.reset(None)
    assert same(list(source), whole[1])


# Several.


def test_several_pipelines(folder):
    """Their epochs are those of one that reads every shard."""

    def make(shard, **options):
        reading = partial(sharded, shard)
        return DALIPipelineNode(factory(folder, make=reading, **options), output_names=["label"], reader_name="reader")

    loader = MultiPipelineLoader([make(0), make(1)])
    steps = list(loader)
    labels = [int(label) for step in steps for batch in step for label in batch["label"].flatten()]
    assert len(labels) >= FILES
    assert set(labels) == {0, 1}
    next(iter(loader))
    checkpoints = loader.checkpoints()
    rest = list(loader)
    resumed = MultiPipelineLoader([make(0), make(1)], checkpoint=checkpoints)
    assert same(list(resumed), rest)
    with pytest.raises(ValueError, match="a shard of its own"):
        MultiPipelineLoader([make(0), make(0)])
    with pytest.raises(ValueError, match="differ in batch_size"):
        MultiPipelineLoader([make(0), make(1, batch_size=BATCH_SIZE + 1)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_each_rank_s_state_under_a_key_of_its_own(folder, tmp_path):
    """Under one key `torch.distributed.checkpoint` keeps one copy, which other ranks refuse."""

    def make(rank):
        reading = partial(sharded, rank)
        return StatefulDataLoader(DALIPipelineNode(factory(folder, make=reading), output_names=["label"], reader_name="reader"))

    saved, resumed = [make(0), make(1)], [make(0), make(1)]
    for loader in saved:
        take(iter(loader), 1)
    dcp.save({f"loader_{rank}": loader for rank, loader in enumerate(saved)}, checkpoint_id=tmp_path)
    dcp.load({f"loader_{rank}": loader for rank, loader in enumerate(resumed)}, checkpoint_id=tmp_path)
    rests = [list(loader) for loader in saved]
    assert same([list(loader) for loader in resumed], rests)
    assert not same(*rests)
    with pytest.raises(StateMismatchError, match=r"operator reader: .*not as saved: shard_id"):
        resumed[1].load_state_dict(saved[0].state_dict())


def sharded(shard, *arguments, **options):
    return shard_of(*arguments, shard=shard, **options)


@pipeline_def
def shard_of(folder, reader, shard):
    _, label = fn.readers.file(file_root=folder, name="reader", shard_id=shard, num_shards=2, **reader)
    return label


# Forks.


def drop(held, told):
    try:
        next(held[0])
    except RuntimeError as error:
        told.send(str(error))
    held.clear()
    gc.collect()


def test_a_forked_child_refuses_it_and_may_drop_it(folder):
    """DALI itself would hang in the child, waiting for threads that only the parent has."""
    held = [node(folder)]
    next(held[0])
    expected = list(node(folder))[1:]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=drop, args=(held, there))
    child.start()
    child.join(20)  # only where it fails
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0
    assert "only in the process that made it" in here.recv()
    assert same(list(held[0]), expected)


def test_workers_come_and_go_above_it(folder):
    expected = list(StatefulDataLoader(SeededMapper(node(folder), draw, seed=1)))
    loader = StatefulDataLoader(ProcessPrefetcher(SeededMapper(node(folder), draw, seed=1), 1))
    read = take(iter(loader), 1)
    loader.close()
    assert same(read + list(loader), expected)
    shut(loader)


def test_what_is_sent_to_a_spawned_worker_holds_no_pipeline(folder):
    with pytest.raises(TypeError, match="cannot be copied or pickled; make one there"):
        pickle.dumps(node(folder))
    runner = pickle.loads(pickle.dumps(SeededMapper(node(folder), draw, seed=1)))
    assert not hasattr(runner.sources[0], "node")


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("above", ["loader", "torchdata's loader", "torchdata's prefetcher"])
def test_every_cut_of_a_pipeline_on_a_gpu(folder, above, monkeypatch):
    monkeypatch.setitem(DEVICES, "decoder", "mixed")
    whole = check_resumes(lambda: ABOVE[above](node(folder, "random_shuffle", device_id=0)), 2)
    assert whole[0][0]["image"].is_cuda
