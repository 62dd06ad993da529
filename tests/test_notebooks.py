"""Every notebook runs from top to bottom, and is committed executed."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted(
    (Path(__file__).parent.parent / "experiments" / "notebooks").glob("*.ipynb")
)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("SPECDEC_SMOKE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_executed(path):
    cells = nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code":
            assert cell.execution_count, "run it, then commit it"
            assert not any(output.output_type == "error" for output in cell.outputs)
