"""Imports a repository from memory, so that a later run can find no copy of its sources.

`MemoryFinder` finds modules below one root. `make_options` turns a repository's own rules for test collection into
options of pytest: from the pytest.ini at its top, a run takes only the settings in NAMES and the import mode. Runs
inside the box.
"""

import configparser
import fnmatch
import importlib.abc
import importlib.machinery
import linecache
import marshal
import os
import shlex
import sys
import types
from collections.abc import Sequence

RULES_FILE = "pytest.ini"
NAMES = (
    "python_classes", "python_functions", "pythonpath", "usefixtures", "consider_namespace_packages",
)  # fmt: skip
_SECTION = "pytest"


class MemoryFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads Python files of `sources` (relative path -> text) below `root`."""

    def __init__(self, root: str, sources: dict[str, bytes], compiled: dict[str, bytes]) -> None:
        """`compiled`: marshalled code of some of the files, from the same interpreter version."""
        self.root = root
        self.sources = sources
        self.codes: dict[str, types.CodeType] = {}
        self._compiled = compiled

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Like PathFinder, on the files in memory."""
        tail = fullname.rpartition(".")[2]
        for entry in sys.path if path is None else path:
            if entry != self.root and not entry.startswith(self.root + "/"):
                continue
            folder = os.path.relpath(entry, self.root)
            base = tail if folder == "." else f"{folder}/{tail}"
            for candidate, is_package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
                if candidate in self.sources:
                    return self._make_spec(fullname, candidate, is_package)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the code of a module."""
        assert module.__spec__ is not None
        assert module.__spec__.origin is not None
        path = os.path.relpath(module.__spec__.origin, self.root)
        self._remember_lines(path)
        exec(self._code(path), module.__dict__)

    def get_source(self, fullname: str) -> str | None:
        """Source of a loaded module."""
        module = sys.modules.get(fullname)
        if module is None or module.__spec__ is None or module.__spec__.origin is None:
            return None
        return self.sources[os.path.relpath(module.__spec__.origin, self.root)].decode()

    def get_resource_reader(self, fullname: str) -> importlib.abc.TraversableResources | None:
        """Reads data files of a package from the box's disk, since only code is in memory."""
        from importlib.readers import FileReader  # noqa: PLC0415 - few packages need it

        spec = sys.modules[fullname].__spec__
        if spec is None or spec.origin is None or not spec.submodule_search_locations:
            return None
        return FileReader(importlib.machinery.SourceFileLoader(fullname, spec.origin))

    def _remember_lines(self, path: str) -> None:
        """Caches the lines, so that tracebacks and inspect show the code that runs."""
        full = f"{self.root}/{path}"
        lines = self.sources[path].decode(errors="replace").splitlines(keepends=True)
        linecache.cache[full] = (len(self.sources[path]), None, lines, full)

    def _code(self, path: str) -> types.CodeType:
        compiled = self._compiled.get(path)
        if compiled is not None:
            return marshal.loads(compiled)
        code = compile(self.sources[path], f"{self.root}/{path}", "exec", dont_inherit=True)
        self.codes[path] = code
        return code

    def _make_spec(
        self, fullname: str, path: str, is_package: bool
    ) -> importlib.machinery.ModuleSpec:
        full = f"{self.root}/{path}"
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=full, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(full)]
        return spec


def read_options(root: str, also: str = "") -> list[str]:
    """Options of pytest for a repository whose files are at `root`. `also`: as for `make_options`."""
    try:
        with open(os.path.join(root, RULES_FILE), encoding="utf-8", errors="replace") as file:
            return make_options(root, file.read(), also)
    except FileNotFoundError:
        return []


def make_options(root: str, rules: str, also: str = "") -> list[str]:
    """Options of pytest for a repository at `root`, from the text of its pytest.ini, which may be empty. `also`: names
    of functions, for canaries, that are tests whatever the repository's rules say.
    """
    settings = _read(rules)
    if also and settings.get("python_functions"):
        settings["python_functions"] += f" {also}"
    paths = [os.path.join(root, path) for path in read_import_roots(rules)]
    if paths:
        settings["pythonpath"] = shlex.join(paths)
    options = [f"--override-ini={name}={settings[name]}" for name in NAMES if settings.get(name)]
    words = settings.get("addopts", "").split()
    return options + [word for word in words if word.startswith("--import-mode=")]


def read_import_roots(rules: str) -> tuple[str, ...]:
    """Folders of a repository on the import path of its tests, from the text of its pytest.ini, which may be empty."""
    return tuple(shlex.split(_read(rules).get("pythonpath", "")))


def is_test_name(name: str, rules: str = "") -> bool:
    """Whether pytest collects a function of this name as a test, in a unittest class or elsewhere."""
    patterns = ["test", *shlex.split(_read(rules).get("python_functions", ""))]
    return any(name.startswith(item) or fnmatch.fnmatch(name, item) for item in patterns)


def function_of(test: str) -> str:
    """A test's id without its parameters. Brackets in the name of its file stay."""
    path, separator, name = test.partition("::")
    return f"{path}{separator}{name.partition('[')[0]}"


def argument_of(test: str) -> str:
    """A test's id or path as an argument of pytest, which takes the first bracket for parameters: for a path with
    brackets, the nearest folder above them.
    """
    head, bracket, _ = test.partition("::")[0].partition("[")
    return os.path.dirname(head) if bracket else test


def _read(rules: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(rules)
    except configparser.Error:
        return {}
    return dict(parser[_SECTION]) if _SECTION in parser else {}
