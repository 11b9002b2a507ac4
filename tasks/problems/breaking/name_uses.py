"""Uses of names in the Python files of a repository, by the module through which a name is reached. No code runs."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostinato.infra.platform.syntax import Defined, dotted_parts, parse_python
from ostinato.infra.sandbox.repository import module_of

UNKNOWN = "?"  # a parameter, a keyword, an assigned variable, an attribute of an unknown object
_STAR = "*"


@dataclass(frozen=True)
class NameUses:
    """Uses of the names in all files that this Python can parse."""

    trees: Mapping[str, ast.Module]
    reached: Mapping[str, set[str]]
    """name -> modules through which a use reaches it, or UNKNOWN"""
    imported: Mapping[str, set[tuple[str, str]]]
    """name -> path and module of each `from MODULE import NAME`"""

    @classmethod
    def read(cls, files: Mapping[str, str]) -> "NameUses":
        """`files`: texts of Python files by path."""
        trees: dict[str, ast.Module] = {}
        reached: dict[str, set[str]] = defaultdict(set)
        imported: dict[str, set[tuple[str, str]]] = defaultdict(set)
        modules = frozenset(map(module_of, files))
        for path, text in files.items():
            try:
                tree = trees[path] = parse_python(text)
            except (SyntaxError, ValueError):  # test data rather than a module
                continue
            for name, module in _find_uses(path, tree, modules):
                reached[name].add(module)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    source = resolve_import(path, node)
                    for alias in node.names:
                        imported[alias.name].add((path, source))
        return cls(trees, reached, imported)

    def is_clear(self, name: str, module: str) -> bool:
        """Whether every use of `name` means the definition in `module`: modules pass it on by importing it."""
        exporters = {module}
        known = 0
        while known != len(exporters):
            known = len(exporters)
            found = self.imported[name] | self.imported[_STAR]
            exporters |= {module_of(path) for path, source in found if source in exporters}
        return self.reached[name] <= exporters


def resolve_import(path: str, node: ast.ImportFrom) -> str:
    """Absolute name of the module that a `from` statement of a file names."""
    if not node.level:
        return node.module or ""
    parts = module_of(path).split(".")
    parts = parts[: len(parts) - node.level + path.endswith("__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _find_uses(path: str, tree: ast.Module, modules: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a name and the module through which a use reaches it."""
    bound = _bind_modules(path, tree, modules)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                yield name, module_of(path)
            case ast.Attribute(attr=name):
                owner = _dotted(node.value, bound)
                yield name, owner if owner in modules else UNKNOWN
            case ast.ImportFrom(names=aliases):
                source = resolve_import(path, node)
                yield from ((alias.name, source) for alias in aliases)
            case ast.alias(asname=name):
                yield name or "", UNKNOWN
            case _ if isinstance(node, Defined) and node in tree.body:
                yield node.name, module_of(path)
            case ast.Constant():
                continue
            case _:  # every other identifier is a field with a text, or a list of texts
                for _, value in ast.iter_fields(node):
                    texts = value if isinstance(value, list) else [value]
                    yield from ((text, UNKNOWN) for text in texts if isinstance(text, str))


def _bind_modules(path: str, tree: ast.Module, modules: frozenset[str]) -> dict[str, str]:
    """Modules of the repository by the local name under which a file imports them."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            source = resolve_import(path, node)
            for alias in node.names:
                if f"{source}.{alias.name}" in modules:
                    bound[alias.asname or alias.name] = f"{source}.{alias.name}"
    return bound


def _dotted(node: ast.expr, bound: Mapping[str, str]) -> str:
    """The module that an expression names. Empty: it is no such name."""
    first, *rest = dotted_parts(node) or ("",)
    return ".".join([bound[first], *rest]) if first in bound else ""
