"""The batches and epochs of DALI nodes: torch's types, epochs as DALI ends them, DALI's own checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchdata.nodes import Loader

import stateful_pipes
from stateful_pipes import SeededBatcher, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import StateMismatchError
from tests.integration.pipelines import epochs, take
from tests.streams import same

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from stateful_pipes.integrations.dali import DALIPipelineNode
from stateful_pipes.integrations.dali import LastBatchPolicy as OurPolicy
from tests.integration.dali_pipelines import BATCH_SIZE, NAMES, draw_nothing, factory, make_folder, node


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


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


FROM_DALI = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FLOAT16": torch.float16,
    "FLOAT": torch.float32,
    "FLOAT64": torch.float64,
}


def test_every_type_that_torch_is_given(folder):
    @pipeline_def
    def cast(folder, reader):
        number = fn.random.uniform(range=[0, 3], shape=[2])
        return tuple(fn.cast(number, dtype=getattr(types, name)) for name in FROM_DALI)

    source, other = (DALIPipelineNode(factory(folder, make=cast), output_names=list(FROM_DALI)) for _ in range(2))
    batch = next(source)
    assert [(value.dtype, tuple(value.shape)) for value in batch.values()] == [
        (dtype, (BATCH_SIZE, 2)) for dtype in FROM_DALI.values()
    ]
    other.reset(source.state_dict())
    assert same(next(other), next(source))


def test_samples_without_elements(folder):
    @pipeline_def
    def sliced(folder, reader):
        number = fn.random.uniform(values=[0, 1], dtype=types.INT32)
        return fn.slice(fn.random.uniform(shape=[5]), 0, number, axes=[0]), types.Constant(np.zeros((0, 3)), device="cpu")

    batches = take(DALIPipelineNode(factory(folder, make=sliced), output_names=["ragged", "none"]), 4)
    assert {tuple(sample.shape) for batch in batches for sample in batch["ragged"]} >= {(0,), (1,)}
    assert [tuple(batch["none"].shape) for batch in batches] == [(BATCH_SIZE, 0, 3)] * 4


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


@pytest.mark.parametrize("batch_size", [1, 2])
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


def test_our_policy_dali_s_and_its_name_mean_the_same(folder):
    assert OurPolicy is stateful_pipes.LastBatchPolicy
    for policy in (OurPolicy.DROP, LastBatchPolicy.DROP, "DROP"):
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
    with pytest.raises(StateMismatchError, match=r"pipeline: the checkpoint is of an iterator .* with another reader_name"):
        node(folder).reset(iterator.checkpoints()[0])
