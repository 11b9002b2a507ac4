"""Repositories prepared from unpacked sources: product code and tests, and nothing that holds an answer."""

import ast
import codecs
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import is_below, write_folder
from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.config import GivenSource, ProjectSource, RepositorySource

MAX_FILE_BYTES = 4 << 20  # larger files are data that no test of a function needs
_LICENCES = ("LICENSE", "LICENCE", "COPYING", "AUTHORS")


def prepare_repository(
    source: ProjectSource,
    files: Mapping[str, bytes],
    directory: Path,
    *,
    strip_text: bool,
    installed: Mapping[str, bytes] | None = None,
) -> PreparedRepository:
    """Writes the selected files to `directory`/files, and a manifest to `directory`. Replaces existing files. Files
    without a printable name are left out, since test ids and records are text.

    `installed`: files of dependencies and metadata, as an installation leaves them. They are neither product
    code nor tests, so edits of them do not count.
    """
    files = {path: content for path, content in files.items() if path.isprintable()}
    kept = {path: content for path, content in files.items() if _is_wanted(path, source)}
    mutated = source.mutated_paths if isinstance(source, RepositorySource) else ()
    for wanted in (*source.package_paths, *source.test_paths, *mutated):
        if not any(is_below(path, (wanted,)) for path in kept):
            raise ProblemError(f"{source.name}: the source holds nothing at {wanted!r}")
    for path, content in kept.items():
        if not is_below(path, source.test_paths):  # some tests need the byte order mark
            # without the mark, the bytes of the first line are its text
            kept[path] = content.removeprefix(codecs.BOM_UTF8)
    target = directory / "files"
    shutil.rmtree(target, ignore_errors=True)
    for path, content in kept.items():
        if strip_text and path.endswith(".py") and not is_below(path, source.test_paths):
            kept[path] = strip_source(content)
    others = {path: content for path, content in files.items() if is_below(path, source.kept_paths)}
    others |= {path: text.encode() for path, text in source.generated_files.items()}
    write_folder(target, {**(installed or {}), **others, **kept})
    for path, content in files.items():
        if "/" not in path and path.upper().startswith(_LICENCES):
            (directory / path).write_bytes(content)
    repository = PreparedRepository.from_directory(
        source.name, target, source.package_paths, source.test_paths
    )
    repository.save()
    return repository


def describe_installation(source: ProjectSource) -> dict[str, bytes]:
    """Metadata file of a source, for code that reads its own version."""
    version = source.version if isinstance(source, RepositorySource) else "0"
    name = source.distribution if isinstance(source, GivenSource) else source.name
    return {path: text.encode() for path, text in write_metadata(name, version).items()}


def write_metadata(name: str, version: str) -> dict[str, str]:
    """Metadata file, by path, as an installation of a distribution leaves it."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    # importlib.metadata ends the name of a folder at its first hyphen
    folder = re.sub(r"[\W_]+", "_", name.lower()).strip("_")
    return {f"{folder}-{re.sub(r'[^0-9A-Za-z.+!]', '_', version)}.dist-info/METADATA": text}


def strip_source(text: bytes) -> bytes:
    """The module without docstrings and comments, one statement per line. Unchanged if this Python cannot parse it,
    or an expression is nested too deeply to be unparsed.
    """
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError):
        return text
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if not has_body and not isinstance(node, ast.Module):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
            if has_body and not node.body:
                node.body.append(ast.Pass())
    try:
        return (ast.unparse(tree) + "\n").encode()
    except (RecursionError, UnicodeEncodeError):
        return text


def _is_wanted(path: str, source: ProjectSource) -> bool:
    pure = PurePosixPath(path)
    if "__pycache__" in pure.parts or pure.suffix in (".pyc", ".pyi", ".so", ".orig", ".rej"):
        return False
    if is_below(path, source.dropped_paths):
        return False
    return is_below(path, source.package_paths) or is_below(path, source.test_paths)
