"""The special tokens and their fixed ids from 0 on; a trained vocabulary starts after them.

Only the template inserts control tokens. Tool and argument tags come from the model or from
demonstrations; line tags also come from tool results.
"""

PAD = "<|pad|>"
END_OF_TEXT = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"
END = "<|end|>"
CONTROL_TOKENS = (PAD, END_OF_TEXT, SYSTEM, USER, ASSISTANT, TOOL, END)

TOOL_NAMES = (
    "read_file",
    "edit_file",
    "write_file",
    "list_dir",
    "grep",
    "codebase_search",
    "read_lints",
    "run_terminal",
    "todo_write",
    "ask_user",
)
ARGUMENT_NAMES = ("path", "old", "new", "text", "query")
NUM_LINE_TAGS = 40


def line_tag(number: int) -> str:
    """The tag of line `number` (1-based) of a region. One token up to NUM_LINE_TAGS."""
    return f"<L{number}>"


CALL_TAGS = tuple(
    tag for name in (*TOOL_NAMES, *ARGUMENT_NAMES) for tag in (f"<{name}>", f"</{name}>")
)
LINE_TAGS = tuple(line_tag(number) for number in range(1, NUM_LINE_TAGS + 1))
SPECIAL_TOKENS = (*CONTROL_TOKENS, *CALL_TAGS, *LINE_TAGS)
SPECIAL_IDS = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
