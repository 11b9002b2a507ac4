"""The extension points of the agent: tools, dialects and harnesses by name.

A package adds one through an entry point: `ostinato.tools` names a `Tool` (tools/definition.py),
`ostinato.dialects` a `Dialect` (dialects/dialect.py), `ostinato.harnesses` a `HarnessCommand`
(harnesses.py).
"""

from ostinato.infra.agent.tools import names
from ostinato.infra.platform.plugins import PluginGroup

COMPACT = "compact"
FULL = "full"
_FORMS = "ostinato.infra.agent.dialects.published.forms"
PUBLISHED = {
    name: f"{_FORMS}:{name.upper()}"
    for name in (
        *("hermes", "qwen3_coder", "llama3", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm4"),
        *("mistral", "harmony"),
    )
}
"""Dialects that published models were trained on."""

TOOLS = PluginGroup(
    "ostinato.tools",
    "tool",
    {
        names.READ_FILE: "ostinato.infra.agent.dialects.full.files:read_file",
        names.EDIT_FILE: "ostinato.infra.agent.dialects.full.files:edit_file",
        names.WRITE_FILE: "ostinato.infra.agent.dialects.full.files:write_file",
        names.DELETE_FILE: "ostinato.infra.agent.dialects.full.files:delete_file",
        names.LIST_DIR: "ostinato.infra.agent.dialects.full.files:list_dir",
        names.GLOB: "ostinato.infra.agent.dialects.full.search:glob",
        names.GREP: "ostinato.infra.agent.dialects.full.search:grep",
        names.CODEBASE_SEARCH: "ostinato.infra.agent.dialects.full.search:codebase_search",
        names.RUN_TERMINAL: "ostinato.infra.agent.dialects.full.terminal:run_terminal",
        names.READ_LINTS: "ostinato.infra.agent.dialects.full.files:read_lints",
        names.TODO_WRITE: "ostinato.infra.agent.dialects.full.tools:todo_write",
        names.ASK_USER: "ostinato.infra.agent.dialects.full.tools:ask_user",
    },
)
"""Tools of the dialects that write calls as plain text; the compact dialect has a closed set."""

DIALECTS = PluginGroup(
    "ostinato.dialects",
    "dialect",
    {
        COMPACT: "ostinato.infra.agent.dialects.compact.calls:DIALECT",
        FULL: "ostinato.infra.agent.dialects.full.calls:DIALECT",
        **PUBLISHED,
    },
)

BUILTIN, COMMAND = "builtin", "command"
_PROGRAMS = "ostinato.infra.agent.harnesses"
HARNESSES = PluginGroup(
    "ostinato.harnesses",
    "harness",
    {
        name: f"{_PROGRAMS}:{name.upper()}"
        for name in ("mini_swe_agent", "mini_swe_agent_tools", "codex", "claude_code", "opencode")
    },
)
