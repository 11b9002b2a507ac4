"""The tools of the full dialect: plain-text tags, typed arguments, twelve tools.

Schemas, the system prompt and the checks come from them through definitions.py and prompts.py. The
work itself is in full_file_tools.py, full_search_tools.py and terminal_tools.py.
"""

from collections.abc import Mapping

from ostinato.infra.agent.definitions import FILES, Argument, Tool, Value

MAX_READ_LINES = 400
TODO_PATTERN = r"\[[ ~x]\] .+"


def _edit_rule(values: Mapping[str, Value]) -> str:
    if values["old"] == "":
        return "old is empty, wanted the exact text to replace; write_file makes new files"
    if values["old"] == values["new"]:
        return "old and new are the same"
    return ""


def _terminal_rule(values: Mapping[str, Value]) -> str:
    if ("command" in values) == ("job" in values):
        return "wanted either command or job"
    if "stop" in values and "job" not in values:
        return "stop is for a job"
    if values.get("background") and "job" in values:
        return "a job is in the background already"
    return ""


def _not_the_root(values: Mapping[str, Value]) -> str:
    return "" if values["path"] else "path is the repository itself, wanted a file in it"


PATH = Argument("path", "file, relative to the repository", kind="path")
PLACE = Argument(
    "path", "file or directory; default: the repository", is_required=False, kind="path"
)

FULL_TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="read_file",
            description="Show a file with numbered lines.",
            arguments=(
                PATH,
                Argument(
                    "offset",
                    "first line to show; default 1",
                    is_required=False,
                    kind="integer",
                    minimum=1,
                ),
                Argument(
                    "limit",
                    f"lines to show; default {MAX_READ_LINES}",
                    is_required=False,
                    kind="integer",
                    minimum=1,
                    maximum=MAX_READ_LINES,
                ),
            ),
            reads=("files/{path}",),
            rule=_not_the_root,
        ),
        Tool(
            name="edit_file",
            description=(
                "Replace text in a file. old must occur exactly once (white space at line ends and "
                "a shifted indentation are forgiven); more lines around it make it unique. Answers "
                "with the changed lines and the lint findings they brought."
            ),
            arguments=(
                PATH,
                Argument("old", "text to replace", kind="text"),
                Argument("new", "its replacement", kind="text"),
                Argument(
                    "replace_all",
                    "replace every exact occurrence; default false",
                    is_required=False,
                    kind="boolean",
                ),
            ),
            writes=("files/{path}",),
            rule=_edit_rule,
        ),
        Tool(
            name="write_file",
            description="Create a file, or overwrite a whole one.",
            arguments=(PATH, Argument("text", "the whole content", kind="text")),
            writes=("files/{path}",),
            rule=_not_the_root,
        ),
        Tool(
            name="delete_file",
            description="Delete a file.",
            arguments=(PATH,),
            writes=("files/{path}",),
            rule=_not_the_root,
        ),
        Tool(
            name="list_dir",
            description="List a directory; directories end in a slash.",
            arguments=(
                Argument(
                    "path", "directory; default: the repository", is_required=False, kind="path"
                ),
                Argument(
                    "depth",
                    "levels to show; default 1",
                    is_required=False,
                    kind="integer",
                    minimum=1,
                    maximum=4,
                ),
            ),
            reads=("files/{path}",),
        ),
        Tool(
            name="glob",
            description="Find files by name, for example src/**/*.py or test_*.py.",
            arguments=(
                Argument("pattern", "as in .gitignore: without a slash it matches at any depth"),
            ),
            reads=(FILES,),
        ),
        Tool(
            name="grep",
            description="Search file contents with a regular expression.",
            arguments=(
                Argument("pattern", "the expression"),
                PLACE,
                Argument("glob", "only files whose name matches, like *.py", is_required=False),
                Argument(
                    "mode",
                    "lines with their numbers, names of files, or matches per file; default lines",
                    is_required=False,
                    kind="choice",
                    choices=("lines", "files", "count"),
                ),
                Argument("ignore_case", "default false", is_required=False, kind="boolean"),
                Argument(
                    "limit",
                    "results to show; default 50",
                    is_required=False,
                    kind="integer",
                    minimum=1,
                    maximum=500,
                ),
            ),
            reads=("files/{path}",),
        ),
        Tool(
            name="codebase_search",
            description="Find the code that a description speaks of; grep is better for exact names.",
            arguments=(
                Argument("query", "words or a sentence"),
                Argument(
                    "directories",
                    "directories to look in, one a line; default: all",
                    is_required=False,
                    kind="list",
                    maximum=8,
                ),
            ),
            reads=(FILES,),
        ),
        Tool(
            name="run_terminal",
            description=(
                "Run a shell command in the repository. With background it goes on after the "
                "answer, which names its job; call again with job to see its output or stop it."
            ),
            arguments=(
                Argument("command", "the command line", is_required=False, kind="text"),
                Argument(
                    "timeout_seconds",
                    "longest wait; the limit is in the answer when it is reached",
                    is_required=False,
                    kind="integer",
                    minimum=1,
                    maximum=600,
                ),
                Argument(
                    "background", "start it and answer at once", is_required=False, kind="boolean"
                ),
                Argument("job", "a background job", is_required=False),
                Argument("stop", "end the job", is_required=False, kind="boolean"),
            ),
            writes=(FILES, "terminal"),
            rule=_terminal_rule,
        ),
        Tool(
            name="read_lints",
            description="Lint findings that were not there before your changes.",
            arguments=(
                Argument(
                    "paths",
                    "files, one a line; default: every file you changed",
                    is_required=False,
                    kind="list",
                    maximum=50,
                ),
            ),
            reads=(FILES,),
        ),
        Tool(
            name="todo_write",
            description="Keep the list of what is to be done: [ ] open, [~] under way, [x] done.",
            arguments=(
                Argument(
                    "items",
                    "one a line, each with its mark, for example: [ ] run the tests",
                    kind="list",
                    minimum=1,
                    maximum=50,
                    pattern=TODO_PATTERN,
                ),
                Argument(
                    "merge",
                    "keep items that are not named; default false: these are all",
                    is_required=False,
                    kind="boolean",
                ),
            ),
            writes=("todo",),
        ),
        Tool(
            name="ask_user",
            description="Ask the user, when going on needs a decision that only the user can make.",
            arguments=(
                Argument("question", "the question", kind="text"),
                Argument(
                    "options",
                    "answers to choose from, one a line",
                    is_required=False,
                    kind="list",
                    maximum=9,
                ),
            ),
            writes=("user",),
        ),
    )
}
