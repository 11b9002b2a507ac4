"""The compact dialect's tools on files: read_file, edit_file, write_file, list_dir, read_lints."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.regions import (
    Region,
    open_region,
    show_lines,
    split_argument,
)
from ostinato.infra.agent.tools.definition import (
    FILE,
    FILES,
    REGION,
    Argument,
    Values,
    optional,
    tool,
)
from ostinato.infra.agent.tools.lints import new_lints
from ostinato.infra.agent.tools.matching import replace_text
from ostinato.models.rendering.vocabulary import line_tag

MAX_LISTED = 60


def _edit_rule(values: Values) -> str:
    given = {name for name in ("old", "new", "lines") if name in values}
    if given not in ({"old", "new"}, {"lines"}):
        return "wanted <Ln>text lines, or path, old and new"
    return "path is missing" if "old" in given and not values.get("path") else ""


PATH = Argument("path", "file, relative to the repository")


@tool(
    "Show a file, one function or class of it (file::name), or lines (file:10-40).",
    Argument("path", "file, file::name or file:first-last"),
    primary="path",
    reads=(FILE,),
    writes=(REGION,),
)
async def read_file(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """Shows a region with numbered lines. Later line edits apply to it."""
    path, _, _ = split_argument(arguments["path"])
    text = await environment.read_text(path)
    region = open_region(text, arguments["path"])
    view, environment.state.region = show_lines(region, config.read_limit_lines)
    return view


@tool(
    "Change a file. Either lines of the region read last, each as <Ln>new text "
    "(lines not named return to what was read), or one exact replacement of old by new.",
    optional("path", "file; default: the one read last"),
    optional("old", "exact text that occurs once", "text"),
    optional("new", "its replacement", "text"),
    optional("lines", "<Ln>new text, repeated", "text"),
    primary="lines",
    writes=(FILE, REGION),
    rule=_edit_rule,
)
async def edit_file(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """Applies line items to the region read last, or replaces one exact occurrence."""
    if "lines" in arguments:
        return await _edit_lines(environment, arguments)
    path = arguments["path"].removeprefix("./")
    text = await environment.read_text(path)
    old, new = arguments["old"], arguments["new"]
    count = text.count(old)
    if count != 1:
        raise ToolFailure(f"old occurs {count} times in {path}, wanted once")
    if old == new:
        raise ToolFailure("old and new are the same")
    edited = replace_text(text, old, new, all_of_them=False, exact=True)
    await environment.write_text(path, edited.text)
    _forget_region(environment, path)
    return "ok"


async def _edit_lines(environment: AgentEnvironment, arguments: Values) -> str:
    region = environment.state.region
    path = arguments.get("path", "").removeprefix("./")
    if region is None or (path and path != region.path):
        raise ToolFailure(f"read {path or 'a file'} before editing its lines")
    edited = region.with_edits(arguments["lines"])
    text = await environment.read_text(region.path)
    if text != region.text():
        environment.state.region = None
        raise ToolFailure(f"{region.path} changed since it was read, read it again")
    new_text = edited.text()
    if new_text == text:
        raise ToolFailure("the edit changes nothing")
    await environment.write_text(region.path, new_text)
    environment.state.region = edited
    return "ok"


def _forget_region(environment: AgentEnvironment, path: str) -> None:
    region = environment.state.region
    if region is not None and region.path == path:
        environment.state.region = None


@tool(
    "Create or overwrite a file.",
    PATH,
    Argument("text", "the whole content", kind="text"),
    primary="text",
    writes=(FILE,),
)
async def write_file(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    path = arguments["path"].removeprefix("./")
    await environment.write_text(path, arguments["text"])
    _forget_region(environment, path)
    return "ok"


@tool(
    "List a directory.",
    optional("path", "directory; default: the root"),
    primary="path",
    reads=(FILES,),
)
async def list_dir(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """Names directly below a directory. Directories end in a slash."""
    path = arguments.get("path") or "."
    names = await environment.list_names(path)
    note = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return "\n".join([*names[:MAX_LISTED], *note]) or "empty"


@tool(
    "Lint findings in a file that were not there before your edits.",
    optional("path", "file; default: the one read last"),
    primary="path",
    reads=(FILE, REGION),
)
async def read_lints(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    """Findings that the attempt's edits brought into a file."""
    region = environment.state.region
    path = arguments.get("path", "").removeprefix("./") or (region.path if region else "")
    if not path:
        raise ToolFailure("read a file before asking for its lints")
    text = await environment.read_text(path)
    original = environment.state.originals.get(path, text)
    new = await new_lints(original, text, path)
    shown = [f"{_place(region, path, line)}: {message}" for line, message in new]
    return "\n".join(shown) or "no new lints"


def _place(region: Region | None, path: str, line: int) -> str:
    number = region.number_at(line) if region is not None and region.path == path else None
    return line_tag(number) if number is not None else f"{path}:{line}"
