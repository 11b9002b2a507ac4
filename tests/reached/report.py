"""Lines of the product that lie in functions that ran, from what the hook in every process recorded."""

import ast
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT, list_files

EXPLAINED = Path(__file__).parent / "not_reached.toml"
STARTERS = {  # of the C programs in a folder
    "infra/sandbox/microvm/": "infra/sandbox/microvm/machine.py",
    "infra/sandbox/": "infra/sandbox/host/box.py",
}
SUFFIXES = {".py", ".c", ".h"}


@dataclass(frozen=True)
class FileReach:
    """Lines of one file, and those in functions that ran."""

    path: str
    lines: int
    reached: int
    silent: tuple[str, ...]  # functions that never ran


def recorded_places(folder: Path) -> dict[str, set[int]]:
    """First lines of the code that ran, by file relative to the repository."""
    places: dict[str, set[int]] = {}
    for record in folder.glob("*.json"):
        for path, line in json.loads(record.read_text()):
            places.setdefault(path, set()).add(line)
    return places


def is_declaration(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether nothing but a docstring or `...` stands in it, as in protocols: it counts with its module."""
    return all(
        isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        for part in function.body
    )


def functions_of(tree: ast.Module) -> Iterator[tuple[str, int, int, int]]:
    """(name, first line of the code object, first line, last line) of outermost functions and methods."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if is_declaration(node):
                    continue
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                yield node.name, first, first, node.end_lineno or node.lineno
            else:
                waiting.append(node)


def measure_file(path: str, places: dict[str, set[int]]) -> FileReach:
    """A module's top level counts when it was imported; C when the module that starts it was."""
    text = (ROOT / path).read_text()
    lines = text.count("\n")
    if not path.endswith(".py"):
        starter = next(module for folder, module in STARTERS.items() if path.startswith(folder))
        return FileReach(path, lines, lines if len(places.get(starter, ())) > 1 else 0, ())
    lines_run = places.get(path, set())
    if not lines_run:
        return FileReach(path, lines, 0, ("the module was never imported",) if lines else ())
    silent = [
        (name, last - first + 1)
        for name, code_line, first, last in functions_of(ast.parse(text))
        if code_line not in lines_run
    ]
    return FileReach(
        path, lines, lines - sum(size for _, size in silent), tuple(name for name, _ in silent)
    )


def measure(folder: Path) -> list[FileReach]:
    """Every file of the product."""
    places = recorded_places(folder)
    return [
        measure_file(path, places)
        for path in list_files()
        if path.split("/")[0] in PACKAGES and Path(path).suffix in SUFFIXES
    ]


def explained(path: str) -> str:
    """Reason why a file need not run here; empty when there is none."""
    for row in tomllib.loads(EXPLAINED.read_text())["rows"]:
        if path.startswith(tuple(row["paths"])):
            return row["reason"]
    return ""


def print_report(files: list[FileReach]) -> float:
    """Prints folders by silent lines, what is unexplained, and the share reached, which it returns."""
    total, reached = sum(file.lines for file in files), sum(file.reached for file in files)
    silent = sorted(files, key=lambda file: file.reached - file.lines)
    print(f"{'lines':>6} {'reached':>8}  file")
    for file in silent[:60]:
        mark = "explained" if explained(file.path) else ", ".join(file.silent[:6])
        print(f"{file.lines:>6} {file.reached / max(1, file.lines):>8.0%}  {file.path}  {mark}")
    excused = sum(file.lines - file.reached for file in files if explained(file.path))
    print(f"product lines {total}, in functions that ran {reached}: {reached / total:.1%}")
    print(f"of the others {excused} are explained in {EXPLAINED.relative_to(ROOT)}")
    return reached / total
