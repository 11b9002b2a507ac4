"""The compact dialect's tools: those on files, and here those that search, run and talk."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact import files
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools.definition import (
    FILES,
    Argument,
    Output,
    Tool,
    Values,
    optional,
    tool,
)
from ostinato.infra.agent.tools.searching import (
    MAX_MATCHES,
    OUTPUT_CAP_BYTES,
    find_text,
    search_texts,
)
from ostinato.infra.agent.tools.testing import describe_report, is_pytest
from ostinato.infra.sandbox.text_search import TextSearch


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
    """The user's answer where there is a user."""
    if environment.ask_user is None:
        return "no user available"
    return await environment.ask_user(arguments["text"])


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        files.read_file,
        files.edit_file,
        files.write_file,
        files.list_dir,
        grep,
        codebase_search,
        files.read_lints,
        run_terminal,
        todo_write,
        ask_user,
    )
}
