"""Notebooks run from top to bottom, and show what they say."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")  # device tests are collected without development packages
NotebookClient = pytest.importorskip("nbclient").NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own machinery
def test_notebook_runs(path):
    """In its own folder, as Jupyter runs it, with the packages of the extra that the README names. Cells with the tag
    `exact` print the same on every machine: as committed, or the outputs are stale."""
    assert imported(path) <= {*packages("notebooks"), *sys.stdlib_module_names, "jllm", "pallas_kernels", "experiments"}
    notebook = nbformat.read(path, as_version=4)
    shown = exact(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    assert exact(notebook) == shown, "run it again"


def imported(path: Path) -> set[str]:
    code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    return set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))


def packages(extra: str) -> set[str]:
    """What is installed with an extra, by the names of requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        needed.partition("==")[0] for needed in [*project["dependencies"], *project["optional-dependencies"][extra]]
    }


def exact(notebook) -> list[str]:
    """What those cells print."""
    cells = [cell for cell in notebook.cells if "exact" in cell.metadata.get("tags", ())]
    return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_as_it_ran(path):
    """From top to bottom, without errors, warnings or paths of a machine."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|Users)/", "".join(output.get("text", "") for output in outputs))
