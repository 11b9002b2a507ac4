"""Every part is connected: modules are reached from an entry, settings are read, functions are called by the product.

Names are compared, not types: a function whose name is used anywhere in the product counts as used.
What may stay unconnected stands in `allowed_unconnected.toml` beside this file, each with its reason.
"""

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, list_files, list_modules, parse

ALLOWED = tomllib.loads((Path(__file__).parent / "allowed_unconnected.toml").read_text())
# Started by name from outside: flows and commands by Prefect and the console script, others by a
# command line that README or docs name, box programs by the box's server.
ENTRY_PACKAGES = ("flows/",)
MODULE_IN_TEXT = re.compile(r"\bostinato(?:\.\w+)+")
LONGEST_NAMING_STRING = 200
RECORD_BASES = {"BaseModel", "BaseSettings", "Record", "Frozen", "Config"}
CALLED_BY_LIBRARIES = {
    "flow", "task", "command", "callback", "get", "post", "put", "delete", "middleware", "exception_handler",
    "field_validator", "model_validator", "field_serializer", "model_serializer", "computed_field",
    "register_fake", "register_autograd", "custom_op", "jit", "njit", "autotune", "heuristics", "intrinsic",
    "listens_for", "overload", "register_cpu", "register_cuda",
}  # fmt: skip


def module_name(path: str) -> str:
    """Dotted name of a file of the packages."""
    return "ostinato." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(parse(path)))


def all_nodes() -> Iterator[ast.AST]:
    """Those of every module."""
    for path in list_modules():
        yield from nodes(path)


@functools.cache
def modules() -> dict[str, str]:
    """Path of each module of the packages by its dotted name."""
    return {module_name(path): path for path in list_modules()}


def named_modules(path: str) -> Iterator[str]:
    """Modules that a file imports, or names in a string."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from MODULE_IN_TEXT.findall(node.value)


def known_parents(name: str) -> Iterator[str]:
    """The module and the packages above it, those that exist."""
    while name:
        if name in modules():
            yield name
        name = name.rpartition(".")[0]


def outside_names() -> set[str]:
    """Modules that the project's configuration, README and guides name as something to start."""
    texts = [
        name
        for name in list_files()
        if name in ("pyproject.toml", "prefect.yaml", "README.md", "Makefile")
        or (name.startswith("docs/") and name.endswith(".md") and "decisions" not in name)
    ]
    return {found for name in texts for found in MODULE_IN_TEXT.findall((ROOT / name).read_text())}


def test_every_module_is_reached_from_an_entry() -> None:
    waiting = [name for name, path in modules().items() if path.startswith(ENTRY_PACKAGES)]
    waiting += [name for text in outside_names() for name in known_parents(text)]
    waiting += [name for name in ALLOWED["modules"] if name in modules()]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for other in named_modules(modules()[name]):
            waiting += [found for found in known_parents(other) if found not in reached]

    islands = {path for name, path in modules().items() if name not in reached}
    assert sorted(path for path in islands if not path.endswith("__init__.py")) == []


@functools.cache
def uses() -> Counter[str]:
    """How often each identifier is read, called, named as a keyword or stands in a short string that is
    no docstring.
    """
    found: Counter[str] = Counter()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)  # type: ignore[attr-defined]
        for node in all_nodes()
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    for node in all_nodes():
        if id(node) in docstrings:
            continue
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found[name] += 1
            case ast.alias(name=name):
                found[name.rpartition(".")[2]] += 1
            case ast.Constant(value=str(text)) if len(text) < LONGEST_NAMING_STRING:
                found.update(re.findall(r"[A-Za-z_]\w+", text))
    return found


@functools.cache
def attribute_reads() -> Counter[str]:
    """How often a name is read as an attribute, or stands alone in a string, in the product."""
    names: Counter[str] = Counter()
    for node in all_nodes():
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                names[name] += 1
            case ast.Constant(value=str(text)) if text.isidentifier():
                names[text] += 1
    for template in (ROOT / "flows/reporting/templates").glob("*"):
        names.update(re.findall(r"\.(\w+)", template.read_text()))
    return names


@functools.cache
def record_classes() -> frozenset[str]:
    """Names of pydantic classes of the product, by following bases."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in all_nodes()
        if isinstance(node, ast.ClassDef)
    }
    known = set(RECORD_BASES)
    while found := {name for name, above in bases.items() if above & known} - known:
        known |= found
    return frozenset(known)


def is_setting(name: str) -> bool:
    """Settings, not records of results: what a person writes."""
    return name.endswith(("Config", "Settings", "Limits", "Options", "Recipe", "Source"))


@functools.cache
def settings() -> dict[str, list[str]]:
    """Places of each setting, "path: Class.field", by the field's name."""
    found: dict[str, list[str]] = {}
    for path in list_modules():
        for node in nodes(path):
            if (
                isinstance(node, ast.ClassDef)
                and node.name in record_classes()
                and is_setting(node.name)
            ):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        place = f"{path}: {node.name}.{item.target.id}"
                        found.setdefault(item.target.id, []).append(place)
    return found


def test_every_setting_has_a_reader() -> None:
    """A name that several classes use must be read as often: reads cannot be told apart here."""
    unread = [
        place
        for name, places in settings().items()
        for place in places
        if attribute_reads()[name] < len(places)
        and place.partition(": ")[2] not in ALLOWED["settings"]
    ]

    assert unread == []


def decorator_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Last name of each decorator."""
    return {
        re.split(r"[.(]", ast.unparse(part).partition("(")[0])[-1] for part in node.decorator_list
    }


def public_functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that the module offers to others; those of library protocols left out."""
    for node in nodes(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") or decorator_names(node) & CALLED_BY_LIBRARIES:
            continue
        yield node


def test_no_public_function_lives_for_tests_alone() -> None:
    found = uses()
    unused = [
        f"{path}:{node.lineno} {node.name}"
        for path in list_modules()
        for node in public_functions(path)
        if not found[node.name] and f"{module_name(path)}.{node.name}" not in ALLOWED["functions"]
    ]

    assert unused == []


def test_what_is_allowed_exists() -> None:
    names = {
        f"{module_name(path)}.{node.name}"
        for path in list_modules()
        for node in public_functions(path)
    }
    fields = {
        f"{node.name}.{item.target.id}"
        for node in all_nodes()
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }

    assert sorted(ALLOWED["functions"].keys() - names) == []
    assert sorted(ALLOWED["modules"].keys() - modules().keys()) == []
    assert sorted(ALLOWED["settings"].keys() - fields) == []
