"""DALI pipelines that read from an external_source: what resumes, what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from torchdata.nodes import Loader

from stateful_pipes import StatefulDataLoader
from stateful_pipes.errors import LoaderFailedError, ResumableModeRequiredError
from tests.integration.pipelines import check_resumes, epochs, take
from tests.streams import same

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")

from nvidia.dali import Pipeline, fn, pipeline_def

from stateful_pipes.integrations.dali import DALIPipelineNode
from tests.integration.dali_pipelines import ABOVE, BATCH_SIZE, FILES, factory, make_folder, node


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


def sample(info):
    if info.idx_in_epoch >= FILES:
        raise StopIteration
    return np.array([info.epoch_idx, info.iteration, info.idx_in_epoch])


def batch_at(info):
    if info.iteration == 3:
        raise StopIteration
    return np.array([[info.epoch_idx, info.iteration]] * BATCH_SIZE)


def batch_of_another_size(info):
    if info.iteration == 4:
        raise StopIteration
    return [np.array([info.epoch_idx, info.iteration, number]) for number in range(1 + info.iteration % BATCH_SIZE)]


class Batches:
    """A callable object."""

    def __call__(self, info):
        return batch_at(info)


SOURCES = {
    "sample": {"source": sample, "batch": False},
    "batch": {"source": batch_at, "batch_info": True},
    "object": {"source": Batches(), "batch_info": True, "no_copy": True},
    "batches of different sizes": {"source": batch_of_another_size, "batch_info": True},
}


@pipeline_def
def external(source):
    return fn.external_source(**source, name="external"), fn.random.uniform()


def external_node(source, **options):
    arguments = {"batch_size": BATCH_SIZE, "num_threads": 1, "device_id": None, "seed": 3, "enable_checkpointing": True}

    def make(checkpoint):
        return external(source, checkpoint=checkpoint, **arguments, **options)

    return DALIPipelineNode(make, output_names=["value", "number"])


@pytest.mark.parametrize(
    ("source", "above"), [*itertools.product(SOURCES, ["loader", "torchdata's loader"]), ("sample", "torchdata's prefetcher")]
)
def test_every_cut_over_an_external_source(source, above):
    whole = check_resumes(lambda: ABOVE[above](external_node(SOURCES[source])), 2)
    assert [[batch["value"][0, :2].tolist() for batch in epoch] for epoch in whole] == [
        [[epoch, iteration] for iteration in range(len(whole[epoch]))] for epoch in range(2)
    ]


@pytest.mark.parametrize(
    "options",
    [{"prefetch_queue_depth": depth, "exec_dynamic": dynamic} for depth in (1, 4) for dynamic in (True, False)],
    ids=str,
)
def test_however_far_it_reads_ahead(options):
    check_resumes(lambda: Loader(external_node(SOURCES["sample"], **options)), 2)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_parallel_one_resumes_and_its_state_fits_one_that_is_not():
    source = {"source": sample, "batch": False}
    whole = epochs(Loader(external_node(source)), 2)
    parallel = {**source, "parallel": True, "prefetch_queue_depth": 2}
    first = external_node(parallel, py_num_workers=1)
    assert same(take(first, 1), whole[0][:1])
    for other in (external_node(parallel, py_num_workers=1), external_node(source)):
        other.reset(first.state_dict())
        assert same(list(other), whole[0][1:])
        other.reset()
        assert same(list(other), whole[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_its_workers_are_forked_before_dali_touches_a_gpu(monkeypatch):
    done = []

    def record(name):
        original = getattr(Pipeline, name)
        monkeypatch.setattr(Pipeline, name, lambda pipeline: (done.append(name), original(pipeline))[1])

    record("_start_py_workers")
    record("_init_pipeline_backend")
    external_node({"source": sample, "batch": False, "parallel": True}, py_num_workers=1)
    assert done == ["_start_py_workers", "_init_pipeline_backend"]


def test_several_outputs():
    def batch(index):
        if index == 3:
            raise StopIteration
        return np.full((BATCH_SIZE, 1), index), np.full((BATCH_SIZE, 2), -index, np.int16)

    @pipeline_def
    def pairs(folder, reader):
        return tuple(fn.external_source(source=batch, num_outputs=2, batch=True))

    whole = check_resumes(lambda: Loader(DALIPipelineNode(factory("", make=pairs), output_names=["one", "two"])), 2)
    assert [batch["two"].tolist() for batch in whole[0]] == [[[-index] * 2] * BATCH_SIZE for index in range(3)]


class Failing:
    """Raises once, at a place."""

    def __init__(self, error, epoch, iteration):
        self.error, self.place = error, (epoch, iteration)

    def __call__(self, info):
        if (info.epoch_idx, info.iteration) == self.place:
            self.place = None
            raise self.error
        return batch_at(info)


@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 0), (1, 1)])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk is gone")], ids=repr)
def test_after_an_error_or_ctrl_c_no_batch_is_lost_without_a_word(error, place):
    """The executor has then read on without what failed."""

    def node():
        return external_node({"source": Failing(error, *place), "batch_info": True})

    whole = epochs(Loader(external_node(SOURCES["batch"])), 2)
    source, found, state = node(), [], external_node(SOURCES["batch"]).state_dict()
    try:
        for _ in range(2):
            source.reset()
            for batch in source:
                found.append(batch)
                state = source.state_dict()
    except type(error):
        pass
    assert len(found) < sum(map(len, whole))
    for ask in (source.reset, source.state_dict, lambda: next(source)):
        with pytest.raises(LoaderFailedError, match=type(error).__name__):
            ask()
    source.reset(state)  # with the same source, which fails once
    for _ in range(2):
        found += source
        source.reset()
    assert same(found[: sum(map(len, whole))], [*whole[0], *whole[1]])


def test_under_our_loader_ctrl_c_loses_nothing():
    loader = StatefulDataLoader(external_node({"source": Failing(KeyboardInterrupt(), 0, 2), "batch_info": True}))
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(loader)
    loader.close()
    assert same(found + list(loader), list(StatefulDataLoader(external_node(SOURCES["batch"]))))


@pytest.mark.parametrize("ragged", [(), ("value", "number")])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_batch_without_samples_is_an_error_and_no_batch(dynamic, ragged):
    """DALI refuses it, but may give an empty batch first, or tell of it with the batch before."""

    @pipeline_def
    def empty(folder, reader):
        return fn.external_source(source=lambda index: [np.zeros(1)] * (index != 1), batch=True), fn.random.uniform()

    make = factory("", make=empty, exec_dynamic=dynamic)
    source = DALIPipelineNode(make, output_names=["value", "number"], ragged=ragged)
    found = []
    with pytest.raises(RuntimeError, match=r"without samples|batch with 0 samples"):
        found.extend(source)
    assert [len(batch["value"]) for batch in found] in ([], [1])


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
