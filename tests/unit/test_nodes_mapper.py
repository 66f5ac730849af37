"""A function under each sample's own seed: its draws depend on seed, epoch and position alone."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from stateful_pipes import (
    Node,
    ProcessPrefetcher,
    RandomSampler,
    SamplerNode,
    SeededBatcher,
    SeededMapper,
    SequentialSampler,
    StatefulDataLoader,
)
from stateful_pipes.errors import GlobalGeneratorThreadError, StateMismatchError
from stateful_pipes.rng import PRIVATE, SAMPLE, derive
from stateful_pipes.ticket import positions_of
from tests.streams import disturb, generator_states, same


def draws(item):
    return item, random.random(), float(np.random.standard_normal()), float(torch.rand(()))


def draws_from(item, rng):
    return item, rng.random()


def mapped(length=8, map_fn=draws, seed=5, **kwargs):
    return SeededMapper(SamplerNode(SequentialSampler(length)), map_fn, seed=seed, **kwargs)


def blocks(node, sizes):
    """The epoch's items, pulled in blocks of these sizes."""
    return [item for size in sizes for item in node.run(node.pull(size))]


@pytest.mark.parametrize("rng", [("python", "numpy", "torch"), "generator"])
@pytest.mark.parametrize("sizes", [[1] * 8, [3, 4, 1], [2, 2, 2, 2]])
def test_blocks_do_not_show(rng, sizes):
    map_fn = draws_from if rng == "generator" else draws
    assert same(blocks(mapped(map_fn=map_fn, rng=rng), sizes), blocks(mapped(map_fn=map_fn, rng=rng), [8]))


def test_run_is_pure():
    node = mapped()
    ticket = node.pull(4)
    first = node.run(ticket)
    disturb()
    node.pull(4)
    assert same(node.run(ticket), first)
    assert same(mapped(seed=99).run(ticket), first)  # the ticket holds the seed


def test_a_sample_s_seed_is_the_documented_hash():
    items = blocks(mapped(map_fn=lambda item: random.getstate()), [8])
    for position, state in enumerate(items):
        assert random.Random(derive(5, SAMPLE, 0, position)).getstate() == state
    generators = blocks(mapped(map_fn=lambda item, rng: rng.bit_generator.state, rng="generator"), [8])
    for position, state in enumerate(generators):
        assert np.random.PCG64(derive(5, SAMPLE, 0, position)).state == state


@pytest.mark.parametrize("rng", [("python", "numpy", "torch"), "generator"])
def test_epochs_positions_and_seeds_differ(rng):
    map_fn = draws_from if rng == "generator" else draws
    found = []
    for seed in range(3):
        node = mapped(map_fn=map_fn, rng=rng, seed=seed)
        for _ in range(3):
            found += node.run(node.pull(8))
            with pytest.raises(StopIteration):
                node.pull(1)
    for column in zip(*found, strict=True):
        values = list(column)
        if type(values[0]) is float:
            assert len(set(values)) == len(values) == 72


def test_the_same_index_drawn_twice_differs():
    class Same:
        def indices(self, seed, epoch, positions):
            return [3] * len(positions)

    node = SeededMapper(SamplerNode(Same()), draws, seed=1)
    assert len(set(node.run(node.pull(50)))) == 50


def test_draws_follow_the_position_and_not_the_index():
    shuffled = SeededMapper(SamplerNode(RandomSampler(8, seed=3)), draws, seed=5)
    assert [one[1:] for one in blocks(shuffled, [8])] == [one[1:] for one in blocks(mapped(), [8])]


def test_ranks_share_the_draws_of_one_order():
    whole = blocks(mapped(), [8])
    for rank in range(2):
        node = SeededMapper(SamplerNode(SequentialSampler(8), rank=rank, world_size=2), draws, seed=5)
        assert same(blocks(node, [4]), whole[rank::2])


@pytest.mark.parametrize("rng", [("python",), ("numpy",), ("torch",), ("numpy", "torch"), ()])
def test_only_the_named_generators_carry_the_seed(rng):
    outcomes = []
    for caller in (1, 2):
        random.seed(caller)
        np.random.seed(caller)
        torch.manual_seed(caller)
        outcomes.append(blocks(mapped(rng=rng), [8]))
    for column, name in ((1, "python"), (2, "numpy"), (3, "torch")):
        alike = [one[column] for one in outcomes[0]] == [one[column] for one in outcomes[1]]
        assert alike is (name in rng)


def test_what_a_generator_draws_leaves_the_global_ones():
    before = generator_states()
    blocks(mapped(map_fn=draws_from, rng="generator"), [8])
    assert generator_states() == before


def test_a_generator_is_numpy_s():
    (kind,) = set(blocks(mapped(map_fn=lambda item, rng: type(rng), rng="generator"), [8]))
    assert kind is np.random.Generator


def test_two_mappers_of_one_seed_draw_differently():
    inner = mapped(map_fn=lambda item: random.random())
    outer = SeededMapper(inner, lambda item: (item, random.random()), seed=5)
    assert all(one != other for one, other in blocks(outer, [8]))


def test_a_plain_map_passes_the_ticket_on():
    node = mapped(map_fn=lambda item: item + 100, rng=())
    assert blocks(node, [3, 5]) == list(range(100, 108))
    assert node.seed is None
    assert node.state_dict()["nodes"]["mapper"] == {"type": "SeededMapper", "rng": ""}


def test_what_it_draws_at_construction():
    source = SamplerNode(SequentialSampler(3))
    before = generator_states()
    SeededMapper(source, draws, seed=1)
    SeededMapper(SamplerNode(SequentialSampler(3)), draws, rng=())
    assert generator_states() == before
    torch.manual_seed(4)
    node = SeededMapper(SamplerNode(SequentialSampler(3)), draws)
    after = generator_states()
    torch.manual_seed(4)
    assert node.seed == int(torch.empty((), dtype=torch.int64).random_())
    assert generator_states() == after


class Dataset:
    def __init__(self):
        self.asked = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.asked.append(index)
        return index * 10

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [index * 10 for index in indices]


def test_getitems_is_used_with_a_plain_map_only():
    for rng, asked in [((), [[0, 1, 2], [3, 4, 5, 6, 7]]), (("torch",), list(range(8)))]:
        dataset = Dataset()
        assert blocks(mapped(map_fn=dataset.__getitem__, rng=rng), [3, 5]) == list(range(0, 80, 10))
        assert dataset.asked == asked


def test_getitems_is_not_used_for_another_method():
    dataset = Dataset()
    dataset.other = dataset.__getitem__
    assert blocks(mapped(map_fn=lambda index: dataset[index], rng=()), [8]) == list(range(0, 80, 10))
    assert dataset.asked == list(range(8))


def test_getitems_with_too_few_samples_is_an_error():
    dataset = Dataset()
    type(dataset).__getitems__ = lambda self, indices: [0]
    with pytest.raises(ValueError, match="__getitems__ gave 1 samples for 3 indices"):
        blocks(mapped(map_fn=dataset.__getitem__, rng=()), [3])


def test_an_error_of_getitems_names_the_block_whatever_the_source():
    """Also over a source of the user's own, which says nothing about its tickets."""

    class Source(Node):
        def pull(self, count):
            return (0, (0, count, 1), list(range(count)))

        def run(self, ticket):
            return ticket[2]

        def mark(self):
            return (0, 0)

    class Failing(list):
        def __getitems__(self, indices):
            raise OSError("shard is gone")

    node = SeededMapper(Source(), Failing([1, 2, 3]).__getitem__, rng=())
    with pytest.raises(OSError, match="shard is gone") as caught:
        node.run(node.pull(3))
    assert "epoch 0, positions 0, 1, 2" in caught.value.__notes__[0]


def test_getitems_may_give_any_sequence():
    class Table(Dataset):
        def __getitems__(self, indices):
            return tuple(indices)

    assert blocks(mapped(map_fn=Table().__getitem__, rng=()), [3]) == [0, 1, 2]


def fails_at(bad, error):
    def map_fn(item, *_):
        if item == bad:
            raise error
        return item

    return map_fn


@pytest.mark.parametrize("rng", [("python", "numpy", "torch"), ("torch",), "generator", ()])
def test_an_error_is_the_original_with_its_place(rng):
    error = KeyError("missing")
    node = mapped(map_fn=fails_at(5, error), rng=rng, name="decode")
    node.pull(3)
    with pytest.raises(KeyError) as caught:
        node.run(node.pull(5))
    assert caught.value is error
    assert caught.value.__notes__ == ["in node 'decode' at epoch 0, position 5, index 5"]
    assert caught.traceback[-1].name == "map_fn"


def test_an_error_notes_the_index_of_the_order():
    index = RandomSampler(8, seed=3).indices(0, range(8)).tolist()[6]
    node = SeededMapper(SamplerNode(RandomSampler(8, seed=3)), fails_at(index, ValueError("x")), seed=1)
    with pytest.raises(ValueError, match="x") as caught:
        blocks(node, [8])
    assert caught.value.__notes__ == [f"in node 'mapper' at epoch 0, position 6, index {index}"]


def test_a_long_item_is_cut_in_the_note():
    inner = mapped(map_fn=lambda item: "x" * 1000)
    node = SeededMapper(inner, fails_at("x" * 1000, ValueError("x")), seed=1)
    with pytest.raises(ValueError, match="x") as caught:
        blocks(node, [1])
    (note,) = caught.value.__notes__
    assert len(note) < 160


def test_an_error_below_is_noted_once():
    node = SeededMapper(mapped(map_fn=fails_at(2, ValueError("x")), name="lower"), lambda item: item, seed=1)
    with pytest.raises(ValueError, match="x") as caught:
        blocks(node, [8])
    assert len(caught.value.__notes__) == 1
    assert "lower" in caught.value.__notes__[0]


@pytest.mark.parametrize("rng", [("torch",), "generator", ()])
def test_stop_iteration_in_a_map_is_an_error(rng):
    node = mapped(map_fn=fails_at(2, StopIteration()), rng=rng)
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        blocks(node, [8])
    assert isinstance(caught.value.__cause__, StopIteration)
    assert "position 2" in caught.value.__notes__[0]


@pytest.mark.parametrize("rng", [("python", "numpy", "torch"), ("numpy",), "generator", ()])
def test_the_caller_s_generators_are_untouched(rng):
    """A whole iteration and every state_dict, also when a sample raises; the cached Gaussian included."""
    map_fn = {3: draws, 1: lambda item: np.random.standard_normal(), 0: abs}.get(len(rng), draws_from)
    np.random.standard_normal()
    node = mapped(map_fn=map_fn, rng=rng)
    before = generator_states()
    for _ in node:
        node.state_dict()
    assert generator_states() == before

    def breaks(item, *args):
        map_fn(item, *args)
        if item == 3:
            raise ValueError("bad")

    node = mapped(map_fn=breaks, rng=rng)
    before = generator_states()
    with pytest.raises(ValueError, match="bad"):
        list(node)
    node.state_dict()
    assert generator_states() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_are_never_touched():
    before = torch.cuda.get_rng_state_all()
    list(mapped())
    assert all(torch.equal(one, other) for one, other in zip(torch.cuda.get_rng_state_all(), before, strict=True))


def in_thread(function):
    outcome = []

    def call():
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return outcome[0]


@pytest.mark.parametrize("top", [lambda node: node, lambda node: iter(StatefulDataLoader(node))])
def test_global_generators_only_on_the_main_thread(top):
    before = generator_states()
    iterator = top(mapped())  # held: its pipeline ends with it
    error = in_thread(lambda: next(iterator))
    assert isinstance(error, GlobalGeneratorThreadError)
    assert "ProcessPrefetcher" in str(error)
    assert generator_states() == before


@pytest.mark.parametrize("rng", ["generator", ()])
def test_without_global_generators_any_thread_will_do(rng):
    map_fn = draws_from if rng == "generator" else (lambda item: item)
    node = mapped(map_fn=map_fn, rng=rng)
    assert in_thread(lambda: next(node)) == next(iter(mapped(map_fn=map_fn, rng=rng)))


def test_global_generators_of_a_whole_pipeline():
    def names(node):
        return sorted(node.global_generators())

    assert names(mapped()) == ["numpy", "python", "torch"]
    assert names(mapped(rng="generator")) == names(mapped(rng=())) == []
    both = SeededMapper(mapped(rng=("torch",)), abs, seed=1, rng=("python",))
    assert names(both) == ["python", "torch"]
    assert names(SeededBatcher(both, 2, seed=1)) == ["python", "torch"]
    assert names(ProcessPrefetcher(both, 0, name="inline")) == ["python", "torch"]
    assert names(ProcessPrefetcher(mapped(), 2)) == []


def test_the_state_holds_seed_and_rng():
    assert mapped().state_dict()["nodes"]["mapper"] == {"type": "SeededMapper", "seed": 5, "rng": "python,numpy,torch"}
    assert mapped(rng="generator").state_dict()["nodes"]["mapper"]["rng"] == "generator"


def test_the_seed_of_the_state_is_taken():
    node = mapped(seed=99)
    node.pull(3)
    node.load_state_dict(mapped().state_dict())
    assert same(blocks(node, [8]), blocks(mapped(), [8]))


@pytest.mark.parametrize("rng", [("torch",), "generator", (), ("torch", "numpy")])
def test_another_rng_is_refused(rng):
    with pytest.raises(StateMismatchError, match=r"mapper\.rng"):
        mapped(rng=rng).load_state_dict(mapped().state_dict())


def test_the_order_of_rng_does_not_matter():
    mapped(rng=["torch", "python", "numpy"]).load_state_dict(mapped().state_dict())


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"map_fn": 3}, TypeError, "map_fn must be callable, got 3"),
        ({"map_fn": None}, TypeError, "map_fn must be callable, got None"),
        ({"rng": "torch"}, ValueError, "rng must be"),
        ({"rng": ("cuda",)}, ValueError, "'cuda'"),
        ({"seed": -1}, ValueError, "got -1"),
        ({"seed": "x"}, TypeError, "got 'x'"),
        ({"seed": True, "rng": ()}, TypeError, "got True"),
        ({"name": 3}, TypeError, "name must be"),
        ({"reseed": 3}, TypeError, "reseed must be callable, got 3"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs, error, words):
    with pytest.raises(error, match=words):
        mapped(**kwargs)


@pytest.mark.parametrize("source", [[1, 2], range(3), SequentialSampler(3), None, 3])
def test_a_source_is_a_node(source):
    with pytest.raises(TypeError, match=f"source must be a torchdata node, got {type(source).__name__}") as caught:
        SeededMapper(source, draws)
    assert "IterableWrapper" in str(caught.value)
    assert "SamplerNode" in str(caught.value)


def test_a_ticket_holds_positions_of_its_items():
    node = mapped()
    assert list(positions_of(node.pull(3))) == [0, 1, 2]
    assert list(positions_of(node.pull(9))) == [3, 4, 5, 6, 7]


def fingerprinted(fingerprint):
    return SeededMapper(SamplerNode(SequentialSampler(4)), abs, seed=1, fingerprint=fingerprint)


def test_other_data_are_named_at_a_load():
    saved = StatefulDataLoader(fingerprinted("v1")).state_dict()
    assert saved["nodes"]["mapper"]["fingerprint"] == "v1"
    loader = StatefulDataLoader(fingerprinted(lambda: "v2"))
    with pytest.raises(StateMismatchError, match="the data are others") as caught:
        loader.load_state_dict(saved)
    assert [(one.node, one.field, one.saved, one.current) for one in caught.value.differences] == [
        ("mapper", "fingerprint", "'v1'", "'v2'")
    ]
    StatefulDataLoader(fingerprinted(lambda: "v1")).load_state_dict(saved)


def test_where_one_side_has_no_fingerprint_there_is_nothing_to_compare():
    without, with_one = StatefulDataLoader(fingerprinted(None)), StatefulDataLoader(fingerprinted("v1"))
    states = without.state_dict(), with_one.state_dict()
    assert "fingerprint" not in states[0]["nodes"]["mapper"]
    for loader in (without, with_one):
        for state in states:
            loader.load_state_dict(state)
            assert next(iter(loader)) == 0
    assert "fingerprint" not in without.state_dict()["nodes"]["mapper"]
    assert with_one.state_dict()["nodes"]["mapper"]["fingerprint"] == "v1"


def test_a_fingerprint_through_the_door_is_asked_for_once():
    asked = []
    loader = StatefulDataLoader(range(4), fingerprint=lambda: asked.append(1) or "v1")
    list(loader)
    assert loader.state_dict()["nodes"]["mapper"]["fingerprint"] == "v1"
    assert asked == [1]


@pytest.mark.parametrize("fingerprint", ["", 3, b"v1", lambda: None, lambda: ""])
def test_what_is_no_fingerprint(fingerprint):
    with pytest.raises(TypeError, match="fingerprint must be a string"):
        fingerprinted(fingerprint)


# Generators that a transform owns.


class Owning:
    """A data set whose transform draws from generators of its own and remembers how often it was asked."""

    def __init__(self):
        self.python, self.numpy, self.torch, self.asked = random.Random(), np.random.default_rng(), torch.Generator(), 0
        self.torch.seed()

    def __len__(self):
        return 8

    def __getitem__(self, index, *_):
        self.asked += 1
        own = self.python.random(), self.numpy.random(), torch.rand((), generator=self.torch).item()
        return index, *own, self.asked, random.random()

    def reset(self, seed):
        self.python.seed(seed)
        self.numpy.bit_generator.state = np.random.PCG64(seed).state
        self.torch.manual_seed(seed)
        self.asked = 0


def reset(dataset, seed):
    dataset.reset(seed)


def owned(seed=5, reseed=reset, **kwargs):
    return mapped(map_fn=Owning().__getitem__, seed=seed, reseed=reseed, **kwargs)


EVERY_RNG = [("python", "numpy", "torch"), ("python",), "generator", ()]


def own(items):
    return [item[:-1] for item in items]


@pytest.mark.parametrize("rng", EVERY_RNG, ids=str)
@pytest.mark.parametrize("sizes", [[1] * 8, [3, 4, 1], [8]], ids=str)
def test_own_generators_draw_the_same_in_any_block(rng, sizes):
    found = own(blocks(owned(rng=rng), sizes))
    assert same(found, own(blocks(owned(), [8])))
    assert [item[-1] for item in found] == [1] * 8
    assert all(len({item[column] for item in found}) == 8 for column in (1, 2, 3))


def test_without_reseed_they_do_not():
    assert not same(own(blocks(owned(reseed=None), [8])), own(blocks(owned(reseed=None), [8])))


def test_own_generators_in_a_run_again():
    node = owned()
    ticket = node.pull(4)
    first = node.run(ticket)
    node.run(node.pull(4))
    assert same(node.run(ticket), first)
    assert same(owned(seed=99).run(ticket), first)


@pytest.mark.parametrize("rng", EVERY_RNG, ids=str)
def test_own_generators_get_the_documented_hash(rng):
    seeds = []
    node = mapped(map_fn=lambda item, *_: item, rng=rng, reseed=lambda _, seed: seeds.append(seed))
    for epoch in range(2):
        node.seek((epoch, 0))
        blocks(node, [3, 5])
    assert PRIVATE == 6
    assert seeds == [derive(5, SAMPLE, epoch, position, PRIVATE) for epoch in range(2) for position in range(8)]


def test_own_generators_are_seeded_after_the_global_ones():
    """What the hook draws is the sample's own too; what it does not draw is there for the map as ever."""
    seen = blocks(mapped(map_fn=lambda item: random.getstate()), [8])
    states = []
    found = blocks(mapped(reseed=lambda *_: states.append(random.getstate())), [8])
    assert states == seen
    assert same(found, blocks(mapped(), [8]))


def test_two_mappers_of_one_seed_reseed_differently():
    seeds = [[], []]
    node = mapped(reseed=lambda _, seed: seeds[0].append(seed))
    blocks(SeededMapper(node, draws, seed=5, reseed=lambda _, seed: seeds[1].append(seed)), [8])
    assert len({*seeds[0], *seeds[1]}) == 16


def test_one_transform_in_two_mappers():
    """What one of them leaves the generators at does not show in the other."""

    def of(inner, outer):
        node = mapped(map_fn=inner.__getitem__, reseed=reset)
        return SeededMapper(node, lambda item: (item, outer[0]), seed=5, reseed=lambda _, seed: outer.reset(seed))

    shared = Owning()
    assert same(blocks(of(shared, shared), [3, 5]), blocks(of(Owning(), Owning()), [8]))


class Augmenter:
    def apply(self, item):
        return item

    __call__ = apply


def test_what_the_hook_is_given():
    augmenter, dataset, listed = Augmenter(), Dataset(), [0] * 8
    given = []
    for map_fn in (dataset.__getitem__, listed.__getitem__, augmenter.apply, augmenter, draws):
        blocks(mapped(map_fn=map_fn, reseed=lambda transform, _: given.append(transform)), [2])
    assert list(map(id, given)) == [id(one) for one in (dataset, listed, augmenter, augmenter, draws) for _ in range(2)]


def test_getitems_is_not_used_with_reseed():
    dataset = Dataset()
    assert blocks(mapped(map_fn=dataset.__getitem__, rng=(), reseed=lambda *_: None), [3, 5]) == list(range(0, 80, 10))
    assert dataset.asked == list(range(8))


@pytest.mark.parametrize("rng", [("torch",), "generator", ()], ids=str)
def test_an_error_of_the_hook_is_told_with_its_place(rng):
    error = KeyError("no such transform")

    def fails(transform, seed):
        if seed == derive(5, SAMPLE, 0, 5, PRIVATE):
            raise error

    node = mapped(map_fn=lambda item, *_: item, rng=rng, reseed=fails)
    with pytest.raises(KeyError) as caught:
        blocks(node, [8])
    assert caught.value is error
    assert caught.value.__notes__ == ["in node 'mapper' at epoch 0, position 5, index 5"]


@pytest.mark.parametrize("rng", EVERY_RNG, ids=str)
def test_samples_that_are_left_out_do_not_move_the_others(rng):
    class Broken(Owning):
        def __getitem__(self, index, *arguments):
            found = super().__getitem__(index)
            if index in (2, 5):
                raise ValueError("broken after it has drawn")
            return found

    seeds = []
    node = mapped(map_fn=Broken().__getitem__, rng=rng, reseed=reset, max_skipped=2)
    node = SeededMapper(node, lambda item: item, seed=5, reseed=lambda _, seed: seeds.append(seed))
    loader = StatefulDataLoader(SeededBatcher(node, 3, collate_fn=list))
    found = [item for batch in loader for item in batch]
    assert same(own(found), [item for item in own(blocks(owned(), [8])) if item[0] not in (2, 5)])
    assert len(seeds) == 6
    assert loader.stats()["skipped"] == 2


@pytest.mark.parametrize("rng", EVERY_RNG, ids=str)
def test_whether_there_is_a_hook_is_in_the_state(rng):
    with_one, without = owned(rng=rng).state_dict(), mapped(rng=rng).state_dict()
    assert with_one["nodes"]["mapper"]["reseed"] is True
    assert with_one["nodes"]["mapper"]["seed"] == 5
    assert "reseed" not in without["nodes"]["mapper"]
    with pytest.raises(StateMismatchError, match=r"mapper\.reseed"):
        mapped(rng=rng).load_state_dict(with_one)
    with pytest.raises(StateMismatchError, match=r"mapper\.reseed"):
        owned(rng=rng).load_state_dict(without)


@pytest.mark.parametrize("rng", EVERY_RNG, ids=str)
def test_a_state_brings_the_seed_of_own_generators(rng):
    node = owned(rng=rng, seed=99)
    node.load_state_dict(owned(rng=rng).state_dict())
    assert same(own(blocks(node, [8])), own(blocks(owned(), [8])))


def test_a_plain_map_with_a_hook_draws_a_seed_at_construction():
    torch.manual_seed(4)
    node = owned(rng=(), seed=None)
    torch.manual_seed(4)
    assert node.seed == int(torch.empty((), dtype=torch.int64).random_())


@pytest.mark.parametrize("rng", ["generator", ()], ids=str)
def test_own_generators_on_any_thread(rng):
    assert same(in_thread(lambda: own([next(owned(rng=rng))])), own(blocks(owned(), [8])[:1]))
