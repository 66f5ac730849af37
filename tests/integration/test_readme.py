"""Every Python snippet of the README runs, in order, each as a script of its own."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stateful_pipes import CheckpointManager, StatefulDataLoader, errors
from stateful_pipes.testing.comparison import first_mismatch

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
FILES = {name[1]: text for text in SNIPPETS if (name := re.match(r"# (\w+\.py)\n", text))}
# In a process of their own: with them imported, every later fork of this one would be slow.
APART = ["pytorch_lightning", "transformers", "datasets", "accelerate", "albumentations", "train"]


def test_the_readme_has_snippets():
    assert len(SNIPPETS) >= 5
    assert set(FILES) == {"train.py", "test_train.py"}


@pytest.fixture(autouse=True)
def reader_s_folder(tmp_path, monkeypatch):
    """Has the README's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks the network
    for name, text in FILES.items():
        Path(name).write_text(text)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("test_")])
def test_tests(name):
    run("-m", "pytest", "-p", "no:cacheprovider", name)


@pytest.mark.parametrize("number", [number for number, text in enumerate(SNIPPETS) if text not in FILES.values()])
def test_snippet(number):
    snippet = SNIPPETS[number]
    if "nvidia.dali" in snippet:
        pytest.importorskip("nvidia.dali", reason="DALI is not built for this machine")
    if any(f"{word} {library}" in snippet for library in APART for word in ("import", "from")):
        Path("snippet.py").write_text(snippet)
        run("snippet.py")
        return
    namespace = {"__name__": "readme"}
    exec(compile(snippet, f"README.md snippet {number}", "exec"), namespace)
    for value in namespace.values():
        if isinstance(value, StatefulDataLoader):
            value.close()


def run(*arguments, status=0):
    """A command of Python's in the current folder, which has to end so."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


KILLING = """
import os, signal, train
from stateful_pipes import CheckpointManager

def save_and_die(self, step, state, save=CheckpointManager.save_if_due):
    save(self, step, state)
    if step == 47:
        os.kill(os.getpid(), signal.SIGKILL)

CheckpointManager.save_if_due = save_and_die
train.main()
"""


def test_the_training_script_is_killed_and_ends_with_the_same_weights():
    run("train.py")
    Path("run").rename("unbroken")
    run("-c", KILLING, status=-signal.SIGKILL)
    run("train.py")
    (expected, found) = (CheckpointManager(folder, every=1).restore() for folder in ("unbroken", "run"))
    assert found.step == expected.step == 96
    for part in ("model", "optimizer", "loader"):  # and torch's generator; the script seeds no other
        assert first_mismatch(expected.state[part], found.state[part]) is None
    assert torch.equal(expected.state["random"]["torch"], found.state["random"]["torch"])


def test_the_training_script_is_verified_as_it_says():
    assert "stateful-pipes verify train:make_loader" in README.read_text()
    run("-m", "stateful_pipes", "verify", "train:make_loader", "--batches", "16")


MADE = """\
    def __init__(self):
        self.generator = torch.Generator()

"""


def test_the_training_script_s_noise_from_elsewhere_is_found_as_it_says():
    text = FILES["train.py"].replace("    def __len__", MADE + "    def __len__")
    Path("train.py").write_text(text.replace("torch.rand(3)", "torch.rand(3, generator=self.generator)"))
    printed = run("-m", "stateful_pipes", "verify", "train:make_loader", "--batches", "16", status=1)
    shown = README.read_text().partition("NOT exact:")[2].partition("```")[0]
    assert " ".join(shown.split()) in " ".join(printed.split())


def test_the_table_of_errors_is_that_of_the_classes():
    found = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    lines = [f"| {one.code} | `{one.__name__}` | {one.__doc__.splitlines()[0].removesuffix('.')} |" for one in found]
    table = README.read_text().partition("## Errors")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line[:3].strip("| ").isdigit()] == sorted(lines)
