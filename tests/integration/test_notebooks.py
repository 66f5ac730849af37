"""Every notebook runs from top to bottom, in a kernel of its own, and what it was kept with is what a run prints.

    python -m tests.integration.test_notebooks notebooks/04_speed.ipynb

runs it and keeps it with what it printed.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MEASURED = "measured"
"""A tag: what such a cell prints is another at each run."""

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(path, folder):
    """The notebook with what it printed; beside it is what a checkout has there, and nothing may be left."""
    notebook = nbformat.read(path, as_version=4)
    (folder / "notebooks").mkdir()
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    where = {"metadata": {"path": str(folder / "notebooks")}}
    NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, resources=where).execute()
    assert list((folder / "notebooks").iterdir()) == []
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def printed(cell):
    """The text, and for each picture what stands for it where none can be shown."""
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return text, [output.data["text/plain"] for output in cell.outputs if output.output_type != "stream"]


def test_the_notebooks_are_numbered_from_one():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02d}_" for number in range(1, len(NOTEBOOKS) + 1)]
    assert NOTEBOOKS


@notebooks
def test_it_is_kept_with_all_outputs_of_one_run_or_with_none(path):
    cells = code_of(nbformat.read(path, as_version=4))
    if cells[0].execution_count is None:
        assert [cell.source for cell in cells if cell.outputs or cell.execution_count is not None] == []
    else:
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@notebooks
def test_its_last_cell_asserts(path):
    assert "assert " in nbformat.read(path, as_version=4).cells[-1].source


@notebooks
def test_it_prints_what_it_was_kept_with(path, tmp_path):
    kept = code_of(nbformat.read(path, as_version=4))
    if any("from nvidia.dali import" in cell.source for cell in kept):
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")
    for before, after in zip(kept, code_of(run(path, tmp_path)), strict=True):
        if before.execution_count is not None and MEASURED not in before.metadata.get("tags", ()):
            assert printed(after) == printed(before)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with TemporaryDirectory() as folder:
            nbformat.write(run(Path(name), Path(folder)), name)
