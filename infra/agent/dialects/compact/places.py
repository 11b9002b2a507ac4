"""Line tags on search results, which read_file accepts as its argument.

`tag_places` puts a tag before each place in a result of grep or codebase_search. `follow_place`
replaces such a tag in a later read_file call by the function around that place, so that locks,
records and grading never see a tag. A tag refers to the last result that named places.
"""

import re
from dataclasses import replace

from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.regions import name_at
from ostinato.infra.agent.tools.calls import ParsedCall
from ostinato.infra.agent.tools.names import CODEBASE_SEARCH, GREP, READ_FILE
from ostinato.infra.agent.transcript import CallStatus
from ostinato.models.rendering.vocabulary import LINE_TAGS, NUM_LINE_TAGS, line_tag

LISTING_TOOLS = frozenset({GREP, CODEBASE_SEARCH})
Places = dict[str, tuple[str, int]]
"""Tag -> path and line of the file (1-based)."""
_PLACE = re.compile(r"([^\s:]+):(\d+)(?=:|-\d+ )")


def tag_places(text: str) -> tuple[str, Places]:
    """The result with tags, and the place of each. Lines that name no place get no tag."""
    places: Places = {}
    lines = text.split("\n")
    for index, line in enumerate(lines):
        named = _PLACE.match(line)
        if named is not None and len(places) < NUM_LINE_TAGS:
            tag = line_tag(len(places) + 1)
            places[tag] = (named[1], int(named[2]))
            lines[index] = tag + line
    return "\n".join(lines), places


def find_place(result: str, path: str, symbol: str) -> str | None:
    """Argument of read_file for the line of a result where a function begins: the line's tag, or
    file and name if lines have no tags. None when no line shows it.
    """
    name = re.escape(symbol.rpartition(".")[2])
    line = rf"^(<L\d+>)?{re.escape(path)}:\d+(?:-\d+ |:)\s*(?:async )?def {name}\("
    found = re.search(line, result, re.MULTILINE)
    return None if found is None else found[1] or f"{path}::{symbol}"


async def follow_place(call: ParsedCall, environment: AgentEnvironment) -> ParsedCall:
    """The call with a tag replaced by the function at its place. Other calls are unchanged.

    A tag that the last result does not have makes the call InvalidArguments.
    """
    tag = call.arguments.get("path", "")
    if call.tool != READ_FILE or call.status is not CallStatus.OK or tag not in LINE_TAGS:
        return call
    place = environment.state.places.get(tag)
    if place is None:
        error = f"the last search result has no {tag}"
        return replace(call, status=CallStatus.INVALID_ARGUMENTS, error=error)
    path, number = place
    try:
        name = name_at((await environment.read_text(path)).split("\n"), number)
    except ToolFailure:
        name = ""  # the file is gone, as read_file will report
    named = f"{path}::{name}" if name else f"{path}:{number}"
    return replace(call, arguments={"path": named}, values={"path": named})
