"""The full dialect's tools on files: read, edit, write, delete, list, lints."""

import shlex

import pathspec

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.environment import (
    AgentEnvironment,
    ToolFailure,
    ToolRefusal,
    content_hash,
)
from ostinato.infra.agent.tools.definition import FILE, FILES, Argument, Values, optional, tool
from ostinato.infra.agent.tools.lints import LINTED_SUFFIXES, new_lints
from ostinato.infra.agent.tools.matching import NoMatch, replace_text
from ostinato.infra.platform.diffs import changed_lines, split_lines

MAX_READ_LINES = 400
MAX_LINE_CHARACTERS = 500
MAX_LISTED = 200
MAX_DIFF_LINES = 40
MAX_SHOWN_LINTS = 20
REMOVE_SECONDS = 10.0


def _edit_rule(values: Values) -> str:
    if values["old"] == "":
        return "old is empty, wanted the exact text to replace; write_file makes new files"
    if values["old"] == values["new"]:
        return "old and new are the same"
    return ""


def _not_the_root(values: Values) -> str:
    return "" if values["path"] else "path is the repository itself, wanted a file in it"


PATH = Argument("path", "file, relative to the repository", kind="path")


@tool(
    "Show a file with numbered lines.",
    PATH,
    optional("offset", "first line to show; default 1", "integer", minimum=1),
    optional(
        "limit",
        f"lines to show; default {MAX_READ_LINES}",
        "integer",
        minimum=1,
        maximum=MAX_READ_LINES,
    ),
    reads=(FILE,),
    rule=_not_the_root,
)
async def read_file(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Numbered lines, and a note on the rest."""
    path, offset = values["path"], values.get("offset", 1)
    limit = min(values.get("limit", MAX_READ_LINES), MAX_READ_LINES)
    text = await environment.read_text(path)
    environment.state.seen[path] = content_hash(text)
    lines = [line.removesuffix("\n") for line in split_lines(text)]
    if not lines:
        return "(empty file)"
    if offset > len(lines):
        raise ToolFailure(f"{path} has {len(lines)} lines, offset is {offset}")
    shown = lines[offset - 1 : offset - 1 + limit]
    numbered = [f"{offset + index}\t{_short(line)}" for index, line in enumerate(shown)]
    following = offset + len(shown)
    if following <= len(lines):
        rest = len(lines) - following + 1
        numbered.append(f"[{rest} more lines: read on with offset {following}]")
    return "\n".join(numbered)


@tool(
    "Replace text in a file. old must occur exactly once (white space at line ends and "
    "a shifted indentation are forgiven); more lines around it make it unique. Answers "
    "with the changed lines and the lint findings they brought.",
    PATH,
    Argument("old", "text to replace", kind="text"),
    Argument("new", "its replacement", kind="text"),
    optional("replace_all", "replace every exact occurrence; default false", "boolean"),
    writes=(FILE,),
    rule=_edit_rule,
)
async def edit_file(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Replaces one occurrence, or every exact one. Answers with the diff and the new lint findings."""
    path, policy = values["path"], environment.policy_under(config)
    _refuse_protected(path, policy)
    text = await environment.read_text(path)
    _want_seen(environment, path, text, policy)
    try:
        edited = replace_text(
            text,
            values["old"],
            values["new"],
            all_of_them=values.get("replace_all", False),
            exact=policy.exact_edits,
        )
    except NoMatch as error:
        raise ToolFailure(f"{path}: {error}") from error
    if edited.text == text:
        raise ToolFailure(f"{path}: the edit changes nothing")
    await _write(environment, path, edited.text)
    note = f" (matched but for {edited.how})" if edited.how != "exact" else ""
    head = f"{edited.replacements} replaced{note}"
    return "\n".join(
        [head, *_shown_changes(text, edited.text), *await _lints_of(environment, path)]
    )


@tool(
    "Create a file, or overwrite a whole one.",
    PATH,
    Argument("text", "the whole content", kind="text"),
    writes=(FILE,),
    rule=_not_the_root,
)
async def write_file(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    path, policy = values["path"], environment.policy_under(config)
    _refuse_protected(path, policy)
    try:
        text = await environment.read_text(path)
    except ToolFailure:
        text = None
    if text is not None:
        _want_seen(environment, path, text, policy)
    await _write(environment, path, values["text"])
    done = "created" if text is None else "overwritten"
    num_lines = len(split_lines(values["text"]))
    lints = await _lints_of(environment, path)
    return "\n".join([f"{done}, {num_lines} lines", *lints])


@tool("Delete a file.", PATH, writes=(FILE,), rule=_not_the_root)
async def delete_file(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    path, policy = values["path"], environment.policy_under(config)
    _refuse_protected(path, policy)
    text = await environment.read_text(path)
    environment.state.originals.setdefault(path, text)
    command = f"rm -- {shlex.quote(path)}"
    result = await environment.sandbox.exec(command, timeout_seconds=REMOVE_SECONDS)
    if result.exit_code != 0:
        raise ToolFailure(result.output.decode(errors="replace").strip() or f"cannot delete {path}")
    environment.state.seen.pop(path, None)
    return "deleted"


@tool(
    "List a directory; directories end in a slash.",
    optional("path", "directory; default: the repository", "path"),
    optional("depth", "levels to show; default 1", "integer", minimum=1, maximum=4),
    reads=(FILE,),
)
async def list_dir(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Names below a directory down to `depth` levels, indented by level."""
    lines = await _list_below(environment, values.get("path", ""), values.get("depth", 1), "")
    note = [f"[{len(lines) - MAX_LISTED} more]"] if len(lines) > MAX_LISTED else []
    return "\n".join([*lines[:MAX_LISTED], *note]) or "(empty directory)"


@tool(
    "Lint findings that were not there before your changes.",
    optional("paths", "files, one per line; default: every file you changed", "list", maximum=50),
    reads=(FILES,),
)
async def read_lints(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """New findings in the named files, or in every Python file the attempt changed."""
    paths = values.get("paths") or sorted(
        path
        for path, content in (await environment.sandbox.diff()).items()
        if content is not None and path.endswith(LINTED_SUFFIXES)
    )
    lines: list[str] = []
    for path in paths:
        lines += await _lints_of(environment, path)
    return "\n".join(lines) or f"no new lints in {len(paths)} files"


async def _list_below(
    environment: AgentEnvironment, path: str, depth: int, indent: str
) -> list[str]:
    lines: list[str] = []
    for name in await environment.list_names(path or "."):
        lines.append(indent + name)
        if depth > 1 and name.endswith("/") and name != ".git/" and len(lines) <= MAX_LISTED:
            below = f"{path}/{name}".strip("/")
            lines += await _list_below(environment, below, depth - 1, indent + "  ")
    return lines


async def _lints_of(environment: AgentEnvironment, path: str) -> list[str]:
    if not path.endswith(LINTED_SUFFIXES):
        return []
    text = await environment.read_text(path)
    found = await new_lints(await environment.read_original(path), text, path)
    lines = [f"new lint {path}:{line}: {message}" for line, message in found[:MAX_SHOWN_LINTS]]
    hidden = len(found) - MAX_SHOWN_LINTS
    return [*lines, f"[{hidden} more lints in {path}]"] if hidden > 0 else lines


async def _write(environment: AgentEnvironment, path: str, text: str) -> None:
    await environment.write_text(path, text)
    environment.state.seen[path] = content_hash(text)


def _refuse_protected(path: str, policy: ToolPolicy) -> None:
    patterns = policy.protected_paths
    if patterns and pathspec.GitIgnoreSpec.from_lines(patterns).match_file(path):
        raise ToolRefusal(f"{path} may not be changed here")


def _want_seen(environment: AgentEnvironment, path: str, text: str, policy: ToolPolicy) -> None:
    seen = environment.state.seen.get(path)
    if seen is None and policy.read_before_edit:
        raise ToolRefusal(f"read {path} before changing it")
    if seen is not None and seen != content_hash(text):
        environment.state.seen.pop(path)
        raise ToolFailure(f"{path} changed since it was read, read it again")


def _shown_changes(before: str, after: str) -> list[str]:
    """The changed lines as a diff without a header."""
    lines = changed_lines(before, after)
    hidden = len(lines) - MAX_DIFF_LINES
    shown = [_short(line) for line in lines[:MAX_DIFF_LINES]]
    return [*shown, f"[{hidden} more changed lines]"] if hidden > 0 else shown


def _short(line: str) -> str:
    if len(line) <= MAX_LINE_CHARACTERS:
        return line
    return f"{line[:MAX_LINE_CHARACTERS]} [{len(line) - MAX_LINE_CHARACTERS} more characters]"
