"""The compact dialect's ten tools."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.regions import Region, open_region, show_lines, split_argument
from ostinato.infra.agent.tools.definition import (
    FILE,
    FILES,
    REGION,
    Argument,
    Output,
    Tool,
    Values,
    optional,
    tool,
)
from ostinato.infra.agent.tools.lints import new_lints
from ostinato.infra.agent.tools.matching import replace_text
from ostinato.infra.agent.tools.searching import (
    MAX_MATCHES,
    OUTPUT_CAP_BYTES,
    find_text,
    search_texts,
)
from ostinato.infra.agent.tools.testing import describe_report, is_pytest
from ostinato.infra.sandbox.text_search import TextSearch
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
    """Findings that the attempt's edits introduced into a file."""
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


@tool(
    "Find lines that match an extended regular expression.",
    Argument("query", "the expression"),
    optional("path", "file or directory; default: the root"),
    primary="query",
    reads=(FILES,),
)
async def grep(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """Matching lines as path:line:text."""
    search = TextSearch(arguments["query"], arguments.get("path") or ".")
    lines = [
        f"{match.path}:{match.number}:{match.text}"
        for match in await find_text(environment, search, config)
    ]
    note = [f"{len(lines) - MAX_MATCHES} more matches"] if len(lines) > MAX_MATCHES else []
    return "\n".join([*sorted(lines[:MAX_MATCHES]), *note]) or "no matches"


@tool(
    "Find the places in the code that speak of something.",
    Argument("query", "words"),
    primary="query",
    reads=(FILES,),
)
async def codebase_search(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    """The best passages as path:first-last and their opening line."""
    return await search_texts(environment, arguments["query"])


@tool(
    "Run a shell command in the repository; `pytest` runs the tests.",
    Argument("command", "the command line"),
    primary="command",
    writes=(FILES, "terminal"),
)
async def run_terminal(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> Output:
    """Output of a command. A test report is formatted once the turn's other calls have run, with
    line tags of the region read last.
    """
    command = arguments["command"]
    if environment.run_tests is not None and is_pytest(command):
        report = await environment.run_tests(environment.sandbox)
        return lambda: describe_report(report, environment.state.region)
    result = await environment.sandbox.exec(
        command,
        timeout_seconds=config.call_time_limit_seconds,
        output_cap_bytes=OUTPUT_CAP_BYTES,
    )
    if result.timed_out:
        raise TimeoutError
    output = result.output.decode(errors="replace").rstrip("\n")
    if result.exit_code == 0:
        return output or "ok"
    return f"exit code {result.exit_code}\n{output}".rstrip("\n")


@tool(
    "Write down what remains to be done.",
    Argument("text", "the list, one item a line", kind="text"),
    primary="text",
    writes=("todo",),
)
async def todo_write(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    environment.state.todo = arguments["text"]
    return "ok"


@tool(
    "Ask the user a question.",
    Argument("text", "the question", kind="text"),
    primary="text",
    writes=("user",),
)
async def ask_user(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """The user's answer, if there is a user."""
    if environment.ask_user is None:
        return "no user available"
    return await environment.ask_user(arguments["text"])


COMPACT_TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        read_file,
        edit_file,
        write_file,
        list_dir,
        grep,
        codebase_search,
        read_lints,
        run_terminal,
        todo_write,
        ask_user,
    )
}
