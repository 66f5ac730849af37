"""A pipeline as an IterableDataset under torchdata's own loader, and an iterable dataset as a pipeline's source."""

from __future__ import annotations

import copy

import pytest
import torch.utils.data._utils.worker as torch_worker
import torchdata.nodes as tn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

from stateful_pipes import (
    IterableDatasetReader,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    StatefulDataLoader,
    as_dataset,
)
from stateful_pipes.errors import ResumableModeRequiredError, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def node(length=7, seed=1):
    return SeededBatcher(SeededMapper(SamplerNode(RandomSampler(length, seed=seed)), abs, seed=2), 2, collate_fn=list, seed=3)


def epochs(loader, count=2):
    return [list(loader) for _ in range(count)]


def reference(count=3):
    pipeline = node()
    found = []
    for _ in range(count):
        pipeline.reset(None)
        found.append(list(pipeline))
    return found


def test_it_is_an_iterable_dataset():
    dataset = as_dataset(node())
    assert isinstance(dataset, IterableDataset)
    assert epochs(dataset) == reference(2)
    assert epochs(DataLoader(as_dataset(node()), batch_size=None)) == reference(2)


def test_under_torchdata_s_loader():
    assert epochs(TorchdataLoader(as_dataset(node()), batch_size=None)) == reference(2)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("consumed", [1, 2, 3])
def test_it_resumes_under_torchdata_s_loader(epoch, consumed):
    expected = reference()
    loader = TorchdataLoader(as_dataset(node()), batch_size=None)
    epochs(loader, epoch)
    iterator = iter(loader)
    for _ in range(consumed):
        next(iterator)
    state = copy.deepcopy(loader.state_dict())
    resumed = TorchdataLoader(as_dataset(node(seed=9)), batch_size=None)
    resumed.load_state_dict(state)
    assert epochs(resumed) == [expected[epoch][consumed:], expected[epoch + 1]]


def test_its_iterator_has_the_pipeline_s_state():
    iterator = iter(as_dataset(node()))
    next(iterator)
    state = iterator.state_dict()
    assert list(state["nodes"]) == ["sampler", "mapper", "batcher"]
    rest = list(iterator)
    resumed = iter(as_dataset(node(seed=9)))
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    with pytest.raises(StateMismatchError, match=r"sampler\.length"):
        iter(as_dataset(node(8))).load_state_dict(state)


def test_inside_workers_it_is_refused_at_the_first_iter(monkeypatch):
    dataset = as_dataset(node())
    info = torch_worker.WorkerInfo(id=0, num_workers=2, seed=0, dataset=dataset)
    monkeypatch.setattr(torch_worker, "_worker_info", info)
    with pytest.raises(ResumableModeRequiredError, match="whole pipeline") as caught:
        iter(dataset)
    assert "num_workers=0" in caught.value.remedy
    assert "ProcessPrefetcher" in caught.value.remedy
    assert caught.value.node == "batcher"


@pytest.mark.parametrize("loader", [TorchdataLoader, DataLoader])
def test_with_workers_the_user_sees_that_error(loader):
    with pytest.raises(ResumableModeRequiredError, match="whole pipeline"):
        list(loader(as_dataset(node()), batch_size=None, num_workers=1))


def test_a_foreign_pipeline_too():
    dataset = as_dataset(tn.IterableWrapper(range(3)))
    assert epochs(dataset) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("wrong", [[1], RandomSampler(3), None])
def test_only_a_node(wrong):
    with pytest.raises(TypeError, match="source must be a torchdata node"):
        as_dataset(wrong)


class Rows:
    """As Hugging Face's: a state that was loaded counts for each later iter of its epoch, and an empty one for none."""

    def __init__(self, length=5):
        self.length, self.epoch, self.loaded, self.row = length, 0, {}, 0
        self.given = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def load_state_dict(self, state):
        self.loaded = dict(state)

    def state_dict(self):
        return {"epoch": self.epoch, "row": self.row}

    def __iter__(self):
        self.row = self.loaded["row"] if self.loaded.get("epoch") == self.epoch else 0
        while self.row < self.length:
            self.row += 1
            self.given += 1
            yield (self.epoch, self.row)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("door", [tn.Loader, lambda node: StatefulDataLoader(node)], ids=["Loader", "ours"])
def test_a_reader_resumes_everywhere_and_later_epochs_are_whole(replay, door):
    loader = door(IterableDatasetReader(Rows(), replay=replay))
    for epoch in range(2):
        for row, item in enumerate(loader, 1):
            assert item == (epoch, row)
            resumed = door(IterableDatasetReader(Rows(), replay=replay))
            resumed.load_state_dict(copy.deepcopy(loader.state_dict()))
            found = list(resumed) or list(resumed)  # at an epoch's end torchdata's Loader says so first
            expected = [(epoch, later) for later in range(row + 1, 6)] or [(epoch + 1, later) for later in range(1, 6)]
            assert found == expected
            assert list(resumed) == [(expected[0][0] + 1, later) for later in range(1, 6)]


def test_a_reader_s_own_state_reads_nothing_again():
    loader = StatefulDataLoader(IterableDatasetReader(Rows()))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    rows = [Rows(), Rows()]
    for one, replay in zip(rows, (False, True), strict=True):
        reader = IterableDatasetReader(one, replay=replay)
        state = {"epoch": 0, "position": 3, "dataset": {"epoch": 0, "row": 3}}
        reader.reset({key: state[key] for key in (state if not replay else ("epoch", "position"))})
        assert next(reader) == (0, 4)
    assert [one.given for one in rows] == [1, 4]


def test_a_reader_that_was_not_read_from_stays_in_its_epoch():
    reader = IterableDatasetReader(Rows())
    reader.reset(None)
    reader.reset(None)
    assert next(reader) == (0, 1)
    reader.reset(None)
    assert next(reader) == (1, 1)


def test_a_replay_is_refused_where_the_epoch_is_shorter():
    with pytest.raises(StateMismatchError, match="epoch 1 of the dataset has fewer than 4 items"):
        IterableDatasetReader(Rows(3), replay=True).reset({"epoch": 1, "position": 4})


def test_a_reader_wants_a_dataset_with_epochs_and_a_state():
    with pytest.raises(TypeError, match=r"set_epoch, state_dict, load_state_dict, which list has not"):
        IterableDatasetReader([1, 2])
