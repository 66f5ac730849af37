"""What DALI nodes refuse, and what they do after an error."""

from __future__ import annotations

import base64
import json
import shutil
from functools import partial

import numpy as np
import pytest
from torchdata.nodes import Loader, Mapper

from stateful_pipes import Mixer, RandomSampler, SamplerNode, SeededMapper, StatefulDataLoader
from stateful_pipes.errors import LoaderFailedError, ResumableModeRequiredError, StateMismatchError
from tests.integration.pipelines import take
from tests.streams import same

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")

import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.experimental.dynamic.pytorch.nodes import DictMapper, Reader, ToTorch

from stateful_pipes.integrations.dali import DALIPipelineNode
from tests.integration.dali_pipelines import FILES, NAMES, READERS, factory, make_folder, node


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


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
        ({"batch_size": 3}, "batch_size: saved 2, here 3"),
        ({"seed": 8}, "seed: saved 7, here 8"),
        ({"reader": "random_shuffle"}, r"operator reader: saved .*\(not as saved: initial_fill, random_shuffle\)"),
        ({"make": images_with_another_range}, r"operator fn\.random\.uniform: saved .*\(not as saved: range\)"),
        ({"last_batch_policy": "FILL"}, "last_batch_policy: saved PARTIAL, here FILL"),
        ({"output_names": ["picture", "label", "number"]}, "output_names: saved .*image.*, here .*picture"),
    ],
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


PARTS = {
    "reading": {"initial_fill": 3, "seed": 5},
    "file_filters": ["*.jpg"],
    "area": [0.1, 1.0],
    "size": [8, 8],
    "mean": [1.0, 2.0, 3.0],
    "probability": 0.5,
    "factor": 2.0,
    "added": 1,
    "constant": [1, 2],
    "order": [0, 1, 2, 3],
}


@pipeline_def
def parts(folder, reader, changed):
    part = {**PARTS, **changed}
    encoded, label = fn.readers.file(
        file_root=folder, name="reader", random_shuffle=True, file_filters=part["file_filters"], **part["reading"]
    )
    image = fn.resize(fn.decoders.image_random_crop(encoded, random_area=part["area"]), size=part["size"])
    mirror = fn.random.coin_flip(probability=part["probability"])
    image = fn.crop_mirror_normalize(image, mean=part["mean"], mirror=mirror)
    number = fn.random.uniform() * part["factor"] + part["added"]
    outputs = image, label, number, types.Constant(np.array(part["constant"], np.int16), device="cpu")
    return tuple(outputs[i] for i in part["order"])


def node_of_parts(folder, changed, **options):
    make = factory(folder, make=lambda *arguments, **more: parts(*arguments, changed=changed, **more), **options)
    return DALIPipelineNode(make, output_names=["0", "1", "2", "3"], reader_name="reader")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"reading": {"initial_fill": 2, "seed": 5}}, "operator reader: .*: initial_fill"),
        ({"reading": {"initial_fill": 3, "seed": 6}}, "operator reader: .*: seed"),
        ({"reading": {"initial_fill": 3, "seed": 5, "pad_last_batch": True}}, "operator reader: .*: pad_last_batch"),
        ({"reading": {"initial_fill": 3, "seed": 5, "num_shards": 2}}, "operator reader: .*: num_shards"),
        ({"file_filters": ["*.jpg", "*.png"]}, "operator reader: .*: file_filters"),
        ({"area": [0.1, 0.9]}, "operator fn.decoders.image_random_crop: .*: random_area"),
        ({"size": [8, 9]}, "operator fn.resize: .*: size"),
        ({"mean": [1.0, 2.0, 4.0]}, "operator fn.crop_mirror_normalize: .*: mean"),
        ({"probability": 0.25}, "operator fn.random.coin_flip: .*: probability"),
        ({"factor": 3.0}, "operator math.mul: .*: real_constants"),
        ({"added": 2}, "operator math.add: .*: integer_constants"),
        ({"added": 1.0}, "operator math.add: .*: expression_desc, real_constants"),
        ({"constant": [1, 3]}, "operator fn.constant: .*: idata"),
        ({"order": [0, 1, 3, 2]}, "pipeline: saved .*outputs"),
    ],
    ids=str,
)
def test_a_changed_argument_of_any_operator_is_refused_and_named(folder, changed, told):
    source = node_of_parts(folder, {})
    next(source)
    with pytest.raises(StateMismatchError, match=told) as caught:
        node_of_parts(folder, changed).reset(source.state_dict())
    assert len(caught.value.differences) == 1  # all others are as they were


def test_the_folder_is_an_argument_too(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(StateMismatchError, match="operator reader: saved"):  # the path itself decides whether its check differs
        node_of_parts(str(tmp_path / "copy"), {}).reset(node_of_parts(folder, {}).state_dict())


@pipeline_def
def grown(folder, reader, added):
    encoded, label = fn.readers.file(file_root=folder, name="reader", **reader)
    image = fn.decoders.image(encoded)
    if added:
        image = fn.crop(image, crop=[9, 9])
    number = fn.random.uniform(range=[0.0, 1.0])
    return fn.resize(image, size=[8, 8]), label, number


def grown_node(folder, added):
    return node(folder, make=lambda *arguments, **options: grown(*arguments, added=added, **options))


def test_an_added_operator_is_named_and_those_that_dali_numbers_anew_are_not(folder):
    """DALI's own names of all that follow it have changed."""
    with pytest.raises(StateMismatchError, match=r"executor doesn.t recognize") as caught:
        grown_node(folder, True).reset(grown_node(folder, False).state_dict())
    named = [(one.field, one.saved == "missing") for one in caught.value.differences]
    assert named == [("operator fn.resize", False), ("operator fn.crop", True)]
    assert "not as saved: input 0" in str(caught.value.differences[0])


def chain_node(folder, length, last=1.0):
    @pipeline_def
    def chain(folder, reader):
        number = fn.random.uniform(name="number")
        for added in [1.0] * (length - 2) + [last]:
            number = number + added
        return number

    return DALIPipelineNode(factory(folder, make=chain), output_names=["number"])


def test_many_operators_are_told_by_one_hash_and_all_are_compared(folder):
    few, many = (chain_node(folder, length).state_dict() for length in (64, 65))
    assert (len(few["operators"]), many["operators"]) == (64, [])
    assert len(json.dumps({**many, "checkpoint": ""})) < 600
    with pytest.raises(StateMismatchError, match=r"pipeline: saved .*65 are too many to tell which"):
        chain_node(folder, 65, last=2.0).reset(many)


def test_damaged_names_of_operators_are_refused(folder):
    state = node(folder).state_dict()
    for damaged in (None, 3, {}, [], [3], ["reader"], [[]], state["operators"][1:]):
        with pytest.raises(StateMismatchError):
            node(folder).reset({**state, "operators": damaged})


def test_keyword_arguments_may_be_given_in_another_order(folder):
    @pipeline_def
    def turned(folder, reader):
        encoded, label = fn.readers.file(**reader, name="reader", file_root=folder)
        image = fn.resize(fn.decoders.image_random_crop(encoded), size=[8, 8])
        return fn.flip(image, horizontal=fn.random.coin_flip()), label, fn.random.uniform(range=[0.0, 1.0])

    source, other = node(folder, "random_shuffle"), node(folder, "random_shuffle", make=turned)
    next(source)
    assert factory(folder, "random_shuffle", make=turned)(None).serialize() != factory(folder, "random_shuffle")(None).serialize()
    other.reset(source.state_dict())
    assert same(list(other), list(source))


@pytest.mark.parametrize(
    "options", [{"num_threads": 1}, {"prefetch_queue_depth": 4}, {"exec_dynamic": False}, {"bytes_per_sample": 100}], ids=str
)
def test_how_it_runs_may_change(folder, options):
    source, other = node_of_parts(folder, {}), node_of_parts(folder, {}, **options)
    next(source)
    other.reset(source.state_dict())
    assert same(list(other), list(source))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", ["added", "removed"])
def test_another_number_of_files_is_refused(folder, tmp_path, reader, change):
    """DALI would read on in another order, or past the end."""
    found = tmp_path / "images"
    shutil.copytree(folder, found)
    source = node(str(found), reader)
    next(source)
    state, checkpoint = source.state_dict(), source._batches.checkpoint()
    path = found / "0" / "0.jpg"
    if change == "added":
        shutil.copy(path, found / "0" / "1.jpg")
    else:
        path.unlink()
    here = {"added": FILES + 1, "removed": FILES - 1}[change]
    other = node(str(found), reader)
    with pytest.raises(StateMismatchError, match=rf"reader_sizes: saved \['reader: {FILES}'\], here \['reader: {here}'\]"):
        other.reset(state)
    with pytest.raises(StateMismatchError, match=f"pipeline: the reader had {FILES} samples, and has {here}"):  # not DALI's words
        other.reset(checkpoint)
    unnamed = DALIPipelineNode(factory(str(found), reader), output_names=NAMES)
    with pytest.raises(StateMismatchError, match="reader_sizes"):
        unnamed.reset({**state, "reader_name": "", "last_batch_policy": "FILL"})


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(folder):
    """DALI reads many of them as another place, or raises errors of many types."""
    source = node(folder)
    next(source)
    state = source.state_dict()
    data = bytearray(base64.b64decode(state["checkpoint"]))
    rest = list(source)
    resumed = node(folder)
    resumed.reset(state)
    for place in range(0, len(data), 7):
        data[place] ^= 1
        with pytest.raises(StateMismatchError, match="damaged"):
            resumed.reset({**state, "checkpoint": base64.b64encode(data).decode()})
        data[place] ^= 1
    for damaged in ("", "%", state["checkpoint"][:-4], None, 3, [], {}):
        with pytest.raises(StateMismatchError, match="damaged"):
            resumed.reset({**state, "checkpoint": damaged})
    assert same(list(resumed), rest)


def test_whatever_dali_raises_over_a_plain_checkpoint_is_one_error(folder):
    checkpoint = node(folder)._batches.checkpoint()
    source = node(folder)
    for damaged in (
        b"",
        checkpoint[:-9],
        checkpoint.replace(b'"iter"', b'"item"'),  # a KeyError
        checkpoint.replace(b'{"iter"', b'["iter"'),  # a ValueError
        checkpoint.replace(b'"_size"', b'"\xffsize"'),  # a UnicodeDecodeError
    ):
        assert damaged != checkpoint
        with pytest.raises(StateMismatchError, match=r"DALI refuses the checkpoint|the checkpoint of the iterator is damaged"):
            source.reset(damaged)
    assert same(list(source), list(node(folder)))


def test_what_is_wrong_with_the_data_is_not_blamed_on_the_state(folder, tmp_path):
    found = tmp_path / "images"
    shutil.copytree(folder, found)
    source = node(str(found), "uncached")
    state = source.state_dict()
    found.rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="Failed to open") as caught:
        source.reset(state)
    assert type(caught.value) is RuntimeError


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
    with pytest.raises(StateMismatchError, match="batch_size: saved 3, here 2"):
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
    for given in (factory(folder)(None), images_elsewhere, partial(images_elsewhere, folder), None):
        with pytest.raises(TypeError, match=r"a function of a checkpoint: lambda checkpoint: my_pipe\(.*; got a"):
            DALIPipelineNode(given, output_names=NAMES)


def test_a_reader_of_the_dynamic_mode_is_refused_and_told_why(folder):
    with pytest.raises(ResumableModeRequiredError, match=r"how much of an epoch is left.*pipeline_def"):
        DALIPipelineNode(lambda checkpoint: ndd.readers.File(file_root=folder), output_names=["encoded", "label"])


@pytest.mark.parametrize(
    "above",
    [
        StatefulDataLoader,
        lambda reader: StatefulDataLoader(ToTorch(DictMapper(reader, lambda data: data))),
        lambda reader: SeededMapper(Mapper(reader, len), abs),
        lambda reader: Mixer([reader, node_of_numbers()], [1, 1]),
    ],
)
def test_the_dynamic_mode_s_own_nodes_are_refused_where_they_are_put_in(folder, above):
    """Their state is {}, and only a load would tell that they take none."""
    reader = Reader(ndd.readers.File, batch_size=2, file_root=folder)
    with pytest.raises(ResumableModeRequiredError, match=r"DALI's dynamic mode.*pipeline_def.*DALIPipelineNode"):
        above(reader)


def node_of_numbers():
    return SamplerNode(RandomSampler(4, seed=1))


def test_an_error_of_the_user_s_data_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="Failed to open") as caught:
        node(str(tmp_path / "checkpoints"))
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


def test_an_error_of_dali_s_tells_where_it_came(folder, tmp_path, monkeypatch):
    found = tmp_path / "images"
    shutil.copytree(folder, found)
    sorted(found.rglob("*.jpg"))[4].write_bytes(b"no JPEG")  # of shard 1, which is read in epoch 1
    monkeypatch.setitem(READERS, "sharded", {"num_shards": 2, "pad_last_batch": True})
    loader = StatefulDataLoader(SeededMapper(node(str(found), "sharded"), len, rng=()))
    assert len(list(loader)) == 2
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match="image_random_crop") as caught:
        next(iterator)
    assert "in node 'dali_pipeline_node' at epoch 1, position 1" in caught.value.__notes__


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
