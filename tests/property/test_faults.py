"""Faults between any two steps: what is consumed is still the next of the one true stream, or an error that says why not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from contextlib import suppress

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from stateful_pipes import StatefulDataLoader
from stateful_pipes.errors import LoaderFailedError, WorkerDiedError, WorkerTimeoutError
from tests.streams import disturb, place_of, same

LENGTH, BATCH, EPOCHS = 23, 4, 12
FINE, RAISES, EXITS, DIES_ONCE = range(4)
IN_FLIGHT = 3 * 3  # the most workers times the largest prefetch_factor


class Faulty:
    """Sample i draws, after doing what the flag says that all processes share."""

    def __init__(self):
        self.flags = multiprocessing.RawArray("b", LENGTH)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        flag = self.flags[index]
        if flag == RAISES:
            raise ValueError(f"sample {index}")
        if flag == EXITS:
            os._exit(0)
        if flag == DIES_ONCE:
            self.flags[index] = FINE
            os.kill(os.getpid(), signal.SIGKILL)
        return index, torch.rand(1100)


def loader_of(workers, **kwargs):
    return StatefulDataLoader(Faulty(), BATCH, True, num_workers=workers, seed=5, **kwargs)


_whole = loader_of(0)
TRUTH = [batch for _ in range(EPOCHS) for batch in _whole]
EPOCH = len(TRUTH) // EPOCHS


class FaultMachine(RuleBasedStateMachine):
    """A loader, a cursor into its one true stream, and faults."""

    @initialize(workers=st.integers(1, 3), prefetch_factor=st.integers(1, 3))
    def start(self, workers, prefetch_factor):
        self.loader = loader_of(workers, prefetch_factor=prefetch_factor, multiprocessing_context="fork", max_restarts=1)
        self.at = 0
        self.failed = False
        self.kills = 0
        self.quiet = 0  # batches since the last of them
        self.raising = set()  # samples that raised at any time since what was read ahead was dropped last
        self.states = [(json.dumps(self.loader.state_dict()), 0)]

    def teardown(self):
        if hasattr(self, "loader"):
            self.loader.close()

    @property
    def flags(self):
        return self.loader.dataset.flags

    def workers(self):
        mine = multiprocessing.active_children()
        return sorted((child for child in mine if child.name.startswith("stateful_pipes")), key=lambda child: child.name)

    def excuses(self):
        """The flags of the samples in the batch whose turn it is."""
        return {self.flags[index] for index in TRUTH[self.at][0].tolist()}

    # No preconditions: whether a fault comes in time differs from run to run, and what is drawn must not.

    @rule(most=st.integers(1, 4))
    def read(self, most):
        for _ in range(most if self.at < len(TRUTH) - 8 else 0):
            disturb()
            if self.failed:
                with pytest.raises(LoaderFailedError):
                    iter(self.loader)
                return
            try:
                batch = next(iter(self.loader))
            except ValueError as error:
                assert self.raising & set(TRUTH[self.at][0].tolist())
                assert "sample" in str(error)
                self.failed = True
            except WorkerDiedError as error:
                assert EXITS in self.excuses() or self.kills or DIES_ONCE in self.excuses()
                assert set(error.indices) <= set(TRUTH[self.at][0].tolist())
                self.failed = True
            else:
                assert same(batch, TRUTH[self.at])
                self.at += 1
                self.quiet += 1
                if self.quiet > IN_FLIGHT:  # until then a death may not have been noticed, or not all that came of it
                    self.kills = sum(flag in (EXITS, DIES_ONCE) for flag in self.flags)
            epoch, done = divmod(self.at, EPOCH)
            assert place_of(self.loader) == (epoch, min(done * BATCH, LENGTH))

    @rule(index=st.integers(0, LENGTH - 1), flag=st.sampled_from([RAISES, EXITS, DIES_ONCE]))
    def spoil(self, index, flag):
        self.flags[index] = flag
        if flag == RAISES:
            self.raising.add(index)
        else:
            self.kills, self.quiet = self.kills + 1, 0

    @rule()
    def mend(self):
        for index in range(LENGTH):
            self.flags[index] = FINE

    @rule(which=st.integers(0, 2), number=st.sampled_from([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1]))
    def kill(self, which, number):
        workers = self.workers()
        if workers:
            victim = workers[which % len(workers)]
            os.kill(victim.pid, number)
            victim.join()
            self.kills, self.quiet = self.kills + 1, 0

    @rule()
    def stall(self):
        """All workers stand still: what is there is handed out, then the timeout says who does not answer."""
        if self.failed or self.at >= len(TRUTH) - 8:
            return
        stopped = [worker.pid for worker in self.workers()]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        pipeline = self.loader.pipeline
        pipeline.timeout = 0.01 if stopped and max(self.flags[:]) == FINE else 0
        try:
            if pipeline.timeout:
                assert same(next(iter(self.loader)), TRUTH[self.at])
                self.at += 1
        except ValueError:
            assert self.raising & set(TRUTH[self.at][0].tolist())
            self.failed = True
        except WorkerTimeoutError as error:
            assert "worker 0 (pid" in str(error)
            self.failed = True
        except WorkerDiedError:
            assert self.kills
            self.failed = True
        finally:
            pipeline.timeout = 0
            for pid in stopped:
                with suppress(ProcessLookupError):  # one that was killed before, and is replaced by now
                    os.kill(pid, signal.SIGCONT)

    @rule()
    def save(self):
        self.states.append((json.dumps(self.loader.state_dict()), self.at))

    @rule(which=st.integers(0, 100))
    def load(self, which):
        saved, self.at = self.states[which % len(self.states)]
        self.loader.load_state_dict(json.loads(saved))
        self._begin_anew()

    @rule()
    def close(self):
        self.loader.close()
        assert not self.workers()
        self._begin_anew()

    def _begin_anew(self):
        self.failed = False
        self.raising = {index for index in range(LENGTH) if self.flags[index] == RAISES}


TestFaults = FaultMachine.TestCase
TestFaults.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=30)
