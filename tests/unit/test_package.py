"""The package as a whole: its public names, its imports, its files, and that importing it changes nothing."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import stateful_pipes
from stateful_pipes import errors

ROOT = Path(stateful_pipes.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

PUBLIC = [
    "BalancedBatchSampler",
    "BatchInfo",
    "Checkpoint",
    "CheckpointManager",
    "ClassBalancedBatchSampler",
    "ExternalSource",
    "Field",
    "FileReader",
    "IndexFilter",
    "InfiniteRandomSampler",
    "IterableDatasetReader",
    "LEFT_OUT",
    "LastBatchPolicy",
    "LoaderState",
    "Mark",
    "Mixer",
    "MultiPipelineLoader",
    "MultiPipelineState",
    "NaiveBatchSampler",
    "Node",
    "Order",
    "OrderSampler",
    "Position",
    "ProcessPrefetcher",
    "RandomSampler",
    "SampleInfo",
    "SamplerNode",
    "SamplerState",
    "SeededBatcher",
    "SeededFlatMapper",
    "SeededMapper",
    "SequentialSampler",
    "StatefulDataLoader",
    "StatefulPipesError",
    "Stats",
    "Ticket",
    "WeightedRandomSampler",
    "as_dataset",
    "as_node",
    "build_batch_sampler",
    "get_error_message",
    "positions_of",
]

# The house: each room imports only from those before it; rooms of one storey may know each other in the order given.
STOREYS = [
    ["caught", "errors", "integers", "naming", "wording"],
    ["fields", "encoding", "rng"],
    ["state"],
    ["permutation"],
    ["samplers"],
    ["skips", "ticket"],
    ["pulled"],
    ["stream"],
    ["contract"],
    ["pipeline_state"],
    ["node"],
    ["nodes"],
    ["prefetch"],
    ["progress"],
    ["drawing"],
    ["checkpoint", "sealed_file"],
    ["checkpoint_manager"],
    ["agreement"],
    ["door"],
    ["stats"],
    ["view"],
    ["iterator"],
    ["elsewhere"],
    ["moves"],
    ["loader"],
    ["alike_pipelines", "joint_step", "multi_view"],
    ["multi_pipeline", "dataset"],
    ["integrations"],
    ["training"],
    ["testing"],
    ["cli"],
]


@functools.cache
def walked(path):
    return list(ast.walk(ast.parse(path.read_text())))


def module_of(path):
    return ".".join(("stateful_pipes", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports_of(path):
    """The modules of ours that a file imports, wherever in it."""
    for one in walked(path):
        if isinstance(one, ast.ImportFrom):
            assert one.level == 0, f"{path} imports relatively"
            if one.module and one.module.split(".")[0] == "stateful_pipes":
                yield one.module
        elif isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names if alias.name.split(".")[0] == "stateful_pipes")


def storey_of(module):
    room = module.split(".")[1]
    return next(number for number, rooms in enumerate(STOREYS) if room in rooms)


def modules():
    found = [stateful_pipes]
    for one in pkgutil.walk_packages(stateful_pipes.__path__, "stateful_pipes."):
        if one.name.endswith("__main__"):
            continue
        try:
            found.append(importlib.import_module(one.name))
        except ImportError:  # the library that it integrates may not be there
            if not one.name.startswith("stateful_pipes.integrations."):
                raise
    return found


# The surface.


def test_the_public_names_are_written_down():
    assert sorted(stateful_pipes.__all__) == sorted(PUBLIC)
    assert len(set(PUBLIC)) == len(PUBLIC)


def test_every_public_name_is_there_and_nothing_else_is():
    present = {
        name
        for name, value in vars(stateful_pipes).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert present - {"LIBRARY_VERSION", "annotations"} == set(PUBLIC)


def test_every_module_has_what_its_all_names():
    for module in modules():
        assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == [], module.__name__


def test_errors_and_samplers_are_public_modules():
    assert errors.__all__[-1] == "get_error_message"
    assert set(stateful_pipes.samplers.__all__) > {"InfiniteRandomSampler", "RandomSampler", "SequentialSampler"}


def test_it_is_typed_and_has_a_version():
    assert (ROOT / "py.typed").exists()
    assert stateful_pipes.__version__ == stateful_pipes.state.LIBRARY_VERSION


def constructors_and_functions():
    for module in modules():
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            if inspect.isclass(value):
                yield f"{module.__name__}.{name}", value.__init__
                for method, function in vars(value).items():
                    if not method.startswith("_") and inspect.isfunction(function):
                        yield f"{module.__name__}.{name}.{method}", function
            elif inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value


CALLABLES = dict(constructors_and_functions())


@pytest.mark.parametrize("name", CALLABLES)
def test_type_hints_can_be_had(name):
    function = CALLABLES[name]
    hints = typing.get_type_hints(function)
    if function is object.__init__ or not name.startswith("stateful_pipes"):
        return
    if getattr(function, "__module__", "").startswith("stateful_pipes"):
        parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        assert set(parameters) <= set(hints), "a parameter without a type"


def test_typed_dicts_have_their_fields():
    assert set(typing.get_type_hints(stateful_pipes.LoaderState)) == {
        "format",
        "version",
        "library",
        "versions",
        "epoch",
        "batch",
        "nodes",
    }
    assert set(typing.get_type_hints(stateful_pipes.SamplerState)) >= {"type", "length", "epoch", "consumed", "seed"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(stateful_pipes, name))


NODES = ["SamplerNode", "SeededMapper", "SeededBatcher", "ProcessPrefetcher"]


@pytest.mark.parametrize("node", [getattr(stateful_pipes, name) for name in NODES])
def test_nodes_take_their_source_first_and_options_by_keyword(node):
    parameters = inspect.signature(node).parameters
    assert next(iter(parameters)) in ("source", "sampler")
    optional = [p for p in parameters.values() if p.default is not p.empty]
    assert all(p.kind is p.KEYWORD_ONLY for p in optional)
    assert parameters["name"].default is None


# The house.


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short(path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    module = module_of(path)
    if module in ("stateful_pipes", "stateful_pipes.__main__"):
        return  # the roof
    for imported in imports_of(path):
        if imported == "stateful_pipes":
            assert module.split(".")[1] == "cli", f"{module} imports from the roof"
            continue
        if imported.split(".")[1] == module.split(".")[1]:
            continue  # within one room; cycles there are found below
        assert storey_of(imported) < storey_of(module), f"{module} imports {imported}"


def test_there_is_no_cycle():
    graph = {module_of(path): set(imports_of(path)) for path in FILES}
    done: set[str] = set()

    def visit(module, above):
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                visit(imported, [*above, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_no_import_hides_in_a_function():
    for path in FILES:
        for one in walked(path):
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and "cli" not in path.parts:
                hidden = [ast.unparse(inner) for inner in ast.walk(one) if isinstance(inner, (ast.Import, ast.ImportFrom))]
                assert not hidden, f"{path}: {hidden}"


def test_the_house_is_drawn_in_this_order():
    rooms = {room for storey in STOREYS for room in storey}
    lines = [line for line in stateful_pipes.__doc__.splitlines() if line.startswith("    ")]
    drawn = [word.strip("/") for line in lines for word in line.split("  ") if word.strip("/") in rooms]
    storeys = [storey_of(f"stateful_pipes.{room}") for room in drawn]
    assert storeys == sorted(storeys)
    assert set(drawn) == rooms


def test_every_room_is_in_the_house():
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert rooms == {room for storey in STOREYS for room in storey}


def test_an_order_knows_no_node_and_a_node_no_process():
    for path in FILES:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        rooms = {imported.split(".")[1] for imported in imports_of(path) if "." in imported}
        if room == "samplers":
            assert rooms.isdisjoint({"node", "nodes", "stream", "prefetch", "loader"})
        if room in ("node", "nodes", "stream"):
            assert rooms.isdisjoint({"prefetch", "loader", "view", "door", "checkpoint"})
        if path.name == "worker.py":
            assert rooms <= {"caught", "errors", "prefetch", "rng", "skips", "ticket"}


def test_no_assert_for_what_a_user_gave():
    for path in FILES:
        asserts = [one.lineno for one in walked(path) if isinstance(one, ast.Assert)]
        assert not asserts or "cli" in path.parts, path


def test_only_the_command_line_the_integrations_and_the_strategies_need_an_extra():
    allowed = {"numpy", "stateful_pipes", "torch", "torchdata", *sys.stdlib_module_names}
    for path in FILES:
        if {"cli", "integrations"} & {*path.parts}:
            continue
        needs = {"hypothesis"} if path.name == "strategies.py" else set()  # whose import says which extra that is
        for one in walked(path):
            names = [alias.name for alias in one.names] if isinstance(one, ast.Import) else []
            names += [one.module or ""] if isinstance(one, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed | needs, path


# Importing changes nothing.

SNAPSHOT = """
import copyreg, json, random, sys, threading, warnings
import numpy as np, torch, torchdata.nodes, torch.distributed, torch.utils.data
from multiprocessing.reduction import ForkingPickler
import torch.utils.data._utils.collate as collate, torch.utils.data._utils.pin_memory, torch.utils.data._utils.worker
from torchdata.stateful_dataloader import StatefulDataLoader

def attributes(module):
    return sorted((name, id(value)) for name, value in vars(module).items() if name != "__builtins__")

def snapshot():
    name, keys, *rest = np.random.get_state()
    return {
        "modules": {m.__name__: attributes(m) for m in (
            torch.utils.data, torch.utils.data.dataloader, torch.utils.data.sampler, torch.utils.data.dataset, collate,
            torch.utils.data._utils.worker, torch.utils.data._utils.pin_memory, torch.multiprocessing, torchdata.nodes,
            torch.storage, copyreg,
        )},
        "classes": {c.__name__: attributes(c) for c in (
            torch.utils.data.DataLoader, torch.utils.data.Sampler, torchdata.nodes.BaseNode, StatefulDataLoader, torch.Tensor,
        )},
        "copyreg": sorted((str(k), id(v)) for k, v in copyreg.dispatch_table.items()),
        "reducers": sorted((str(k), id(v)) for k, v in ForkingPickler._extra_reducers.items()),
        "collate": sorted((str(k), id(v)) for k, v in collate.default_collate_fn_map.items()),
        "python": hash(random.getstate()),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "start": __import__("multiprocessing").get_start_method(allow_none=True),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "filters": [str(f) for f in warnings.filters],
        "hooks": [id(sys.excepthook), id(threading.excepthook)],
        "signals": [str(__import__("signal").getsignal(s)) for s in (2, 15, 17)],
    }

def changed(before):
    return [key for key, value in snapshot().items() if value != before[key]]

before = snapshot()
import stateful_pipes
by_the_import = changed(before)
before = snapshot()
torch.set_num_threads(1 + torch.get_num_threads() % 2)
copyreg.pickle(set, sorted)
torch.rand(1)
random.random()
print(json.dumps([by_the_import, changed(before)]))
"""


def in_a_new_process(code):
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_importing_imports_no_integration():
    assert in_a_new_process("import json, sys, stateful_pipes; print(json.dumps([m for m in sys.modules if 'dali' in m]))") == []


def test_importing_changes_nothing_in_torch():
    by_the_import, by_something_that_does = in_a_new_process(SNAPSHOT)
    assert by_the_import == []
    assert set(by_something_that_does) == {"copyreg", "threads", "torch", "python"}  # the check itself can fail
