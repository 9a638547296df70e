"""Every notebook runs from its first cell to its last."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_notebooks_are_there():
    assert [p.name[:2] for p in NOTEBOOKS] == ["01", "02", "03"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_small(path):
    assert path.stat().st_size < 400_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path):
    nbclient = pytest.importorskip("nbclient", reason="needs pip install -e '.[notebook]'")
    nbformat = pytest.importorskip("nbformat", reason="needs pip install -e '.[notebook]'")
    notebook = nbformat.read(path, as_version=4)
    # The kernel must not inherit what the tests set for eight devices.
    before = {name: os.environ.pop(name, None) for name in ("XLA_FLAGS", "NPROC")}
    try:
        nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(path.parent)}}).execute()
    finally:
        os.environ.update({k: v for k, v in before.items() if v is not None})
    assert any(cell.get("outputs") for cell in notebook.cells)
