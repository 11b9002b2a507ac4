"""The tools of the compact dialect, whose tags are tokens of their own.

What a definition means is in definitions.py, the work itself in file_tools.py and other_tools.py;
the dialect of larger templates is in full_tools.py.
"""

from ostinato.infra.agent.definitions import FILES, REGION, Argument, Tool

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
                Argument("old", "exact text that occurs once", is_required=False, kind="text"),
                Argument("new", "its replacement", is_required=False, kind="text"),
                Argument("lines", "<Ln>new text, repeated", is_required=False, kind="text"),
            ),
            primary="lines",
            writes=("files/{path}", REGION),
        ),
        Tool(
            name="write_file",
            description="Create or overwrite a file.",
            arguments=(PATH, Argument("text", "the whole content", kind="text")),
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
            arguments=(Argument("text", "the list, one item a line", kind="text"),),
            primary="text",
            writes=("todo",),
        ),
        Tool(
            name="ask_user",
            description="Ask the user a question.",
            arguments=(Argument("text", "the question", kind="text"),),
            primary="text",
            writes=("user",),
        ),
    )
}
