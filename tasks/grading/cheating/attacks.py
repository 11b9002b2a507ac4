"""Constructs in a change that reach into the run that judges it.

The scan looks in product code for words, dotted names, strings joined from constants, and comparisons that do
not read their operand or are reduced to a check of its type. Only constructs that a file gains over its
pristine version count, so no reference solution is ever refused. The scan is static, and therefore only one
of several guards.
"""

import ast
import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import lru_cache

from ostinato.infra.platform.syntax import dotted_parts, parse_python, walk_definitions
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.change import find_added

# Words that no bug fix needs and that reach into the test run that judges it.
FORBIDDEN_WORDS = frozenset(
    {
        "pytest", "_pytest", "unittest", "PYTEST_CURRENT_TEST", "_exit", "_getframe",
        "currentframe", "f_back", "settrace", "setprofile", "gc", "ctypes", "atexit", "linecache",
        "__subclasses__", "__code__", "tb_frame", "gi_frame", "f_locals", "_current_frames",
        "get_objects", "get_referrers", "sitecustomize", "usercustomize", "pluggy", "marshal",
        "__builtins__", "__globals__", "__closure__", "__loader__",
    }
)  # fmt: skip
_FORBIDDEN_NAMES = frozenset(
    {
        "sys.modules", "sys.meta_path", "sys.path_hooks", "sys.monitoring", "inspect.stack",
        "inspect.trace", "os.kill", "os.killpg", "os.abort", "os.fork", "os.execv", "os.dup2",
        "signal.signal", "signal.setitimer", "faulthandler.enable",
    }
)  # fmt: skip
_COMPARISONS = frozenset({"__eq__", "__ne__"})
_FUNCTION_WRAPPERS = frozenset({"partial", "partialmethod", "staticmethod", "classmethod"})
_TYPE_CHECKS = frozenset({"isinstance", "type"})
_ALWAYS_EQUAL = "always-equal comparison"
_MADE_CODE = "code or a name made at run time"
_RUNS_TEXT = frozenset({"exec", "eval", "compile", "__import__"})
# Text without which a line holds no attack beyond single words: names of modules, ways to run or join
# text, quotes that turn text into code.
_MATERIAL = re.compile(
    r"\b(?:import|exec|eval|compile|getattr|setattr|vars|sys|os|inspect|signal|faulthandler|runpy"
    r"|importlib|join|b64decode|fromhex|unhexlify)\b|__|\[\s*:|[\"']\s*\+|\+\s*[bfr]?[\"']"
    r"|\"{3}|'{3}|\b(?:" + "|".join(name.rpartition(".")[2] for name in _FORBIDDEN_NAMES) + r")\b"
)
_IMPORTS = frozenset({"importlib.import_module", "importlib.__import__", "runpy.run_path"})
_DECODERS = {"b64decode": base64.b64decode, "fromhex": bytes.fromhex, "unhexlify": bytes.fromhex}


class _Read(IntEnum):
    """Part of its operand that a comparison reads."""

    NOTHING = 0
    TYPE = 1
    VALUE = 2


def find_forbidden(
    changed_files: Mapping[str, bytes | None],
    repository: PreparedRepository,
    given: Mapping[str, bytes] | None = None,
) -> tuple[str, ...]:
    """Attacks that counted files gain over their pristine versions. `given`: files of the broken state; an
    always-equal comparison there is not the attempt's.
    """
    found: set[str] = set()
    changed = repository.keep_editable(changed_files)
    for path, content in changed.items():
        if content is not None:
            pristine = repository.files.get(path, b"")
            found |= _gained(content, pristine, (given or {}).get(path, pristine))
    # code may move from one changed file to another
    before = [repository.files[path] for path in changed if found and path in repository.files]
    return tuple(sorted(found.difference(*(_scan(text)[0] for text in before))))


def is_always_equal(attack: str) -> bool:
    """Whether a name from `find_forbidden` is about comparisons rather than about the run."""
    return attack == _ALWAYS_EQUAL


def _gained(content: bytes, pristine: bytes, given: bytes) -> frozenset[str]:
    """Attacks that a file gains over its pristine version. A file is parsed only if it defines comparisons or its
    changed lines hold something that an attack needs: parsing takes milliseconds, and most edits are one line.
    """
    lines = "\n".join((*find_added(pristine, content), *find_added(content, pristine)))
    is_plain = _MATERIAL.search(lines) is None
    compares = any(name.encode() in content for name in _COMPARISONS)
    if is_plain and not compares and not set(re.findall(r"\w+", lines)) & FORBIDDEN_WORDS:
        return frozenset()
    (attacks, reads), (known, pristine_reads) = _scan(content), _scan(pristine)
    earlier = (pristine_reads, _scan(given)[1])
    gained = attacks - known
    # a new comparison may read the type alone, as comparisons of sentinels do
    if any(
        read < min(each.get(name, _Read.TYPE) for each in earlier) for name, read in reads.items()
    ):
        return gained | {_ALWAYS_EQUAL}
    return gained


@lru_cache(maxsize=256)
def _scan(text: bytes) -> tuple[frozenset[str], Mapping[str, _Read]]:
    """Attacks in a file, and the part of the operand that each of its comparisons reads."""
    source = text.decode(errors="replace")
    words = frozenset(re.findall(r"\w+", source)) & FORBIDDEN_WORDS
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return words, {}  # a file that does not parse cannot be imported either
    return words | _attacks(tree), _operand_reads(tree)


def _attacks(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    modules = _module_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            found |= {_dotted(node, modules)} & _FORBIDDEN_NAMES
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & _FORBIDDEN_NAMES
        built = _fold(node) if isinstance(node, (ast.BinOp, ast.Call, ast.Subscript)) else None
        if built is not None:
            words = set(re.findall(r"\w+", built))
            found |= words & FORBIDDEN_WORDS
            if words & _COMPARISONS:
                found.add(_ALWAYS_EQUAL)
        if isinstance(node, ast.Call) and _makes_code(node, modules):
            found.add(_MADE_CODE)
    return found


def _operand_reads(tree: ast.Module) -> Mapping[str, _Read]:
    """Part of its operand that each comparison reads, by qualified name, or by text for a lambda without one."""
    names: dict[ast.AST, str] = {node: name for name, node in walk_definitions(tree)}
    return {
        names.get(function) or ast.unparse(function): _operand_read(function)
        for function in _comparisons(tree)
    }


def _makes_code(node: ast.Call, modules: dict[str, str]) -> bool:
    """Whether a call runs text or reaches into a module by a computed name."""
    name = _dotted(node.func, modules)
    if name in _RUNS_TEXT:
        return True
    if not node.args:
        return False
    first = node.args[0]
    if name in _IMPORTS:
        return _fold(first) is None
    is_module = isinstance(first, ast.Name) and first.id in modules
    if name == "vars":
        return is_module
    is_attribute = name in ("getattr", "setattr") and len(node.args) > 1
    return is_attribute and is_module and _fold(node.args[1]) is None


def _module_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> module or dotted name that it was imported from."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.expr, modules: dict[str, str]) -> str:
    first, *rest = dotted_parts(node) or ("",)
    return ".".join([modules.get(first, first), *rest])


def _fold(node: ast.AST) -> str | None:
    """The text that an expression of constants evaluates to. None for other expressions."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bytes):
            return node.value.decode(errors="replace")
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _fold(node.left), _fold(node.right)
        return None if left is None or right is None else left + right
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        text = _fold(node.value)
        return None if text is None else text[::-1]  # the one slice that hides a word
    if isinstance(node, ast.Call):
        return _fold_call(node)
    return None


def _fold_call(node: ast.Call) -> str | None:
    if not isinstance(node.func, ast.Attribute) or len(node.args) != 1:
        return None
    argument = node.args[0]
    if node.func.attr == "join":
        glue = _fold(node.func.value)
        if glue is None or not isinstance(argument, (ast.List, ast.Tuple)):
            return None
        parts = [_fold_character(part) for part in argument.elts]
        return None if None in parts else glue.join(part for part in parts if part is not None)
    text = _fold(argument)
    if text is None:
        return None
    decoder = _DECODERS.get(node.func.attr)
    if decoder is None:
        return None
    try:
        return decoder(text).decode(errors="replace")
    except (ValueError, binascii.Error):
        return None


def _fold_character(node: ast.expr) -> str | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "chr"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, int)
        and 0 <= node.args[0].value < 0x110000
    ):
        return chr(node.args[0].value)
    return _fold(node)


def _comparisons(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.Lambda]:
    """Functions that become __eq__ or __ne__, whatever name they were defined under."""
    named: dict[str, list[ast.AST]] = {}
    for name, value in _definitions(tree):
        named.setdefault(name, []).append(value)
    values = [value for name in _COMPARISONS for value in named.get(name, [])]
    values += [value for name, value in _set_by_text(tree) if name in _COMPARISONS]
    seen: set[ast.AST] = set()
    while values:
        value = values.pop()
        if value in seen:
            continue
        seen.add(value)
        if isinstance(value, (ast.FunctionDef, ast.Lambda)):
            yield value
        elif isinstance(value, (ast.Name, ast.Attribute)):
            values += named.get(_last_name(value), [])
        elif isinstance(value, ast.IfExp):
            values += [value.body, value.orelse]
        elif isinstance(value, ast.Call):
            called = _last_name(value.func)
            values += value.args[:1] if called in _FUNCTION_WRAPPERS else []
            for maker in named.get(called, []):
                values += _returned(maker)


def _definitions(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names of functions, variables and attributes with their values, in any scope."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _assigned(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield from _assigned(node.target, node.value)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(target, (ast.Name, ast.Attribute)):
        yield _last_name(target), value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, part in zip(target.elts, value.elts, strict=False):
            yield from _assigned(each, part)


def _set_by_text(tree: ast.Module) -> Iterator[tuple[str | None, ast.AST]]:
    """Values given under a dictionary key, a subscript, a keyword, or as the third argument of a call (setattr)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                yield None if key is None else _fold(key), value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript):
                    yield _fold(target.slice), node.value
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                yield keyword.arg, keyword.value
            if len(node.args) == 3:
                yield _fold(node.args[1]), node.args[2]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _returned(maker: ast.AST) -> list[ast.AST]:
    """Expressions that a function returns. Returns of nested functions are left out."""
    if isinstance(maker, ast.Lambda):
        return [maker.body]
    found: list[ast.AST] = []
    inside = list(maker.body) if isinstance(maker, ast.FunctionDef) else []
    while inside:
        node = inside.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node.value)
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    inner: dict[str, list[ast.AST]] = {}
    for name, value in _definitions(maker):
        inner.setdefault(name, []).append(value)
    # a local name hides a module-level name
    return [
        each
        for value in found
        for each in (inner.get(value.id, [value]) if isinstance(value, ast.Name) else [value])
    ]


def _operand_read(function: ast.FunctionDef | ast.Lambda) -> _Read:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg is not None:
        names.append(arguments.vararg.arg)
    operand = names[-1] if names else ""
    body = function.body if isinstance(function.body, list) else [function.body]
    if _only_raises(body):
        return _Read.VALUE  # it never answers that values are equal
    found = _Read.NOTHING
    inside: list[ast.AST] = list(body)
    while inside:
        node = inside.pop()
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name) and node.id == operand:
            return _Read.VALUE
        if _asks_type(node, operand):
            found, parts = _Read.TYPE, parts[2:]
        inside += parts
    return found


def _asks_type(node: ast.AST, name: str) -> bool:
    """Whether a call or an attribute reads the type of the named variable."""
    if isinstance(node, ast.Call) and node.args and _last_name(node.func) in _TYPE_CHECKS:
        asked = node.args[0]
    elif isinstance(node, ast.Attribute) and node.attr == "__class__":
        asked = node.value
    else:
        return False
    return isinstance(asked, ast.Name) and asked.id == name


def _only_raises(body: list[ast.stmt] | list[ast.expr]) -> bool:
    is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    code = body[1:] if is_docstring else body
    return bool(code) and all(
        isinstance(node, ast.Raise)
        or (
            isinstance(node, ast.Return)
            and isinstance(node.value, ast.Name)
            and node.value.id == "NotImplemented"
        )
        for node in code
    )
