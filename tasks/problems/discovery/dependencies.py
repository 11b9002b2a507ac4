"""Packages that code and tests of a project import, found by comparing imports with the modules of distributions."""

import ast
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.folders import is_below
from ostinato.infra.platform.packages import pin
from ostinato.infra.platform.source_archives import fetch_wheel, read_wheel
from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.discovery.layout import ProjectLayout, declares_namespace, strip_prefix
from ostinato.infra.sandbox.discovery.metadata import Metadata

_IN_BOX = frozenset(("pytest", "pluggy", "iniconfig", "packaging"))  # packages of the test runner
_TRIED_REQUIREMENTS = 16  # requirements of tests; each takes some seconds of pip
_MAX_TEST_WHEELS_BYTES = 30 << 20  # every box holds all of these files


def find_dependencies(
    files: Mapping[str, bytes], metadata: Metadata, layout: ProjectLayout, cache: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pinned packages that code and tests import, and remarks on imports that nothing provides."""
    own = canonicalize_name(metadata.name)
    moved = strip_prefix(files, layout.stripped_prefix) if layout.stripped_prefix else files
    known = _modules(moved) | sys.stdlib_module_names | _IN_BOX | {"_pytest", "py"}
    # the folder of a test file and the folders of pythonpath are on the import path
    roots = (*layout.test_paths, *metadata.rules.pythonpath)
    for path in moved:
        if is_below(path, roots):
            parts = path.split("/")
            known |= _modules({"/".join(parts[n:]): b"" for n in range(1, len(parts))})
    imported = _imports(moved, (*layout.package_paths, *layout.test_paths))
    runtime = [text for text in metadata.requires if _name(text) not in _IN_BOX | {own}]
    if any(name.partition(".")[0] == "zoneinfo" for name in imported):
        runtime.append("tzdata")  # boxes have no time zone data of the system
    wanted = [text for text in metadata.test_requires if _is_test_library(text, own)]
    pins, remarks = set[str](), list[str]()
    try:
        pins = set(pin(runtime))
        known |= _held_by(pins, cache)
    except ConfigError as error:  # perhaps for a requirement that nothing imports
        remarks.append(f"the project's requirements cannot all be installed: {error!s:.300}")
        pins, wanted = set(), [*runtime, *wanted]
    missing = _missing(imported, known)
    # similar names first, because the modules of a distribution are known only after its download
    wanted.sort(key=lambda text: not _resembles(text, missing))
    for text in wanted[:_TRIED_REQUIREMENTS]:
        if not missing:
            break
        try:
            more = set(pin([*sorted(pins), text])) - pins
            size = sum(fetch_wheel(item, cache).stat().st_size for item in more)
            held = _held_by(more, cache) if size <= _MAX_TEST_WHEELS_BYTES else set[str]()
        except ConfigError as error:
            remarks.append(f"{text} left out: {error!s:.200}")
            continue
        if size > _MAX_TEST_WHEELS_BYTES:
            remarks.append(f"{text} left out: its wheels take {size >> 20} MiB")
        elif _missing(imported, known | held) < missing:
            pins |= more
            known |= held
            missing = _missing(imported, known)
    if missing:
        remarks.append(
            f"imported, but in no metadata or not available: {', '.join(sorted(missing))}"
        )
    found = sorted(item for item in pins if _name(item) not in _IN_BOX | {own})
    return tuple(found), tuple(remarks)


def _held_by(pins: Iterable[str], cache: Path) -> set[str]:
    """Modules in the wheels."""
    wheels = (read_wheel(fetch_wheel(item, cache), is_whole=True) for item in pins)
    return {name for files in wheels for name in _modules(files)}


def _modules(files: Mapping[str, bytes]) -> set[str]:
    """Dotted names of the modules and packages among some files. Namespace packages are left out, because several
    distributions hold their parts.
    """
    found: set[str] = set()
    for path, content in files.items():
        head, _, name = path.rpartition("/")
        stem = name.partition(".")[0]
        if not name.endswith((".py", ".so")):
            continue
        if stem != "__init__":
            found.add(f"{head}/{stem}".strip("/").replace("/", "."))
        elif head and not declares_namespace(content):
            found.add(head.replace("/", "."))
    return found


def _missing(imported: Iterable[str], known: Collection[str]) -> set[str]:
    """The shortest prefix of each imported name that is neither a known module nor a namespace of one."""
    namespaces = {name[:at] for name in known for at, letter in enumerate(name) if letter == "."}
    found: set[str] = set()
    for name in imported:
        ends = [at for at, letter in enumerate(f"{name}.") if letter == "."]
        for part in (name[:end] for end in ends):
            if part in known:
                break
            if part not in namespaces:
                found.add(part)
                break
    return found


def _imports(files: Mapping[str, bytes], roots: Sequence[str]) -> set[str]:
    """Dotted names of absolute imports below some paths. `from a import b` gives the name a.b."""
    found: set[str] = set()
    for path, content in files.items():
        if not path.endswith(".py") or not is_below(path, roots):
            continue
        try:
            tree = parse_python(content)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = (alias.name for alias in node.names)
                found.update(
                    node.module if name == "*" else f"{node.module}.{name}" for name in names
                )
    return found


def _name(requirement: str) -> str:
    return canonicalize_name(re.split(r"[\[<>=!~ ;]", requirement)[0])


def _is_test_library(requirement: str, own: str) -> bool:
    """Whether a requirement may help tests. Plug-ins of pytest do not, because boxes do not load them."""
    name = _name(requirement)
    return name not in _IN_BOX | {own} and not name.startswith("pytest-")


def _resembles(requirement: str, modules: Iterable[str]) -> bool:
    """Whether the names of a distribution and of an imported module are similar, as python-dateutil and dateutil,
    or protobuf and google.protobuf.
    """
    name = re.sub(r"^(python|py)-?|-?(python|py)$", "", _name(requirement)).replace("-", "_")
    alike = {
        form
        for module in modules
        for form in (module.lower().replace(".", "_"), module.lower().rpartition(".")[2])
    }
    return any(name in (form, form + "s") for form in alike)
