"""The structure that docs/ARCHITECTURE.md draws, held against the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "toque"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of ours; concrete classes meet in the last ones, which may import all.
ALLOWED = {
    "telemetry": set(),
    "spec": {"telemetry"},
    "sampling": {"telemetry"},
    "types": {"telemetry", "sampling", "spec", "handover"},
    "errors": set(),
    "slo": {"types", "errors"},
    "options": {"errors"},
    "config": {"types", "errors", "slo", "options"},
    "ipc": {"types", "errors"},
    "metrics": {"types", "errors", "slo"},
    "files": {"types", "errors"},
    "memory": {"types", "errors"},
    "scheduler": {"types", "errors", "memory"},
    "kernels": {"types", "errors"},
    "layers": {"types", "errors", "kernels"},
    "model": {"types", "errors", "kernels", "layers", "files"},
    "worker": {"types", "errors", "kernels", "model", "layers"},
    "engine": {"types", "errors", "ipc", "scheduler"},
    "handover": {"telemetry"},
    "disagg": {"types", "telemetry", "errors", "ipc", "memory"},
    "structured": {"types", "errors", "ipc"},
    "serve": {"types", "errors", "options", "slo", "ipc", "metrics", "files", "structured"},
    "record": {"types", "telemetry", "errors", "ipc"},
    "sim": {"types", "errors", "slo", "ipc", "engine", "scheduler", "memory"},
}
COMPOSERS = {"build", "llm", "cli", "commands", "bench", "engine_process", "__main__", "__init__"}


def part_of(path: Path) -> str:
    """The first name below the package: a file's own, or its folder's."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every `toque` module that a file imports, wherever in it, TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("toque"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toque"):
            assert node.level == 0
            yield node.module or ""


def test_every_part_imports_only_what_its_place_allows() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        if part in COMPOSERS:
            continue
        for module in imports(path):
            target = module.split(".")[1] if "." in module else "__init__"
            version_only = target == "__init__"
            if target != part and target not in ALLOWED[part] and not version_only:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_layers_see_kernels_only_through_the_contract() -> None:
    wrong = [
        f"{path.name}: {module}"
        for folder in ("layers", "model", "worker")
        for path in (PACKAGE / folder).glob("*.py")
        for module in imports(path)
        if module.startswith("toque.kernels") and module != "toque.kernels.api"
    ]
    assert not wrong


def test_torch_and_transformers_are_named_nowhere_but_in_the_bench() -> None:
    """The serving path on a CPU has neither; the bench compares with them where they are."""
    for path in FILES:
        if part_of(path) == "bench":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            heavy = [name for name in names if name.split(".")[0] in ("torch", "transformers")]
            assert not heavy, f"{path} imports {heavy}"


def test_serving_and_generating_load_no_torch(tiny_config: Path) -> None:
    """All that `toque serve` imports in either process, and a model really run."""
    program = f"""
import sys
import toque.serve.server, toque.commands.serve, toque.engine_process, toque.llm
from toque.build import build_engine
from toque.options import EngineOptions
from toque.ipc import InProcess
from pathlib import Path
options = EngineOptions(load_format="dummy")
build_engine(Path({str(tiny_config)!r}), "tiny", options, InProcess().engine)
heavy = {{"torch", "transformers", "gguf", "safetensors", "scipy"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_help_imports_nothing_heavy() -> None:
    """`toque --help` answers at once: no numpy, no web framework, no tokenizer."""
    program = """
import sys
from toque.cli import parser
parser().format_help()
heavy = {"numpy", "fastapi", "pydantic", "tokenizers", "zmq", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes_and_manners(path: Path) -> None:
    """Files up to 400 lines, classes 300, functions 60, constructors 8 arguments; every module
    says what it is; nothing global is changed, no pickle, nothing is caught without a name."""
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "the module has no docstring"
    assert len(text.splitlines()) <= 400
    for function in functions(tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= 60, f"{function.name} has {lines} lines"
        if function.name == "__init__":
            arguments = len(function.args.args) + len(function.args.kwonlyargs) - 1
            assert arguments <= 8, f"a constructor with {arguments} arguments"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 320, f"class {node.name} has {lines} lines"
        assert not isinstance(node, ast.Global), "a `global` statement"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), "a bare except"
        if isinstance(node, ast.Import):
            assert not {"pickle", "marshal", "shelve"} & {alias.name for alias in node.names}


def test_functions_are_short_in_the_median() -> None:
    lengths = sorted(
        (function.end_lineno or 0) - function.lineno + 1
        for path in FILES
        for function in functions(ast.parse(path.read_text()))
    )
    assert lengths[len(lengths) // 2] <= 12


@pytest.mark.parametrize("document", ["docs/ARCHITECTURE.md", "docs/tour.md"])
def test_the_names_that_documents_give_exist(document: str) -> None:
    """`path/file.py` in backquotes is a file of the tree, and `name()` a function or class."""
    text = (ROOT / document).read_text()
    code = "\n".join(path.read_text() for path in [*FILES, *(ROOT / "csrc").glob("*")])
    for name in re.findall(r"`([\w/.-]+\.(?:py|h|cpp|md|json))`", text):
        known = [ROOT / name, PACKAGE / name, ROOT / "docs" / name]
        assert any(place.exists() for place in known), f"{document} names {name}"
    for name in re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)\(\)`", text):
        last = name.split(".")[-1]
        assert re.search(rf"\b(def|class) {last}\b", code), f"{document} names {name}()"


def test_no_path_of_a_machine_is_in_the_tree() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".cpp", ".h", ".sh", ".toml", ".json", ".txt"):
            assert not re.search(r"/(work|root|home)/[a-z]", path.read_text()), name
