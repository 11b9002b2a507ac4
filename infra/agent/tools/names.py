"""Names of the built-in tools, and the word for a passed test run.

The first ten are the compact dialect's, whose names are token ids (models/rendering/vocabulary.py).
"""

from ostinato.models.rendering.vocabulary import TOOL_NAMES

(
    READ_FILE,
    EDIT_FILE,
    WRITE_FILE,
    LIST_DIR,
    GREP,
    CODEBASE_SEARCH,
    READ_LINTS,
    RUN_TERMINAL,
    TODO_WRITE,
    ASK_USER,
) = TOOL_NAMES
DELETE_FILE = "delete_file"
GLOB = "glob"
PASSED = "passed"  # begins the result of a test run in which all tests passed
SEARCH_TOOLS = frozenset({CODEBASE_SEARCH, GREP, LIST_DIR})
EDIT_TOOLS = frozenset({EDIT_FILE, WRITE_FILE, DELETE_FILE})
