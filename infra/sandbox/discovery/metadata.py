"""Metadata in a project's files: name, version, requirements, pytest settings. No code of the project runs."""

import ast
import codecs
import configparser
import contextlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from email.message import Message
from email.parser import BytesParser
from fnmatch import fnmatch
from typing import Any

from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import Field

from ostinato.infra.platform.bounded_files import parse_toml
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import stays_below
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.discovery.collection import Rules, read_rules

REQUIREMENT_FILES = (
    "*requirements*test*.txt", "*test*requirements*.txt", "requirements/*test*.txt", "*requirements*dev*.txt",
    "dev-requirements*.txt", "requirements/*dev*.txt", "tests/requirements*.txt", "test/requirements*.txt",
    "requirements.txt",
)  # fmt: skip
TEST_GROUPS = re.compile(r"test|dev|ci\b", re.IGNORECASE)
_FILES = re.compile(r"(?:-r|--requirement[ =]|file:)\s*(.+)")
_ELSEWHERE = {"path", "git", "url", "file"}  # keys of Poetry's dependencies that no index provides
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


class Metadata(Record):
    """Static facts of a project."""

    name: str
    version: str = Field(description="0 if only a build would know it")
    requires: tuple[str, ...] = Field(
        description="requirements of the code, markers evaluated for this Python"
    )
    test_requires: tuple[str, ...] = Field(
        description="requirements of tests, from extras, groups and files"
    )
    top_level: tuple[str, ...] = Field(description="import names, if stated")
    import_roots: tuple[str, ...] = Field(description="folders of packages, if stated")
    rules: Rules
    version_files: tuple[str, ...] = Field(description="modules that a build writes the version to")


def read_metadata(files: Mapping[str, bytes], fallback_name: str) -> Metadata:
    """Metadata from PKG-INFO, pyproject.toml, setup.cfg, setup.py, tox.ini, pytest.ini and requirement files.
    ProblemError names the file that does not parse.
    """
    try:
        return _read_metadata(files, fallback_name)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProblemError(
            f"{fallback_name}: its metadata cannot be read, wanted the standard forms of packaging: {error!r:.200}"
        ) from error


def _read_metadata(files: Mapping[str, bytes], fallback_name: str) -> Metadata:
    project = parse_toml("pyproject.toml", files.get("pyproject.toml", b""), ProblemError)
    setup, tox, _ = (_ini(files, name) for name in ("setup.cfg", "tox.ini", "pytest.ini"))
    program = read_setup_call(files.get("setup.py", b""))
    info = BytesParser().parsebytes(files.get("PKG-INFO", b""), headersonly=True)
    table, tool = project.get("project", {}), project.get("tool", {})
    poetry = tool.get("poetry", {})
    stated = [str(text) for text in info.get_all("Requires-Dist", [])] or _requires_txt(files)
    requires = [text for text in stated if not _EXTRA.search(text)]
    if not stated:
        requires = [*table.get("dependencies", ()), *_lines(setup, "options", "install_requires")]
        requires += [name for name in _of_index(poetry.get("dependencies", {})) if name != "python"]
        requires += _dynamic(tool)
        requires += program.get("install_requires", [])
    tests = [text for text in stated if any(TEST_GROUPS.search(e) for e in _EXTRA.findall(text))]
    tests += _groups(table.get("optional-dependencies", {}))
    tests += _groups(_resolve_groups(project.get("dependency-groups", {})))
    tests += _groups(_poetry_groups(poetry))
    if setup.has_section("options.extras_require"):
        extras = setup.items("options.extras_require")
        tests += _groups({extra: text.splitlines() for extra, text in extras})
    tests += _lines(setup, "options", "tests_require") + _lines(tox, "testenv", "deps")
    tests += [*program.get("tests_require", []), *_groups(program.get("extras_require", {}))]
    tests += [f"-r {path}" for path in sorted(files) if _holds_requirements(path)]
    places = (info, table, poetry, dict(setup["metadata"]) if "metadata" in setup else {}, program)
    return Metadata(
        name=_first_stated("name", places) or fallback_name,
        version=_first_stated("version", places) or "0",
        requires=_usable(_with_files(requires, files)),
        test_requires=_usable(_with_files(tests, files)),
        top_level=_top_level(files, setup, tool) or tuple(program.get("py_modules", ())),
        import_roots=_import_roots(setup, tool),
        rules=read_rules(files),
        version_files=_version_files(tool, files),
    )


def _first_stated(field: str, places: Iterable[Any]) -> str:
    found = (place.get(field.title() if isinstance(place, Message) else field) for place in places)
    return next((text for text in found if isinstance(text, str) and text), "")


def _requires_txt(files: Mapping[str, bytes]) -> list[str]:
    """Requirements from the requires.txt of older builds, with their extras as markers."""
    found: list[str] = []
    for path, content in files.items():
        if path.endswith(".egg-info/requires.txt"):
            extra = ""
            for line in content.decode(errors="replace").splitlines():
                if line.startswith("["):
                    extra, _, marker = line.strip("[]").partition(":")
                    extra = f"; extra == '{extra}'" if extra else f"; {marker}"
                elif line.strip():
                    found.append(line + extra)
    return found


def _ini(files: Mapping[str, bytes], name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(files.get(name, b"").decode(errors="replace"))
    except configparser.Error as error:
        reason = " ".join(str(error).split())
        raise ProblemError(f"{name} does not parse: {reason}") from error
    return parser


def _lines(parser: configparser.ConfigParser, section: str, key: str) -> list[str]:
    return parser.get(section, key, fallback="").splitlines()


def _groups(table: Mapping[str, Iterable[Any]]) -> list[str]:
    """Requirements of the groups for tests and development."""
    return [
        item
        for group, items in table.items()
        if TEST_GROUPS.search(group)
        for item in items or ()
        if isinstance(item, str)
    ]


def _resolve_groups(table: Mapping[str, Any]) -> dict[str, Iterable[Any]]:
    """Dependency groups with the groups that they include. A group that cannot be resolved keeps its own lines."""
    resolved: dict[str, Iterable[Any]] = dict(table)
    for group in table:
        with contextlib.suppress(ExceptionGroup):
            resolved[group] = resolve_dependency_groups(table, group)
    return resolved


def _poetry_groups(poetry: Mapping[str, Any]) -> dict[str, list[str]]:
    groups = {
        name: _of_index(table.get("dependencies", {}))
        for name, table in poetry.get("group", {}).items()
    }
    return groups | {"dev-dependencies": _of_index(poetry.get("dev-dependencies", {}))}


def _of_index(table: Mapping[str, Any]) -> list[str]:
    """Names of Poetry's dependencies that an index provides. The others are folders, files and repositories, and an
    index may have another package of their name.
    """
    return [
        name
        for name, wanted in table.items()
        if not isinstance(wanted, dict) or not _ELSEWHERE & wanted.keys()
    ]


def _dynamic(tool: Mapping[str, Any]) -> list[str]:
    """The requirement files that setuptools reads the dependencies from."""
    stated = tool.get("setuptools", {}).get("dynamic", {}).get("dependencies", {}).get("file", [])
    return [f"-r {path}" for path in ([stated] if isinstance(stated, str) else stated)]


def _holds_requirements(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in REQUIREMENT_FILES)


def _with_files(lines: Iterable[str], files: Mapping[str, bytes]) -> Iterator[str]:
    """The lines, with those of a file in place of each line that names it: `-r FILE`, or `file: FILE, FILE` of
    setup.cfg. Each file is read once.
    """
    waiting = [("", line) for line in lines][::-1]
    read: set[str] = set()
    while waiting:
        folder, line = waiting.pop()
        named = _FILES.fullmatch(line.partition(" #")[0].strip())
        if named is None:
            yield line
            continue
        for name in reversed(named[1].split(",")):
            path = posixpath.normpath(posixpath.join(folder, name.strip()))
            if path in files and path not in read:
                read.add(path)
                text = _decode(files[path]).replace("\\\n", " ").replace("\\\r\n", " ")
                inside = posixpath.dirname(path)
                waiting += [(inside, item) for item in reversed(text.splitlines())]


def _decode(text: bytes) -> str:
    """A requirement file's text. pip reads UTF-16 with its byte order mark too, as PowerShell writes it."""
    is_wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return text.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")


def _usable(texts: Iterable[str]) -> tuple[str, ...]:
    """Requirements that apply to this Python, each once. Options and links are skipped, and tox factors removed."""
    found: dict[str, None] = {}
    for text in texts:
        line = re.split(r"\s(?:#|--)", text)[0].strip()  # comments, and options such as --hash
        line = re.sub(r"^[\w!,{}.-]+:\s+", "", line)  # a factor of tox: `py311: mock`
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        extras = _EXTRA.findall(str(marker)) or [""]
        if requirement.url or (marker and not any(marker.evaluate({"extra": e}) for e in extras)):
            continue
        asked = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        found[f"{canonicalize_name(requirement.name)}{asked}{requirement.specifier}"] = None
    return tuple(found)


def _top_level(
    files: Mapping[str, bytes], setup: configparser.ConfigParser, tool: Mapping[str, Any]
) -> tuple[str, ...]:
    for path, content in files.items():
        if path.endswith(".egg-info/top_level.txt"):
            return tuple(content.decode(errors="replace").split())
    modules = [*_lines(setup, "options", "py_modules")]
    setuptools = tool.get("setuptools", {})
    modules += setuptools.get("py-modules", [])
    found = setuptools.get("packages", {})
    named = found.get("find", {}).get("include", []) if isinstance(found, dict) else found
    modules += named + [pattern.rstrip("*.") for pattern in named]
    modules.append(tool.get("flit", {}).get("module", {}).get("name", ""))
    return tuple(item.strip() for item in modules if item.strip(" *."))


def _import_roots(setup: configparser.ConfigParser, tool: Mapping[str, Any]) -> tuple[str, ...]:
    """Folders in which a build looks for packages."""
    setuptools = tool.get("setuptools", {})
    found = setuptools.get("packages", {})
    roots = found.get("find", {}).get("where", []) if isinstance(found, dict) else []
    roots = [*roots, setuptools.get("package-dir", {}).get("", "")]
    roots += _lines(setup, "options.packages.find", "where")
    roots += [line.partition("=")[2] for line in _lines(setup, "options", "package_dir")]
    cleaned = (posixpath.normpath(root.strip()) for root in roots if root.strip())
    return tuple(dict.fromkeys(root for root in cleaned if root[0] not in "./"))


def _version_files(tool: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[str, ...]:
    scm = tool.get("setuptools_scm", {})
    hook = tool.get("hatch", {}).get("build", {}).get("hooks", {}).get("vcs", {})
    pdm = tool.get("pdm", {}).get("version", {})
    stated = (
        scm.get("write_to"),
        scm.get("version_file"),
        hook.get("version-file"),
        pdm.get("write_to"),
    )
    paths = (posixpath.normpath(path) for path in stated if path and path.endswith(".py"))
    return tuple(path for path in paths if stays_below(path) and path not in files)


READ = ("name", "version", "install_requires", "tests_require", "extras_require", "py_modules")


def read_setup_call(text: bytes) -> dict[str, Any]:
    """Values of the arguments in `READ` that are literals, or top-level names with a literal value. Empty if the
    text does not parse.
    """
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return {}
    constants: dict[str, ast.expr] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = statement.value
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) == "setup":
            for keyword in node.keywords:
                if keyword.arg in READ:
                    value = _value(keyword.value, constants)
                    found |= {} if value is None else {keyword.arg: value}
    return found


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _value(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 4) -> Any:
    """A string, or a list or mapping of strings. None for values that only running the code would give."""
    if depth == 0:
        return None
    if isinstance(node, ast.Name) and node.id in constants:
        return _value(constants[node.id], constants, depth - 1)
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item, constants, depth - 1) for item in node.elts]
        return [item for item in items if isinstance(item, str)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [_value(side, constants, depth - 1) for side in (node.left, node.right)]
        return [item for side in both if isinstance(side, list) for item in side]
    if isinstance(node, ast.Dict):
        keys = [_value(key, constants, depth - 1) for key in node.keys if key is not None]
        values = [_value(value, constants, depth - 1) for value in node.values]
        if len(keys) == len(values):
            return {k: v for k, v in zip(keys, values, strict=True) if isinstance(k, str)}
    return None
