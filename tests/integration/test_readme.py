"""Every Python snippet of the README runs, in order, each as a script of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stateful_pipes import StatefulDataLoader, errors

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
# In a process of their own: with them imported, every later fork of this one would be slow.
HEAVY = ["pytorch_lightning", "transformers", "datasets"]


def test_the_readme_has_snippets():
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks the network
    if "nvidia.dali" in SNIPPETS[number]:
        pytest.importorskip("nvidia.dali", reason="DALI is not built for this machine")
    if any(f"import {name}" in SNIPPETS[number] or f"from {name}" in SNIPPETS[number] for name in HEAVY):
        done = subprocess.run([sys.executable, "-c", SNIPPETS[number]], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return
    namespace = {"__name__": "readme"}
    exec(compile(SNIPPETS[number], f"README.md snippet {number}", "exec"), namespace)
    for value in namespace.values():
        if isinstance(value, StatefulDataLoader):
            value.close()


def test_the_table_of_errors_is_that_of_the_classes():
    found = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    lines = [f"| {one.code} | `{one.__name__}` | {one.__doc__.splitlines()[0].removesuffix('.')} |" for one in found]
    table = README.read_text().partition("## Errors")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line[:3].strip("| ").isdigit()] == sorted(lines)
