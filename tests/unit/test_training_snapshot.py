"""cpu_state: equal, independent both ways, and nothing of the original is touched."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from stateful_pipes.testing.comparison import first_mismatch
from stateful_pipes.training import cpu_state

Pair = namedtuple("Pair", "first second")


class PairWithMore(Pair):
    pass


class Words(dict):
    default = "of the class"


class Refusing(dict):
    """Changes by its own methods alone."""

    def __setitem__(self, key, value):
        raise TypeError("frozen")

    def items(self):
        return [("computed", torch.zeros(1))]


class Sized(OrderedDict):
    """Cannot be made of its items, as copy.copy would."""

    def __init__(self, size):
        super().__init__()
        self.size = size


class Lines(list):
    __slots__ = ("__hidden", "note")

    def hide(self, value):
        self.__hidden = value

    def hidden(self):
        return self.__hidden


class Reversed(list):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Point(tuple):
    pass


class Own:
    def __init__(self, value):
        self.value = value


@dataclass
class Record:
    tensor: torch.Tensor
    names: list = field(default_factory=list)


class Loud(torch.Tensor):
    """Answers nothing that it is asked through torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Quiet(torch.Tensor):
    pass


class Wrapped(torch.Tensor):
    """Two tensors that pass for one."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=scale.dtype, requires_grad=False)

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self):
        return ["inner", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].inner), func(args[0].scale))
        args = tree_map(lambda one: one.inner * one.scale if isinstance(one, cls) else one, args)
        return func(*args, **(kwargs or {}))


class Watched(torch.Tensor):
    """With memory of its own and a `__torch_dispatch__`."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with no_dispatch():
            return func(*args, **(kwargs or {}))


def same(one, other):
    assert type(one) is type(other)
    mismatch = first_mismatch(one, other)
    assert mismatch is None, str(mismatch)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


# Containers


def containers():
    x = torch.arange(4.0)
    counted = defaultdict(list, {"a": [x.clone()]})
    lines = Lines([x.clone(), 2])
    lines.note = {"of": x.clone()}
    lines.hide(x.clone())
    words = Words(a=x.clone())
    words.default = "of the instance"
    sized = Sized(3)
    sized["b"], sized["a"] = x.clone(), 1
    more = PairWithMore(x.clone(), 2)
    more.note = [x.clone()]
    point = Point((x.clone(), 2))
    point.note = [x.clone()]
    ordered = OrderedDict(b=x.clone(), a=2)
    ordered._metadata = {"": {"version": 1, "extra": [1]}}
    return {
        "dict": {"a": x.clone(), 2: [1, (2.5, None, b"x")], (1, "t"): True},
        "list": [x.clone(), [x.clone()]],
        "tuple": (x.clone(), (1, x.clone())),
        "empty": ({}, [], (), OrderedDict(), deque()),
        "named tuple": Pair(x.clone(), [1]),
        "named tuple with attributes": more,
        "tuple with attributes": point,
        "OrderedDict": ordered,
        "OrderedDict with a size": sized,
        "defaultdict": counted,
        "Counter": Counter("hello"),
        "dict with attributes": words,
        "list with slots": lines,
        "deque": deque([x.clone(), 2], maxlen=2),
        "what torch.max returns": torch.max(torch.eye(2), 0),
        "what time returns": time.gmtime(0),
        "Size": torch.Size([2, 3]),
        "set": {1, "a"},
        "array": np.arange(3.0),
        "record": Record(x.clone(), ["a"]),
        "object": Own({"x": x.clone()}),
        "a view of memory": bytearray(b"abc"),
        "dtype": [torch.float32, torch.device("cpu"), int, len],
    }


@pytest.mark.parametrize("name", containers())
def test_containers(name):
    value = containers()[name]
    made = cpu_state(value)
    same(value, made)
    change(made)
    same(value, containers()[name])
    made = cpu_state(value)
    change(value)
    same(made, containers()[name])


def change(value, seen=None):
    """Everything in it that can be changed in place."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    for one in [*vars(value).values()] if hasattr(value, "__dict__") and not isinstance(value, type) else []:
        change(one, seen)
    if isinstance(value, Lines):
        change([value.note, value.hidden()], seen)
    if isinstance(value, torch.Tensor):
        value.detach().fill_(-1)
    elif isinstance(value, dict):
        for one in [*dict.values(value)]:
            change(one, seen)
        value["new"] = -1
    elif isinstance(value, (list, deque)):
        for one in [*value]:
            change(one, seen)
        value.append(-1)
    elif isinstance(value, tuple):
        for one in value:
            change(one, seen)
    elif isinstance(value, set):
        value.add(-1)
    elif isinstance(value, np.ndarray):
        value.fill(-1)
    elif isinstance(value, bytearray):
        value.extend(b"d")


def test_what_a_container_is_made_with():
    made = cpu_state([deque([1], maxlen=2), defaultdict(list), time.gmtime(0)])
    assert made[0].maxlen == 2
    assert made[1]["new"] == []
    assert made[2].tm_zone == time.gmtime(0).tm_zone, "which is none of its nine items"


def test_the_metadata_of_a_module():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    state = model.state_dict()
    made = cpu_state(state)
    assert made._metadata == state._metadata
    assert made._metadata is not state._metadata
    assert made._metadata["0"] is not state._metadata["0"]
    same(state, made)


def test_an_attribute_with_the_name_of_its_classs():
    words = Words()
    words.default = "other"
    assert vars(cpu_state(words)) == {"default": "other"}
    assert vars(cpu_state(Words())) == {}


def test_the_methods_of_a_subclass_are_not_asked():
    frozen = Refusing(a=torch.ones(2))
    made = cpu_state(frozen)
    assert [*dict.keys(made)] == ["a"]
    assert torch.equal(dict.__getitem__(made, "a"), torch.ones(2))
    assert [*list.__iter__(cpu_state(Reversed([1, 2])))] == [1, 2]


def test_a_class_that_copies_itself_does():
    class Itself(dict):
        def __deepcopy__(self, memo):
            made = Itself(copied=copy.deepcopy(self["x"], memo))
            return made

    x = torch.zeros(2)
    made = cpu_state([x, Itself(x=x)])
    assert list(made[1]) == ["copied"]
    assert made[1]["copied"] is made[0]


def test_keys_are_copied_too():
    parameter = torch.nn.Parameter(torch.ones(2))
    made = cpu_state({"state": {parameter: {"step": 1}}, "parameters": [parameter]})
    (key,) = made["state"]
    assert key is made["parameters"][0]
    assert key is not parameter


def test_cycles():
    holder = {}
    inner = [holder]
    chain = (inner, "x")
    inner.append(chain)
    holder["chain"] = chain
    made = cpu_state(holder)
    assert made is not holder
    assert made["chain"][0][0] is made
    assert made["chain"][0][1] is made["chain"]
    made = cpu_state(chain)
    assert made[0][1] is made
    assert made[0] is not inner
    owned = torch.nn.Parameter(torch.zeros(1))
    owned.owner = {"me": owned}
    made = cpu_state(owned)
    assert made.owner["me"] is made
    round_about = Own(None)
    round_about.value = [round_about]
    made = cpu_state([round_about])
    assert made[0].value[0] is made[0]


def test_what_stands_at_several_places_is_one_thing_again():
    x, inner, own = torch.ones(2), [1], Own(torch.zeros(1))
    made = cpu_state({"a": x, "b": (x, inner), "c": OrderedDict(d=inner), "own": [own, own, own.value], "in own": Own(x)})
    assert made["a"] is made["b"][0]
    assert made["b"][1] is made["c"]["d"]
    assert made["own"][0] is made["own"][1]
    assert made["own"][0].value is made["own"][2]
    assert made["in own"].value is made["a"]


def test_the_same_again_is_another_copy():
    x = [torch.ones(2)]
    assert cpu_state(x)[0].data_ptr() != cpu_state(x)[0].data_ptr()


def test_functions_classes_and_modules_in_objects():
    def function():
        pass

    assert cpu_state([function, Own, torch.float16]) == [function, Own, torch.float16]


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(TypeError, match="pickle"):
        cpu_state({"a": [iter_of_its_own()]})


def iter_of_its_own():
    yield 1


def test_nothing_is_drawn():
    before = random.getstate(), torch.default_generator.get_state()
    cpu_state(containers())
    assert random.getstate() == before[0]
    assert torch.equal(torch.default_generator.get_state(), before[1])


def test_generators_go_on_alike_and_apart():
    made = cpu_state(ours := [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)])
    expected = ours[0].random(), ours[1].random(), torch.rand((), generator=ours[2]).item()
    assert (made[0].random(), made[1].random(), torch.rand((), generator=made[2]).item()) == expected


# Tensors

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)], ids=str)
def test_dtypes_and_shapes(dtype, shape):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    value = raw.view(dtype).view(shape)
    made = cpu_state(value)
    assert (made.dtype, made.shape, made.stride()) == (dtype, value.shape, value.stride())
    assert bits(made) == bits(value), "NaNs with their payloads, too"
    assert not value.numel() or made.data_ptr() != value.data_ptr()


def test_views_keep_their_strides_and_what_they_share():
    base = torch.arange(24.0).view(4, 6)
    views = {
        "turned": base.T,
        "offset": base[1:, 2::2],
        "expanded": base[0].expand(3, 6),
        "one": base[2, 3],
        "as bytes": base.view(torch.uint8),
        "overlapping": base.as_strided((3, 3), (1, 1), 2),
        "empty": base[2:2],
    }
    made = cpu_state({"views": views, "base": base})
    for name, view in views.items():
        other = made["views"][name]
        assert (other.stride(), other.storage_offset()) == (view.stride(), view.storage_offset())
        assert bits(other) == bits(view)
        assert other.untyped_storage().data_ptr() == made["base"].untyped_storage().data_ptr()
    made["base"].fill_(-1)
    assert float(made["views"]["one"]) == -1
    assert float(views["one"]) == 15


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("around", [Own, Record, lambda x: {"set": Own((x,))}], ids=["object", "record", "deeper"])
def test_memory_shared_with_a_tensor_in_an_object(order, around):
    x = torch.arange(4.0)
    values = [around(x[2:]), x]
    made = cpu_state(values[:: 1 - 2 * order])[:: 1 - 2 * order]
    made[1].fill_(-1)
    inner = made[0]["set"].value[0] if isinstance(made[0], dict) else next(iter(vars(made[0]).values()))
    assert inner.tolist() == [-1, -1]
    assert x.tolist() == [0, 1, 2, 3]


def test_a_storage_itself():
    x = torch.zeros(2, dtype=torch.uint8)
    made = cpu_state([x.untyped_storage(), x])
    made[1].fill_(1)
    assert made[0].tolist() == [1, 1]
    assert x.untyped_storage().tolist() == [0, 0]


def test_tied_weights():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    state = cpu_state({"one": first.state_dict(), "other": second.state_dict()})
    assert state["one"]["weight"].data_ptr() == state["other"]["weight"].data_ptr()
    assert state["one"]["bias"].data_ptr() != state["other"]["bias"].data_ptr()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameters_and_buffers(requires_grad):
    parameter = torch.nn.Parameter(torch.ones(2, 2), requires_grad=requires_grad)
    parameter.rank, parameter.moments = 3, [torch.zeros(2)]
    made = cpu_state({"p": parameter})["p"]
    assert type(made) is torch.nn.Parameter
    assert made.requires_grad is requires_grad
    assert made.rank == 3
    assert made.moments[0].data_ptr() != parameter.moments[0].data_ptr()
    buffer = torch.nn.Buffer(torch.ones(2), persistent=False)
    made = cpu_state(buffer)
    assert isinstance(made, torch.nn.Buffer)
    assert made.persistent is False


def test_no_graph_and_no_gradient():
    weight = torch.ones(2, requires_grad=True)
    loss = weight * 2
    loss.sum().backward()
    made = cpu_state({"weight": weight, "loss": loss, "view": loss[:1], "in": deque([loss]), "max": torch.max(loss, 0)})
    for one in (made["weight"], made["loss"], made["view"], made["in"][0], made["max"].values):
        assert one.is_leaf
        assert one.requires_grad
        assert one.grad is None
    assert not made["max"].indices.requires_grad
    assert loss.grad_fn is not None
    assert weight.grad.tolist() == [2, 2]
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [5, 5]


def test_a_graph_is_let_go_of():
    freed = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = Guard()
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Guard:
        def __del__(self):
            freed.append(True)

    out = Node.apply(torch.ones(1, requires_grad=True))
    made = cpu_state(out)
    assert not freed
    del out
    assert freed
    assert made.tolist() == [2]


def test_a_tensor_in_an_object_may_have_a_graph():
    computed = torch.ones(1, requires_grad=True) * 2
    record, again = cpu_state([Record(computed), computed])
    (found,) = [one for one in vars(record).values() if isinstance(one, torch.Tensor)]
    assert found is again
    assert found.is_leaf
    assert found.tolist() == [2]
    with pytest.raises(RuntimeError, match="leaves"):
        cpu_state(Record({"deeper": computed}))


@pytest.mark.parametrize("kind", [Quiet, Loud])
def test_subclasses(kind):
    value = torch.arange(3.0).as_subclass(kind)
    value.__dict__["note"] = ["a"]
    made = cpu_state([value])[0]
    assert type(made) is kind
    assert made.__dict__ == {"note": ["a"]}
    assert made.__dict__["note"] is not value.__dict__["note"]
    plain = torch.Tensor._make_subclass(torch.Tensor, made)
    plain.fill_(-1)
    assert torch.Tensor._make_subclass(torch.Tensor, value).tolist() == [0, 1, 2]


@pytest.mark.parametrize("as_parameter", [False, True])
def test_a_subclass_that_wraps_others(as_parameter):
    value = Wrapped(torch.tensor([1, 2], dtype=torch.int8), torch.tensor(0.5))
    value.note = "mine"
    if as_parameter:
        value = torch.nn.Parameter(value, requires_grad=False)
    made = cpu_state({"w": value})["w"]
    assert type(made) is Wrapped
    assert isinstance(made, torch.nn.Parameter) is as_parameter
    assert (made.inner.tolist(), made.scale.item()) == ([1, 2], 0.5)
    assert getattr(made, "note", None) == getattr(value, "note", None)
    made.inner.fill_(0)
    assert value.inner.tolist() == [1, 2]


def test_a_subclass_that_sees_every_operation():
    value = torch.Tensor._make_subclass(Watched, torch.arange(2.0))
    made = cpu_state(value)
    assert type(made) is Watched
    assert torch.equal(made + 0, torch.arange(2.0))
    assert made.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("part", ["conj", "neg", "both"])
def test_lazy_views_of_complex_numbers(part):
    x = torch.tensor([1 + 2j, 3 - 4j])
    view = {"conj": x.conj(), "neg": torch._neg_view(x), "both": torch._neg_view(x).conj()}[part]
    made = cpu_state({"x": x, "view": view})
    assert (made["view"].is_conj(), made["view"].is_neg()) == (view.is_conj(), view.is_neg())
    assert torch.equal(made["view"], view)
    made["x"].zero_()
    assert made["view"].abs().sum() == 0
    assert x.tolist() == [1 + 2j, 3 - 4j]
    imaginary = x.conj().imag
    assert torch.equal(cpu_state(imaginary), imaginary)
    leaf = torch.tensor([1j], requires_grad=True)
    made = cpu_state(leaf.conj())
    assert made.is_leaf
    assert made.requires_grad


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_sparse(layout):
    value = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(layout=layout)
    made = cpu_state(value)
    assert made.layout is layout
    assert torch.equal(made.to_dense(), value.to_dense())
    made.values().fill_(-1)
    assert value.to_dense().tolist() == [[0, 2], [3, 0]]
    made = cpu_state(torch.nn.Parameter(torch.eye(2).to_sparse()))
    assert type(made) is torch.nn.Parameter
    assert made.requires_grad
    assert made.is_leaf


def test_uncoalesced_stays_so():
    value = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True)
    made = cpu_state(value)
    assert not made.is_coalesced()
    assert made._values().tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized():
    value = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.qint8)
    made = cpu_state(value)
    assert (made.q_scale(), made.q_zero_point(), made.int_repr().tolist()) == (0.5, 1, [1, 3, 5])
    assert made.data_ptr() != value.data_ptr()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(layout):
    value = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=layout)
    made = cpu_state(value)
    assert [one.tolist() for one in made.unbind()] == [[1, 1], [0, 0, 0]]
    made.unbind()[0].fill_(-1)
    assert value.unbind()[0].tolist() == [1, 1]


def test_tensors_without_memory():
    meta = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    made = cpu_state([meta, meta * 2])
    assert type(made[0]) is torch.nn.Parameter
    assert [one.device.type for one in made] == ["meta", "meta"]
    assert [tuple(one.shape) for one in made] == [(2, 3), (2, 3)]
    assert made[1].is_leaf
    lazy = cpu_state(torch.nn.LazyLinear(3).state_dict(keep_vars=True))
    assert type(lazy["weight"]) is UninitializedParameter
    assert cpu_state(torch._efficientzerotensor(2)).tolist() == [0, 0]


def test_inference_tensors():
    with torch.inference_mode():
        value = torch.ones(2)
    made = cpu_state(value)
    assert not made.is_inference()
    assert made.tolist() == [1, 1]


def test_in_any_mode():
    value = {"x": torch.nn.Parameter(torch.ones(2)), "y": torch.zeros(3, dtype=torch.float64)[1:]}
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with mode:
            made = cpu_state(value)
        assert [one.device.type for one in made.values()] == ["cpu", "cpu"]
        assert made["x"].tolist() == [1, 1]
        assert made["x"].requires_grad


def test_nothing_of_the_input_is_changed():
    state = containers()
    weight = torch.nn.Parameter(torch.ones(2))
    state["graph"] = weight * 2
    state["weight"] = weight
    versions = state["graph"]._version, weight._version
    pointers = state["graph"].data_ptr(), weight.data_ptr()
    cpu_state(state)
    assert (state["graph"]._version, weight._version) == versions
    assert (state["graph"].data_ptr(), weight.data_ptr()) == pointers
    assert not state["graph"].is_leaf
    for name, expected in containers().items():
        same(state[name], expected)


def test_a_training_is_there_and_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    made = cpu_state(whole)
    same(whole, made)
    before = copy.deepcopy(made)
    torch.save(made, tmp_path / "file")
    optimizer.step()
    same(before, made)
    found = torch.load(tmp_path / "file", weights_only=True)
    same(before, found)
    assert found["model"]._metadata == whole["model"]._metadata


@pytest.mark.parametrize("kind", ["views", "conj", "sparse", "parameter", "requires_grad", "ordered"])
def test_it_is_saved_and_loaded_as_weights(tmp_path, kind):
    x = torch.arange(4.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.rank = 3
    value = {
        "views": [x, x[1:3], x.view(2, 2).T],
        "conj": [torch.tensor([1j]).conj()],
        "sparse": [torch.eye(2).to_sparse()],
        "parameter": [parameter],
        "requires_grad": [torch.ones(1, requires_grad=True) * 2],
        "ordered": [OrderedDict(b=1, a=2), Counter("ab")],
    }[kind]
    torch.save(cpu_state(value), tmp_path / "file")
    with torch.serialization.safe_globals([]):
        found = torch.load(tmp_path / "file", weights_only=True)
    for one, other in zip(value, found, strict=True):
        same(one, other)
    if kind == "views":
        found[0].fill_(-1)
        assert found[1].tolist() == [-1, -1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_a_cuda_device():
    base = torch.arange(6.0, device="cuda").view(2, 3)
    stream = torch.cuda.Stream()
    parameter = torch.nn.Parameter(base)
    value = {"p": parameter, "turned": base.T, "graph": parameter * 2, "pinned": torch.ones(2).pin_memory()}
    with torch.cuda.stream(stream):
        made = cpu_state(value)
    assert all(one.device.type == "cpu" for one in made.values())
    assert made["p"].data_ptr() == made["turned"].data_ptr()
    assert made["turned"].stride() == base.T.stride()
    assert type(made["p"]) is torch.nn.Parameter
    assert made["graph"].tolist() == [[0, 2, 4], [6, 8, 10]]
    base.fill_(-1)
    assert made["p"].tolist() == [[0, 1, 2], [3, 4, 5]]
