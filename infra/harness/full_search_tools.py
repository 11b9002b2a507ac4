"""The full dialect's tools that search or talk: glob, grep, codebase_search, todo_write, ask_user.

Typed values and the environment in, the text for the model out; ToolFailure when the environment
says no. grep runs ripgrep where the sandbox has it, else grep with the same output.
"""

import shlex
from collections.abc import Mapping
from typing import Any

import pathspec

from infra.harness.config import HarnessConfig
from infra.harness.environment import AgentEnvironment, ToolFailure, ToolTimeout
from infra.harness.other_tools import OUTPUT_CAP_BYTES, search_texts

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
    result = await environment.sandbox.exec(
        _grep_command(values),
        timeout_seconds=config.call_time_limit_seconds,
        output_cap_bytes=OUTPUT_CAP_BYTES,
    )
    if result.timed_out:
        raise ToolTimeout(f"ran longer than {config.call_time_limit_seconds:g} seconds")
    output = result.output.decode(errors="replace")
    if result.exit_code > 1:
        raise ToolFailure(output.strip() or f"grep ended with exit code {result.exit_code}")
    lines = [line.removeprefix("./") for line in output.splitlines()]
    if values.get("mode") == "count":
        lines = [line for line in lines if not line.endswith(":0")]
    if not lines:
        return "no matches"
    limit = values.get("limit", MAX_MATCHES)
    shown = [
        line if len(line) <= MAX_MATCH_CHARACTERS else f"{line[:MAX_MATCH_CHARACTERS]} [cut]"
        for line in lines[:limit]
    ]
    note = [f"[{len(lines) - limit} more]"] if len(lines) > limit else []
    return "\n".join([*shown, *note])


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


def _grep_command(values: Values) -> str:
    mode = values.get("mode", "lines")
    pattern, path = shlex.quote(values["pattern"]), shlex.quote(values.get("path") or ".")
    only = shlex.quote(values.get("glob", ""))
    case = "-i " if values.get("ignore_case") else ""
    flag = {"lines": "-n", "files": "-l", "count": "-c"}[mode]
    ripgrep = (
        f"rg --no-config --color never --no-heading --with-filename --sort path {flag} "
        f"{case}{f'-g {only} ' if values.get('glob') else ''}-e {pattern} -- {path}"
    )
    plain = (
        f"grep -rIHE --exclude-dir=.git {flag} "
        f"{case}{f'--include={only} ' if values.get('glob') else ''}-e {pattern} -- {path}"
    )
    # grep visits files in the order of the directory; its status must survive the sorting
    return (
        f"if command -v rg >/dev/null; then {ripgrep}; else out=$({plain} 2>&1); code=$?; "
        f'printf "%s\\n" "$out" | sort -s -t: -k1,1 | sed "/^$/d"; exit $code; fi'
    )


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
