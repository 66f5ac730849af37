"""Run as a program: loads a state from a file, reads some batches, and writes them and its own state to another.

python -m tests.property.other_process SHAPE WORKERS METHOD COUNT STATE_FILE BATCHES_FILE
"""

from __future__ import annotations

import pickle
import sys
from itertools import chain, islice, repeat
from pathlib import Path

from tests.property.pipelines import Case, Engine, build


def case_of(shape):
    return Case(shape, length=23, order="random", batch_size=4, collate="boxes", epochs=2)


def main(shape, workers, method, count, state_file, batches_file):
    engine = Engine(int(workers), 2, method)
    with build(case_of(shape), engine, checkpoint=Path(state_file)) as loader:
        batches = list(islice(chain.from_iterable(repeat(loader)), int(count)))
        loader.checkpoint(state_file)
    Path(batches_file).write_bytes(pickle.dumps(batches))


if __name__ == "__main__":
    main(*sys.argv[1:])
