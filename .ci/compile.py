"""A copy of the package, compiled with Cython as it stands: pure Python mode, annotations not taken for C types.

All of it is translated to C; what the tests below are about is compiled to machine code, too. Then these tests are run on it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

HOUSE = Path(__file__).parents[1]
# Flags, cursors, seeds and states.
COMPILED = """
    caught errors integers naming fields encoding rng state permutation skips ticket pulled stream contract pipeline_state node
    samplers/* nodes/dealing nodes/sampler nodes/mapper nodes/batcher training/gate
"""
TESTS = """
    golden unit/test_fields.py unit/test_state.py unit/test_rng.py unit/test_permutation.py unit/test_samplers.py
    unit/test_batch_samplers.py unit/test_nodes_sampler.py unit/test_nodes_mapper.py unit/test_nodes_batcher.py
    unit/test_errors.py unit/test_training_gate.py unit/test_skips.py
"""


def main(folder: Path) -> int:
    """Compiles into a folder that is not there yet, and returns what pytest returned."""
    for name in ("stateful_pipes", "tests"):
        shutil.copytree(HOUSE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HOUSE / "pyproject.toml", folder)
    package = folder / "stateful_pipes"
    files = [path for path in sorted(package.rglob("*.py")) if not path.name.startswith("__")]
    made = cythonize(
        [Extension(_module(path, folder), [str(path)], extra_compile_args=["-O0", "-g0", "-w"]) for path in files],
        language_level=3,
        compiler_directives={"annotation_typing": False},
        nthreads=2,
        quiet=True,
    )
    wanted = {path for pattern in COMPILED.split() for path in package.glob(f"{pattern}.py")}
    compiled = [one for one, path in zip(made, files, strict=True) if path in wanted]
    built = ["--build-lib", str(folder), "--build-temp", str(folder / "build")]
    setup(name="stateful_pipes", ext_modules=compiled, script_args=["--quiet", "build_ext", "--parallel", "2", *built])
    names = [one.name for one in compiled]
    check = f"import importlib; assert all(importlib.import_module(name).__file__.endswith('.so') for name in {names!r})"
    subprocess.run([sys.executable, "-c", check], cwd=folder, check=True)
    tests = [f"tests/{name}" for name in TESTS.split()]
    return subprocess.run([sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *tests], cwd=folder).returncode


def _module(path: Path, folder: Path) -> str:
    return ".".join(path.relative_to(folder).with_suffix("").parts)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
