"""What a loader tells of its pipeline, by torch's names, and that none of it can be assigned."""

from __future__ import annotations

import pytest
import torchdata.nodes as tn
from torch.utils.data import BatchSampler, DataLoader, default_collate, default_convert
from tqdm import tqdm

from stateful_pipes import (
    InfiniteRandomSampler,
    Position,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)

DATASET = [10, 11, 12, 13, 14]


def composed(batch=True):
    node = SeededMapper(SamplerNode(RandomSampler(5, seed=1)), abs, seed=2)
    return SeededBatcher(node, 2, drop_last=True, collate_fn=list, seed=3) if batch else node


def test_the_dataset_door():
    loader = StatefulDataLoader(DATASET, batch_size=2, drop_last=True, shuffle=True)
    assert loader.dataset is DATASET
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (2, True, 0)
    assert loader.collate_fn is default_collate
    assert type(loader.sampler) is RandomSampler
    assert type(loader.batch_sampler) is BatchSampler
    assert list(loader.batch_sampler) == [batch for batch in BatchSampler(loader.sampler, 2, True)]
    assert type(loader.pipeline) is ProcessPrefetcher


KWARGS = [
    {},
    {"batch_size": 3},
    {"batch_size": None},
    {"collate_fn": list},
    {"drop_last": True},
    {"batch_size": None, "collate_fn": abs},
]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_the_same_as_torch_s_loader_says(kwargs):
    ours, torchs = StatefulDataLoader(DATASET, **kwargs), DataLoader(DATASET, **kwargs)
    for name in ("dataset", "batch_size", "drop_last", "num_workers", "collate_fn"):
        assert getattr(ours, name) is getattr(torchs, name) or getattr(ours, name) == getattr(torchs, name)
    assert (ours.batch_sampler is None) is (torchs.batch_sampler is None)
    assert len(ours) == len(torchs)


def test_unbatched():
    loader = StatefulDataLoader(DATASET, batch_size=None)
    assert loader.batch_size is loader.batch_sampler is None
    assert loader.drop_last is False
    assert loader.collate_fn is default_convert


def test_a_composed_pipeline():
    loader = StatefulDataLoader(composed())
    assert loader.dataset is None
    assert (loader.batch_size, loader.drop_last, loader.collate_fn, loader.num_workers) == (2, True, list, 0)
    assert loader.sampler.length == 5
    plain = StatefulDataLoader(composed(batch=False))
    assert plain.batch_size is plain.batch_sampler is plain.collate_fn is None
    assert plain.drop_last is False
    foreign = StatefulDataLoader(tn.IterableWrapper(DATASET))
    assert foreign.sampler is foreign.batch_sampler is foreign.dataset is None


def test_the_batches_that_come_out_are_meant():
    loader = StatefulDataLoader(SeededBatcher(composed(), 3, collate_fn=tuple, seed=4))
    assert (loader.batch_size, loader.drop_last, loader.collate_fn) == (3, False, tuple)


def test_num_workers():
    assert StatefulDataLoader(DATASET, num_workers=3).num_workers == 3
    assert StatefulDataLoader(ProcessPrefetcher(composed(), 2)).num_workers == 2


def test_batch_sampler_goes_on_from_the_position():
    loader = StatefulDataLoader(DATASET, batch_size=2)
    next(iter(loader))
    assert list(loader.batch_sampler) == [[2, 3], [4]]


NAMES = ["dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn", "num_workers", "pipeline", "position"]


@pytest.mark.parametrize("name", [*NAMES, "is_restored_from_checkpoint"])
@pytest.mark.parametrize("make", [lambda: StatefulDataLoader(DATASET), lambda: StatefulDataLoader(composed())])
def test_nothing_can_be_assigned_or_deleted(make, name):
    loader = make()
    before = getattr(loader, name)
    with pytest.raises(AttributeError):
        setattr(loader, name, before)
    with pytest.raises(AttributeError):
        delattr(loader, name)


def test_no_attribute_that_frameworks_clear():
    assert not hasattr(StatefulDataLoader(DATASET), "_iterator")


def test_position():
    loader = StatefulDataLoader(DATASET, batch_size=2)
    assert loader.position == Position(epoch=0, batch=0, consumed=0, delivered=0, prefetched=0)
    iterator = iter(loader)
    for batch in (1, 2):
        next(iterator)
        assert loader.position == Position(epoch=0, batch=batch, consumed=2 * batch, delivered=batch, prefetched=0)
    next(iterator)
    assert loader.position == Position(epoch=1, batch=0, consumed=0, delivered=3, prefetched=0)


def test_the_position_s_batches_go_on_after_a_resume_and_begin_anew_with_an_epoch():
    loader = StatefulDataLoader(DATASET, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state["batch"] == 1
    next(iterator)
    loader.load_state_dict(state)
    assert (loader.position.batch, loader.position.delivered) == (1, 2)
    next(iter(loader))
    assert loader.position.batch == 2
    loader.restart()
    assert loader.position.batch == 0
    next(iter(loader))
    loader.set_epoch(3)
    assert loader.position.batch == 0
    loader.load_state_dict({key: value for key, value in state.items() if key != "batch"})  # of a version that counted none
    assert (loader.position.batch, loader.position.consumed) == (0, 2)


def test_a_batch_that_is_left_out_whole_is_one_of_the_position_s_batches():
    def read(index):
        if index < 2:
            raise ValueError(index)
        return index

    node = SeededMapper(SamplerNode(SequentialSampler(6)), read, max_skipped=2)
    loader = StatefulDataLoader(SeededBatcher(node, 2))
    assert next(iter(loader)).tolist() == [2, 3]
    assert (loader.position.batch, loader.position.delivered) == (2, 1)


def test_a_progress_bar_goes_on_where_it_was(capsys):
    loader = StatefulDataLoader(DATASET, batch_size=1)
    next(iter(loader))
    resumed = StatefulDataLoader(DATASET, batch_size=1)
    resumed.load_state_dict(loader.state_dict())
    bar = tqdm(resumed, initial=resumed.position.batch, total=len(resumed))
    assert len(list(bar)) == 4
    assert (bar.n, bar.total) == (5, 5)
    assert "5/5" in capsys.readouterr().err


def test_the_position_counts_what_is_prefetched():
    with StatefulDataLoader(DATASET, batch_size=2, num_workers=1, multiprocessing_context="fork", prefetch_factor=3) as loader:
        next(iter(loader))
        assert loader.position.prefetched == loader.stats()["prefetched"] == 3


def test_describe():
    loader = StatefulDataLoader(ProcessPrefetcher(composed(), 0))
    next(iter(loader))
    assert loader.describe() == loader.describe(format="text")
    assert loader.describe().splitlines() == [
        "prefetcher: ProcessPrefetcher()",
        "└─ batcher: SeededBatcher(batch_size=2, drop_last=True, seed=3)",
        "   └─ mapper: SeededMapper(seed=2, rng='python,numpy,torch')",
        "      └─ sampler: SamplerNode(order='RandomSampler', length=5, seed=1, world_size=1, uneven='pad', epoch=0, consumed=2)",
    ]


def test_describe_as_mermaid():
    assert StatefulDataLoader(composed()).describe(format="mermaid").startswith("flowchart LR\n")
    with pytest.raises(ValueError, match="format must be 'text' or 'mermaid', got 'svg'"):
        StatefulDataLoader(composed()).describe(format="svg")


def test_describe_leaves_a_foreign_state_out():
    assert StatefulDataLoader(tn.IterableWrapper(DATASET)).describe() == "iterable_wrapper: IterableWrapper(epoch=0, position=0)"


def test_repr():
    class Mine(StatefulDataLoader):
        pass

    assert repr(Mine(composed())) == "Mine(SamplerNode -> SeededMapper -> SeededBatcher)"


def test_looking_changes_nothing():
    loader = StatefulDataLoader(DATASET, batch_size=2, shuffle=True, seed=1)
    expected = [batch.tolist() for batch in StatefulDataLoader(DATASET, batch_size=2, shuffle=True, seed=1)]
    iterator = iter(loader)
    found = [next(iterator).tolist()]
    for name in NAMES:
        getattr(loader, name)
    list(loader.batch_sampler)
    list(loader.sampler)
    for look in (loader.stats, loader.describe, loader.state_dict, loader.checkpoint, lambda: repr(loader), lambda: len(loader)):
        look()
    assert [*found, *(batch.tolist() for batch in iterator)] == expected


def test_an_endless_pipeline_has_no_length():
    loader = StatefulDataLoader(DATASET, sampler=InfiniteRandomSampler(5))
    with pytest.raises(TypeError, match="endless"):
        len(loader)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 5, None])
def test_length_is_a_full_epoch_s(batch_size, drop_last):
    if batch_size is None and drop_last:
        return
    loader = StatefulDataLoader(DATASET, batch_size=batch_size, drop_last=drop_last, sampler=SequentialSampler(5))
    assert len(loader) == len(list(loader))
    next(iter(loader))
    assert len(loader) == len(DataLoader(DATASET, batch_size=batch_size, drop_last=drop_last))


def test_batches_are_counted_at_the_top_alone():
    node = SamplerNode(SequentialSampler(9))
    next(node)
    loader = StatefulDataLoader(SeededBatcher(node, 2))
    next(iter(loader))
    assert (node.get_state()["batch"], node.get_state()["nodes"]["sampler"]["consumed"]) == (0, 3)
    assert loader.state_dict()["batch"] == 1
