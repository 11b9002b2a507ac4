"""Packages import one another in one direction, and the flow process loads few modules."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.source import ROOT, list_modules, parse

FLOW_MODULES = 150


def module_name(path: str) -> str:
    """Dotted name of a file of the packages, without `ostinato`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(path: str) -> Iterator[str]:
    """Modules, or names in modules, that a file imports anywhere; those for type checkers too."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("depth", [2, 3])
def test_packages_import_in_no_ring(depth: int) -> None:
    """Packages are named by so many parts: `flows.stages`, `infra.agent.tools`."""
    modules = {module_name(path): path for path in list_modules()}
    folders = {cut(name, depth) for name in modules if name.count(".") >= depth}
    packages: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for target in imported_names(path):
            pair = {cut(name, depth), cut(target.removeprefix("ostinato."), depth)}
            if target.startswith("ostinato.") and len(pair) == 2 and pair <= folders:
                packages[cut(name, depth)] |= pair - {cut(name, depth)}
    try:
        TopologicalSorter(packages).prepare()
    except CycleError as error:
        pytest.fail(f"packages in a ring: {' <- '.join(error.args[1])}")


def cut(name: str, depth: int) -> str:
    """The first parts of a dotted name."""
    return ".".join(name.split(".")[:depth])


def test_the_flow_process_loads_few_modules() -> None:
    """It supervises: what trains, decodes, runs boxes or serves is imported in its children. Empty
    files of packages do not count.
    """
    program = (
        "import sys, ostinato.flows.reinforcement\n"
        "files = [module.__file__ for name, module in sys.modules.items()"
        " if name.partition('.')[0] == 'ostinato']\n"
        "print(*files, sep='\\n')\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = [path for path in found.stdout.split() if (ROOT / path).stat().st_size]
    assert len(loaded) <= FLOW_MODULES, "\n".join(sorted(loaded))
