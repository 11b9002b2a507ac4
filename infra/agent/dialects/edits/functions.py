"""Finds the function that a block of an answer replaces, before any call of the turn runs."""

import ast
import re
import tokenize
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rapidfuzz.distance import Indel

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.dialect import catalogue_of
from ostinato.infra.agent.dialects.edits.blocks import FUNCTION, OVERLOAD, role_of
from ostinato.infra.agent.dialects.edits.imports import missing_imports
from ostinato.infra.agent.dialects.full.calls import call_from_texts
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolTimeout
from ostinato.infra.agent.regions import definition_at, name_at
from ostinato.infra.agent.tools.calls import ParsedCall
from ostinato.infra.agent.tools.matching import indent_of
from ostinato.infra.agent.tools.names import EDIT_FILE, WRITE_FILE
from ostinato.infra.agent.tools.searching import find_text
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.syntax import parse_once
from ostinato.infra.sandbox.text_search import TextSearch

MAX_CANDIDATES = 50


@dataclass(frozen=True, slots=True)
class _Place:
    """A function in a file: 0-based lines of its first decorator, of its `def`, and after its end."""

    path: str
    text: str
    name: str
    first: int
    opening: int
    end: int
    note: str = ""  # of the result: why this function

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @property
    def source(self) -> str:
        return "\n".join(self.lines[self.first : self.end])


async def place_edits(
    calls: Sequence[ParsedCall], environment: AgentEnvironment, config: HarnessConfig
) -> list[ParsedCall]:
    """The calls of blocks as edits of files. A block for a function that does not exist, or for a new file that exists
    already, is an invalid call. Of several blocks for one function the last is placed. The first edit of a file adds the
    imports that its blocks need.
    """
    placed = list(calls)
    places: dict[int, _Place] = {}  # by call
    taken: dict[
        tuple[str, int], int
    ] = {}  # path and line of a function -> the call that replaces it
    for index, call in enumerate(calls):
        try:
            place = await _place_of(call, environment, config, taken)
        except (ToolFailure, ToolTimeout) as error:
            placed[index] = _invalid(call, str(error))
            continue
        if isinstance(place, ParsedCall):
            placed[index] = place
            continue
        key = place.path, place.opening
        if key in taken:
            error = f"a later block replaces {place.name} in {place.path} too, wanted one block"
            placed[taken[key]] = _invalid(calls[taken[key]], error)
            del places[taken[key]]
        taken[key] = index
        places[index] = place
    begun: set[str] = set()
    for index, place in places.items():
        blocks = [calls[each].arguments for each in places if places[each].path == place.path]
        is_first = place.path not in begun
        begun.add(place.path)
        at, imports = missing_imports(place.text, blocks) if is_first else (0, [])
        old, new = _replaced(place, calls[index].arguments["new"], at, imports)
        arguments = {"path": place.path, "old": old, "new": new}
        edit = call_from_texts(EDIT_FILE, arguments, catalogue_of(config))
        note = place.note
        if imports:
            note += f"\nadded imports to {place.path}: {'; '.join(imports)}"
        placed[index] = replace(edit, note=note)
    return placed


async def _place_of(
    call: ParsedCall,
    environment: AgentEnvironment,
    config: HarnessConfig,
    taken: Collection[tuple[str, int]],
) -> "_Place | ParsedCall":
    """The function that a block replaces, or the call itself if it is no such block or is invalid."""
    if call.status is not CallStatus.OK:
        return call
    if call.tool == WRITE_FILE:
        path = str(call.values["path"])
        try:
            await environment.read_text(path)
        except ToolFailure:
            return call
        return _invalid(call, f"{path} is there: search for what it holds")
    if FUNCTION not in call.arguments:
        return call
    name, new = call.arguments[FUNCTION], call.arguments["new"]
    places = await _find_places(call, environment, config)
    if role_of(new) == OVERLOAD:  # each of a function's overloads has a block of its own
        places = [place for place in places if (place.path, place.opening) not in taken]
    if not places:
        return _invalid(call, f"no function {name} in the repository's Python files")
    place = max(places, key=lambda each: _likeness(each.source, new))
    note = f"{place.name} in {place.path}, line {place.opening + 1}"
    if len(places) > 1:
        note += f": the most like of {len(places)} functions of this name"
    return replace(place, note=note)


async def _find_places(
    call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig
) -> list[_Place]:
    """Functions with the call's name in its class, limited to its path and to its role unless that leaves none."""
    name, wanted_path = call.arguments[FUNCTION], call.arguments["path"]
    scope, _, own_name = name.rpartition(".")
    pattern = rf"^\s*(async\s+)?def\s+{re.escape(own_name)}\s*\("
    matches = await find_text(environment, TextSearch(pattern, glob="*.py"), config)
    if scope:
        opening = rf"^\s*class\s+{re.escape(scope.rpartition('.')[2])}\b"
        classes = await find_text(environment, TextSearch(opening, glob="*.py"), config)
        with_class = {match.path for match in classes}
        matches = [match for match in matches if match.path in with_class]
    in_file = [
        match for match in matches if wanted_path and f"/{match.path}".endswith(f"/{wanted_path}")
    ]
    matches = in_file or matches
    if len(matches) > MAX_CANDIDATES:
        raise ToolFailure(
            f"{len(matches)} functions {own_name} in the repository, wanted at most {MAX_CANDIDATES}: write the "
            "file's path in a comment on the block's first line, or the class statement above a method"
        )
    texts = {match.path: "" for match in matches}
    for path in texts:
        texts[path] = await environment.read_text(path)
    found = (_place(match.path, texts[match.path], match.number, own_name) for match in matches)
    places = [
        place for place in found if place is not None and f".{place.name}".endswith(f".{name}")
    ]
    new = call.arguments["new"]
    is_decorated, role = new.lstrip().startswith("@"), role_of(new)
    alike = [
        place
        for place in places
        if (role_of(place.source) == role if is_decorated else role_of(place.source) != OVERLOAD)
    ]
    return alike or places


def _place(path: str, text: str, number: int, name: str) -> _Place | None:
    """The function that opens at a line. None if the file parses and none opens there, as in a text."""
    lines = text.split("\n")
    extent = None
    try:
        tree = parse_once(text)
    except (SyntaxError, ValueError):
        extent = definition_at(lines, number)
    else:
        extent = _parsed_extent(tree, number, name)
        if extent is None and "\r" in text.replace(
            "\r\n", ""
        ):  # the parser counts it as a line end
            extent = definition_at(lines, number)
    if extent is None:
        return None
    return _Place(path, text, name_at(lines, number), extent[0] - 1, number - 1, extent[1])


def _parsed_extent(tree: ast.Module, number: int, name: str) -> tuple[int, int] | None:
    """First and last line of the function of a name that opens at a line."""
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (node.lineno, node.name) == (number, name) and node.end_lineno:
            return min([number, *(each.lineno for each in node.decorator_list)]), node.end_lineno
    return None


def _replaced(place: _Place, new: str, at: int, imports: Sequence[str]) -> tuple[str, str]:
    """Old and new text of the edit. The new function gets the old indentation, and keeps the old decorators if it
    has none. `imports` are added before the line `at`, which is not below the function. Lines around are included until
    the old text is unique.
    """
    lines = place.lines
    first = place.first if new.lstrip().startswith("@") else place.opening
    fresh = _indented(new.split("\n"), indent_of(lines[place.opening]))
    if lines[place.opening].endswith("\r"):
        fresh = [f"{line}\r" for line in fresh]
        imports = [f"{line}\r" for line in imports]
    start, end, further = at if imports else first, place.end, 1
    while place.text.count("\n".join(lines[start:end])) > 1 and (start, end) != (0, len(lines)):
        start, end = max(0, start - further), end if start else min(len(lines), end + further)
        further *= 2
    changed = [*lines[start:at], *imports, *lines[at:first]] if imports else lines[start:first]
    return "\n".join(lines[start:end]), "\n".join([*changed, *fresh, *lines[place.end : end]])


def _indented(lines: Sequence[str], indent: str) -> list[str]:
    present = indent_of(next(line for line in lines if line.strip()))
    if present == indent:
        return list(lines)
    kept = _lines_of_texts(lines)
    return [
        indent + line.removeprefix(present) if line.strip() and index not in kept else line
        for index, line in enumerate(lines)
    ]


def _lines_of_texts(lines: Sequence[str]) -> set[int]:
    """Indices of the lines within texts that do not follow the indentation of the code around them."""
    kept: set[int] = set()
    for token in tokenize.generate_tokens((f"{line}\n" for line in lines).__next__):
        (first, _), (last, _) = token.start, token.end
        inner = lines[first:last]
        if token.type == tokenize.STRING and any(
            line.strip() and not line.startswith(indent_of(lines[first - 1])) for line in inner
        ):
            kept.update(range(first, last))
    return kept


def _likeness(first: str, second: str) -> float:
    """From 0 to 1. rapidfuzz compares functions of 10,000 words in milliseconds, difflib in minutes."""
    return Indel.normalized_similarity(
        *(re.findall(r"\w+|[^\w\s]", text) for text in (first, second))
    )


def _invalid(call: ParsedCall, error: str) -> ParsedCall:
    return replace(call, status=CallStatus.INVALID_ARGUMENTS, error=error)
