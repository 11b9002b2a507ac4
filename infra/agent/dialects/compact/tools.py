"""The ten tools of the compact dialect, in the order of their token ids."""

from ostinato.infra.agent.dialects.compact import dialogue, files, search, terminal
from ostinato.infra.agent.tools.definition import Tool

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        files.READ_FILE,
        files.EDIT_FILE,
        files.WRITE_FILE,
        files.LIST_DIR,
        search.GREP,
        search.CODEBASE_SEARCH,
        files.READ_LINTS,
        terminal.RUN_TERMINAL,
        dialogue.TODO_WRITE,
        dialogue.ASK_USER,
    )
}
