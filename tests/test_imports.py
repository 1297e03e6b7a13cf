"""Checks that imports point one way: experiments -> jllm -> pallas_kernels, and inside jllm along ORDER."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folders and files of jllm: each imports only what stands before it.
ORDER = [
    *("errors", "config", "parallel", "model", "quant", "training", "nnx", "speculative", "guides", "step", "files"),
    *("programs", "engine", "api", "distributed", "kv_policies", "analysis", "cli", "chat", "generate", "serve"),
    *("batch", "__main__"),
]
OPERATIONS = sorted(path.parent.name for path in (ROOT / "pallas_kernels").glob("*/api.py"))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Modules, or names in modules, those inside of functions too, but not what type checkers alone import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse)
        else:
            yield from imported(ast.iter_child_nodes(node))


def imports_of(folder: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(ast.parse(path.read_text(encoding="utf-8")).body):
            yield path.relative_to(ROOT), name


def test_packages_point_one_way():
    above = {
        "pallas_kernels": ("jllm", "experiments", "tests"),
        "jllm": ("experiments", "tests"),
        "experiments": ("tests",),
    }
    for folder, others in above.items():
        for path, name in imports_of(folder):
            assert name.partition(".")[0] not in others, f"{path} imports {name}"


def test_rooms_of_jllm_point_one_way():
    rooms = {path.stem for path in (ROOT / "jllm").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(ORDER)
    for path, name in imports_of("jllm"):
        parts, room = name.split("."), Path(path.parts[1]).stem
        if parts[0] != "jllm" or room == "__init__" or parts[1] not in rooms:
            continue
        assert ORDER.index(parts[1]) <= ORDER.index(room), f"{path} imports {name}"


def test_only_nnx_takes_what_trainers_install():
    found = {
        (path.as_posix(), top)
        for folder in ("jllm", "pallas_kernels")
        for path, name in imports_of(folder)
        if (top := name.partition(".")[0]) in ("flax", "optax", "orbax") or name.startswith("jllm.nnx")
    }
    assert found == {("jllm/nnx.py", "flax")}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_does_not_need_its_benchmark(operation):
    """And its cases, which benchmarks and tests share, not its kernels."""
    for path, name in imports_of(f"pallas_kernels/{operation}"):
        if path.name not in ("bench.py", "bench_runs.py", "cases.py"):
            assert ".bench" not in name, f"{path} imports {name}"
            assert not name.endswith(".cases"), f"{path} imports {name}"


def test_a_kernels_reference_shares_nothing_with_it():
    for operation in OPERATIONS:
        path = ROOT / "pallas_kernels" / operation / "reference.py"
        if path.exists():
            names = list(imported(ast.parse(path.read_text(encoding="utf-8")).body))
            assert not [name for name in names if "sm90" in name or ".xla" in name or ".api" in name], path
