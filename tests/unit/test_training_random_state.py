"""The main process's generators: there and back exactly, and either all of them or none."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training import random_state, restore_random_state

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _kept():
    states = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)


def draws():
    """Of each generator, of each kind; an odd number, so that halves of pairs are left over."""
    return [
        (random.random(), random.gauss(0, 1), random.getrandbits(70)),
        (np.random.random(), np.random.standard_normal(3).tolist(), np.random.randint(99), np.random.permutation(5).tolist()),
        (torch.rand(3).tolist(), torch.randn(3).tolist(), torch.randn(1, dtype=torch.float64).item(), torch.randperm(5).tolist()),
    ]


def seen():
    """The generators' own states, to the byte."""
    python = random.getstate()
    numpy = np.random.get_state(legacy=False)
    numpy = (numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])
    return python, numpy, torch.default_generator.get_state().numpy().tobytes()


@pytest.mark.parametrize("drawn", range(4))
def test_there_and_back(drawn):
    seed(drawn)
    for _ in range(drawn):
        draws()
    before = seen()
    state = random_state()
    assert seen() == before, "nothing is drawn"
    expected = [draws() for _ in range(3)]
    seed(99)
    restore_random_state(state)
    assert seen() == before
    assert [draws() for _ in range(3)] == expected


def half_of_a_pair():
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1, dtype=torch.float64)
    torch.randn(1)


def test_the_second_number_of_a_pair():
    seed(1)
    half_of_a_pair()
    state = random_state()
    assert state["python"]["gauss"] is not None
    assert state["numpy"]["has_gauss"] == 1
    expected = random.gauss(0, 1), np.random.standard_normal(), torch.randn(1, dtype=torch.float64).item(), torch.randn(1).item()
    seed(2)
    restore_random_state(state)
    assert (
        random.gauss(0, 1),
        np.random.standard_normal(),
        torch.randn(1, dtype=torch.float64).item(),
        torch.randn(1).item(),
    ) == expected


def test_no_second_number_where_one_is_left():
    seed(1)
    state = random_state()
    half_of_a_pair()
    restore_random_state(state)
    seed_of_one = random.gauss(0, 1), np.random.standard_normal()
    seed(1)
    assert (random.gauss(0, 1), np.random.standard_normal()) == seed_of_one


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625])
def test_at_every_place_of_the_words(drawn):
    seed(5)
    for _ in range(drawn):
        random.getrandbits(32)
        np.random.randint(2**32, dtype=np.uint32)
        torch.randint(2**31, (1,))
    state = random_state()
    before, expected = seen(), draws()
    restore_random_state(state)
    assert seen() == before
    assert draws() == expected


def test_only_tensors_and_plain_values(tmp_path):
    seed(3)
    half_of_a_pair()
    state = random_state()

    def leaves(value):
        return [leaf for one in value.values() for leaf in leaves(one)] if type(value) is dict else [type(value)]

    assert set(leaves(state)) == {torch.Tensor, int, float}
    torch.save(state, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 20_000
    with torch.serialization.safe_globals([]):
        found = torch.load(tmp_path / "file", weights_only=True)
    assert first_mismatch(state, found) is None
    before, expected = seen(), draws()
    seed(4)
    restore_random_state(found)
    assert seen() == before
    assert draws() == expected


def test_the_state_shares_nothing():
    seed(3)
    state = random_state()
    kept = copy.deepcopy(state)
    before, expected = seen(), draws()
    assert first_mismatch(kept, state) is None, "drawing changes nothing of it"
    restore_random_state(state)
    draws()
    assert first_mismatch(kept, state) is None, "nor does it after a restore"
    restore_random_state(state)
    for part in (state["python"]["words"], state["numpy"]["words"], state["torch"]):
        part.zero_()
    assert seen() == before
    assert draws() == expected


def test_any_mapping_will_do():
    seed(3)
    state = random_state()
    before = seen()
    draws()
    restore_random_state(OrderedDict((name, OrderedDict(one) if isinstance(one, dict) else one) for name, one in state.items()))
    assert seen() == before


def test_tensors_are_made_on_the_cpu():
    seed(3)
    with torch.device("meta"):
        state = random_state()
    before = seen()
    draws()
    with torch.device("meta"):
        restore_random_state(state)
    assert seen() == before


LEAVES = [
    *(("python", name) for name in ("version", "words", "gauss")),
    *(("numpy", name) for name in ("words", "position", "has_gauss", "gauss")),
    ("torch",),
]
WRONG = [
    *("3", b"3", [], {}, (1,), object(), 2.5j, -1, 2**40, 10**400, True, float("nan"), float("inf")),
    *(torch.zeros(()), torch.zeros(5056, dtype=torch.uint8), torch.zeros(624, dtype=torch.int64), np.zeros(624, np.int64)),
    *(torch.zeros(625, dtype=torch.int64), torch.ones(625), torch.ones(624), torch.empty(624, dtype=torch.int64, device="meta")),
    *(np.float64(1.5), np.int64(1), torch.tensor(1), torch.ones(5056, dtype=torch.uint8).to_sparse()),
]


def damaged(state, leaf, value):
    made = copy.deepcopy(state)
    inner = made
    for name in leaf[:-1]:
        inner = inner[name]
    inner[leaf[-1]] = value
    return made


def refused(state, device=None):
    before = seen()
    with pytest.raises((ValueError, TypeError)) as raised:
        restore_random_state(state, device)
    assert seen() == before, "nothing is set"
    return str(raised.value)


@pytest.mark.parametrize("leaf", LEAVES, ids=".".join)
def test_every_leaf_is_validated(leaf):
    seed(3)
    half_of_a_pair()
    state = random_state()
    draws()
    for value in WRONG:
        refused(damaged(state, leaf, value))
    if leaf != ("python", "gauss"):
        refused(damaged(state, leaf, None))
    inner = state[leaf[0]][leaf[1]] if len(leaf) > 1 else state["torch"]
    if isinstance(inner, torch.Tensor):
        for tensor in (inner[:-1], torch.cat([inner, inner[:1]]), inner.double(), inner.int(), inner.to("meta"), inner.tolist()):
            refused(damaged(state, leaf, tensor))
        if inner.dtype is torch.int64:
            for place, word in [(0, -1), (5, 2**32), (623, 2**63 - 1)]:
                wrong = inner.clone()
                wrong[place] = word
                refused(damaged(state, leaf, wrong))
            refused(damaged(state, leaf, inner.view(1, -1)))
    restore_random_state(state)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (("python", "version"), 2),
        (("python", "version"), 3.0),
        (("python", "gauss"), 1),
        (("numpy", "position"), 625),
        (("numpy", "position"), 1.0),
        (("numpy", "has_gauss"), 2),
        (("numpy", "has_gauss"), True),
        (("numpy", "gauss"), 0),
    ],
)
def test_values_that_a_generator_would_take(leaf, value):
    assert repr(value) in refused(damaged(random_state(), leaf, value))


def test_an_index_beyond_the_words():
    state = random_state()
    state["python"]["words"][-1] = 625
    refused(state)
    state["python"]["words"][-1] = 624
    restore_random_state(state)


def test_words_that_would_give_nothing_but_zeros():
    for name in ("python", "numpy"):
        state = random_state()
        state[name]["words"][:624] = 0
        assert "0" in refused(state)


@pytest.mark.parametrize("path", [(), ("python",), ("numpy",)], ids=str)
def test_missing_and_extra_entries(path):
    def inner_of(state):
        for name in path:
            state = state[name]
        return state

    for name in inner_of(random_state()):
        state = random_state()
        del inner_of(state)[name]
        assert name in refused(state)
    state = random_state()
    inner_of(state)["more"] = 1
    assert "more" in refused(state)
    for wrong in (None, [], "abc", 3, {}):
        refused(damaged(random_state(), path, wrong) if path else wrong)


def test_bytes_of_torchs_state_that_no_generator_has():
    state = random_state()
    state["torch"].fill_(255)
    assert "damaged" in refused(state)


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_another_bit_generator_of_numpy(name):
    state = random_state()
    random.random()
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, name)(1))
    try:
        with pytest.raises(ValueError, match=name):
            random_state()
        before = random.getstate(), repr(np.random.get_state(legacy=False)), torch.default_generator.get_state().tolist()
        with pytest.raises(ValueError, match=name):
            restore_random_state(state)
        assert (
            random.getstate(),
            repr(np.random.get_state(legacy=False)),
            torch.default_generator.get_state().tolist(),
        ) == before
    finally:
        np.random.set_bit_generator(own)


def test_a_bit_generator_of_the_same_kind():
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(5))
    try:
        state = random_state()
        expected = np.random.random(3).tolist()
        restore_random_state(state)
        assert np.random.random(3).tolist() == expected
    finally:
        np.random.set_bit_generator(own)


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_has_no_generator_beside(device):
    state = random_state(device)
    assert list(state) == ["python", "numpy", "torch"]
    restore_random_state(state, device)
    assert "name the device" in refused({**state, "cuda": state["torch"]}, device)


@pytest.mark.parametrize("device", ["mps", "meta", torch.device("xpu", 0)])
def test_other_devices(device):
    with pytest.raises(ValueError, match=str(device)):
        random_state(device)
    assert str(device) in refused(random_state(), device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_is_not_there(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"{device} is not available"):
        random_state(device)
    state = random_state()
    refused({**state, "cuda": state["torch"]}, device)


@cuda
def test_cuda_there_and_back():
    torch.cuda.manual_seed(3)
    torch.rand(3, device="cuda")
    state = random_state("cuda")
    before = torch.cuda.get_rng_state().tolist()
    expected = torch.randn(5, device="cuda").tolist()
    restore_random_state(state, "cuda")
    assert torch.cuda.get_rng_state().tolist() == before
    assert torch.randn(5, device="cuda").tolist() == expected
    refused(state)
    refused(random_state(), "cuda")


@cuda
@pytest.mark.parametrize("value", [None, torch.zeros(3, dtype=torch.uint8), torch.ones(16), "x", [1]])
def test_a_damaged_cuda_state_sets_nothing(value):
    state = random_state("cuda")
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state().tolist()
    refused({**state, "cuda": value}, "cuda")
    assert torch.cuda.get_rng_state().tolist() == before


@cuda
def test_a_state_that_was_loaded_onto_the_device(tmp_path):
    state = random_state("cuda")
    before = seen()
    draws()
    torch.save(state, tmp_path / "file")
    restore_random_state(torch.load(tmp_path / "file", map_location="cuda", weights_only=True), "cuda")
    assert seen() == before
