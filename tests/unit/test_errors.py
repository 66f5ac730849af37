"""The error family: fixed codes, messages and behaviour in other people's hands."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

import stateful_pipes
from stateful_pipes import errors
from stateful_pipes.errors import Difference, StatefulPipesError, StateMismatchError, TrainingPausedError, get_error_message

FAMILY = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]

CODES = {
    "StatefulPipesError": 300,
    "StateVersionError": 301,
    "StateMismatchError": 302,
    "StateEncodingError": 303,
    "CheckpointFileError": 304,
    "ResumableModeRequiredError": 305,
    "NodeAttachedError": 306,
    "IteratorInvalidError": 307,
    "LoaderFailedError": 308,
    "WorkerDiedError": 309,
    "WorkerTimeoutError": 310,
    "GlobalGeneratorThreadError": 311,
    "ConcurrentUseError": 312,
    "TrainingResumeCheckpointFormatError": 321,
    "TrainingStepIncompleteError": 322,
    "TrainingResumeIncompleteError": 323,
    "TrainingPausedError": 324,
    "TrainingResumeConfigMismatchError": 325,
    "TrainingResumeDeviceMismatchError": 326,
    "TrainingResumeAMPMismatchError": 327,
    "TrainingResumeObjectsMismatchError": 328,
    "TrainingResumeVersionMismatchError": 329,
    "ResumableBatchConfigurationError": 338,
    "ResumableSamplerGeneratorError": 351,
}

each = pytest.mark.parametrize("error", FAMILY, ids=lambda error: error.__name__)


def raised(error, *args, **kwargs):
    with pytest.raises(error) as caught:
        raise error(*args, **kwargs)
    return caught.value


def test_codes_never_change():
    assert {error.__name__: error.code for error in FAMILY} == CODES


def test_codes_and_messages_are_unique():
    assert len({error.code for error in FAMILY}) == len({error.message for error in FAMILY}) == len(FAMILY)


def test_only_direct_subclasses_and_no_error_elsewhere():
    assert all(error.__bases__ == (StatefulPipesError,) for error in FAMILY if error is not StatefulPipesError)
    assert StatefulPipesError.__bases__ == (Exception,)
    package = Path(stateful_pipes.__file__).parent
    bases = {
        base.id
        for path in package.rglob("*.py")
        if path.name != "errors.py"
        for defined in ast.walk(ast.parse(path.read_text()))
        if isinstance(defined, ast.ClassDef)
        for base in defined.bases
        if isinstance(base, ast.Name)
    }
    assert bases.isdisjoint(CODES)


@each
def test_code_and_message_are_the_class_s_own(error):
    assert type(error.__dict__["code"]) is int
    assert type(error.__dict__["message"]) is str
    assert error.__dict__["message"]


@each
def test_raised_without_arguments(error):
    with pytest.raises(error) as caught:
        raise error  # the class itself
    assert str(caught.value) == error.message
    assert caught.value.args == ()
    details = caught.value.__dict__
    assert (details["detail"], details["node"], details["remedy"]) == ("", "", "")
    assert details["expected"] is details["found"] is None


@each
def test_the_detail_follows_the_message(error):
    assert str(error("what happened")) == f"{error.message}: what happened"


def test_every_detail_is_an_attribute_and_is_shown():
    error = StatefulPipesError("what", node="mapper", expected=3, found="4", remedy="Do this")
    assert (error.detail, error.node, error.expected, error.found, error.remedy) == ("what", "mapper", 3, "4", "Do this")
    assert str(error) == f"{error.message}: what [node mapper]; expected 3, found '4'. Do this"


def test_details_are_shown_each_alone():
    head = StatefulPipesError.message
    assert str(StatefulPipesError(node="mapper")) == f"{head} [node mapper]"
    assert str(StatefulPipesError(found=0)) == f"{head}; found 0"
    assert str(StatefulPipesError(expected=False)) == f"{head}; expected False"
    assert str(StatefulPipesError(remedy="Do this")) == f"{head}. Do this"


@each
@pytest.mark.parametrize("copied", [copy.copy, *(lambda e, n=n: pickle.loads(pickle.dumps(e, n)) for n in range(2, 6))])
def test_pickling_keeps_everything(error, copied):
    given = {"node": "mapper", "expected": [1, 2], "found": {"a": 1}, "remedy": "Do this"}
    given["differences"] = (Difference("mapper", "rng", "''", "'torch'", "set it"),)
    one = error("what", **given)
    one.add_note("in a file")
    other = copied(one)
    assert type(other) is error
    assert other.__dict__ == one.__dict__
    assert other.args == one.args
    assert str(other) == str(one)


@each
def test_get_error_message(error):
    assert get_error_message(error.code) == error.message


@pytest.mark.parametrize("code", [0, 299, 313, -324, 999])
def test_get_error_message_of_an_unknown_code(code):
    with pytest.raises(ValueError, match=str(code)):
        get_error_message(code)


def test_api_code():
    assert TrainingPausedError.api_code(3) == -300324
    assert TrainingPausedError().api_code(3) == -300324
    assert StatefulPipesError.api_code(0) == -300


@each
def test_torch_raises_it_again(error):
    try:
        raise error("in the worker")
    except StatefulPipesError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(error, match="in DataLoader worker process 0") as caught:
        wrapped.reraise()
    assert "in the worker" in str(caught.value)
    assert caught.value.code == error.code


def test_a_mismatch_lists_every_difference_in_order():
    differences = (
        Difference("mapper", "rng", "''", "'torch'", "set it"),
        Difference("batcher", "", "missing", "SeededBatcher", "build it"),
        Difference("", "format", "missing", "'x'", "damaged"),
    )
    lines = str(raised(StateMismatchError, "why", differences=differences)).splitlines()
    assert lines == [
        "The state does not fit this pipeline: why",
        "  mapper.rng: saved '', here 'torch' (set it)",
        "  batcher: saved missing, here SeededBatcher (build it)",
        "  format: saved missing, here 'x' (damaged)",
    ]


def test_details_are_keywords():
    parameters = list(inspect.signature(StatefulPipesError).parameters.values())
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == ["detail"]
