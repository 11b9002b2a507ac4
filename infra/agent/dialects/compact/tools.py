"""The compact dialect's tools: those on files, and here those that search, run and talk."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact import files
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools import names
from ostinato.infra.agent.tools.definition import FILES, Argument, Output, Tool, Values, optional
from ostinato.infra.agent.tools.searching import (
    MAX_MATCHES,
    OUTPUT_CAP_BYTES,
    find_text,
    search_texts,
)
from ostinato.infra.agent.tools.testing import describe_report, is_pytest
from ostinato.infra.sandbox.text_search import TextSearch


async def grep(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """Matching lines as path:line:text."""
    search = TextSearch(arguments["query"], arguments.get("path") or ".")
    lines = [
        f"{match.path}:{match.number}:{match.text}"
        for match in await find_text(environment, search, config)
    ]
    note = [f"{len(lines) - MAX_MATCHES} more matches"] if len(lines) > MAX_MATCHES else []
    return "\n".join([*sorted(lines[:MAX_MATCHES]), *note]) or "no matches"


async def codebase_search(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    """The best passages as path:first-last and their opening line."""
    return await search_texts(environment, arguments["query"])


GREP = Tool(
    name=names.GREP,
    description="Find lines that match an extended regular expression.",
    arguments=(
        Argument("query", "the expression"),
        optional("path", "file or directory; default: the root"),
    ),
    primary="query",
    reads=(FILES,),
    run=grep,
)

CODEBASE_SEARCH = Tool(
    name=names.CODEBASE_SEARCH,
    description="Find the places in the code that speak of something.",
    arguments=(Argument("query", "words"),),
    primary="query",
    reads=(FILES,),
    run=codebase_search,
)


async def run_terminal(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> Output:
    """Output of a command. A test report is worded after the turn, by the region read last."""
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


RUN_TERMINAL = Tool(
    name=names.RUN_TERMINAL,
    description="Run a shell command in the repository; `pytest` runs the tests.",
    arguments=(Argument("command", "the command line"),),
    primary="command",
    writes=(FILES, "terminal"),
    run=run_terminal,
)


async def todo_write(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    environment.state.todo = arguments["text"]
    return "ok"


async def ask_user(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """The user's answer where there is a user."""
    if environment.ask_user is None:
        return "no user available"
    return await environment.ask_user(arguments["text"])


TODO_WRITE = Tool(
    name=names.TODO_WRITE,
    description="Write down what remains to be done.",
    arguments=(Argument("text", "the list, one item a line", kind="text"),),
    primary="text",
    writes=("todo",),
    run=todo_write,
)

ASK_USER = Tool(
    name=names.ASK_USER,
    description="Ask the user a question.",
    arguments=(Argument("text", "the question", kind="text"),),
    primary="text",
    writes=("user",),
    run=ask_user,
)

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        files.READ_FILE,
        files.EDIT_FILE,
        files.WRITE_FILE,
        files.LIST_DIR,
        GREP,
        CODEBASE_SEARCH,
        files.READ_LINTS,
        RUN_TERMINAL,
        TODO_WRITE,
        ASK_USER,
    )
}
