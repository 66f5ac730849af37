"""One step at a time, and none where the trainer is paused or half restored."""

from __future__ import annotations

import copy
import functools
import pickle
import threading

import pytest
import torch

from stateful_pipes.errors import TrainingPausedError, TrainingResumeIncompleteError, TrainingStepIncompleteError
from stateful_pipes.training import TrainingResumeMixin, serialized_training, training_step
from stateful_pipes.training.gate import gate_of
from tests.unit.trainers import Planned, Trainer, look, paused, raising, run, trained

PATIENCE = 20  # seconds, after which a test has failed; no test that passes waits for time


class WatchedLock:
    """Tells when somebody has to wait for it."""

    def __init__(self, lock):
        self.lock, self.awaited = lock, threading.Event()

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            self.awaited.set()
            self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


METHODS = ["step", "add", "pause", "resume"]


@pytest.mark.parametrize("second", METHODS)
@pytest.mark.parametrize("first", METHODS)
def test_one_at_a_time_across_threads(tmp_path, first, second):
    paused(tmp_path / "old", 1)
    trainer = trained(1)
    gate = gate_of(trainer)
    gate._lock = WatchedLock(gate._lock)
    inside = threading.Event()
    log, waited, refused = [], [], []

    def on_reach(place):
        log.append(threading.current_thread().name)
        if threading.current_thread().name == "first" and not inside.is_set():
            inside.set()
            waited.append(gate._lock.awaited.wait(PATIENCE))

    trainer.on_reach = on_reach

    def call(method):
        try:
            getattr(trainer, method)(*{"pause": [tmp_path / "new"], "resume": [tmp_path / "old"]}.get(method, []))
        except TrainingPausedError:
            refused.append(threading.current_thread().name)

    threads = [threading.Thread(target=call, args=(one,), name=name) for name, one in (("first", first), ("second", second))]
    threads[0].start()
    assert inside.wait(PATIENCE)
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert waited == [True], "the second did not wait for the first"
    assert log == sorted(log), "they ran at the same time"
    assert refused == (["second"] if first == "pause" and second in ("step", "pause") else [])
    assert ("second" in log) is not bool(refused)


class Nested(TrainingResumeMixin):
    def __init__(self):
        self.log = []
        self._initialize_training_resume({}, version=1, device="cpu", amp=False)

    @training_step
    def outer(self, *calls):
        """Does what it is told, within the step."""
        for call in calls:
            call()
        return "outer"

    @training_step
    def inner(self):
        self.log.append("inner")

    @training_step
    def failing(self):
        raise Planned

    @serialized_training
    def both(self, left, *, right):
        """Documented."""
        self.log.append("both")
        return left, right


@pytest.fixture
def can_pause():
    """Whether a step counts as completed."""

    def ask(trainer):
        try:
            with gate_of(trainer).pausing():
                raise Planned
        except Planned:
            return True
        except TrainingStepIncompleteError:
            return False

    return ask


def test_decorated_methods_are_called_as_they_are():
    trainer = Nested()
    assert trainer.both(1, right=2) == (1, 2)
    assert trainer.outer() == "outer"
    assert (Nested.both.__name__, Nested.both.__doc__) == ("both", "Documented.")


def test_steps_and_serialized_methods_may_be_nested():
    trainer = Nested()
    trainer.outer(trainer.inner, lambda: trainer.both(1, right=2), lambda: trainer.outer(trainer.inner))
    assert trainer.log == ["inner", "both", "inner"]


def test_only_the_outermost_step_completes(can_pause):
    trainer = Nested()
    asked = []
    trainer.outer(trainer.inner, lambda: asked.append(can_pause(trainer)))
    assert asked == [False]
    assert can_pause(trainer)

    def fail():
        raise Planned

    with pytest.raises(Planned):
        trainer.outer(trainer.inner, fail)
    assert not can_pause(trainer), "the inner one's success is none"


def test_a_nested_failure_that_the_outer_step_catches_is_none(can_pause):
    trainer = Nested()

    def caught():
        with pytest.raises(Planned):
            trainer.failing()

    trainer.outer(caught)
    assert can_pause(trainer)


@pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])
def test_a_failed_step_forbids_a_pause_until_one_succeeds(can_pause, error):
    trainer = Nested()
    trainer.outer()

    def fail():
        raise error("the text")

    with pytest.raises(error):
        trainer.outer(fail)
    with (
        pytest.raises(TrainingStepIncompleteError, match=rf"the last one failed with .*{error.__name__}: the text") as caught,
        gate_of(trainer).pausing(),
    ):
        pass
    assert caught.value.code == 322
    trainer.outer()
    assert can_pause(trainer)


def test_what_runs_later_than_it_is_called_cannot_be_decorated():
    async def coroutine(self): ...

    async def asynchronous_generator(self):
        yield

    def generator(self):
        yield

    @torch.no_grad()
    @functools.wraps(generator)
    def wrapped(self):
        return generator(self)

    @functools.wraps(can_be_decorated)
    def wrapping(self):
        yield

    class Callable:
        def __call__(self): ...

    refused = [coroutine, asynchronous_generator, generator, wrapped, wrapping, staticmethod(len), classmethod(len)]
    refused += [staticmethod(lambda self: None), Callable(), len, None, functools.partial(can_be_decorated, None)]
    for decorator in (training_step, serialized_training):
        for method in refused:
            with pytest.raises(TypeError, match="only a plain method can be decorated, got"):
                decorator(method)


def can_be_decorated(self):
    return "called"


def test_what_other_decorators_made_can_be_decorated():
    trainer = Nested()
    partial = functools.wraps(functools.partial(can_be_decorated, None))(lambda self: can_be_decorated(self))
    for method in (can_be_decorated, torch.no_grad()(can_be_decorated), functools.cache(can_be_decorated).__wrapped__, partial):
        for decorator in (training_step, serialized_training):
            assert decorator(method)(trainer) == "called"


class Uninitialized(Trainer):
    def _initialize_training_resume(self, *_, **options):
        pass


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_that_was_not_initialized_says_so(tmp_path, method):
    trainer = Uninitialized()
    arguments = [tmp_path / "file"] if method in ("pause", "resume") else []
    with pytest.raises(AttributeError, match=r"Uninitialized has to call _initialize_training_resume\(\)") as caught:
        getattr(trainer, method)(*arguments)
    assert not hasattr(caught.value, "code")
    assert trainer.reached == []


def test_a_copy_stands_where_the_trainer_does_with_a_lock_of_its_own():
    trainer = Nested()
    copied = []
    trainer.outer(lambda: copied.append(copy.deepcopy(trainer)))
    with gate_of(trainer).pausing():
        pass
    copied.append(pickle.loads(pickle.dumps(trainer)))
    assert len({id(gate_of(one)._lock) for one in (trainer, *copied)}) == 3
    copied[0].outer()
    with pytest.raises(TrainingPausedError):
        copied[1].outer()
    with pytest.raises(Planned), gate_of(copied[1]).restoring():
        raise Planned
    with pytest.raises(TrainingResumeIncompleteError):
        copy.deepcopy(copied[1]).outer()


def refused_pause(trainer, path, error, text):
    before = look(trainer)
    with pytest.raises(error, match=text):
        trainer.pause(path)
    assert look(trainer) == before
    assert not path.exists()


def test_a_pause_before_any_step_is_refused(tmp_path):
    trainer = Trainer()
    refused_pause(trainer, tmp_path / "file", TrainingStepIncompleteError, "none has been taken yet")
    assert trainer.reached == []
    trainer.step()
    trainer.pause(tmp_path / "file")


@pytest.mark.parametrize("method", ["pause", "resume"])
def test_a_pause_or_resume_inside_a_step_is_refused(tmp_path, method):
    paused(tmp_path / "old", 1)
    trainer = trained(1)

    def on_reach(place):
        trainer.on_reach = lambda place: None
        path = tmp_path / {"pause": "new", "resume": "old"}[method]
        before = look(trainer)
        with pytest.raises(TrainingStepIncompleteError, match=f"{method} was called within a step"):
            getattr(trainer, method)(path)
        assert look(trainer) == before

    trainer.on_reach = on_reach
    trainer.step()
    assert not (tmp_path / "new").exists()
    trainer.pause(tmp_path / "new")


def test_after_a_failed_step_a_retry_or_a_resume_allows_a_pause(tmp_path):
    paused(tmp_path / "old", 2)
    trainer = trained(2)
    for mend in (trainer.step, lambda: trainer.resume(tmp_path / "old")):
        trainer.on_reach = raising("step")
        with pytest.raises(Planned):
            trainer.step()
        trainer.on_reach = lambda place: None
        refused_pause(trainer, tmp_path / "new", TrainingStepIncompleteError, "the last one failed with .*Planned: step")
        mend()
        trainer.pause(tmp_path / "new")
        trainer.resume(tmp_path / "new")
        (tmp_path / "new").unlink()


def test_a_failed_first_step_is_no_step(tmp_path):
    trainer = Trainer()
    trainer.on_reach = raising("step")
    with pytest.raises(Planned):
        trainer.step()
    refused_pause(trainer, tmp_path / "file", TrainingStepIncompleteError, "the last one failed")


def test_a_paused_trainer_takes_no_step_until_it_is_resumed(tmp_path):
    trainer = paused(tmp_path / "file", 2)
    before = look(trainer)
    for _ in range(2):
        with pytest.raises(TrainingPausedError) as caught:
            trainer.step()
        assert caught.value.code == 324
    assert look(trainer) == before
    refused_pause(trainer, tmp_path / "other", TrainingPausedError, "it was paused already")
    trainer.add()
    assert trainer.count == 3, "a serialized method is not refused"
    trainer.resume(tmp_path / "file")
    assert run(trainer, 3) == run(trained(2), 3)


def test_hooks_of_a_pause_find_a_paused_trainer(tmp_path):
    trainer = trained(2)
    asked = []

    def on_reach(place):
        with pytest.raises(TrainingPausedError):
            trainer.step()
        asked.append(place)

    trainer.on_reach = on_reach
    trainer.pause(tmp_path / "file")
    assert "_resume_extra_state" in asked
    assert "step" not in asked


def test_hooks_of_a_resume_find_a_locked_trainer(tmp_path):
    trainer = paused(tmp_path / "file", 2)
    asked = []

    def on_reach(place):
        if place == "_rebuild_resume_iterators":
            for method in (trainer.step, lambda: trainer.pause(tmp_path / "other")):
                with pytest.raises(TrainingResumeIncompleteError, match="it is under way"):
                    method()
            asked.append(place)

    trainer.on_reach = on_reach
    trainer.resume(tmp_path / "file")
    assert asked
    trainer.step()
