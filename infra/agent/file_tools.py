"""The compact dialect's tools on files: read_file, edit_file, write_file, list_dir, read_lints.

Arguments and the environment in, the text for the model out; ToolFailure when the environment says
no. Parsing, locks and limits are elsewhere.
"""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.lints import new_lints
from ostinato.infra.agent.regions import Region, open_region, show_lines, split_argument
from ostinato.models.rendering.vocabulary import line_tag

MAX_LISTED = 60


async def read_file(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """Shows a region with numbered lines; it becomes the region that line edits speak of."""
    path, _, _ = split_argument(arguments["path"])
    text = await environment.read_text(path)
    region = open_region(text, arguments["path"])
    view, environment.state.region = show_lines(
        region, config.line_numbers, config.read_limit_lines
    )
    return view


async def edit_file(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
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
    await environment.write_text(path, text.replace(old, new))
    _forget_region(environment, path)
    return "ok"


async def _edit_lines(environment: AgentEnvironment, arguments: dict[str, str]) -> str:
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


async def write_file(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """Creates or overwrites a file."""
    path = arguments["path"].removeprefix("./")
    await environment.write_text(path, arguments["text"])
    _forget_region(environment, path)
    return "ok"


async def list_dir(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """Names directly below a directory; directories end in a slash."""
    path = arguments.get("path") or "."
    names = await environment.list_names(path)
    note = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return "\n".join([*names[:MAX_LISTED], *note]) or "empty"


async def read_lints(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
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
