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
    snippet = SNIPPETS[number]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks the network
    if "nvidia.dali" in snippet:
        pytest.importorskip("nvidia.dali", reason="DALI is not built for this machine")
    name = re.match(r"# (\w+\.py)\n", snippet)
    if name is not None or any(f"import {library}" in snippet or f"from {library}" in snippet for library in HEAVY):
        file = tmp_path / ("snippet.py" if name is None else name[1])
        file.write_text(snippet)
        run("-m", "pytest", "-p", "no:cacheprovider", file.name) if file.name.startswith("test_") else run(file.name)
        return
    namespace = {"__name__": "readme"}
    exec(compile(snippet, f"README.md snippet {number}", "exec"), namespace)
    for value in namespace.values():
        if isinstance(value, StatefulDataLoader):
            value.close()


def run(*arguments):
    """A command of Python's in the current folder, which has to end well."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_training_script_is_verified_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = (snippet for snippet in SNIPPETS if snippet.startswith("# train.py"))
    Path("train.py").write_text(script)
    assert "stateful-pipes verify train:make_loader" in README.read_text()
    run("-m", "stateful_pipes", "verify", "train:make_loader", "--batches", "16")


def test_the_table_of_errors_is_that_of_the_classes():
    found = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    lines = [f"| {one.code} | `{one.__name__}` | {one.__doc__.splitlines()[0].removesuffix('.')} |" for one in found]
    table = README.read_text().partition("## Errors")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line[:3].strip("| ").isdigit()] == sorted(lines)
