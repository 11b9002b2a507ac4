"""The tools as the model sees them: names, arguments, what they touch.

Owns the ten definitions, the OpenAI-style schemas made from them, and the resources each call reads
and writes (calls of one turn run together unless they conflict). The work itself is in file_tools,
terminal_tools and search_tools.
"""

from collections.abc import Iterable
from dataclasses import dataclass

FILES = "files"
REGION = "region"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `is_text` keeps surrounding white space; other values are stripped."""

    name: str
    description: str
    is_required: bool = True
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. The primary argument may be written bare, without tags, after the others.

    `reads` and `writes` name resources; "files/{path}" stands for the file in the path argument
    and "files" for all.
    """

    name: str
    description: str
    arguments: tuple[Argument, ...]
    primary: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def argument(self, name: str) -> Argument | None:
        """The argument called `name`, or None."""
        return next((argument for argument in self.arguments if argument.name == name), None)


PATH = Argument("path", "file, relative to the repository")

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="read_file",
            description=(
                "Show a file, one function or class of it (file::name), or lines (file:10-40)."
            ),
            arguments=(Argument("path", "file, file::name or file:first-last"),),
            primary="path",
            reads=("files/{path}",),
            writes=(REGION,),
        ),
        Tool(
            name="edit_file",
            description=(
                "Change a file. Either lines of the region read last, each as <Ln>new text "
                "(lines not named return to what was read), or one exact replacement of old by new."
            ),
            arguments=(
                Argument("path", "file; default: the one read last", is_required=False),
                Argument("old", "exact text that occurs once", is_required=False, is_text=True),
                Argument("new", "its replacement", is_required=False, is_text=True),
                Argument("lines", "<Ln>new text, repeated", is_required=False, is_text=True),
            ),
            primary="lines",
            writes=("files/{path}", REGION),
        ),
        Tool(
            name="write_file",
            description="Create or overwrite a file.",
            arguments=(PATH, Argument("text", "the whole content", is_text=True)),
            primary="text",
            writes=("files/{path}",),
        ),
        Tool(
            name="list_dir",
            description="List a directory.",
            arguments=(Argument("path", "directory; default: the root", is_required=False),),
            primary="path",
            reads=(FILES,),
        ),
        Tool(
            name="grep",
            description="Find lines that match an extended regular expression.",
            arguments=(
                Argument("query", "the expression"),
                Argument("path", "file or directory; default: the root", is_required=False),
            ),
            primary="query",
            reads=(FILES,),
        ),
        Tool(
            name="codebase_search",
            description="Find the places in the code that speak of something.",
            arguments=(Argument("query", "words"),),
            primary="query",
            reads=(FILES,),
        ),
        Tool(
            name="read_lints",
            description="Lint findings in a file that were not there before your edits.",
            arguments=(Argument("path", "file; default: the one read last", is_required=False),),
            primary="path",
            reads=("files/{path}", REGION),
        ),
        Tool(
            name="run_terminal",
            description="Run a shell command in the repository; `pytest` runs the tests.",
            arguments=(Argument("command", "the command line"),),
            primary="command",
            writes=(FILES, "terminal"),
        ),
        Tool(
            name="todo_write",
            description="Write down what remains to be done.",
            arguments=(Argument("text", "the list, one item a line", is_text=True),),
            primary="text",
            writes=("todo",),
        ),
        Tool(
            name="ask_user",
            description="Ask the user a question.",
            arguments=(Argument("text", "the question", is_text=True),),
            primary="text",
            writes=("user",),
        ),
    )
}


def tool_schemas(names: Iterable[str]) -> list[dict[str, object]]:
    """The named tools as OpenAI-style function schemas."""
    schemas: list[dict[str, object]] = []
    for name in names:
        tool = TOOLS[name]
        properties = {
            argument.name: {"type": "string", "description": argument.description}
            for argument in tool.arguments
        }
        required = [argument.name for argument in tool.arguments if argument.is_required]
        parameters = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
        function = {"name": name, "description": tool.description, "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


def resources(tool: Tool, arguments: dict[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    """What a call reads and what it writes."""
    path = arguments.get("path", "").split(":", 1)[0].strip().removeprefix("./")

    def fill(names: tuple[str, ...]) -> frozenset[str]:
        # A call without a path depends on what was read last, so it stands for all files.
        return frozenset(
            (f"{FILES}/{path}" if path else FILES) if name == "files/{path}" else name
            for name in names
        )

    return fill(tool.reads), fill(tool.writes)


def covers(resource: str, other: str) -> bool:
    """Whether two resources overlap: equal, or one the directory of the other."""
    return resource == other or resource.startswith(other + "/") or other.startswith(resource + "/")
