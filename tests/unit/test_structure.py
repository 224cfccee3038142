"""House rules that a reader relies on: short modules, short functions, said purposes, and arrows in one direction.

Each rule is a function over sources, so that it is tested itself on a source that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 40  # statements, without the docstring

# Who may import whom, besides its own room.
MAY_IMPORT = {
    "kernels": set(),
    "refengine": {"kernels"},
    "exercises": {"refengine", "kernels"},
    "solutions": {"refengine", "kernels", "exercises"},  # its sources are the exercises' notebooks too
    "chapters": {"refengine", "kernels", "exercises"},
}
FORBIDDEN = {  # inside refengine
    "refengine.v0": ("refengine.v1",),
    "refengine.v1": ("refengine.v0",),
    "refengine.viz": ("refengine.v0", "refengine.v1", "refengine.llm", "refengine.parts", "refengine.guard"),
    "refengine.model": ("refengine.v0", "refengine.v1"),
}
HOME = re.compile(r"/(?:work/(?:main|shared)|home/\w+|Users/\w+|root)/")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = sorted(path for room in ("kernels", "refengine") for path in (ROOT / room).rglob("*.py"))


def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def dotted(path: Path) -> str:
    """`refengine/v1/block.py` -> `refengine.v1.block`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# The rules


def long_functions(source: str) -> list[str]:
    """Functions whose statements span more lines than allowed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} ({lines} lines)")
    return found


def undocumented(source: str, contracts: frozenset[str] = frozenset()) -> list[str]:
    """Public symbols without a docstring.

    A property says itself what it is. So does a method that fulfils a contract: `contracts` names the methods
    that a base class or a protocol documents.
    """
    tree = ast.parse(source)
    found = ["(the module)"] if source.strip() and not ast.get_docstring(tree) else []
    silent = [(name, node) for name, node in _public(tree) if not ast.get_docstring(node)]
    return found + [name for name, node in silent if not _spared(node, contracts)]


def _public(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{node.name}.")


def _spared(node: ast.stmt, contracts: frozenset[str]) -> bool:
    if not isinstance(node, Function):
        return False
    return node.name in contracts or any("property" in ast.unparse(d) for d in node.decorator_list)


def contracts_in(sources: Iterable[str]) -> frozenset[str]:
    """Names of the methods that base classes and protocols document.

    torch's own two belong to them: it calls them, and what a layer computes is said by its class.
    """
    classes = [
        node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)
    ]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    names = {"forward", "reset_parameters"}
    for node in classes:
        if node.name in bases or {"ABC", "Protocol"} & {ast.unparse(base) for base in node.bases}:
            names |= {n.name for n in node.body if isinstance(n, Function) and ast.get_docstring(n)}
    return frozenset(names)


def imports(source: str, package: str) -> set[str]:
    """Every module that a source imports, at its head or inside a function. `package`: the one it stands in."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            module = ".".join(filter(None, (above, node.module)))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def against_the_arrows(source: str, module: str, package: str) -> list[str]:
    """Imports of `module` that the table forbids."""
    room = module.split(".")[0]
    rooms = {*MAY_IMPORT, "tests"} - {room} - MAY_IMPORT[room]
    forbidden = [name for own, others in FORBIDDEN.items() if _within(module, own) for name in others]
    return sorted(
        name for name in imports(source, package) if any(_within(name, f) for f in (*rooms, *forbidden))
    )


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# The code


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_modules_and_functions_are_short(path: Path) -> None:
    source = source_of(path)
    num_lines = source.count("\n")
    assert num_lines <= MAX_MODULE_LINES
    assert long_functions(source) == []


def test_every_public_symbol_says_what_it_is_for() -> None:
    contracts = contracts_in(map(source_of, MODULES))
    missing = {dotted(path): found for path in MODULES if (found := undocumented(source_of(path), contracts))}
    assert missing == {}, missing


def test_arrows_point_upwards() -> None:
    wrong = {}
    for room in MAY_IMPORT:
        for path in sorted((ROOT / room).rglob("*.py")):
            package = dotted(path) if path.name == "__init__.py" else dotted(path.parent)
            if found := against_the_arrows(source_of(path), dotted(path), package):
                wrong[dotted(path)] = found
    assert wrong == {}, wrong


def test_no_file_knows_where_it_was_written() -> None:
    """A path of somebody's home in a file that others will read: tracked files, and those about to be."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout, so nobody knows which files belong to it")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    assert len(files) > 50
    found = [str(path.relative_to(ROOT)) for path in files if path.is_file() and HOME.search(_text(path))]
    assert found == [], found


def _text(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8", errors="replace")


# The rules themselves


def test_a_long_function_is_noticed_and_its_docstring_does_not_count() -> None:
    long = "def f():\n" + '    """Why.\n\n    ' + "More.\n" * 50 + '    """\n' + "    x = 1\n" * 40
    assert long_functions(long) == []
    assert long_functions(long + "    x = 1\n") == ["f (41 lines)"]


def test_a_missing_docstring_is_noticed() -> None:
    source = (
        "class A:\n  def b(self): ...\n  @property\n  def c(self): ...\n  def _d(self): ...\ndef e(): ...\n"
    )
    assert undocumented(source) == ["(the module)", "A", "A.b", "e"]
    assert undocumented(source, frozenset({"b"})) == ["(the module)", "A", "e"]
    documented = 'class A:\n    def b(self):\n        """Does b."""\n'
    assert "b" not in contracts_in([documented])
    assert "b" in contracts_in([documented, "class B(A): ..."])


@pytest.mark.parametrize(
    ("statement", "module", "wrong"),
    [
        ("import refengine.config", "kernels.x", ["refengine.config"]),
        ("import kernels", "refengine.x", []),
        ("from refengine import v1", "refengine.v0.x", ["refengine.v1"]),
        (
            "def f():\n  from refengine.v0.block import B",
            "refengine.v1.x",
            ["refengine.v0.block", "refengine.v0.block.B"],
        ),
        ("from ..v0 import block", "refengine.v1.x", ["refengine.v0", "refengine.v0.block"]),
        ("from refengine.trace import record", "refengine.viz.x", []),
        (
            "from refengine.v1.block import B",
            "refengine.viz.x",
            ["refengine.v1.block", "refengine.v1.block.B"],
        ),
        ("import tests.unit", "refengine.x", ["tests.unit"]),
        ("import exercises.grader", "chapters.x", []),
        ("import exercises.grader", "solutions.x", []),
        ("import solutions.x", "exercises.grader.x", ["solutions.x"]),
    ],
)
def test_an_arrow_that_points_down_is_noticed(statement: str, module: str, wrong: list[str]) -> None:
    assert against_the_arrows(statement, module, module.rpartition(".")[0]) == wrong


def test_a_home_path_is_noticed() -> None:
    for path in ("/ho" + "me/ada/x", "/Us" + "ers/ada/x", "/wo" + "rk/main/x", "/ro" + "ot/x"):
        assert HOME.search(f"see {path} for more")
    assert not HOME.search("see the /homepage/ and /adapters/one")
