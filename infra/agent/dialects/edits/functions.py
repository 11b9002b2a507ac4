"""Finds the function that a block of an answer replaces, before any call of the turn runs."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.dialect import catalogue_of
from ostinato.infra.agent.dialects.edits.blocks import FUNCTION
from ostinato.infra.agent.dialects.full.calls import call_from_texts
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolTimeout
from ostinato.infra.agent.regions import definition_at, name_at
from ostinato.infra.agent.tools.calls import ParsedCall
from ostinato.infra.agent.tools.matching import indent_of
from ostinato.infra.agent.tools.names import EDIT_FILE, WRITE_FILE
from ostinato.infra.agent.tools.searching import find_text
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.platform.syntax import parse_once, walk_definitions
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

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @property
    def source(self) -> str:
        return "\n".join(self.lines[self.first : self.end])


async def place_edit(
    call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig
) -> ParsedCall:
    """The call of a block as the edit of a file. A block for a function that does not exist, or for a new file that
    exists already, is an invalid call.
    """
    if call.status is not CallStatus.OK:
        return call
    try:
        if call.tool == WRITE_FILE:
            await environment.read_text(call.arguments["path"])
            return _invalid(call, f"{call.arguments['path']} is there: search for what it holds")
        if FUNCTION not in call.arguments:
            return call
        places = await _find_places(call, environment, config)
    except (ToolFailure, ToolTimeout) as error:
        return call if call.tool == WRITE_FILE else _invalid(call, str(error))
    name, new = call.arguments[FUNCTION], call.arguments["new"]
    if not places:
        return _invalid(call, f"no function {name} in the repository's Python files")
    place = max(places, key=lambda each: _likeness(each.source, new))
    old, changed = _replaced(place, new)
    arguments = {"path": place.path, "old": old, "new": changed}
    placed = call_from_texts(EDIT_FILE, arguments, catalogue_of(config))
    others = len(places) - 1
    note = f"{place.name} in {place.path}, line {place.opening + 1}"
    if others:
        note += f": the most like of {len(places)} functions of this name"
    return replace(placed, note=note)


async def _find_places(
    call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig
) -> list[_Place]:
    """Functions with the call's name, limited to its class and to its path unless that leaves none."""
    name, wanted_path = call.arguments[FUNCTION], call.arguments["path"]
    pattern = rf"^\s*(async\s+)?def\s+{re.escape(name.rpartition('.')[2])}\s*\("
    matches = await find_text(environment, TextSearch(pattern, glob="*.py"), config)
    texts = {match.path: "" for match in matches[:MAX_CANDIDATES]}
    for path in texts:
        texts[path] = await environment.read_text(path)
    places = [
        _place(match.path, texts[match.path], match.number) for match in matches[:MAX_CANDIDATES]
    ]
    in_class = [place for place in places if f".{place.name}".endswith(f".{name}")]
    places = in_class or places
    in_file = [
        place for place in places if wanted_path and f"/{place.path}".endswith(f"/{wanted_path}")
    ]
    return in_file or places


def _place(path: str, text: str, number: int) -> _Place:
    lines = text.split("\n")
    first, end = _parsed_extent(text, number) or definition_at(lines, number)
    return _Place(path, text, name_at(lines, number), first - 1, number - 1, end)


def _parsed_extent(text: str, number: int) -> tuple[int, int] | None:
    """First and last line of the function that opens at a line. None if the file does not parse."""
    try:
        tree = parse_once(text)
    except (SyntaxError, ValueError):
        return None
    for _, node in walk_definitions(tree):
        if node.lineno == number and node.end_lineno is not None:
            return min([number, *(each.lineno for each in node.decorator_list)]), node.end_lineno
    return None


def _replaced(place: _Place, new: str) -> tuple[str, str]:
    """Old and new text of the edit. The new function gets the old indentation, and keeps the old decorators if it
    has none. Lines above are included until the old text is unique.
    """
    lines = place.lines
    first = place.first if new.lstrip().startswith("@") else place.opening
    fresh = _indented(new.split("\n"), indent_of(lines[place.opening]))
    start = first
    while start and place.text.count("\n".join(lines[start : place.end])) > 1:
        start -= 1
    return "\n".join(lines[start : place.end]), "\n".join([*lines[start:first], *fresh])


def _indented(lines: Sequence[str], indent: str) -> list[str]:
    present = indent_of(next(line for line in lines if line.strip()))
    if present == indent:
        return list(lines)
    return [indent + line.removeprefix(present) if line.strip() else line for line in lines]


def _likeness(first: str, second: str) -> float:
    words = [re.findall(r"\w+|[^\w\s]", text) for text in (first, second)]
    return difflib.SequenceMatcher(None, *words, autojunk=False).ratio()


def _invalid(call: ParsedCall, error: str) -> ParsedCall:
    return replace(call, status=CallStatus.INVALID_ARGUMENTS, error=error)
