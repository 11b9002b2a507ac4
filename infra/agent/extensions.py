"""The extension points of the agent: tools and dialects by name.

A package adds one through an entry point: `ostinato.tools` names a `Tool` (tools/definition.py),
`ostinato.dialects` a `Dialect` (dialects/dialect.py).
"""

from ostinato.infra.agent.tools import names
from ostinato.infra.platform.plugins import PluginGroup

COMPACT = "compact"
FULL = "full"
_FULL = "ostinato.infra.agent.dialects.full"

TOOLS = PluginGroup(
    "ostinato.tools",
    "tool",
    {
        names.READ_FILE: f"{_FULL}.files:READ_FILE",
        names.EDIT_FILE: f"{_FULL}.files:EDIT_FILE",
        names.WRITE_FILE: f"{_FULL}.files:WRITE_FILE",
        names.DELETE_FILE: f"{_FULL}.files:DELETE_FILE",
        names.LIST_DIR: f"{_FULL}.files:LIST_DIR",
        names.GLOB: f"{_FULL}.search:GLOB",
        names.GREP: f"{_FULL}.search:GREP",
        names.CODEBASE_SEARCH: f"{_FULL}.search:CODEBASE_SEARCH",
        names.RUN_TERMINAL: f"{_FULL}.terminal:RUN_TERMINAL",
        names.READ_LINTS: f"{_FULL}.files:READ_LINTS",
        names.TODO_WRITE: f"{_FULL}.dialogue:TODO_WRITE",
        names.ASK_USER: f"{_FULL}.dialogue:ASK_USER",
    },
)
"""Tools of the dialects that write calls as plain text; the compact dialect has a closed set."""

DIALECTS = PluginGroup(
    "ostinato.dialects",
    "dialect",
    {
        COMPACT: "ostinato.infra.agent.dialects.compact.dialect:DIALECT",
        FULL: "ostinato.infra.agent.dialects.full.dialect:DIALECT",
    },
)
