"""The extension points of the agent: tools and dialects by name.

A package adds one through an entry point: `ostinato.tools` names a `Tool` (tools/definition.py),
`ostinato.dialects` a `Dialect` (dialects/dialect.py).
"""

from ostinato.infra.agent.tools import names
from ostinato.infra.platform.plugins import PluginGroup

COMPACT = "compact"
FULL = "full"

TOOLS = PluginGroup(
    "ostinato.tools",
    "tool",
    {
        names.READ_FILE: "ostinato.infra.agent.dialects.full.files:READ_FILE",
        names.EDIT_FILE: "ostinato.infra.agent.dialects.full.files:EDIT_FILE",
        names.WRITE_FILE: "ostinato.infra.agent.dialects.full.files:WRITE_FILE",
        names.DELETE_FILE: "ostinato.infra.agent.dialects.full.files:DELETE_FILE",
        names.LIST_DIR: "ostinato.infra.agent.dialects.full.files:LIST_DIR",
        names.GLOB: "ostinato.infra.agent.dialects.full.search:GLOB",
        names.GREP: "ostinato.infra.agent.dialects.full.search:GREP",
        names.CODEBASE_SEARCH: "ostinato.infra.agent.dialects.full.search:CODEBASE_SEARCH",
        names.RUN_TERMINAL: "ostinato.infra.agent.dialects.full.terminal:RUN_TERMINAL",
        names.READ_LINTS: "ostinato.infra.agent.dialects.full.files:READ_LINTS",
        names.TODO_WRITE: "ostinato.infra.agent.dialects.full.dialogue:TODO_WRITE",
        names.ASK_USER: "ostinato.infra.agent.dialects.full.dialogue:ASK_USER",
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
