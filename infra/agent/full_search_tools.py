"""The full dialect's tools that search or talk: glob, grep, codebase_search, todo_write, ask_user.

Typed values and the environment in, the text for the model out; ToolFailure when the environment
says no.
"""

from collections.abc import Mapping
from typing import Any

import pathspec

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.other_tools import find_text, search_texts
from ostinato.infra.sandbox.text_search import TextMatch, TextSearch

Values = Mapping[str, Any]
MAX_WALKED_FILES = 20_000
MAX_NAMES = 200
MAX_MATCHES = 50
MAX_MATCH_CHARACTERS = 300
HIDDEN_FOLDERS = frozenset({".git/", "__pycache__/", ".venv/", "node_modules/"})


async def glob(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Paths that match, sorted."""
    spec = pathspec.GitIgnoreSpec.from_lines([values["pattern"]])
    found = sorted(spec.match_files(await _walk(environment)))
    note = [f"[{len(found) - MAX_NAMES} more]"] if len(found) > MAX_NAMES else []
    return "\n".join([*found[:MAX_NAMES], *note]) or "no files match"


async def grep(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Matching lines as path:line:text, or names, or counts; sorted by path."""
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


async def codebase_search(
    environment: AgentEnvironment, values: Values, config: HarnessConfig
) -> str:
    """The best passages as path:first-last and their opening line."""
    return await search_texts(environment, values["query"], values.get("directories", ()))


async def todo_write(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Keeps the list and shows it."""
    items = {item[4:]: item[:3] for item in values["items"]}
    state = environment.state
    state.todos = state.todos | items if values.get("merge") else items
    state.todo = "\n".join(f"{mark} {item}" for item, mark in state.todos.items())
    num_open = sum(mark != "[x]" for mark in state.todos.values())
    return f"{num_open} of {len(state.todos)} open\n{state.todo}"


async def ask_user(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """The user's answer where there is a user."""
    if environment.ask_user is None:
        return "no user available: decide yourself and say what you assumed"
    options = [f"{number}. {text}" for number, text in enumerate(values.get("options", ()), 1)]
    return await environment.ask_user("\n".join([values["question"].strip(), *options]))


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
