"""Which tools a dialect has, and which of them an attempt may call.

The compact dialect writes calls in tags that are single tokens (models/rendering/vocabulary.py);
the full one in plain text, for templates without such tokens.
"""

from collections.abc import Mapping

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.definitions import Tool
from ostinato.infra.agent.full_tools import FULL_TOOLS
from ostinato.infra.agent.tools import TOOLS

CATALOGUES: Mapping[str, Mapping[str, Tool]] = {"compact": TOOLS, "full": FULL_TOOLS}


def enabled_tools(config: HarnessConfig, policy: ToolPolicy) -> dict[str, Tool]:
    """The tools an attempt may call, in the order of its config."""
    catalogue = CATALOGUES[config.dialect]
    return {
        name: catalogue[name]
        for name in config.enabled_names
        if policy.tools is None or name in policy.tools
    }
