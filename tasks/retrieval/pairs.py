"""Functions of packages, and questions made of their docstrings and names."""

import ast
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import util
from pathlib import Path, PurePosixPath

import numpy as np

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.source_archives import fetch_archive, read_archive
from ostinato.infra.platform.syntax import parse_python, walk_definitions
from ostinato.models.search_encoder.code_words import CodeText, describe_code, split_words
from ostinato.tasks.retrieval.config import (
    STANDARD_LIBRARY,
    CodePackage,
    Package,
    PairsConfig,
    name_of,
)

LARGEST_FILE_CHARACTERS = 400_000
_MAX_BODY_CHARACTERS = 6_000
# Tests repeat the names that they test. Vendored copies would put one package into two splits.
_TESTS = ("test", "tests", "idlelib", "lib2to3", "turtledemo")
_COPIES = ("_vendor", "_vendored", "vendored", "extern", "thirdparty_files", "site-packages")
_SKIPPED = frozenset((*_TESTS, *_COPIES, "__pycache__"))


@dataclass(frozen=True, slots=True)
class IndexedFunction:
    """One function or method of a package."""

    package: str
    name: str
    """Qualified name."""
    code: CodeText
    """Text without the docstring."""
    summary: str
    """First paragraph of the docstring; empty without one."""
    num_lines: int
    """Lines of `code`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A question, and the code that answers it."""

    query: str
    code: CodeText


def read_package(package: Package, archives: Path) -> list[IndexedFunction]:
    """Every function of a package, ordered by path and line. Left out: tests, vendored copies, undecodable and very
    large files. `archives`: cache of source archives.
    """
    found: list[tuple[PurePosixPath, bytes]] = []
    if isinstance(package, CodePackage):
        content = read_archive(fetch_archive(package, archives), below=package.folder)
        found = [(PurePosixPath(path), data) for path, data in content.items()]
        if not found:
            raise ConfigError(
                f"source archive of {package.name}=={package.version} holds no files in "
                f"{package.folder!r}, wanted the folder of its code"
            )
    else:
        for root in _installed_roots(package):
            found += [
                (PurePosixPath(path.relative_to(root)), path.read_bytes())
                for path in root.rglob("*.py")
            ]
    texts = (
        (path.as_posix(), _read(data))
        for path, data in sorted(found)
        if path.suffix == ".py" and not _SKIPPED.intersection(path.parts[:-1])
    )
    name = name_of(package)
    return [
        function
        for path, text in texts
        if text is not None
        for function in functions_of(name, path, text)
    ]


def _installed_roots(name: str) -> list[Path]:
    """Folders of an installed package."""
    if name == STANDARD_LIBRARY:
        return [Path(sysconfig.get_paths()["stdlib"])]
    spec = util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"retrieval package {name!r} is not installed, wanted an import name")
    return [Path(location) for location in spec.submodule_search_locations]


def _read(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    return text if len(text) <= LARGEST_FILE_CHARACTERS else None


def functions_of(package: str, path: str, text: str) -> list[IndexedFunction]:
    """The functions of one file. Empty if it does not parse with this version of Python."""
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.split("\n")
    return [
        _function(package, path, name, node, lines)
        for name, node in walk_definitions(tree)
        if not isinstance(node, ast.ClassDef)
    ]


def _function(
    package: str,
    path: str,
    name: str,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    lines: list[str],
) -> IndexedFunction:
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    kept = lines[first:last]
    docstring = ast.get_docstring(node)
    if docstring is not None:
        text = node.body[0]
        kept = lines[first : text.lineno - 1] + lines[text.end_lineno : last]
    summary = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return IndexedFunction(
        package, name, describe_code(path, name, "\n".join(kept)), summary, len(kept)
    )


def make_pairs(
    functions: Iterable[IndexedFunction], config: PairsConfig, generator: np.random.Generator
) -> list[Pair]:
    """Questions from docstrings and names, at most `most_pairs`, in random order."""
    described: list[Pair] = []
    named: list[Pair] = []
    for function in functions:
        is_short = function.num_lines < config.least_body_lines
        if is_short or len(function.code.body) > _MAX_BODY_CHARACTERS:
            continue
        if len(split_words(function.summary)) >= config.least_query_words:
            described.append(Pair(function.summary, function.code))
        words = split_words(function.name)
        if len(words) >= config.least_query_words:
            named.append(Pair(" ".join(words), _nameless(function.code)))
    most_named = min(len(named), round(config.name_ratio * len(described)))
    chosen = generator.permutation(len(named))[:most_named]
    pairs = described + [named[index] for index in chosen]
    order = generator.permutation(len(pairs))[: config.most_pairs]
    return [pairs[index] for index in order]


def _nameless(code: CodeText) -> CodeText:
    """The code with the function's name replaced by an underscore."""
    head, body = (text.replace(code.name, "_") for text in (code.head, code.body))
    return CodeText(code.scope, "", head, body)


def remove_duplicates(
    functions: Iterable[IndexedFunction], of: Iterable[IndexedFunction]
) -> list[IndexedFunction]:
    """Those of `functions` that share neither body nor docstring summary with any of `of`."""
    others = list(of)
    bodies = {_fingerprint(function.code) for function in others}
    summaries = {function.summary for function in others if function.summary}
    return [
        function
        for function in functions
        if _fingerprint(function.code) not in bodies and function.summary not in summaries
    ]


def _fingerprint(code: CodeText) -> int:
    """Hash of the text without whitespace and without the first line, which holds the path."""
    return hash("".join(code.body.partition("\n")[2].split()))
