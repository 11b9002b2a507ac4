"""The compact dialect's tools that search: grep, codebase_search."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools import names
from ostinato.infra.agent.tools.definition import FILES, Argument, Tool, Values, optional
from ostinato.infra.agent.tools.searching import MAX_MATCHES, find_text, search_texts
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
