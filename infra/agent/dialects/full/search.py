"""The full dialect's tools that search: glob, grep, codebase_search."""

import pathspec

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools.definition import FILE, FILES, Argument, Values, optional, tool
from ostinato.infra.agent.tools.searching import find_text, search_texts
from ostinato.infra.sandbox.text_search import TextMatch, TextSearch

MAX_WALKED_FILES = 20_000
MAX_NAMES = 200
MAX_MATCHES = 50
MAX_MATCH_CHARACTERS = 300
HIDDEN_FOLDERS = frozenset({".git/", "__pycache__/", ".venv/", "node_modules/"})

PLACE = optional("path", "file or directory; default: the repository", "path")


@tool(
    "Find files by name, for example src/**/*.py or test_*.py.",
    Argument("pattern", "as in .gitignore: without a slash it matches at any depth"),
    reads=(FILES,),
)
async def glob(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Paths that match, sorted."""
    spec = pathspec.GitIgnoreSpec.from_lines([values["pattern"]])
    found = sorted(spec.match_files(await _walk(environment)))
    note = [f"[{len(found) - MAX_NAMES} more]"] if len(found) > MAX_NAMES else []
    return "\n".join([*found[:MAX_NAMES], *note]) or "no files match"


@tool(
    "Search file contents with a regular expression.",
    Argument("pattern", "the expression"),
    PLACE,
    optional("glob", "only files whose name matches, like *.py"),
    optional(
        "mode",
        "lines with their numbers, names of files, or matches per file; default lines",
        "choice",
        choices=("lines", "files", "count"),
    ),
    optional("ignore_case", "default false", "boolean"),
    optional("limit", "results to show; default 50", "integer", minimum=1, maximum=500),
    reads=(FILE,),
)
async def grep(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Matching lines as path:line:text, or names, or counts. Sorted by path."""
    mode = values.get("mode", "lines")
    search = TextSearch(
        pattern=values["pattern"],
        path=values.get("path") or ".",
        glob=values.get("glob") or "",
        ignores_case=bool(values.get("ignore_case")),
        counts_only=mode != "lines",
    )
    lines = [_shown_match(match, mode) for match in await find_text(environment, search, config)]
    if not lines:
        return "no matches"
    limit = values.get("limit", MAX_MATCHES)
    shown = [
        line if len(line) <= MAX_MATCH_CHARACTERS else f"{line[:MAX_MATCH_CHARACTERS]} [cut]"
        for line in lines[:limit]
    ]
    note = [f"[{len(lines) - limit} more]"] if len(lines) > limit else []
    return "\n".join([*shown, *note])


def _shown_match(match: TextMatch, mode: str) -> str:
    if mode == "files":
        return match.path
    tail = [match.text] if mode == "lines" else []
    return ":".join([match.path, str(match.number), *tail])


@tool(
    "Find the code that a description speaks of; grep is better for exact names.",
    Argument("query", "words or a sentence"),
    optional(
        "directories", "directories to look in, one per line; default: all", "list", maximum=8
    ),
    reads=(FILES,),
)
async def codebase_search(
    environment: AgentEnvironment, values: Values, config: HarnessConfig
) -> str:
    """The best passages as path:first-last and their opening line."""
    return await search_texts(environment, values["query"], values.get("directories", ()))


async def _walk(environment: AgentEnvironment) -> list[str]:
    found: list[str] = []
    folders = [""]
    while folders and len(found) < MAX_WALKED_FILES:
        folder = folders.pop()
        for name in await environment.list_names(folder or "."):
            if not name.endswith("/"):
                found.append(folder + name)
            elif name not in HIDDEN_FOLDERS:
                folders.append(folder + name)
    return found
