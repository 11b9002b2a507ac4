"""Edits in a plain answer: whole functions in fenced blocks, search and replace blocks, unified diffs.

Each becomes a call of `edit_file`, `write_file` or `delete_file`, so that all code that handles calls handles edits
too. A whole function becomes such a call once its place is found (functions.py).
"""

import ast
import difflib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ostinato.infra.agent.dialects.full.calls import call_from_texts
from ostinato.infra.agent.regions import find_symbol
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool, Value
from ostinato.infra.agent.tools.names import DELETE_FILE, EDIT_FILE, WRITE_FILE
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.diffs import split_lines
from ostinato.infra.platform.syntax import parse_python, walk_definitions

OVERLOAD = "overload"
_DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]", re.MULTILINE)
FUNCTION = "function"  # argument of a call whose place is yet to be found
IMPORTS = "imports"  # argument beside it: import statements of its block
_FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,})(?P<info>[^`\n]*)(?:\n|\Z)(?P<body>.*?)(?:^[ \t]*(?P=fence)`*[ \t\r]*$|(?P<open>\Z))",
    re.DOTALL | re.MULTILINE,
)
_MAX_FENCES = 9  # in the texts of one block's functions
_PYTHON = ("", "py", "python", "python3")
_SEARCH = re.compile(r"^[ \t]*<{7}[ \t]*SEARCH\b[^\n]*\n", re.MULTILINE)
_DIVIDER = re.compile(r"^[ \t]*={7}[ \t\r]*\n", re.MULTILINE)
_REPLACE = re.compile(r"^[ \t]*>{7}[ \t]*REPLACE\b[^\n]*$", re.MULTILINE)
_NAME_ALONE = re.compile(r"[ \t`*#]*(\w[\w-]*)[ \t`*]*\r?")  # of a file, such as Makefile
_ROLE = re.compile(r"^[ \t]*@[\w.]*?\b(setter|deleter|overload)\b", re.MULTILINE)
_PATH = re.compile(r"[^\s`*:#\"'()]*[./][^\s`*:#\"'()]+")
_HEADER = re.compile(r"^--- (?P<old>[^\n]+)\n\+\+\+ (?P<new>[^\n]+)\n", re.MULTILINE)
_HUNK = re.compile(r"\s*@@")
_NO_FILE = "/dev/null"

GUIDES = {
    "whole_function": (
        "To change code, write each changed function whole in a fenced block of Python: it replaces the "
        "function of its name in the repository. Write a method below the class statement of its class."
    ),
    "search_replace": (
        "To change a file, write its path alone on a line and below it a block: a line of seven < and the "
        "word SEARCH, the lines to replace as they are, a line of seven =, the lines in their place, a line "
        "of seven > and the word REPLACE. A block that searches for nothing makes a new file."
    ),
    "udiff": (
        "To change a file, write a unified diff in a fenced block: the two header lines with its path, then "
        "hunks with some unchanged lines around each change. Numbers of lines are not read."
    ),
}
"""Explanations of the forms in the system prompt, without examples, because small models repeat examples."""
REMINDERS = {
    "whole_function": "Answer with each changed function, whole, in a fenced block of Python.",
    "search_replace": "Answer with the path of each changed file and its search and replace blocks.",
    "udiff": "Answer with a unified diff in a fenced block.",
}
"""Last sentence of the user's message, by form."""


def read_edits(text: str, edits: str, tools: Mapping[str, Tool]) -> ParsedAnswer:
    """The edits of an answer as calls, and the text outside of them."""
    calls: list[ParsedCall] = []
    prose, position = "", 0
    for begin, end, found in _READERS[edits](text, tools):
        prose += text[position:begin]
        calls += found
        position = end
    if edits == "whole_function":  # the last block for a function of a file counts
        last = {_function_of(call): call for call in calls}
        calls = [
            call
            for call in calls
            if call.status is not CallStatus.OK or last[_function_of(call)] is call
        ]
    return ParsedAnswer(tuple(_made_once(calls)), (prose + text[position:]).strip())


def _function_of(call: ParsedCall) -> tuple[str, str, str]:
    """File, name and role of a block's function. An overload is a function of its own."""
    path, name, new = (call.arguments.get(key, "") for key in ("path", FUNCTION, "new"))
    role = role_of(new)
    return path, name, new if role == OVERLOAD else role


def role_of(source: str) -> str:
    """setter, deleter or overload, if a decorator makes one of several functions of a name to that. Else empty."""
    definition = _DEFINITION.search(source)
    head = source if definition is None else source[: definition.start()]
    found = _ROLE.search(head)
    return "" if found is None else found[1]


def _made_once(calls: Sequence[ParsedCall]) -> Iterator[ParsedCall]:
    """The calls. One that makes a file which an earlier call makes is invalid: it would overwrite that."""
    made: set[Value] = set()
    for call in calls:
        path = call.values.get("path")
        if call.tool == WRITE_FILE and call.status is CallStatus.OK and path is not None:
            if path in made:
                error = f"the answer makes {path} twice, wanted it once"
                call = replace(call, status=CallStatus.INVALID_ARGUMENTS, error=error)
            made.add(path)
        yield call


def write_edit(edits: str, path: str, old: str, new: str) -> str:
    """A search block or diff that replaces lines by others. `read_edits` reads it back."""
    before, after = ([f"{line}\n" for line in text.split("\n")] for text in (old, new))
    if edits == "search_replace":
        body = f"<<<<<<< SEARCH\n{''.join(before)}=======\n{''.join(after)}>>>>>>> REPLACE"
        return f"{path}\n```python\n{body}\n```"
    hunk = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=max(len(before), 3))
    return f"```diff\n{''.join(hunk)}```"


def write_function(symbol: str, lines: Sequence[str]) -> str:
    """A block with a whole function of a file's lines, a method below its class statement."""
    first, end = find_symbol(list(lines), symbol)
    scope, _, _ = symbol.rpartition(".")
    head = [f"class {scope}:"] if scope else []
    return "\n".join(["```python", *head, *lines[first - 1 : end], "```"])


Found = tuple[int, int, list[ParsedCall]]
"""Begin and end of a part of an answer, and the calls in it."""


def _whole_functions(text: str, tools: Mapping[str, Tool]) -> Iterator[Found]:
    position = 0
    while block := _FENCE.search(text, position):
        begin, position = block.span()
        language, _, rest = block["info"].strip().partition(" ")
        code = _plain_code(block["body"])
        holds_function = _DEFINITION.search(code) is not None
        is_cut = block["open"] is not None and (holds_function or bool(language))
        if language.lower() not in _PYTHON or not (holds_function or is_cut):
            continue
        if is_cut:
            yield begin, position, [_broken("the last block of code is not closed")]
            continue
        path = _path_in(rest) or _path_in(code.partition("\n")[0], comment="#")
        found, position = _functions_of(text, block)
        if isinstance(found, ParsedCall):
            yield begin, position, [found]
            continue
        functions, imports = found
        calls = [
            ParsedCall(EDIT_FILE, {"path": path, FUNCTION: name, "new": source, IMPORTS: imports})
            for name, source in functions
        ]
        yield begin, position, calls


def _functions_of(
    text: str, block: re.Match[str]
) -> tuple[tuple[list[tuple[str, str]], str] | ParsedCall, int]:
    """The functions of a block with its import statements, and its end. Fences within the texts of the code do not end it:
    the end is the first fence at which the code parses. If there is none, a malformed call, and the end of the first
    fence.
    """
    closing = re.compile(rf"^[ \t]*{block['fence']}`*[ \t\r]*$", re.MULTILINE)
    ends = [(block.end("body"), block.end())]
    ends += [found.span() for found in islice(closing.finditer(text, block.end()), _MAX_FENCES - 1)]
    fault = ""
    for body_end, end in ends:
        try:
            code = _plain_code(text[block.start("body") : body_end])
            return (list(_functions(code)), _imports(code)), end
        except (SyntaxError, ValueError) as error:
            fault = fault or f"a block of code does not parse: {error}"
    return _broken(fault), block.end()


def _plain_code(body: str) -> str:
    """A block's code from its left margin, with the line ends that a parser counts."""
    return textwrap.dedent(re.sub("\r\n?", "\n", body))


def _functions(code: str) -> Iterator[tuple[str, str]]:
    """Name and source of each function of a module, and of each method as Class.method."""
    lines = code.split("\n")
    for name, node in walk_definitions(parse_python(code)):
        if not isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield name, "\n".join(lines[first - 1 : node.end_lineno])


def _imports(code: str) -> str:
    """Import statements of a module, a line each."""
    kinds = ast.Import | ast.ImportFrom
    return "\n".join(
        ast.unparse(node) for node in parse_python(code).body if isinstance(node, kinds)
    )


def _searches(text: str, tools: Mapping[str, Tool]) -> Iterator[Found]:
    path, position = "", 0
    while opening := _SEARCH.search(text, position):
        above = text[position : opening.start()].rstrip().split("\n")
        if above[-1].lstrip().startswith("```"):
            above.pop()
        alone = _NAME_ALONE.fullmatch(above[-1]) if above else None
        named = _path_in(above[-1]) if above else ""
        path = named or (path if alone is None else alone[1])
        end = _REPLACE.search(text, opening.end())
        limit = opening.end() if end is None else end.start()
        dividers = list(_DIVIDER.finditer(text, opening.end(), limit))
        is_cut = _SEARCH.search(text, opening.end(), limit) is not None  # the next block began
        if end is None or not dividers or is_cut or not path:
            is_open = end is None or not dividers or is_cut
            missing = "the ======= or >>>>>>> REPLACE line" if is_open else "the path above it"
            fault = _broken(f"a block lacks {missing}; nothing behind it was read")
            yield opening.start(), len(text), [fault]
            return
        position = end.end()
        # a heading underlined with seven = is in the old text and in the new one
        divider = dividers[(len(dividers) - 1) // 2]
        old = text[opening.end() : divider.start()]
        new = text[divider.end() : end.start()]
        yield opening.start(), position, [_replace(path, old, new, tools)]


def _diffs(text: str, tools: Mapping[str, Tool]) -> Iterator[Found]:
    # a line `-- a` that is removed before a line `++ b` is added looks like a header, but no hunk follows
    headers = [
        found
        for index, found in enumerate(_HEADER.finditer(text))
        if index == 0 or found["new"].startswith(_NO_FILE) or _HUNK.match(text, found.end())
    ]
    cut_at = next(
        (block.start() for block in _FENCE.finditer(text) if block["open"] is not None), None
    )
    limits = [*(header.start() for header in headers[1:]), len(text)]
    for header, limit in zip(headers, limits, strict=False):
        old, new = (header[side].partition("\t")[0].strip() for side in ("old", "new"))
        path = re.sub("^[ab]/", "", old if new == _NO_FILE else new)
        if new == _NO_FILE:
            yield header.start(), limit, [call_from_texts(DELETE_FILE, {"path": path}, tools)]
            continue
        if cut_at is not None and header.start() > cut_at:
            yield header.start(), len(text), [_broken("the last block of a diff is not closed")]
            return
        hunks = text[header.end() : limit]
        calls, end = _hunks(hunks, path, tools, is_new=old == _NO_FILE)
        yield header.start(), header.end() + end, calls


def _hunks(
    text: str, path: str, tools: Mapping[str, Tool], *, is_new: bool
) -> tuple[list[ParsedCall], int]:
    """Calls of the hunks at the beginning of a text, and the end of the hunks. All hunks of a new file are one call."""
    calls: list[ParsedCall] = []
    old: list[str] = []
    new: list[str] = []
    blank: list[str] = []  # blank lines that may belong to the hunk

    def close() -> None:
        if old or new:
            calls.append(_replace(path, "".join(old), "".join(new), tools))
        for lines in (old, new, blank):
            lines.clear()

    end, is_open = 0, False
    for line in split_lines(text):
        content = line.removesuffix("\n") + "\n"
        if line.startswith("@@"):
            blank.clear()
            if not is_new:
                close()
            is_open = True
        elif not is_open:
            break
        elif not line.strip():
            blank.append(content.removeprefix(" "))
        elif line[0] in " +-":
            old += [*blank, content[1:]] if line[0] != "+" else blank
            new += [*blank, content[1:]] if line[0] != "-" else blank
            blank.clear()
        elif line.startswith("```") or blank:
            break
        elif line[0] != "\\":
            calls.append(
                _broken(f"{line[:40].rstrip()!r} in a hunk, wanted a space, + or - before it")
            )
            return calls, len(text)
        end += len(line)
    close()
    return calls or [_broken(f"the diff of {path} has no hunk")], end


def _replace(path: str, old: str, new: str, tools: Mapping[str, Tool]) -> ParsedCall:
    """The call that replaces text in a file, or makes the file if there is no text to replace."""
    if not old:
        return call_from_texts(WRITE_FILE, {"path": path, "text": new}, tools)
    return call_from_texts(EDIT_FILE, {"path": path, "old": old, "new": new}, tools)


def _path_in(line: str, comment: str = "") -> str:
    """The last path in a line, or an empty text."""
    found = _PATH.findall(line) if line.lstrip().startswith(comment) else []
    return found[-1] if found else ""


def _broken(error: str) -> ParsedCall:
    return ParsedCall(EDIT_FILE, {}, CallStatus.MALFORMED, error)


_READERS: dict[str, Callable[[str, Mapping[str, Tool]], Iterator[Found]]] = {
    "whole_function": _whole_functions,
    "search_replace": _searches,
    "udiff": _diffs,
}
