"""Every notebook runs from top to bottom, in a kernel of its own, and is kept without what it printed."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_notebooks_are_numbered_from_one():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02d}_" for number in range(1, len(NOTEBOOKS) + 1)]
    assert NOTEBOOKS


@notebooks
def test_it_is_kept_without_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count is not None] == []


@notebooks
def test_its_last_cell_asserts(path):
    assert "assert " in nbformat.read(path, as_version=4).cells[-1].source


@notebooks
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    if any("from nvidia.dali import" in cell.source for cell in notebook.cells):
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
