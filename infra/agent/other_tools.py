"""The compact dialect's tools that run, search or talk: run_terminal, grep, codebase_search, todo_write,
ask_user.

Arguments and the environment in, the text for the model out; ToolFailure when the environment says
no. `pytest` goes to the environment's test runner, any other command to a shell in the sandbox.
"""

from collections.abc import Callable, Sequence

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolTimeout
from ostinato.infra.agent.report import describe_report
from ostinato.infra.agent.search import Hit, search_files
from ostinato.infra.sandbox.text_search import TextMatch, TextSearch, read_matches, search_command

MAX_MATCHES = 20
MAX_HITS = 5
MAX_HITS_ANYWHERE = 100  # looked through when only some directories are wanted
MAX_SEARCHED_FILES = 400
MAX_SEARCHED_FILE_BYTES = 200_000
SEARCHED_SUFFIXES = (".py", ".md", ".rst", ".toml", ".txt", ".cfg")
OUTPUT_CAP_BYTES = 100_000
PYTEST_PREFIXES = (["pytest"], ["python", "-m", "pytest"], ["python3", "-m", "pytest"])


def is_pytest(command: str) -> bool:
    """Whether a command line is a plain call of pytest."""
    words = command.split()
    return any(words[: len(prefix)] == prefix for prefix in PYTEST_PREFIXES)


async def run_terminal(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str | Callable[[], str]:
    """Output of a command; a test report is worded after the turn, by the region read last."""
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


async def grep(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """Matching lines as path:line:text."""
    search = TextSearch(arguments["query"], arguments.get("path") or ".")
    lines = [
        f"{match.path}:{match.number}:{match.text}"
        for match in await find_text(environment, search, config)
    ]
    note = [f"{len(lines) - MAX_MATCHES} more matches"] if len(lines) > MAX_MATCHES else []
    return "\n".join([*sorted(lines[:MAX_MATCHES]), *note]) or "no matches"


async def find_text(
    environment: AgentEnvironment, search: TextSearch, config: HarnessConfig
) -> list[TextMatch]:
    """A search in the sandbox, by ripgrep where it has that."""
    result = await environment.sandbox.exec(
        search_command(search),
        timeout_seconds=config.call_time_limit_seconds,
        output_cap_bytes=OUTPUT_CAP_BYTES,
    )
    if result.timed_out:
        raise ToolTimeout(f"grep ran longer than {config.call_time_limit_seconds:g} seconds")
    matches, said = read_matches(result.output)
    if result.exit_code > 1 and not matches:
        raise ToolFailure(said or f"grep ended with exit code {result.exit_code}")
    return matches


async def codebase_search(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """The best passages as path:first-last and their opening line."""
    return await search_texts(environment, arguments["query"])


async def search_texts(
    environment: AgentEnvironment, query: str, directories: Sequence[str] = ()
) -> str:
    """The best passages of the sandbox, or of some of its directories: by the search service where
    there is one, else by BM25 over its text files.
    """
    places = [directory.strip("./") for directory in directories]
    if environment.code_search is not None:
        changes = await environment.sandbox.diff()
        most = MAX_HITS if not places else MAX_HITS_ANYWHERE
        hits = await environment.code_search.search(changes, query, most)
        return list_hits([hit for hit in hits if _is_below(hit.path, places)][:MAX_HITS])
    files: dict[str, str] = {}
    for path in await _walk(environment):
        if not _is_below(path, places):
            continue
        data = await environment.sandbox.read(path)
        if len(data) <= MAX_SEARCHED_FILE_BYTES:
            files[path] = data.decode(errors="replace")
    return list_hits(search_files(files, query, limit=MAX_HITS))


def _is_below(path: str, places: Sequence[str]) -> bool:
    return not places or any(path.startswith(f"{place}/") or not place for place in places)


def list_hits(hits: Sequence[Hit]) -> str:
    """Hits as codebase_search shows them."""
    lines = [f"{hit.path}:{hit.first_line}-{hit.last_line} {hit.title}" for hit in hits]
    return "\n".join(lines) or "nothing found"


async def _walk(environment: AgentEnvironment) -> list[str]:
    """Files that are searched, sorted; hidden ones are left out."""
    found: list[str] = []
    folders = [""]
    while folders and len(found) < MAX_SEARCHED_FILES:
        folder = folders.pop()
        names = [name for name in await environment.list_names(folder or ".") if name[0] != "."]
        folders += [folder + name for name in names if name.endswith("/")]
        found += [folder + name for name in names if name.endswith(SEARCHED_SUFFIXES)]
    return sorted(found[:MAX_SEARCHED_FILES])


async def todo_write(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """Keeps the list."""
    environment.state.todo = arguments["text"]
    return "ok"


async def ask_user(
    environment: AgentEnvironment, arguments: dict[str, str], config: HarnessConfig
) -> str:
    """The user's answer where there is a user."""
    if environment.ask_user is None:
        return "no user available"
    return await environment.ask_user(arguments["text"])
