"""The twelve tools of the full dialect that ship with the project, and which of them edit."""

from ostinato.infra.agent.extensions import TOOLS
from ostinato.infra.agent.tools.definition import Tool

FULL_TOOLS: dict[str, Tool] = {name: TOOLS.load(name) for name in TOOLS.built_in}
EDIT_TOOLS = frozenset(tool.name for tool in FULL_TOOLS.values() if tool.edits_files)
"""Tools that change the file they name; those of the compact dialect are among them."""
