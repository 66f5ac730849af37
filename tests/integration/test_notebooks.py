"""Every notebook runs from top to bottom, in a kernel of its own, and what it was kept with is what a run prints.

`jupyter execute --inplace notebooks/*.ipynb`, in the folder of a checkout, keeps it with its outputs.
"""

from pathlib import Path

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


def printed(cell):
    """The text, and for each picture what stands for it where there are none."""
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
def test_it_runs(path, tmp_path):
    kept, notebook = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    if any("from nvidia.dali import" in cell.source for cell in notebook.cells):
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (extra dali)")
    # The folder and its neighbour as in a checkout, but nothing can be left there.
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    assert list(folder.iterdir()) == []
    for before, after in zip(code_of(kept), code_of(notebook), strict=True):
        if before.execution_count is not None and MEASURED not in before.metadata.get("tags", ()):
            assert printed(after) == printed(before)
