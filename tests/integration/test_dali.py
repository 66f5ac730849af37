"""DALI pipelines as nodes: every cut of two epochs, whatever stands above them; what is refused; epochs as DALI ends them."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import multiprocessing
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image
from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher

from stateful_pipes import (
    Mixer,
    MultiPipelineLoader,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    StatefulDataLoader,
)
from stateful_pipes.errors import LoaderFailedError, ResumableModeRequiredError, StateMismatchError
from tests.integration.pipelines import check_resumes, epochs, shut, states, take
from tests.streams import same

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")

import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from stateful_pipes.integrations.dali import DALIPipelineNode

ROOT = Path(__file__).parents[2]
FILES, BATCH_SIZE = 5, 2
NAMES = ["image", "label", "number"]
READERS = {
    "plain": {},
    "random_shuffle": {"random_shuffle": True, "initial_fill": 3},
    "shuffle_after_epoch": {"shuffle_after_epoch": True},
}
UNCACHED = {"dont_use_mmap": True}
"""For files that change: DALI shares what it has mapped between its pipelines."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JPEGs of different sizes, the label in the name of the folder."""
    found = tmp_path_factory.mktemp("images")
    random = np.random.RandomState(0)
    for number in range(FILES):
        (found / str(number % 2)).mkdir(exist_ok=True)
        pixels = random.randint(0, 256, (20 + number, 30 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(found / str(number % 2) / f"{number}.jpg")
    return str(found)


@pipeline_def
def images(folder, reader):
    encoded, label = fn.readers.file(file_root=folder, name="reader", **reader)
    image = fn.resize(fn.decoders.image_random_crop(encoded, device=DEVICES["decoder"]), size=[8, 8])
    return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.uniform(range=[0.0, 1.0])


DEVICES = {"decoder": "cpu"}


def factory(folder, reader="plain", make=images, **options):
    arguments = {"batch_size": BATCH_SIZE, "num_threads": 2, "device_id": None, "seed": 7, "enable_checkpointing": True}
    return lambda checkpoint: make(folder, READERS.get(reader, UNCACHED), checkpoint=checkpoint, **{**arguments, **options})


def node(folder, reader="plain", make=images, last_batch_policy="PARTIAL", output_names=NAMES, **options):
    return DALIPipelineNode(
        factory(folder, reader, make, **options),
        output_names=output_names,
        reader_name="reader",
        last_batch_policy=last_batch_policy,
    )


def draw(batch):
    return {**batch, "drawn": torch.rand(2)}


def numbers():
    return SamplerNode(RandomSampler(4, seed=1))


# What a resume gives.

ABOVE = {
    "loader": StatefulDataLoader,
    "mapper": lambda source: StatefulDataLoader(SeededMapper(source, draw, seed=1)),
    "batcher": lambda source: StatefulDataLoader(SeededBatcher(source, 2, collate_fn=list, seed=1)),
    "workers": lambda source: StatefulDataLoader(ProcessPrefetcher(SeededMapper(source, draw, seed=1), 2)),
    "mixture": lambda source: StatefulDataLoader(Mixer([source, numbers()], [2, 1], seed=3)),
    "mixture of the shorter": lambda source: StatefulDataLoader(
        Mixer([source, numbers()], [1, 4], seed=3, stop_criteria="FIRST_DATASET_EXHAUSTED")
    ),
    "torchdata's loader": Loader,
    "torchdata's prefetcher": lambda source: Loader(Prefetcher(source, prefetch_factor=2)),
    "torchdata's nodes": lambda source: Loader(Batcher(Mapper(source, draw_nothing), 2, drop_last=False)),
    "torchdata's prefetcher below ours": lambda source: StatefulDataLoader(SeededMapper(Prefetcher(source, 2), draw, seed=1)),
}


def draw_nothing(batch):
    return batch, len(batch["label"])


@pytest.mark.parametrize("above", ABOVE)
def test_every_cut_below_everything(folder, above):
    check_resumes(lambda: ABOVE[above](node(folder, "random_shuffle")), 2)


@pytest.mark.parametrize("above", ["loader", "torchdata's loader", "torchdata's prefetcher"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("policy", ["FILL", "DROP"])
def test_every_cut_of_every_reader(folder, reader, above, policy):
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
    expected = epochs(remake(), 2)
    assert same(check_resumes(make, 2, remake), expected)
    assert same(check_resumes(remake, 1, make), expected[:1])


def digest(batches):
    """Of batches of tensors, in order."""
    found = hashlib.sha256()
    for batch in batches:
        for name, value in batch.items():
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.numpy().tobytes())
    return found.hexdigest()


def rest_digests(folder, paths):
    """For each checkpoint what is left of its epoch, and the epoch after that."""
    found = []
    for path in paths:
        loader = StatefulDataLoader(node(folder, "random_shuffle"), checkpoint=path)
        found.append([digest(loader), digest(loader)])
    return found


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
        "import json, sys; from tests.integration.test_dali import rest_digests as r; print(json.dumps(r(*json.load(sys.stdin))))"
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


# Batches.


@pipeline_def
def several(folder, reader):
    encoded, label = fn.readers.file(file_root=folder, name="reader", **reader)
    return encoded, label, types.Constant(np.array([1, 2], np.int16), device="cpu"), fn.decoders.image(encoded)


def test_outputs_by_name_and_ragged_ones_as_lists(folder):
    source = node(folder, make=several, output_names=["encoded", "label", "constant", "image"])
    batches = list(source)
    paths = sorted(Path(folder).rglob("*.jpg"))
    encoded = [sample for batch in batches for sample in batch["encoded"]]
    assert [sample.numpy().tobytes() for sample in encoded] == [path.read_bytes() for path in paths]
    shapes = []
    for path in paths:
        with Image.open(path) as image:
            shapes.append((image.height, image.width, 3))
    assert [tuple(sample.shape) for batch in batches for sample in batch["image"]] == shapes
    assert [batch["label"].tolist() for batch in batches] == [[[0], [0]], [[0], [1]], [[1]]]
    assert batches[0]["label"].dtype == torch.int32
    assert batches[0]["constant"].dtype == torch.int16
    assert list(batches[0]) == ["encoded", "label", "constant", "image"]
    assert isinstance(batches[0]["image"], list)


def test_ragged_names_are_lists_even_of_equal_shapes(folder):
    source = DALIPipelineNode(factory(folder), output_names=NAMES, ragged=["number"])
    batch = next(source)
    assert [type(value) for value in batch.values()] == [torch.Tensor, torch.Tensor, list]


@pytest.mark.parametrize("options", [{}, {"exec_dynamic": False}], ids=str)
def test_batches_survive_later_ones_and_may_be_written_to(folder, options):
    names = ["encoded", "label", "constant", "image"]
    expected = list(node(folder, make=several, output_names=names, **options))
    digests = [str(batch) for batch in expected]
    kept = []
    for batch in node(folder, make=several, output_names=names, **options):
        kept.append(
            {name: [one.clone() for one in value] if type(value) is list else value.clone() for name, value in batch.items()}
        )
        for value in batch.values():
            for one in value:
                one.zero_()
    assert same(kept, expected)
    assert [str(batch) for batch in expected] == digests


def test_a_type_that_torch_is_not_given_is_named(folder):
    @pipeline_def
    def unsigned(folder, reader):
        return fn.cast(fn.readers.file(file_root=folder, name="reader")[1], dtype=types.UINT32)

    source = node(folder, make=unsigned, output_names=["label"])
    with pytest.raises(TypeError, match=r"output 'label' is of .*UINT32.*fn\.cast"):
        next(source)


# Epochs.


@pipeline_def
def labels(files, reader):
    return fn.readers.file(files=files, labels=list(range(1, len(files) + 1)), name="reader", **reader)[1]


def as_dali_ends_them(make, policy, count):
    iterator = DALIGenericIterator(
        make(None), ["label"], reader_name="reader", last_batch_policy=policy, auto_reset=True, prepare_first_batch=False
    )
    return [[batch["label"].flatten().tolist() for (batch,) in iterator] for _ in range(count)]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("policy", list(LastBatchPolicy))
def test_epochs_end_as_with_dali_s_iterator(folder, policy, batch_size):
    paths = sorted(map(str, Path(folder).rglob("*.jpg")))
    for num_shards, pad, stick in itertools.product((1, 2, 3), (False, True), (False, True)):
        reader = {"num_shards": num_shards, "shard_id": num_shards - 1, "pad_last_batch": pad, "stick_to_shard": stick}

        def make(checkpoint, reader=reader):
            return labels(
                paths,
                reader,
                batch_size=batch_size,
                num_threads=1,
                device_id=None,
                enable_checkpointing=True,
                checkpoint=checkpoint,
            )

        def new(make=make):
            return DALIPipelineNode(make, output_names=["label"], reader_name="reader", last_batch_policy=policy)

        source, found, saved = new(), [], []
        for epoch in range(3):
            source.reset()
            found.append([])
            for batch in source:
                found[-1].append(batch["label"].flatten().tolist())
                saved.append((epoch, len(found[-1]), source.state_dict()))
        assert found == as_dali_ends_them(make, policy, 3), reader
        if saved:  # DROP may leave nothing
            epoch, read, state = saved[len(saved) // 2]
            resumed = new()
            resumed.reset(state)
            assert [batch["label"].flatten().tolist() for batch in resumed] == found[epoch][read:], reader
            for following in found[epoch + 1 :]:
                resumed.reset()
                assert [batch["label"].flatten().tolist() for batch in resumed] == following, reader


def test_the_policy_of_another_enum_or_its_name_means_the_same(folder):
    class Policy:
        name = "DROP"

    for policy in (LastBatchPolicy.DROP, "DROP", Policy()):
        assert node(folder, last_batch_policy=policy).state_dict()["last_batch_policy"] == "DROP"


def test_without_a_reader_there_is_one_endless_epoch(folder):
    source = DALIPipelineNode(factory(folder), output_names=NAMES)
    first = take(source, 3)
    source.reset(None)
    second = take(source, 4)
    state = source.state_dict()
    resumed = DALIPipelineNode(factory(folder), output_names=NAMES)
    resumed.reset(state)
    assert same(take(resumed, 4), take(source, 4))
    assert not same(first, second[:3])


# External sources.


def sample(info):
    if info.idx_in_epoch >= FILES:
        raise StopIteration
    return np.array([info.epoch_idx, info.iteration, info.idx_in_epoch])


def batch_at(info):
    if info.iteration == 3:
        raise StopIteration
    return np.array([[info.epoch_idx, info.iteration]] * BATCH_SIZE)


SOURCES = {"sample": {"source": sample, "batch": False}, "batch": {"source": batch_at, "batch_info": True}}


@pipeline_def
def external(source):
    return fn.external_source(**source, name="external"), fn.random.uniform()


def external_node(source):
    def make(checkpoint):
        return external(
            source,
            batch_size=BATCH_SIZE,
            num_threads=1,
            device_id=None,
            seed=3,
            enable_checkpointing=True,
            checkpoint=checkpoint,
        )

    return DALIPipelineNode(make, output_names=["value", "number"])


@pytest.mark.parametrize("above", ["loader", "torchdata's loader", "torchdata's prefetcher"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_cut_over_an_external_source(source, above):
    whole = check_resumes(lambda: ABOVE[above](external_node(SOURCES[source])), 2)
    assert [[batch["value"][0, :2].tolist() for batch in epoch] for epoch in whole] == [
        [[epoch, iteration] for iteration in range(len(whole[epoch]))] for epoch in range(2)
    ]


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"source": [[np.zeros(1)] * BATCH_SIZE], "cycle": True},
        {"source": lambda: [np.zeros(1)] * BATCH_SIZE},
        {"source": (np.zeros((BATCH_SIZE, 1)) for _ in range(3))},
    ],
    ids=["fed from outside", "list", "callable of nothing", "generator"],
)
def test_what_dali_does_not_capture_is_refused_at_construction(source):
    with pytest.raises(ResumableModeRequiredError, match=r"external_source 'external'.*a callable of one argument"):
        external_node(source)


def test_an_external_source_that_ends_before_the_reader_s_epoch_is_told(folder):
    @pipeline_def
    def both(folder, reader):
        return fn.readers.file(file_root=folder, name="reader")[1], fn.external_source(source=one_batch, batch=True)

    def one_batch(index):
        if index:
            raise StopIteration
        return np.zeros((BATCH_SIZE, 1))

    source = node(folder, make=both, output_names=["label", "value"])
    next(source)
    with pytest.raises(RuntimeError, match="ended before the epoch of reader 'reader'"):
        next(source)


# Refusals.


def test_without_checkpointing_it_is_refused(folder):
    with pytest.raises(ResumableModeRequiredError, match="enable_checkpointing=True"):
        node(folder, enable_checkpointing=False)


def test_a_factory_that_leaves_out_the_checkpoint_is_refused(folder):
    source = DALIPipelineNode(lambda checkpoint: factory(folder)(None), output_names=NAMES)
    with pytest.raises(ResumableModeRequiredError, match="left out the checkpoint"):
        source.reset(source.state_dict())


@pytest.mark.filterwarnings("ignore:.*separated.*")
def test_what_dali_cannot_keep_checkpoints_of_is_refused_in_its_words(folder):
    @pipeline_def
    def video(folder, reader):
        return fn.experimental.inputs.video(name="video", sequence_length=2)

    with pytest.raises(ResumableModeRequiredError, match=r"Checkpointing is not implemented .*inputs\.video"):
        DALIPipelineNode(factory(folder, make=video), output_names=["frames"])

    @pipeline_def
    def python(folder, reader):
        return fn.python_function(fn.random.uniform(), function=np.abs)

    with pytest.raises(ResumableModeRequiredError, match=r"Could not serialize the operator: .*python_function"):
        DALIPipelineNode(factory(folder, make=python), output_names=["number"])


@pipeline_def
def images_unnamed(folder, reader):
    encoded, label = fn.readers.file(file_root=folder, name="another", **reader)
    image = fn.resize(fn.decoders.image_random_crop(encoded), size=[8, 8])
    return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.uniform(range=[0.0, 1.0])


@pipeline_def
def images_with_another_range(folder, reader):
    encoded, label = fn.readers.file(file_root=folder, name="reader", **reader)
    image = fn.resize(fn.decoders.image_random_crop(encoded), size=[8, 8])
    return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.uniform(range=[0.0, 2.0])


@pipeline_def
def images_elsewhere(folder, reader):
    encoded, label = fn.readers.file(file_root=folder, name="reader", **reader)

    def decoded():
        return fn.decoders.image_random_crop(encoded)

    image = fn.resize(decoded(), size=[8, 8])
    return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.uniform(range=[0.0, 1.0])


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"batch_size": 3}, "pipeline: saved"),
        ({"seed": 8}, "pipeline: saved"),
        ({"reader": "random_shuffle"}, "pipeline: saved"),
        ({"make": images_with_another_range}, "pipeline: saved"),
        ({"last_batch_policy": "FILL"}, "last_batch_policy: saved PARTIAL, here FILL"),
        ({"output_names": ["picture", "label", "number"]}, "output_names: saved .*image.*, here .*picture"),
    ],
    ids=str,
)
def test_changed_arguments_are_refused_and_change_nothing(folder, other, told):
    source = node(folder)
    take(source, 1)
    state = source.state_dict()
    rest = list(source)
    loader, resumed = Loader(node(folder, **other)), node(folder, **other)
    expected = next(iter(loader))
    with pytest.raises(StateMismatchError, match=told):
        resumed.reset(state)
    assert same(next(resumed), expected)
    right = node(folder)
    right.reset(state)
    assert same(list(right), rest)


def test_dali_s_own_words_are_in_the_error(folder):
    other = DALIPipelineNode(factory(folder, make=images_unnamed), output_names=NAMES, reader_name="another")
    with pytest.raises(
        StateMismatchError, match=r'(?s)executor doesn.t recognize "another".*reader_name: saved another'
    ) as caught:
        node(folder).reset(other.state_dict())
    assert caught.value.differences
    with pytest.raises(StateMismatchError, match="Failed to deserialize checkpoint"):
        node(folder).reset(b"no checkpoint")
    with pytest.raises(StateMismatchError, match="no DALI checkpoint"):
        node(folder).reset({**node(folder).state_dict(), "checkpoint": "%"})
    with pytest.raises(StateMismatchError, match="no DALI checkpoint"):
        node(folder).reset({})


def test_under_our_loader_a_refused_state_changes_nothing(folder):
    saved = StatefulDataLoader(node(folder, batch_size=3))
    take(iter(saved), 1)
    loader = StatefulDataLoader(node(folder))
    iterator = iter(loader)
    whole = list(StatefulDataLoader(node(folder)))
    assert same(take(iterator, 1), whole[:1])
    with pytest.raises(StateMismatchError, match="pipeline: saved"):
        loader.load_state_dict(saved.state_dict())
    assert same(list(iterator), whole[1:])


def test_code_that_moved_is_no_other_pipeline(folder):
    """DALI writes down where in the code an operator was made; the state is not bound to that."""
    source, other = node(folder), node(folder, make=images_elsewhere)
    take(source, 1)
    assert factory(folder)(None).serialize() != factory(folder, make=images_elsewhere)(None).serialize()
    other.reset(source.state_dict())
    assert same(list(other), list(source))


def test_arguments_that_do_not_fit_are_named(folder):
    with pytest.raises(ValueError, match=r"reader_name must be one of .*\['reader'\], got 'Reader'"):
        DALIPipelineNode(factory(folder), output_names=NAMES, reader_name="Reader")
    with pytest.raises(ValueError, match=r"output_names must name 3 outputs, got \['image'\]"):
        DALIPipelineNode(factory(folder), output_names=["image"])
    with pytest.raises(ValueError, match="distinct"):
        DALIPipelineNode(factory(folder), output_names=["image", "image", "label"])
    with pytest.raises(ValueError, match=r"ragged must be among .*, got \['masks'\]"):
        DALIPipelineNode(factory(folder), output_names=NAMES, ragged=["masks"])
    with pytest.raises(ValueError, match=r"last_batch_policy must be one of .*, got 'KEEP'"):
        node(folder, last_batch_policy="KEEP")
    with pytest.raises(ValueError, match="last_batch_policy=DROP needs a reader_name"):
        DALIPipelineNode(factory(folder), output_names=NAMES, last_batch_policy="DROP")
    with pytest.raises(TypeError, match=r"must return a nvidia\.dali\.Pipeline, got list"):
        DALIPipelineNode(lambda checkpoint: [], output_names=NAMES)


def test_a_reader_of_the_dynamic_mode_is_refused_and_told_why(folder):
    with pytest.raises(ResumableModeRequiredError, match=r"how much of an epoch is left.*pipeline_def"):
        DALIPipelineNode(lambda checkpoint: ndd.readers.File(file_root=folder), output_names=["encoded", "label"])


def test_an_error_of_the_user_s_data_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="Failed to open") as caught:
        node(str(tmp_path / "nowhere"))
    assert type(caught.value) is RuntimeError


@pytest.fixture
def damaged(folder, tmp_path):
    """The same folder, where the third file is no JPEG; and what mends it."""
    found = tmp_path / "damaged"
    shutil.copytree(folder, found)
    path = sorted(found.rglob("*.jpg"))[2]
    good = path.read_bytes()
    path.write_bytes(b"no JPEG")
    return str(found), lambda: path.write_bytes(good)


def test_after_an_error_a_load_goes_on_and_nothing_else_does(damaged):
    folder, mend = damaged
    source = node(folder, "uncached")
    next(source)
    state = source.state_dict()
    with pytest.raises(RuntimeError, match="image_random_crop"):
        next(source)
    for ask in (source.state_dict, source.reset, lambda: next(source)):
        with pytest.raises(LoaderFailedError, match=r"(?s)image_random_crop.*Load a state"):
            ask()
    mend()
    source.reset(state)
    whole = list(node(folder, "uncached"))
    assert same(list(source), whole[1:])


def test_under_our_loader_closing_is_enough_after_an_error(damaged):
    folder, mend = damaged
    loader = StatefulDataLoader(node(folder, "uncached"))
    iterator = iter(loader)
    read = take(iterator, 1)
    with pytest.raises(RuntimeError, match="image_random_crop"):
        next(iterator)
    state = loader.state_dict()
    mend()
    loader.close()
    whole = list(node(folder, "uncached"))
    assert same(read + list(loader), whole)
    loader.load_state_dict(state)
    assert same(list(loader), whole[1:])


def test_what_is_told_of_its_reader(folder):
    source = node(folder)
    assert source.batch_size == BATCH_SIZE
    assert source.reader_meta() == factory(folder)(None).reader_meta("reader")
    assert DALIPipelineNode(factory(folder), output_names=NAMES).reader_meta() == {}


def test_the_length_of_an_epoch(folder):
    for policy in ("FILL", "PARTIAL", "DROP"):
        loader = StatefulDataLoader(SeededMapper(node(folder, last_batch_policy=policy), draw_nothing, rng=()))
        assert len(loader) == len(list(loader))
    endless = DALIPipelineNode(factory(folder), output_names=NAMES)
    with pytest.raises(TypeError, match="without reader_name it is not known"):
        len(endless)
    with pytest.raises(TypeError, match="does not know its length"):
        len(StatefulDataLoader(SeededBatcher(endless, 2, collate_fn=list)))


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


def sharded(shard, *arguments, **options):
    return shard_of(*arguments, shard=shard, **options)


@pipeline_def
def shard_of(folder, reader, shard):
    _, label = fn.readers.file(file_root=folder, name="reader", shard_id=shard, num_shards=2, **reader)
    return label


# Plain checkpoints of DALI's.


def test_a_checkpoint_of_dali_s_iterator_goes_both_ways(folder):
    def iterator(checkpoint):
        return DALIGenericIterator(
            factory(folder, "random_shuffle")(checkpoint),
            NAMES,
            reader_name="reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )

    theirs = iterator(None)
    list(theirs)
    take(theirs, 1)
    (checkpoint,) = theirs.checkpoints()
    rest = [batch for (batch,) in theirs]
    assert len(rest) == 2
    assert same(list(DALIPipelineNode(factory(folder, "random_shuffle"), output_names=NAMES, reader_name="reader",
                                      last_batch_policy="PARTIAL", checkpoint=checkpoint)), rest)  # fmt: skip
    source = node(folder, "random_shuffle")
    source.reset(checkpoint)
    assert same(take(source, 1), rest[:1])
    back = source._batches.checkpoint()
    assert same([batch for (batch,) in iterator(back)], rest[1:])


@pytest.mark.parametrize("policy", ["FILL", "PARTIAL", "DROP"])
def test_a_checkpoint_of_a_pipeline_run_by_hand_tells_where_its_epoch_stands(folder, policy):
    whole = epochs(Loader(node(folder, "random_shuffle", last_batch_policy=policy)), 3)
    lengths = {"FILL": [3, 2, 3], "PARTIAL": [3, 3, 3], "DROP": [2, 2, 2]}[policy]
    assert list(map(len, whole)) == lengths
    pipeline = factory(folder, "random_shuffle")(None)
    for _ in range(4):
        pipeline.run()
    source = node(folder, "random_shuffle", last_batch_policy=policy)
    source.reset(pipeline.checkpoint())
    assert same(list(source), whole[1][1:])
    source.reset()
    assert same(list(source), whole[2])


def test_a_checkpoint_of_an_iterator_that_counts_otherwise_is_refused(folder):
    iterator = DALIGenericIterator(factory(folder)(None), NAMES)
    with pytest.raises(StateMismatchError, match="with another reader_name"):
        node(folder).reset(iterator.checkpoints()[0])


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
