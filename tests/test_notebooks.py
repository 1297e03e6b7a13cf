"""Notebooks run from top to bottom, and show what they say."""

import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_docs import shallow

nbformat = pytest.importorskip("nbformat")  # device tests are collected without development packages
NotebookClient = pytest.importorskip("nbclient").NotebookClient

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHALLOW = {"rollouts", "adapters"}  # these train, and name no layer
LOAD = "import jllm\nfrom dataclasses import replace\nfrom jllm.files.load import load\njllm.load = load\n"


@pytest.fixture(scope="module")
def run():
    """Runs notebooks one after the other in one process, which imports JAX once. No notebook sees another's names."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, resources={"metadata": {"path": str(FOLDER)}})

    def run(notebook, code: str, last: bool = False):
        begin = nbformat.v4.new_code_cell(f"%reset -f\nexec({code!r}, {{}})")
        for client.nb in (nbformat.v4.new_notebook(cells=[begin]), notebook):
            client.execute(cleanup_kc=last and client.nb is notebook)

    yield run
    run(nbformat.v4.new_notebook(), "", last=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own machinery
def test_notebook_runs(path, run):
    """In its own folder, as Jupyter runs it, with the packages of the extra that the README names. Cells with the tag
    `exact` print the same on every machine: as committed, or the outputs are stale."""
    assert imported(path) <= {*packages("notebooks"), *sys.stdlib_module_names, "jllm", "pallas_kernels", "experiments"}
    notebook = nbformat.read(path, as_version=4)
    shown = exact(notebook)
    run(notebook, LOAD + (inspect.getsource(shallow) + "jllm.load = shallow" if path.stem in SHALLOW else ""))
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
