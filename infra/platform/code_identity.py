"""Identity of the code behind a stage: modules that its entry imports, and files that those read.

A module's digest covers its compiled code without docstrings, so comments and docstrings do not change it. C sources
and data files belong to the module that names them. The code also includes the versions of packages that compute, and
the plug-ins that a stage is configured with.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import ostinato
from ostinato.infra.platform.cluster.workspace import replace_text
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.plugins import VERIFIERS, verifiers_module
from ostinato.infra.platform.syntax import parse_python

# groups of plug-ins that record what others compute, so that their code changes no artifact
_RECORDING_GROUPS = ("ostinato.trackers", "ostinato.model_registries")
# import name -> distribution of packages that compute: their versions belong to the code (torch's fixes Triton's)
COMPUTING_PACKAGES = {
    "torch": "torch",
    "megatron": "megatron-core",
    "numba": "numba",
    "llvmlite": "llvmlite",
    "numpy": "numpy",
    "scipy": "scipy",
    "tokenizers": "tokenizers",
    "tree_sitter": "tree-sitter",
    "tree_sitter_python": "tree-sitter-python",
    "transformer_engine": "transformer-engine",
    "transformers": "transformers",
    "vllm": "vllm",
    "pytest": "pytest",
}
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.\w+)+(:\w+)?")
_FILE_NAME = re.compile(r"[\w.*?/-]{2,}")
_NAME = re.compile(r"[\w.*?/:-]{2,}")
_LONGEST_NAME = 80
# a module that imports one of these, or uses __file__, reads files in its folder
_LOCATING = {"importlib.resources.files", "jinja2.PackageLoader"}
_CACHE_SALT = b"2 %d.%d " % sys.version_info[:2]  # bytecode differs between versions of Python
_PROSE_SUFFIXES = {".md", ".pyc"}


class ModuleFacts(NamedTuple):
    """Digest of a file; for a Python module also its imports and strings."""

    digest: str
    imported: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    reads_files: bool = False  # whether it reads files in its folder


class SourceTree:
    """Import graph and digests of a package's modules, each parsed once."""

    def __init__(self, root: Path, package: str = "ostinato", cache: Path | None = None) -> None:
        """`root`: the folder that is imported as `package`. `cache`: file that keeps facts of parsed modules."""
        self._root = root
        self._paths = dict(_find_modules(root, package))
        self._cache = FactsCache(cache)
        self._facts: dict[Path, ModuleFacts] = {}
        self._imports: dict[str, frozenset[str]] = {}

    def imports(self, module: str) -> frozenset[str]:
        """Project modules that `module` imports or names in a string, and the packages above them."""
        known = self._imports.get(module)
        if known is None:
            facts = self._facts_of(self._paths[module])
            entries = (text.partition(":")[0] for text in facts.strings if _ENTRY.fullmatch(text))
            found = {self._module_of(name) for name in (*facts.imported, *entries)}
            above = {parent for name in found for parent in _parents(name)}
            known = frozenset((found | above) & self._paths.keys() - {module})
            self._imports[module] = known
        return known

    def closure(self, entries: Iterable[str]) -> frozenset[str]:
        """Modules reached from `entries`, dotted names with or without ":function"."""
        waiting = []
        for entry in entries:
            module = entry.partition(":")[0]
            if module not in self._paths:
                raise ConfigError(f"entry {entry!r} names no module of {self._root}")
            waiting += [module, *(name for name in _parents(module) if name in self._paths)]
        reached: set[str] = set()
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting.extend(self.imports(module) - reached)
        return frozenset(reached)

    def code_of(self, entries: Iterable[str], plugins: Collection[str] = ()) -> dict[str, str]:
        """Identity of the code behind `entries`: file, package or plug-in -> digest or version.
        `plugins`: names, of which those of installed plug-ins are included.
        """
        code = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
        packages = set()
        for module in self.closure(entries):
            path = self._paths[module]
            for file in (path, *self._files_beside(module)):
                code[file.relative_to(self._root).as_posix()] = self._facts_of(file).digest
            tops = {name.partition(".")[0] for name in self._facts_of(path).imported}
            packages |= tops & COMPUTING_PACKAGES.keys()
        for name in packages:
            version = _version(COMPUTING_PACKAGES[name])
            if version is not None:
                code[COMPUTING_PACKAGES[name]] = version
        self._cache.save()
        return {**code, **_plugin_code(frozenset(plugins))}

    def _facts_of(self, path: Path) -> ModuleFacts:
        facts = self._facts.get(path)
        if facts is None:
            facts = self._facts[path] = self._cache.facts(path)
        return facts

    def _module_of(self, name: str) -> str:
        """The longest module in a dotted name. Empty outside the package."""
        while name and name not in self._paths:
            name = name.rpartition(".")[0]
        return name

    def _files_beside(self, module: str) -> Iterator[Path]:
        """Files that a string of the module names, relative to its folder: a file, a folder, or a pattern."""
        folder = self._paths[module].parent
        facts = self._facts_of(self._paths[module])
        for name in facts.strings if facts.reads_files else ():
            if not _FILE_NAME.fullmatch(name) or name.startswith((".", "/")) or ".." in name:
                continue
            if "*" in name or "?" in name:
                yield from _files_of(folder.glob(name)) if "." in name else ()
            elif (folder / name).is_dir():
                yield from _files_of((folder / name).rglob("*"))
            elif (folder / name).is_file():
                yield from _files_of([folder / name])


class FactsCache:
    """Facts of files by the checksum of their content, kept in a file if one is named."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, ModuleFacts] = {}
        self._is_changed = False
        if path is not None and path.is_file():
            with contextlib.suppress(ValueError, TypeError):  # cut short by a full disk: made again
                written = json.loads(path.read_bytes())
                self._known = {
                    key: ModuleFacts(digest, tuple(imported), tuple(strings), reads)
                    for key, (digest, imported, strings, reads) in written.items()
                }

    def facts(self, path: Path) -> ModuleFacts:
        """Facts of a file, from the cache if its content is known."""
        content = path.read_bytes()
        if path.suffix != ".py":
            return ModuleFacts(hashlib.sha256(content).hexdigest()[:12])
        key = hashlib.sha256(_CACHE_SALT + content).hexdigest()[:24]
        facts = self._known.get(key)
        if facts is None:
            facts = self._known[key] = read_facts(content)
            self._is_changed = True
        return facts

    def save(self) -> None:
        """Writes the file if there is something new."""
        if self._path is not None and self._is_changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(self._known, separators=(",", ":")))
            self._is_changed = False


def read_facts(content: bytes) -> ModuleFacts:
    """Facts of Python source."""
    tree = parse_python(content)
    imported = tuple(sorted(set(_strip_prose(tree))))
    code = compile(tree, "", "exec", dont_inherit=True)
    strings = tuple(sorted(set(_short_strings(code))))
    return ModuleFacts(
        hashlib.sha256(_canonical(code)).hexdigest()[:12],
        imported,
        strings,
        "__file__" in _names(code) or not _LOCATING.isdisjoint(imported),
    )


@functools.lru_cache(maxsize=1)
def installed_tree(cache_directory: Path | None = None) -> SourceTree:
    """The project as this process imports it."""
    cache = None if cache_directory is None else cache_directory / "code_identity.json"
    return SourceTree(Path(ostinato.__file__).parent, cache=cache)


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Names whose digests differ between the two, for packages with both versions."""
    names = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    return tuple(
        name
        if "." in name.rpartition("/")[2]
        else f"{name} {before.get(name)} -> {after.get(name)}"
        for name in names
    )


def _find_modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    waiting = [(root, package)]
    while waiting:
        folder, name = waiting.pop()
        for path in sorted(folder.iterdir()):
            if path.suffix == ".py":
                yield (name if path.stem == "__init__" else f"{name}.{path.stem}"), path
            elif (path / "__init__.py").is_file():
                waiting.append((path, f"{name}.{path.name}"))


def _parents(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module


def _strip_prose(tree: ast.Module) -> Iterator[str]:
    """Removes docstrings and TYPE_CHECKING blocks from the tree. Yields the names that the rest imports."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, field, None)
            if not isinstance(inside, list):
                continue
            kept = [item for item in inside if not _is_prose(item)]
            if inside and not kept:
                kept = [ast.copy_location(ast.Pass(), inside[0])]
            setattr(node, field, kept)
            waiting.extend(kept)


def _is_prose(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _short_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if len(value) <= _LONGEST_NAME and _NAME.fullmatch(value):
            yield value
    elif isinstance(value, CodeType):
        yield from _short_strings(value.co_consts)
    elif isinstance(value, tuple | frozenset):
        for item in value:
            yield from _short_strings(item)


def _canonical(value: object) -> bytes:
    """Compiled code as bytes, without file name and line numbers."""
    if isinstance(value, CodeType):
        parts = (
            value.co_code,
            value.co_consts,
            value.co_names,
            value.co_varnames,
            value.co_freevars,
            value.co_cellvars,
            value.co_name,
            value.co_flags,
            value.co_argcount,
            value.co_posonlyargcount,
            value.co_kwonlyargcount,
            value.co_exceptiontable,
        )
        return b"(" + b",".join(map(_canonical, parts)) + b")"
    if isinstance(value, tuple):
        return b"[" + b",".join(map(_canonical, value)) + b"]"
    if isinstance(value, frozenset):
        return b"{" + b",".join(sorted(map(_canonical, value))) + b"}"
    return f"{type(value).__name__} {value!r}".encode()


def _files_of(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        is_compiled = "__pycache__" in path.parts  # numba keeps its files there too
        if path.is_file() and path.suffix not in _PROSE_SUFFIXES and not is_compiled:
            yield path


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=64)
def _plugin_code(names: frozenset[str]) -> Mapping[str, str]:
    """Plug-ins among `names`: "plug-in NAME" -> digest of the files of its package."""
    code = {}
    cache = FactsCache(None)
    modules = [
        (point.name, point.module)
        for distribution in importlib.metadata.distributions()
        for point in distribution.entry_points
        if point.group.startswith("ostinato.") and point.group not in _RECORDING_GROUPS
    ]
    modules += [(name, verifiers_module(name)) for name in names if name.startswith(VERIFIERS)]
    for name, module in modules:
        if name not in names or module.startswith("ostinato."):
            continue
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is None or spec.origin is None:
            raise ConfigError(f"plug-in {name!r}: no module {module!r}")
        origin = Path(spec.origin)
        files = sorted(origin.parent.rglob("*")) if origin.stem == "__init__" else [origin]
        digest = hashlib.sha256()
        for path in _files_of(files):
            name_in_package = path.relative_to(origin.parent).as_posix()
            digest.update(f"{name_in_package} {cache.facts(path).digest} ".encode())
        code[f"plug-in {name}"] = digest.hexdigest()[:12]
    return code
