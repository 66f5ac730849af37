"""What a DALI pipeline is, read from its own serialization: hashes of its operators, and what cannot be resumed in it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stateful_pipes.errors import Difference, ResumableModeRequiredError

__all__ = ["Graph", "check_resumable"]

# Fields of DALI's PipelineDef, its OpDef, InputOutput and Argument.
_BATCH_SIZE, _OPERATOR, _SEED, _ENABLE_CHECKPOINTING = 2, 5, 9, 10
_SCHEMA, _INPUT, _OUTPUT, _ARGUMENT, _INSTANCE = 1, 2, 3, 4, 5
_EDGE, _DEVICE, _IS_ARGUMENT, _ARGUMENT_INPUT = 1, 2, 3, 4
_ARGUMENT_NAME, _TEXT, _FLAG = 1, 5, 6
# Where and how fast a pipeline runs, which may be another after a resume.
_NUM_THREADS, _DEVICE_ID, _EXECUTOR, _EXECUTOR_FLAGS, _QUEUE_CPU, _QUEUE_GPU, _BYTES_HINT = 1, 8, 11, 12, 13, 14, 15
_PLACE = frozenset({_NUM_THREADS, _DEVICE_ID, _EXECUTOR, _EXECUTOR_FLAGS, _QUEUE_CPU, _QUEUE_GPU, _BYTES_HINT})

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_MOST_TOLD = 64
"""Pipelines of more operators are told by one hash, so that no state grows beyond some kilobytes."""


class _Operator(NamedTuple):
    """An operator's entry in the state: a hash of all of it, and a check of each argument and input by its name."""

    digest: str
    checks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.digest} {''.join(self.checks.values())}".rstrip()


class Graph:
    """What `Pipeline.serialize()` tells: operators with their arguments and inputs, outputs, batch size and seed.

    Left out are the numbers of threads, queue depths, the executor and the device; the lines of source code in which operators
    were made, which DALI writes down beside their arguments; and the order of keyword arguments.
    """

    def __init__(self, serialized: bytes) -> None:
        fields = list(_fields(serialized))
        plain = {number: value for number, value in fields if number in (_BATCH_SIZE, _SEED)}
        self._batch_size, self._seed = plain.get(_BATCH_SIZE, -1), plain.get(_SEED, -1)
        operators = [list(_fields(value)) for number, value in fields if number == _OPERATOR]
        labels = _labels(operators)
        edges = {
            dict(_fields(value))[_EDGE]: f"{label}[{number}]".encode()
            for label, operator in zip(labels, operators, strict=True)
            for number, value in enumerate(value for part, value in operator if part == _OUTPUT)
        }
        self._operators = {label: _told(one, edges) for label, one in zip(labels, operators, strict=True)}
        exact = [
            (sorted(_parts(one, {}).items()), [(part, value) for part, value in one if part not in (_INPUT, _ARGUMENT)])
            for one in operators
        ]
        rest = [field for field in fields if field[0] not in {_OPERATOR, *_PLACE}]
        self._digest = _hash((exact, rest), 16)

    def entries(self) -> dict[str, Any]:
        """What the state has of it; `seed` is -1 where none was given."""
        told = self._operators if len(self._operators) <= _MOST_TOLD else {}
        return {
            "pipeline": self._digest,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "operators": [f"{label}: {operator}" for label, operator in told.items()],
        }

    def differences(self, state: Mapping[str, Any]) -> tuple[Difference, ...]:
        """In what the pipeline of a state is another; empty if in nothing."""
        here = self.entries()
        if all(state.get(name) == value for name, value in here.items()):
            return ()
        found = [
            Difference("", name, state.get(name, "missing"), here[name], f"build the pipeline with the {name} that it had")
            for name in ("batch_size", "seed")
            if state.get(name, "missing") != here[name]
        ]
        saved = state.get("operators")
        if isinstance(saved, list) and saved and here["operators"]:
            found += self._other_operators(dict(str(one).rpartition(": ")[::2] for one in saved))
        if not found:
            what = "its outputs are others, or its operators without a name= are numbered otherwise"
            if not here["operators"]:
                what = f"one of its operators, or an argument, is another: {len(self._operators)} are too many to tell which"
            found.append(Difference("", "pipeline", state.get("pipeline", "missing"), self._digest, what))
        return tuple(found)

    def _other_operators(self, saved: Mapping[str, str]) -> Iterator[Difference]:
        for label in {**saved, **self._operators}:
            old, new = saved.get(label, ""), self._operators.get(label)
            if new is None or not old:
                remedy = "operators were added, removed or renamed"
                yield Difference("", f"operator {label}", old[:8] or "missing", new.digest if new else "missing", remedy)
            elif str(new) != old:
                checks = old[9:]
                known = {checks[at : at + 4] for at in range(0, len(checks), 4)}
                others = [name for name, check in new.checks.items() if check not in known]
                remedy = f"not as saved: {', '.join(others)}" if others else "an argument that it had, or its kind, is another"
                yield Difference("", f"operator {label}", old[:8], new.digest, remedy)


def check_resumable(serialized: bytes, pipeline: Any) -> None:
    """Refuses a pipeline whose checkpoints would not lead back to where it stood.

    Raises:
        ResumableModeRequiredError: checkpointing is off, or something is fed to it that DALI does not capture.
    """
    fields = list(_fields(serialized))
    if (_ENABLE_CHECKPOINTING, 1) not in fields:
        raise ResumableModeRequiredError(
            "the pipeline keeps no checkpoints",
            expected="enable_checkpointing=True",
            found="enable_checkpointing=False",
            remedy="Let the factory build with enable_checkpointing=True and the checkpoint that it is given",
        )
    operators = [dict(_fields(value)) for number, value in fields if number == _OPERATOR]
    captured = {
        instance.name for group in pipeline._input_callbacks or () if group.source_desc.has_inputs for instance in group.instances
    }
    for operator in operators:
        name = operator.get(_INSTANCE, b"").decode()
        if operator[_SCHEMA] == b"ExternalSource" and name not in captured:
            raise ResumableModeRequiredError(
                f"DALI does not capture what is fed to its external_source {name!r}",
                remedy="Give it a callable of one argument (SampleInfo, BatchInfo or the batch's index) as its source, which "
                "is no generator, or read with one of DALI's readers",
            )


def _labels(operators: list[list[tuple[int, Any]]]) -> list[str]:
    """What each operator is called: by its `name=`, else by its function, since DALI's own numbers shift when one is added."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    for operator in operators:
        told = (b"preserve_name", b"_module", b"_display_name")
        given = [(_name_of(value), value) for part, value in operator if part == _ARGUMENT]
        arguments = {name: dict(_fields(value)) for name, value in given if name in told}
        label: str = dict(operator)[_INSTANCE].decode()
        if not arguments.get(b"preserve_name", {}).get(_FLAG):
            names = [arguments[name][_TEXT].decode() for name in (b"_module", b"_display_name") if name in arguments]
            label = ".".join(names).removeprefix("nvidia.dali.") or label
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} {seen[label]}")
    return found


def _told(operator: list[tuple[int, Any]], edges: Mapping[bytes, bytes]) -> _Operator:
    parts = _parts(operator, edges)
    told = [name for name in sorted(parts) if not name.startswith("_") and name != "preserve_name"]
    checks = {name: _hash(name, 2) + _hash(parts[name], 2) for name in told}
    return _Operator(_hash((dict(operator)[_SCHEMA], sorted(parts.items())), 8), checks)


def _parts(operator: list[tuple[int, Any]], edges: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Arguments and inputs by name; an input's value is where it comes from, by the names that `edges` gives."""
    found: dict[str, Any] = {}
    inputs = 0
    for part, value in operator:
        if part == _ARGUMENT:
            name = _name_of(value)
            if not _is_place(name):
                found[name.decode()] = value
        elif part == _INPUT:
            inner = dict(_fields(value))
            label = inner[_ARGUMENT_INPUT].decode() if inner.get(_IS_ARGUMENT) else f"input {inputs}"
            inputs += not inner.get(_IS_ARGUMENT)
            found[label] = (edges.get(inner[_EDGE], inner[_EDGE]), inner.get(_DEVICE))
    return found


def _name_of(argument: bytes) -> Any:
    return next(value for number, value in _fields(argument) if number == _ARGUMENT_NAME)


def _hash(value: object, digits: int) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:digits]


def _is_place(argument: bytes) -> bool:
    """Whether an argument says where an operator was made, how far it reads ahead, or that it shares memory (if parallel)."""
    return argument.startswith(b"_origin_stack") or argument in (b"prefetch_queue_depth", b"no_copy")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message, in order: (number, int or bytes)."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind, 0)
            if kind == _BYTES:
                size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
        else:
            raise ValueError(f"not a serialized DALI pipeline: a field of wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
