"""The stream over spawn, forkserver and brand-new processes: a fixed grid, since each cell takes seconds."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.property.other_process import case_of
from tests.property.pipelines import DATASET, END, Engine, build, play, uninterrupted
from tests.streams import same

SEED = 2**63 + 5
ROOT = Path(__file__).parents[2]

# Door, what reads before the cut, where the cut is, what reads after it.
GRID = [
    (DATASET, Engine(1, 2, "spawn"), 3, Engine(2, 1, "fork")),
    (DATASET, Engine(2, 1, "fork"), 6, Engine(1, 3, "spawn")),
    (DATASET, Engine(1, 1, "forkserver"), 2, Engine(0)),
    ("nodes", Engine(None), 7, Engine(2, 2, "forkserver")),
    ("nodes", Engine(2, 3, "spawn"), 1, Engine(1, 1, "fork")),
    ("filter_over_sampler", Engine(1, 2, "forkserver"), 5, Engine(1, 2, "spawn")),
]


@pytest.mark.parametrize(("shape", "before", "cut", "after"), GRID)
def test_start_methods(shape, before, cut, after):
    case = case_of(shape)
    steps = uninterrupted(case, SEED, 2)
    with build(case, before, SEED) as loader:
        play(loader, steps[:cut])
        state = json.loads(json.dumps(loader.state_dict()))
    with build(case, after) as loader:
        loader.load_state_dict(state)
        play(loader, steps[cut + (steps[cut] is END) :])


@pytest.mark.parametrize(
    ("shape", "workers", "method", "count"),
    [(DATASET, 1, "spawn", 5), ("batcher_above", 2, "fork", 8), ("two_mappers", 0, "", 2)],
)
def test_new_process(shape, workers, method, count, tmp_path):
    """It resumes from the file that this process wrote, and this one from the file that it writes."""
    case = case_of(shape)
    steps = uninterrupted(case, SEED, 3)
    batches = [step for step in steps if step is not END]
    state, found = tmp_path / "state", tmp_path / "batches"
    with build(case, seed=SEED) as loader:
        play(loader, steps[:1])
        loader.checkpoint(state)
    command = [sys.executable, "-m", "tests.property.other_process", shape, workers, method, count, state, found]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, timeout=120)
    assert same(pickle.loads(found.read_bytes()), batches[1 : 1 + count])
    with build(case, checkpoint=state) as loader:
        assert same(next(iter(loader)), batches[1 + count])
