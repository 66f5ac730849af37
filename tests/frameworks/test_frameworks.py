"""All of this folder, in one process of its own: the frameworks would make every fork of the other tests three times as long.

To see the lines of one: python -m pytest tests/frameworks/with_lightning.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("with_*.py"))
FRAMEWORKS = {"accelerate", "datasets", "lightning", "torchtitan_torchtune", "transformers"}
LIMIT = 900  # seconds, where an idle machine takes one minute; nothing else waits for time


def test_with_every_framework():
    assert {path.stem.removeprefix("with_") for path in FILES} == FRAMEWORKS
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--numprocesses=0", "-p", "no:cacheprovider", *map(str, FILES)],
        cwd=FOLDER.parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(path.name in run.stdout for path in FILES), run.stdout
