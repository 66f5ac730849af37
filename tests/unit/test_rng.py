"""Seeds: their derivation, their checks, and the scope that leaves the caller's generators as they were."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from stateful_pipes.errors import GlobalGeneratorThreadError
from stateful_pipes.rng import (
    COLLATE,
    GLOBAL_GENERATORS,
    ORDER,
    SAMPLE,
    WORKER,
    as_seed,
    check_rng,
    derive,
    derive_each,
    draw_seed,
    mix64,
    mix64_array,
    preserved,
    seeder,
)
from tests.streams import disturb, generator_states

EDGES = [0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
ALL = frozenset(GLOBAL_GENERATORS)


def test_mix64_is_splitmix64():
    # The first outputs of the reference implementation with seed 0: mix(1 * G), mix(2 * G), ...
    golden = 0x9E3779B97F4A7C15
    found = [mix64(golden * n % 2**64) for n in (1, 2, 3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_mix64_array_is_mix64():
    values = np.array(EDGES, dtype=np.uint64)
    assert mix64_array(values.copy()).tolist() == [mix64(value) for value in EDGES]


@pytest.mark.parametrize("key", EDGES)
def test_derive_each_is_the_last_link_of_derive(key):
    assert derive_each(derive(key, SAMPLE, 3), EDGES) == [derive(key, SAMPLE, 3, position) for position in EDGES]


@pytest.mark.parametrize("positions", [range(5), range(3, 30, 7), [4, 2, 4], ()])
def test_derive_each_takes_any_sequence(positions):
    assert derive_each(9, positions) == [derive_each(9, [position])[0] for position in positions]
    assert all(type(seed) is int for seed in derive_each(9, positions))


def test_seeds_stay_inside_64_bits():
    assert all(0 <= derive(seed, word) < 2**64 for seed in EDGES for word in EDGES)


def test_neighbours_share_nothing():
    # seed + epoch would make (0, 1) and (1, 0) replay each other.
    words = itertools.product(range(5), range(5), range(5), range(20))
    seeds = [derive(*four) for four in words]
    assert len(set(seeds)) == len(seeds)
    halves = {half for seed in seeds for half in (seed >> 32, seed & 0xFFFFFFFF)}
    assert len(halves) > 2 * len(seeds) - 5  # a chance of 1 in 300 for each coincidence of 32 bits


def test_purposes_differ():
    assert len({ORDER, SAMPLE, COLLATE, WORKER}) == 4


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1, np.int64(7), np.uint64(2**64 - 1), torch.tensor(7)])
def test_a_seed_is_any_integer_of_64_bits(seed):
    assert as_seed(seed) == int(seed)
    assert type(as_seed(seed)) is int


@pytest.mark.parametrize("seed", [-1, 2**64, 10**400])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed must be from 0 to 2\*\*64 - 1, got {seed}"):
        as_seed(seed)


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, float("nan"), [1]])
def test_a_seed_of_another_type_is_refused(seed):
    with pytest.raises(TypeError, match="seed must be an integer, got"):
        as_seed(seed)


@pytest.mark.parametrize(
    ("rng", "canonical"),
    [
        ("generator", "generator"),
        ((), ()),
        (["torch"], ("torch",)),
        (["torch", "python"], ("python", "torch")),
        (("numpy", "numpy"), ("numpy",)),
        ({"torch", "numpy", "python"}, ("python", "numpy", "torch")),
        (GLOBAL_GENERATORS, GLOBAL_GENERATORS),
    ],
)
def test_rng_in_canonical_form(rng, canonical):
    assert check_rng(rng) == canonical


@pytest.mark.parametrize("rng", ["torch", "", None, 3, ("cuda",), ("python", "Numpy"), [["torch"]], ("generator",)])
def test_an_unknown_rng_is_refused(rng):
    with pytest.raises(ValueError, match=r'rng must be "generator" or a sequence of .*python.*, got'):
        check_rng(rng)


def test_draw_seed_is_one_draw_of_torch_s_generator():
    torch.manual_seed(3)
    expected = int(torch.empty((), dtype=torch.int64).random_())
    after = generator_states()
    torch.manual_seed(3)
    assert draw_seed() == expected
    assert generator_states() == after


def test_draw_seed_from_a_generator_leaves_the_default_one():
    before = generator_states()
    one, other = (draw_seed(torch.Generator().manual_seed(3)) for _ in range(2))
    assert one == other != draw_seed(torch.Generator().manual_seed(4))
    assert generator_states() == before


@pytest.mark.parametrize("generator", [3, np.random.default_rng(0), "cpu"])
def test_draw_seed_from_something_else_is_refused(generator):
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got"):
        draw_seed(generator)


def first_draws():
    return random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))


@pytest.mark.parametrize("names", [(), ("python",), ("numpy",), ("torch",), ("python", "torch"), GLOBAL_GENERATORS])
def test_a_seeder_seeds_what_it_names_and_nothing_else(names):
    seed = 0xDEADBEEF_12345678
    with preserved(ALL):
        before = dict(zip(GLOBAL_GENERATORS, generator_states(), strict=True))
        seeder(names)(seed)
        after = dict(zip(GLOBAL_GENERATORS, generator_states(), strict=True))
        assert [name for name in GLOBAL_GENERATORS if after[name] != before[name]] == list(names)
        seeder(names)(seed)
        one = first_draws()
        disturb()
        seeder(names)(seed)
        other = first_draws()
    assert [a == b for a, b in zip(one, other, strict=True)] == [name in names for name in GLOBAL_GENERATORS]


def test_both_halves_of_a_seed_count():
    with preserved(ALL):
        draws = []
        for seed in (1, 2, 1 << 32, 2 << 32):
            seeder(GLOBAL_GENERATORS)(seed)
            draws.append(first_draws())
    assert len(set(draws)) == 4
    assert len({python for python, _, _ in draws}) == 4


@pytest.mark.parametrize("names", [("python",), GLOBAL_GENERATORS])
@pytest.mark.parametrize("seed", EDGES)
def test_python_is_left_as_by_random_seed(names, seed):
    with preserved(ALL):
        random.seed(seed)
        expected = random.getstate()
        random.gauss(0, 1)  # of a pair, the other one is kept
        seeder(names)(seed)
        assert random.getstate() == expected


def test_numpy_and_torch_take_different_halves():
    """Both use 32 bits: two samples agree in both generators only if their seeds agree in all 64."""
    with preserved(ALL):
        draws = {}
        for seed in (1, 2, 1 << 32 | 1):
            seeder(GLOBAL_GENERATORS)(seed)
            draws[seed] = first_draws()
    assert draws[1][1] == draws[2][1] != draws[1 << 32 | 1][1]
    assert draws[1][2] == draws[1 << 32 | 1][2] != draws[2][2]


def test_torch_s_initial_seed_fits_a_tensor_and_its_draws_are_those_of_the_seed():
    with preserved(ALL):
        seeder(GLOBAL_GENERATORS)(2**64 - 1)
        assert torch.tensor(torch.initial_seed()).item() == 2**63 - 1
        found = torch.rand(1000)
        torch.default_generator.manual_seed(2**64 - 1)
        assert torch.equal(found, torch.rand(1000))


def test_the_cached_gaussian_is_kept():
    with preserved(ALL):
        np.random.seed(0)
        np.random.standard_normal()
        np.random.standard_normal()
        second = np.random.get_state()
        np.random.seed(0)
        expected = [np.random.standard_normal() for _ in range(2)]
        np.random.seed(0)
        first = np.random.standard_normal()  # leaves the other one of the pair in the cache
        with preserved(frozenset({"numpy"})):
            np.random.seed(5)
            np.random.standard_normal()
        assert [first, np.random.standard_normal()] == expected
        assert np.random.get_state()[2:] == second[2:]


@pytest.mark.parametrize("names", [frozenset({name}) for name in GLOBAL_GENERATORS] + [ALL])
def test_preserved_puts_back_what_it_names(names):
    with preserved(ALL):
        np.random.standard_normal()
        before = dict(zip(GLOBAL_GENERATORS, generator_states(), strict=True))
        with preserved(names):
            seeder(GLOBAL_GENERATORS)(1)
            disturb()
        after = dict(zip(GLOBAL_GENERATORS, generator_states(), strict=True))
        assert {name for name in GLOBAL_GENERATORS if after[name] == before[name]} == set(names)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_preserved_puts_back_after_an_error(error):
    np.random.standard_normal()
    before = generator_states()

    def scope():
        with preserved(ALL):
            disturb()
            raise error

    with pytest.raises(error):
        scope()
    assert generator_states() == before


def in_thread(function):
    outcome = []

    def call():
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call, name="side")
    thread.start()
    thread.join()
    return outcome[0]


def test_preserved_is_refused_beside_the_main_thread():
    before = generator_states()
    error = in_thread(lambda: preserved(ALL).__enter__())
    assert isinstance(error, GlobalGeneratorThreadError)
    assert error.found == "side"
    assert 'rng="generator"' in error.remedy
    assert "ProcessPrefetcher" in error.remedy
    assert generator_states() == before


def test_nothing_to_preserve_is_allowed_anywhere():
    def scope():
        with preserved(frozenset()):
            return "entered"

    assert in_thread(scope) == "entered"
