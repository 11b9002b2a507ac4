"""Applies an edit to imported modules by replacing the code of existing functions.

The decision whether an edit may be applied that way: it must lie in one top-level function or
class, change nothing but function bodies (or default values of a plain top-level function), and
touch no function that ran while the package and its tests were imported. Everything else is
refused, and the caller imports afresh. Runs inside the box.
"""

import ast
import copy
import gc
import types
from dataclasses import dataclass, field

_FUTURE_FLAGS = 0x1FF0000  # the bits of co_flags that `from __future__ import` sets
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class NotSwappable(Exception):
    """The edit needs a fresh import. The message says why."""


@dataclass
class FileIndex:
    """One file as text and line ranges.

    No syntax tree: freeing a big one in a child would copy all its pages.
    """

    text: bytes
    definitions: list[tuple[int, int]]  # first and last line of each top-level function and class
    future_flags: int


@dataclass
class SwapIndex:
    """Index of imported code before any fork. Keys of code: (file, first line, qualified name)."""

    functions: dict[str, dict[tuple[str, int, str], list[types.FunctionType]]] = field(
        default_factory=dict
    )
    ran_on_import: set[tuple[str, int, str]] = field(default_factory=set)
    files: dict[str, "FileIndex"] = field(default_factory=dict)

    @classmethod
    def build(
        cls, root: str, sources: dict[str, bytes], ran_on_import: set[types.CodeType]
    ) -> "SwapIndex":
        """Index of every function in `sources` (relative path -> text below `root`)."""
        index = cls(ran_on_import={code_key(code) for code in ran_on_import})
        for path, text in sources.items():
            filename = f"{root}/{path}"
            index.files[filename] = _index_file(text)
            index.functions[filename] = {}
        for thing in gc.get_objects():
            if type(thing) is types.FunctionType and thing.__code__.co_filename in index.functions:
                key = code_key(thing.__code__)
                index.functions[key[0]].setdefault(key, []).append(thing)
        return index

    def clear(self) -> None:
        """Forget the unedited texts and codes, so that tested code cannot find them here."""
        self.functions.clear()
        self.files.clear()


def _index_file(text: bytes) -> FileIndex:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return FileIndex(text, [], 0)
    definitions = [
        (_first_line(statement), statement.end_lineno or 0)
        for statement in tree.body
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef))
    ]
    return FileIndex(text, definitions, _future_flags(tree))


def code_key(code: types.CodeType) -> tuple[str, int, str]:
    """Identity of a code object across compilations of the same text."""
    return (code.co_filename, code.co_firstlineno, code.co_qualname)


@dataclass(frozen=True)
class LineShift:
    """Shift of the code below an edit: functions after `after_line` now lie `by_lines` further down."""

    after_line: int
    by_lines: int


def swap_edit(filename: str, new: bytes, index: SwapIndex) -> LineShift:
    """Make the imported module behave like `new`. NotSwappable leaves everything untouched."""
    known = index.files.get(filename)
    if known is None:
        raise NotSwappable("the file was not part of the repository")
    old_lines, new_lines = _split(known.text), _split(new)
    start, old_end, new_end = _changed_range(old_lines, new_lines)
    first_line, last_line = _enclosing_definition(known.definitions, start, old_end)
    shift = new_end - old_end
    padding = b"\n" * (first_line - 1)
    text = padding + b"".join(new_lines[first_line - 1 : last_line + shift])
    statement = _parse_one(padding + b"".join(old_lines[first_line - 1 : last_line]))
    replacement = _parse_one(text)
    same_shape = ast.dump(_without_bodies(statement)) == ast.dump(_without_bodies(replacement))
    defaults = None if same_shape else _changed_defaults(statement, replacement)
    swaps = _pair_functions(filename, statement, replacement, text, known.future_flags, index)
    for functions, code in swaps:
        for function in functions:
            function.__code__ = code
            if defaults is not None:
                function.__defaults__, function.__kwdefaults__ = defaults
    return LineShift(last_line, shift)


def _split(text: bytes) -> list[bytes]:
    return text.splitlines(keepends=True)


def _parse_one(text: bytes) -> ast.stmt:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotSwappable(f"the text does not parse: {error}") from error
    if len(tree.body) != 1:
        raise NotSwappable("the edit adds or removes top-level statements")
    return tree.body[0]


def _changed_range(old: list[bytes], new: list[bytes]) -> tuple[int, int, int]:
    """Half-open line ranges [start, old_end) and [start, new_end) outside which texts agree."""
    start = 0
    shorter = min(len(old), len(new))
    while start < shorter and old[start] == new[start]:
        start += 1
    common = 0
    while common < shorter - start and old[-1 - common] == new[-1 - common]:
        common += 1
    return start, len(old) - common, len(new) - common


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _enclosing_definition(
    definitions: list[tuple[int, int]], start: int, end: int
) -> tuple[int, int]:
    for first, last in definitions:
        if first - 1 <= start < last and end <= last:
            return first, last
    raise NotSwappable("the edit is not inside one top-level function or class")


def _without_bodies(statement: ast.stmt) -> ast.stmt:
    """A copy with the bodies of its functions emptied. Nested classes keep theirs."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        bare = copy.copy(statement)
        is_class = isinstance(statement, ast.ClassDef)
        bare.body = [_without_bodies(inner) for inner in statement.body] if is_class else []
        return bare
    return statement


def _changed_defaults(old: ast.stmt, new: ast.stmt) -> tuple[tuple | None, dict | None]:
    """Default values of a plain function that differs in them alone.

    Literals only: evaluating other expressions would run code that can reach the unedited text.
    """
    if not isinstance(old, ast.FunctionDef) or not isinstance(new, ast.FunctionDef):
        raise NotSwappable("the edit changes more than function bodies")
    if old.decorator_list or _without_defaults(old) != _without_defaults(new):
        raise NotSwappable("the edit changes more than function bodies and default values")
    arguments = new.args
    try:
        plain = tuple(map(ast.literal_eval, arguments.defaults))
        named = {
            argument.arg: ast.literal_eval(default)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        }
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotSwappable(f"the default values are no literals: {error}") from error
    return plain or None, named or None


def _without_defaults(function: ast.FunctionDef) -> str:
    bare = _without_bodies(function)
    assert isinstance(bare, ast.FunctionDef)
    bare.args = copy.copy(function.args)
    bare.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    bare.args.kw_defaults = [item and ast.Constant(None) for item in function.args.kw_defaults]
    return ast.dump(bare)


def _functions_of(statement: ast.stmt) -> list[ast.FunctionDef]:
    """The function itself, or the methods of a class in order, nested classes included."""
    if isinstance(statement, _FUNCTIONS):
        return [statement]  # pyright: ignore[reportReturnType]
    if isinstance(statement, ast.ClassDef):
        return [function for inner in statement.body for function in _functions_of(inner)]
    return []


def _pair_functions(
    filename: str,
    old: ast.stmt,
    new: ast.stmt,
    text: bytes,
    flags: int,
    index: SwapIndex,
) -> list[tuple[list[types.FunctionType], types.CodeType]]:
    new_codes = {
        code.co_firstlineno: code
        for code in _nested_codes(_compile(text, filename, flags))
        if code.co_name != "<lambda>"
    }
    old_functions, new_functions = _functions_of(old), _functions_of(new)
    if len(old_functions) != len(new_functions):
        raise NotSwappable("the edit adds or removes a function")
    by_line: dict[int, list[tuple[tuple[str, int, str], list[types.FunctionType]]]] = {}
    for key, functions in index.functions[filename].items():
        by_line.setdefault(key[1], []).append((key, functions))
    pairs: list[tuple[list[types.FunctionType], types.CodeType]] = []
    for old_function, new_function in zip(old_functions, new_functions, strict=True):
        is_changed = ast.dump(old_function) != ast.dump(new_function)
        code = new_codes[_first_line(new_function)]
        found = [
            (key, functions)
            for key, functions in by_line.get(_first_line(old_function), [])
            if key[2] == code.co_qualname
        ]
        if is_changed and (not found or found[0][0] in index.ran_on_import):
            raise NotSwappable(
                f"{code.co_qualname} ran on import or is not reachable as a function"
            )
        for _, functions in found:
            if any(function.__code__.co_freevars != code.co_freevars for function in functions):
                raise NotSwappable(f"{code.co_qualname} closes over other names")
            pairs.append((functions, code))
    return pairs


def _compile(text: bytes, filename: str, flags: int) -> types.CodeType:
    try:
        return compile(text, filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotSwappable(f"the text does not compile: {error}") from error


def _nested_codes(code: types.CodeType) -> list[types.CodeType]:
    """Codes of the functions of a module's code, through classes but not into functions."""
    found: list[types.CodeType] = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            is_function = bool(constant.co_flags & 0x2)  # CO_NEWLOCALS: functions, not class bodies
            found += [constant] if is_function else _nested_codes(constant)
    return found


def _future_flags(tree: ast.Module) -> int:
    names = [
        alias.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        for alias in statement.names
    ]
    if not names:
        return 0
    text = f"from __future__ import {', '.join(names)}\n"
    return compile(text, "<future>", "exec", dont_inherit=True).co_flags & _FUTURE_FLAGS
