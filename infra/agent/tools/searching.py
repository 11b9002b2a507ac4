"""Searches that the tools of every dialect share: text in the sandbox's files, and passages."""

from collections.abc import Sequence

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolTimeout
from ostinato.infra.agent.search.index import Hit
from ostinato.infra.sandbox.text_search import TextMatch, TextSearch, read_matches, search_command

MAX_MATCHES = 20  # of grep, in the compact dialect
MAX_HITS = 5
MAX_HITS_ANYWHERE = 100  # hits to filter when only some directories are wanted
OUTPUT_CAP_BYTES = 100_000


async def find_text(
    environment: AgentEnvironment, search: TextSearch, config: HarnessConfig
) -> list[TextMatch]:
    """Matches of a search in the sandbox, by ripgrep if the sandbox has it."""
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


async def search_texts(
    environment: AgentEnvironment, query: str, directories: Sequence[str] = ()
) -> str:
    """The best chunks of the sandbox's code, or of some of its directories."""
    if environment.code_search is None:
        raise ToolFailure("there is no code search here, use grep")
    places = [directory.strip("./") for directory in directories]
    starts = tuple(f"{place}/" if place else "" for place in places) or ("",)
    changes = await environment.sandbox.diff()
    most = MAX_HITS if not places else MAX_HITS_ANYWHERE
    hits = environment.code_search.search(changes, query, most)
    return list_hits([hit for hit in hits if hit.path.startswith(starts)][:MAX_HITS])


def list_hits(hits: Sequence[Hit]) -> str:
    """Hits as codebase_search shows them."""
    lines = [f"{hit.path}:{hit.first_line}-{hit.last_line} {hit.title}" for hit in hits]
    return "\n".join(lines) or "nothing found"
