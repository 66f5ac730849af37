"""assert_training_resume: whatever a trainer forgets is found and named, and what forgets nothing passes."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from stateful_pipes import StatefulDataLoader
from stateful_pipes.errors import StateMismatchError, TrainingPausedError, TrainingResumeCheckpointFormatError
from stateful_pipes.testing import assert_training_resume
from stateful_pipes.training import TrainingResumeMixin, random_state, restore_random_state, training_step
from tests.streams import generator_states

GENERATORS = ("python", "numpy", "torch")
DRAWS = {"python": random.random, "numpy": np.random.random, "torch": lambda: torch.rand(()).item()}
TRAINERS = []
SMALL = []
SEEDS = {"python": random.seed, "numpy": np.random.seed, "torch": torch.default_generator.manual_seed}


@pytest.fixture(autouse=True)
def _cached_gaussians():
    """Each test begins, and has to end, amid a pair of Gaussians of Python and of NumPy."""
    before = random_state()
    random.seed(3)
    random.gauss(0, 1)
    np.random.seed(4)
    np.random.standard_normal()
    torch.default_generator.manual_seed(5)
    own = generator_states()
    yield
    after = generator_states()
    restore_random_state(before)
    assert after == own, "the caller's generators are as before"
    assert multiprocessing.active_children() == []


@contextmanager
def closing():
    """All trainers and loaders that are made within are closed at its end."""
    TRAINERS.clear()
    SMALL.clear()
    try:
        yield
    finally:
        for trainer in TRAINERS:
            for name, loader in trainer.loaders.items():  # by the trainer, and by its hook's name
                assert loader.closed == (1 if name in trainer.forgets else 2)
        for trainer in SMALL:
            assert (trainer.closed, [loader.closed for loader in trainer.loaders]) == (1, [1, 1])


class Loader(StatefulDataLoader):
    closed = 0

    def close(self):
        self.closed += 1
        super().close()


class Trainer(TrainingResumeMixin):
    """With one of everything that can be forgotten, all of which is in the results of the steps to come."""

    def __init__(self, *forgets, workers=0, names=True):
        self.forgets = forgets
        self.names = names
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.loaders = {
            name: Loader(torch.arange(5.0)[:, None] + 10 * number, 2, True, seed=number, num_workers=workers)
            for number, name in enumerate(("real", "fake"))
        }
        self.iterators = {name: iter(loader) for name, loader in self.loaders.items()}
        self.choice = "real"
        self.pool = []
        self.count = 0
        self.generator = torch.Generator().manual_seed(1)
        self._initialize_training_resume({}, version=1, device="cpu", amp=True)
        TRAINERS.append(self)

    @training_step
    def step(self):
        batch = self.batch()
        self.pool = [*self.pool, batch][-3:]
        old = self.pool[int(torch.randint(len(self.pool), (), generator=self.generator))]
        noise = random.gauss(0, 1) + np.random.standard_normal()
        loss = (self.model(batch / 10) + noise - old.mean() / 10).square().mean()
        self.scaler.scale(loss).backward()
        self.count += 1
        if self.count % 3 == 0:  # an optimizer's step takes the gradients of three batches
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.choice = "fake" if self.choice == "real" else "real"
        gradients = {name: one.grad for name, one in self.model.named_parameters()}
        rate = self.optimizer.param_groups[0]["lr"]
        return {"batch": batch, "count": self.count, "loss": loss, "old": old, "gradients": gradients, "rate": rate}

    def batch(self):
        try:
            return next(self.iterators[self.choice])
        except StopIteration:
            self.iterators[self.choice] = iter(self.loaders[self.choice])
            return next(self.iterators[self.choice])

    def kept(self, **all):
        return {name: one for name, one in all.items() if name not in self.forgets}

    def _resume_objects(self):
        return self.kept(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler)

    def _resume_loaders(self):
        named = self.kept(**self.loaders)
        return named if self.names else list(named.values())

    def _resume_extra_state(self):
        return self.kept(
            gradients=[one.grad for one in self.model.parameters()],
            choice=self.choice,
            pool=self.pool,
            count=self.count,
            generator=self.generator.get_state(),
        )

    def _load_resume_extra_state(self, state):
        for parameter, gradient in zip(self.model.parameters(), state.pop("gradients", []), strict=False):
            parameter.grad = gradient
        if "generator" in state:
            self.generator.set_state(state.pop("generator"))
        vars(self).update(state)

    def _rebuild_resume_iterators(self):
        self.iterators = {name: iter(loader) for name, loader in self.loaders.items()}

    def _validate_resume(self):
        pass

    def resume(self, path):
        before = random_state()
        super().resume(path)
        restored = random_state()
        restore_random_state({name: (before if name in self.forgets else restored)[name] for name in restored})

    def close(self):
        for loader in self.loaders.values():  # which the hook above may have forgotten
            loader.close()


def attributes(trainer):
    """What a user's snapshot reads: attributes, as they are."""
    return {
        "model": dict(trainer.model.named_parameters()),
        "gradients": [one.grad for one in trainer.model.parameters()],
        "optimizer": [trainer.optimizer.state[one].get("momentum_buffer") for one in trainer.model.parameters()],
        "scheduler": trainer.scheduler.last_epoch,
        "scaler": trainer.scaler.get_scale(),
        "real": trainer.loaders["real"].position[:3],
        "fake": trainer.loaders["fake"].position[:3],
        "choice": trainer.choice,
        "pool": trainer.pool,
        "count": trainer.count,
        "generator": trainer.generator,
    }


def nothing(trainer):
    return None


PARTS = ("model", "gradients", "optimizer", "scheduler", "scaler", "real", "fake", "choice", "pool", "count", "generator")


def check(tmp_path, factory, step=Trainer.step, pause_after=4, total_steps=8, snapshot=attributes, device="cpu"):
    with closing():
        assert_training_resume(factory, step, tmp_path / "paused.pt", pause_after, total_steps, snapshot, device)


@pytest.mark.parametrize("pause_after", range(1, 9))
def test_the_complete_trainer_passes_at_every_place(tmp_path, pause_after):
    check(tmp_path, Trainer, pause_after=pause_after)


@pytest.mark.parametrize("forgotten", PARTS)
def test_what_is_forgotten_is_named(tmp_path, forgotten):
    with pytest.raises(AssertionError) as caught:
        check(tmp_path, lambda: Trainer(forgotten))
    assert str(caught.value).startswith(f"right after the resume: snapshot['{forgotten}']")


@pytest.mark.parametrize("forgotten", GENERATORS)
def test_a_forgotten_generator_is_named(tmp_path, forgotten):
    with pytest.raises(AssertionError) as caught:
        check(tmp_path, lambda: Trainer(forgotten), snapshot=nothing)
    assert str(caught.value).startswith(f"right after the resume: generators['{forgotten}']")


RESULTS = {
    "model": "loss",
    "gradients": "gradients",
    "optimizer": "loss",
    "scheduler": "rate",
    "scaler": "gradients",
    "real": "batch",
    "fake": "batch",
    "choice": "batch",
    "pool": "loss",
    "count": "count",
    "generator": "loss",
}


@pytest.mark.parametrize("forgotten", PARTS)
def test_what_the_snapshot_does_not_show_is_found_in_the_results(tmp_path, forgotten):
    with pytest.raises(AssertionError, match=rf"^step \d+, after the resume: result\['{RESULTS[forgotten]}'\]"):
        check(tmp_path, lambda: Trainer(forgotten), snapshot=nothing)


def test_what_shows_at_the_end_only_is_found_there(tmp_path):
    class Late(Small):
        """Whose sum over all steps comes out of the last one."""

        def resume(self, path):
            super().resume(path)
            self.hidden = 0

        def step(self):
            result = super().step()
            self.hidden = getattr(self, "hidden", 0) + 1
            return result

    def snapshot(trainer):
        return {"value": trainer.value, "sum": trainer.hidden if trainer.count == 5 else None}

    with pytest.raises(AssertionError, match=r"^at the end, after step 5: snapshot\['sum'\]: expected 5, found 2$"):
        check(tmp_path, Late, Late.step, 3, 5, snapshot)


def test_loaders_may_be_a_list(tmp_path):
    check(tmp_path, lambda: Trainer(names=False))


def test_workers_are_ended(tmp_path):
    check(tmp_path, lambda: Trainer(workers=1), pause_after=2, total_steps=4)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("place", [1, 3, 7])
def test_workers_are_ended_on_a_failure(tmp_path, place):
    steps = itertools.count(1)

    def step(trainer):
        result = trainer.step()
        assert multiprocessing.active_children(), "there are some to end"
        if next(steps) == place:
            raise ZeroDivisionError
        return result

    with pytest.raises(ZeroDivisionError):
        check(tmp_path, lambda: Trainer(workers=1), step, 2, 4)
    assert multiprocessing.active_children() == []


# A trainer without the mixin, that takes no time.


class Closed:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


class Small:
    """Pauses and resumes by hand."""

    def __init__(self):
        self.value = 0.0
        self.count = 0
        self.history = []
        self.paused = False
        self.closed = 0
        self.loaders = [Closed(), Closed()]
        SMALL.append(self)

    def step(self):
        if self.paused:
            raise TrainingPausedError
        self.count += 1
        self.value += self.draw()
        self.history.append(self.value)
        return self.history

    def draw(self):
        return random.gauss(0, 1) + np.random.standard_normal() + torch.randn(()).item()

    def pause(self, path):
        state = {"value": self.value, "count": self.count, "history": self.history, "generators": random_state()}
        torch.save(state, path)
        self.paused = True

    def resume(self, path):
        state = torch.load(path)
        restore_random_state(state.pop("generators"))
        vars(self).update(state)

    def _resume_loaders(self):
        return self.loaders

    def close(self):
        self.closed += 1


def shown(trainer):
    return {"value": trainer.value, "count": trainer.count, "history": trainer.history}


def small(tmp_path, kind=Small, step=Small.step, pause_after=2, total_steps=4, snapshot=shown, device="cpu"):
    check(tmp_path, kind, lambda trainer: step(trainer), pause_after, total_steps, snapshot, device)


@pytest.mark.parametrize("pause_after", [1, 2, 3, 4])
def test_one_without_the_mixin_passes(tmp_path, pause_after):
    small(tmp_path, pause_after=pause_after)
    assert len(SMALL) == 3


@pytest.mark.parametrize("forgotten", GENERATORS)
@pytest.mark.parametrize("draws", [0, 1, 2, 3])
def test_seeding_in_the_constructor_hides_nothing(tmp_path, forgotten, draws):
    """Nor where the new trainer's generator, moved by a draw or by none, would stand where the paused one's stood."""

    class Seeding(Small):
        def __init__(self):
            super().__init__()
            SEEDS[forgotten](7)

        def draw(self):
            return DRAWS[forgotten]() if self.count <= draws or self.count > 3 else 0.0

        def resume(self, path):
            before = random_state()
            super().resume(path)
            restore_random_state({**random_state(), forgotten: before[forgotten]})

    with pytest.raises(AssertionError, match=rf"^right after the resume: generators\['{forgotten}'\]"):
        small(tmp_path, Seeding, pause_after=3, total_steps=5)

    class Complete(Seeding):
        resume = Small.resume

    small(tmp_path, Complete, pause_after=3, total_steps=5)


def test_generators_are_moved_before_a_trainer_is_made_and_before_it_resumes(tmp_path):
    seen = {"made": [], "paused": [], "resumed": []}

    class Looking(Small):
        def __init__(self):
            super().__init__()
            seen["made"].append(random_state())
            for name in GENERATORS:
                SEEDS[name](7)

        def pause(self, path):
            seen["paused"].append(random_state())
            super().pause(path)

        def resume(self, path):
            seen["resumed"].append(random_state())
            super().resume(path)

    small(tmp_path, Looking)
    (first, second, third), (paused,), (resumed,) = seen.values()
    for name in GENERATORS:
        SEEDS[name](7)
    others = (first, paused, random_state())
    small(tmp_path)
    for name in GENERATORS:
        assert str(first[name]) == str(second[name])
        for moved in (third, resumed):
            assert all(bits(moved[name]) != bits(other[name]) for other in others)
    assert resumed["python"]["gauss"] is not None
    assert resumed["numpy"]["has_gauss"] == 1
    restore_random_state(first)


def bits(state):
    return (state if isinstance(state, torch.Tensor) else state["words"]).numpy().tobytes()


def set_words_only(state):
    """As one does who knows NumPy's bit generator, but not that the Gaussian is kept elsewhere."""
    restored = random_state()
    restore_random_state({**restored, "python": state["python"], "torch": state["torch"]})
    np.random.get_bit_generator().state = {
        "bit_generator": "MT19937",
        "state": {"key": state["numpy"]["words"].numpy().astype(np.uint32), "pos": state["numpy"]["position"]},
    }


@pytest.mark.parametrize("draws", [1, 2])
def test_a_forgotten_gaussian_of_numpy_is_named(tmp_path, draws):
    """Whether the paused one had a second one to give, or the new one has."""

    class Forgetful(Small):
        def draw(self):
            return sum(np.random.standard_normal(draws).tolist())

        def resume(self, path):
            state = torch.load(path)
            set_words_only(state.pop("generators"))
            vars(self).update(state)

    with pytest.raises(AssertionError, match=r"^right after the resume: generators\['numpy'\]\['(has_)?gauss'\]"):
        small(tmp_path, Forgetful, pause_after=1)


@pytest.mark.parametrize("draws", [1, 2])
def test_a_forgotten_gaussian_of_python_is_named(tmp_path, draws):
    class Forgetful(Small):
        def draw(self):
            return sum(random.gauss(0, 1) for _ in range(draws))

        def resume(self, path):
            before = random.getstate()
            super().resume(path)
            random.setstate((*random.getstate()[:2], before[2]))

    with pytest.raises(AssertionError, match=r"^right after the resume: generators\['python'\]\['gauss'\]"):
        small(tmp_path, Forgetful, pause_after=1)


# What a trainer, a step or a snapshot does wrong: the error, and that all is closed and the generators are as before.


class TakesStep(Small):
    def pause(self, path):
        super().pause(path)
        self.paused = False


class RaisesAnother(Small):
    def step(self):
        if self.paused:
            raise RuntimeError("not now")
        return super().step()


class ChangedByPause(Small):
    def pause(self, path):
        super().pause(path)
        self.value += 1


class DrawsInPause(Small):
    def pause(self, path):
        super().pause(path)
        torch.rand(1)


class FailsInPause(Small):
    def pause(self, path):
        raise OSError("full")


class FailsInResume(Small):
    def resume(self, path):
        random.seed(0)
        raise OSError("gone")


class WithoutPause(Small):
    pause = property(lambda self: object().pause)


class WithoutResume(Small):
    resume = property(lambda self: object().resume)


class Unsteady(Small):
    clock = itertools.count()

    def draw(self):
        return next(self.clock)


class Forgets(Small):
    def resume(self, path):
        count = self.count
        super().resume(path)
        self.count = count


class FailsAt(Small):
    """In one of the steps of all three trainers."""

    at = 0

    def step(self):
        if sum(trainer.count for trainer in SMALL) + 1 == self.at:
            torch.rand(1)
            raise ZeroDivisionError("step")
        return super().step()


FAULTS = {
    TakesStep: (AssertionError, r"^a paused trainer must refuse a step with TrainingPausedError, it took one$"),
    RaisesAnother: (AssertionError, r"^a paused trainer must refuse .*, it raised RuntimeError\('not now'\)$"),
    ChangedByPause: (AssertionError, r"^the pause has changed the trainer: snapshot\['value'\]: expected"),
    DrawsInPause: (AssertionError, r"^the pause has changed the trainer: generators\['torch'\]"),
    FailsInPause: (OSError, "^full$"),
    FailsInResume: (OSError, "^gone$"),
    WithoutPause: (AttributeError, "'pause'"),
    WithoutResume: (AttributeError, "'resume'"),
    Unsteady: (AssertionError, r"^step 1, of a second run without a break, gives something else: result\[0\]: expected"),
    Forgets: (AssertionError, r"^right after the resume: snapshot\['count'\]: expected 2, found 0$"),
}


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_what_a_trainer_does_wrong(tmp_path, kind):
    error, message = FAULTS[kind]
    with pytest.raises(error, match=message):
        small(tmp_path, kind, kind.step)


@pytest.mark.parametrize("at", [1, 4, 6, 9])
def test_a_step_that_fails(tmp_path, monkeypatch, at):
    monkeypatch.setattr(FailsAt, "at", at)
    with pytest.raises(ZeroDivisionError, match="step"):
        small(tmp_path, FailsAt, FailsAt.step)


def test_a_missing_method_is_an_attribute_error(tmp_path):
    class Bare:
        def step(self):
            return 1

    with pytest.raises(AttributeError, match="pause"):
        assert_training_resume(Bare, Bare.step, tmp_path / "paused.pt", 1, 2, lambda trainer: None)
    Bare.pause = lambda self, path: setattr(self, "step", paused)
    with pytest.raises(AttributeError, match="resume"):
        assert_training_resume(Bare, lambda bare: bare.step(), tmp_path / "paused.pt", 1, 2, lambda trainer: None)


def paused():
    raise TrainingPausedError


@pytest.mark.parametrize("name", GENERATORS)
def test_a_snapshot_that_moves_a_generator(tmp_path, name):
    def snapshot(trainer):
        DRAWS[name]()
        return shown(trainer)

    with pytest.raises(AssertionError, match=rf"^snapshot moves a generator: generators\['{name}'\]"):
        small(tmp_path, snapshot=snapshot)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_snapshot_that_differs_or_fails(tmp_path, place):
    """At each of the places at which it is taken, twice each."""
    calls = itertools.count(1)

    def differing(trainer):
        return {**shown(trainer), "calls": next(calls) == 2 * place}

    def failing(trainer):
        if next(calls) == place:
            raise ZeroDivisionError("snapshot")
        return shown(trainer)

    if place <= 6:
        with pytest.raises(
            AssertionError, match=r"^snapshot differs when it is repeated: snapshot\['calls'\]: expected False, found True$"
        ):
            small(tmp_path, snapshot=differing)
        calls = itertools.count(1)
    with pytest.raises(ZeroDivisionError, match="snapshot"):
        small(tmp_path, snapshot=failing)


def test_how_often_a_snapshot_is_taken(tmp_path):
    """Before and after the pause, right after the resume and at the end of both."""
    taken = []
    small(tmp_path, snapshot=lambda trainer: taken.append(trainer.count))
    assert taken == [2, 2, 4, 4, 2, 2, 2, 2, 2, 2, 4, 4]


def test_a_snapshot_of_live_references(tmp_path):
    """Is copied at once, so that later steps change neither it nor what was compared with it."""
    small(tmp_path, snapshot=lambda trainer: {"history": trainer.history})
    with pytest.raises(AssertionError, match=r"^right after the resume: snapshot\['history'\]: expected 2 items, found 0 items$"):
        small(tmp_path, forgetting("history"), snapshot=lambda trainer: {"history": trainer.history})


def forgetting(name):
    class Forgetful(Small):
        def resume(self, path):
            own = getattr(self, name)
            super().resume(path)
            setattr(self, name, own)

    return Forgetful


def test_results_are_copied_at_once(tmp_path):
    """The steps return one list that grows."""
    with pytest.raises(AssertionError, match=r"^step 3, after the resume: result: expected 3 items, found 1 items$"):
        small(tmp_path, forgetting("history"), snapshot=nothing)


@pytest.mark.parametrize("order", [(0, 0), (0, 1, 0), (0, 1, 1)])
def test_a_factory_that_returns_a_trainer_again(tmp_path, order):
    made = {}
    calls = iter(order)

    def factory():
        number = next(calls)
        if number not in made:
            made[number] = Small()
        return made[number]

    with pytest.raises(AssertionError, match=r"^factory returned a trainer that it had returned before$"):
        small(tmp_path, factory)
    assert next(calls, None) is None


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_factory_that_fails(tmp_path, place):
    calls = itertools.count(1)

    def factory():
        random.random()
        if next(calls) == place:
            raise ZeroDivisionError
        return Small()

    with pytest.raises(ZeroDivisionError):
        small(tmp_path, factory)
    assert len(SMALL) == place - 1


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("part", ["trainer", "loader"])
def test_a_close_that_fails_leaves_no_other_open(tmp_path, place, part):
    def factory():
        made = Small()
        if len(SMALL) == place + 1:
            broken = made if part == "trainer" else made.loaders[0]
            monkey(broken)
        return made

    def monkey(broken):
        def close():
            broken.closed += 1
            raise ZeroDivisionError

        broken.close = close

    with pytest.raises(ZeroDivisionError):
        small(tmp_path, factory)
    assert len(SMALL) == place + 1


def test_a_close_that_fails_does_not_hide_what_failed_before(tmp_path):
    class Open(Small):
        def close(self):
            super().close()
            raise ZeroDivisionError

    def step(trainer):
        raise KeyError("the first")

    with pytest.raises(KeyError, match="the first") as caught:
        assert_training_resume(Open, step, tmp_path / "paused.pt", 1, 2, shown)
    assert caught.value.__notes__ == ["its trainer's close() failed as well: ZeroDivisionError"]


def half():
    yield from ()
    raise ZeroDivisionError


@pytest.mark.parametrize("loaders", [lambda self: None, lambda self: half(), lambda self: 1 / 0])
def test_a_trainer_is_closed_when_its_loaders_cannot_be_had(tmp_path, loaders):
    class Odd(Small):
        _resume_loaders = loaders

    assert_training_resume(Odd, Odd.step, tmp_path / "paused.pt", 1, 2, shown)
    assert [trainer.closed for trainer in SMALL[-3:]] == [1, 1, 1]


def test_what_cannot_be_closed_need_not_be(tmp_path):
    class Open(Small):
        close = property(lambda self: object().close)

        def _resume_loaders(self):
            return {"one": 1, "two": object()}

    assert_training_resume(Open, Open.step, tmp_path / "paused.pt", 1, 2, shown)


def test_a_loaders_refusal_comes_through(tmp_path):
    lengths = iter([0, 0, 1])

    def factory():
        made = Trainer()
        if next(lengths):
            made.loaders["fake"] = Loader(torch.zeros(4, 1), 2, True, seed=1)
        return made

    with pytest.raises(StateMismatchError, match="length"):
        check(tmp_path, factory)


def test_a_file_that_was_spoilt_comes_through(tmp_path):
    class Spoilt(Trainer):
        def pause(self, path):
            super().pause(path)
            path.write_bytes(path.read_bytes().replace(b"training_state", b"training_stave"))

    with pytest.raises(TrainingResumeCheckpointFormatError):
        check(tmp_path, Spoilt, Spoilt.step)


@pytest.mark.parametrize(
    ("pause_after", "total_steps", "error", "message"),
    [
        (0, 4, ValueError, "pause_after must be at least 1, got 0"),
        (-1, 4, ValueError, "pause_after must be at least 1, got -1"),
        (3, 2, ValueError, "total_steps must be at least 3, got 2"),
        (1.0, 4, TypeError, "pause_after must be an integer, got 1.0"),
        (True, 4, TypeError, "pause_after must be an integer, got True"),
        (1, "4", TypeError, "total_steps must be an integer, got '4'"),
        (1, None, TypeError, "total_steps must be an integer, got None"),
    ],
)
def test_wrong_numbers_of_steps(tmp_path, pause_after, total_steps, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        small(tmp_path, pause_after=pause_after, total_steps=total_steps)
    assert SMALL == []


def test_a_device_whose_generator_is_not_known(tmp_path):
    with pytest.raises(ValueError, match="meta"):
        small(tmp_path, device="meta")
    assert SMALL == []


def test_the_file_is_replaced_and_the_path_may_be_text(tmp_path):
    path = tmp_path / "paused.pt"
    path.write_bytes(b"another's")
    with closing():
        assert_training_resume(Trainer, Trainer.step, str(path), np.int64(1), 2, attributes, torch.device("cpu"))
    assert "training_state" in torch.load(path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_forgotten_generator_of_a_gpu_is_named(tmp_path):
    class OnDevice(Small):
        def draw(self):
            return torch.rand((), device="cuda").item()

    before = torch.cuda.get_rng_state()
    with pytest.raises(AssertionError, match=r"^right after the resume: generators\['cuda'\]"):
        small(tmp_path, OnDevice, OnDevice.step, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
