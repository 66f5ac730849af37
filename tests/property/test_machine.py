"""A loader against a plain list of epochs and a cursor, whatever is called in whatever order."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stateful_pipes.errors import IteratorInvalidError, LoaderFailedError, ResumableModeRequiredError
from tests.property.pipelines import DATASET, END, INDIRECT, Case, Engine, build, make_batches
from tests.property.strategies import cases, engines
from tests.streams import disturb, place_of, same

SEED = 2**64 - 3

LIVE, JUMPED, INVALID = "live", "ended by set_epoch", "invalid"


class Model:
    """The epochs of a loader that only ever reads on, and a cursor into them."""

    def __init__(self, case):
        self.case = case
        self.at = (0, 0)
        self._source = build(case, seed=SEED)
        self._epochs = []
        self._endless = {}

    def epoch(self, number):
        """All batches of an epoch that has an end."""
        while len(self._epochs) <= number:
            self._epochs.append(list(self._source))
        return self._epochs[number]

    def next(self):
        """The next batch; the epoch's last one takes the cursor to the next epoch, as an empty epoch's end does."""
        number, done = self.at
        if self.case.is_endless:
            self.at = (number, done + 1)
            return self._of_endless(number, done)
        batches = self.epoch(number)
        self.at = (number, done + 1) if done + 1 < len(batches) else (number + 1, 0)
        return batches[done] if batches else END

    def _of_endless(self, number, done):
        if number not in self._endless:
            source = build(self.case, seed=SEED)
            source.set_epoch(number)
            self._endless[number] = (iter(source), [])
        source, batches = self._endless[number]
        while len(batches) <= done:
            batches.append(next(source))
        return batches[done]

    def samples(self):
        """Samples consumed in the current epoch."""
        if self.case.shape == "batch_sampler":  # the last batch of each of its cycles may be smaller
            return sum(map(len, islice(make_batches(self.case, SEED), self.at[1])))
        return self.at[1] * self.case.samples_a_batch


class LoaderMachine(RuleBasedStateMachine):
    """The rules; a subclass says with which workers.

    An iterator is remembered with its epoch and with what became of it.
    """

    WORKERS: tuple[int | None, ...] = (None, 0)

    @initialize(data=st.data())
    def start(self, data):
        self.case = data.draw(cases(orders=("sequential", "random", "user", "replacement")), label="case")
        self.model = Model(self.case)
        self.loader = build(self.case, data.draw(engines(self.WORKERS), label="engine"), SEED)
        self.iterators = [[iter(self.loader), 0, LIVE, False]]  # whether it has been asked for anything
        self.failed = False
        self.states = [(json.dumps(self.loader.state_dict()), (0, 0))]

    def teardown(self):
        if hasattr(self, "loader"):
            self.loader.close()

    @rule()
    def iterate(self):
        if self.failed:
            with pytest.raises(LoaderFailedError):
                iter(self.loader)
        else:
            self.iterators = [*self.iterators[-3:], [iter(self.loader), self.model.at[0], LIVE, False]]

    @rule(which=st.integers(0, 3))
    def next(self, which):
        iterator = self.iterators[-1 - which % len(self.iterators)]
        batches, epoch, fate, is_begun = iterator
        if not is_begun and fate == JUMPED:  # what has read nothing yet goes to that epoch
            epoch, fate = self.model.at[0], LIVE
        iterator[1:] = [epoch, fate, True]
        disturb()
        if fate == INVALID:
            with pytest.raises(IteratorInvalidError):
                next(batches)
        elif self.failed:
            is_current = fate == LIVE and epoch == self.model.at[0]
            with pytest.raises(LoaderFailedError if is_current else (LoaderFailedError, StopIteration)):
                next(batches)
        elif fate == JUMPED or epoch != self.model.at[0]:
            assert next(batches, END) is END
        else:
            assert same(next(batches, END), self.model.next())

    @precondition(lambda self: not self.failed)
    @rule(most=st.integers(1, 5))
    def loop(self, most):
        """What a training loop does, which leaves it early or at the epoch's end."""
        epoch, batches = self.model.at[0], iter(self.loader)
        for batch in islice(batches, most):
            disturb()
            assert same(batch, self.model.next())
        if self.model.at == (epoch, 0):
            assert self.model.next() is END  # an epoch without batches
        self.iterators = [*self.iterators[-3:], [batches, epoch, LIVE, True]]

    @rule()
    def save(self):
        state = self.loader.state_dict()
        self.states.append((json.dumps(state), self.model.at))
        _spoil(state)

    @rule(which=st.integers(0, 100))
    def load(self, which):
        saved, at = self.states[which % len(self.states)]
        state = json.loads(saved)
        self.loader.load_state_dict(state)
        _spoil(state)
        self.model.at = at
        self.failed = False
        self._end_iterators(INVALID)

    @precondition(lambda self: not self.failed)
    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        if epoch == self.model.at[0]:
            self.loader.set_epoch(epoch)
        elif self.case.is_foreign:
            with pytest.raises(ResumableModeRequiredError):
                self.loader.set_epoch(epoch)
        else:
            self.loader.set_epoch(epoch)
            self.model.at = (epoch, 0)
            self._end_iterators(JUMPED)

    @precondition(lambda self: not self.failed)
    @rule()
    def restart(self):
        if self.model.at[1] == 0:
            self.loader.restart()  # nothing has begun, so nothing is left
        elif self.case.is_foreign:
            with pytest.raises(ResumableModeRequiredError):
                self.loader.restart()
        else:
            self.loader.restart()
            self.model.at = (self.model.at[0], 0)
            self._end_iterators(INVALID)

    @rule()
    def close(self):
        self.loader.close()
        self.failed = False
        self._end_iterators(INVALID)

    @precondition(lambda self: self.case.shape == DATASET and self.loader.num_workers == 0 and not self.failed)
    @rule()
    def read_a_broken_sample(self):
        live = [batches for batches, epoch, fate, _ in self.iterators if fate == LIVE and epoch == self.model.at[0]]
        if live:
            self.loader.dataset.broken = True
            with pytest.raises(ValueError, match="broken sample"):
                next(live[0])
            self.loader.dataset.broken = False
            self.failed = True

    @invariant()
    def state_reads_the_cursor(self):
        if not hasattr(self, "loader"):
            return
        nodes = self.loader.state_dict()["nodes"]
        epoch, done = self.model.at
        assert self.loader.position.epoch == epoch
        if self.case.is_foreign or self.case.shape in INDIRECT:
            assert (done == 0) == (self.loader.position.consumed == 0)
            return
        consumed = self.model.samples()
        assert (nodes["sampler"]["epoch"], nodes["sampler"]["consumed"]) == (epoch, consumed)
        assert place_of(self.loader) == (epoch, consumed)
        if self.case.is_endless:
            with pytest.raises(TypeError):
                len(self.loader)
        else:
            assert len(self.loader) == len(self.model.epoch(epoch))

    def _end_iterators(self, fate):
        for iterator in self.iterators:
            if fate == INVALID or iterator[2] == LIVE:
                iterator[2] = fate


def _spoil(state):
    """What a state's owner may do to it without the loader's noticing."""
    for entry in state["nodes"].values():
        entry.update(epoch=77, consumed=77, seed=77)
    state.clear()


class InlineMachine(LoaderMachine):
    pass


class WorkersMachine(LoaderMachine):
    WORKERS = (1, 2)


TestInline = InlineMachine.TestCase
TestInline.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
TestWorkers = WorkersMachine.TestCase
TestWorkers.settings = settings(max_examples=settings.default.max_examples // 8, stateful_step_count=30)


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_ends_older_iterators(workers):
    """A jump is an epoch's end to a loop that is under way, and going back does not bring its iterator to life."""
    case = Case(length=10, batch_size=2)
    with build(case, Engine(workers), SEED) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_epoch(1)
        assert next(batches, END) is END
        loader.set_epoch(0)
        assert next(batches, END) is END
