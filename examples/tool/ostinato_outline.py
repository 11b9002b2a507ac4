"""A tool: the classes and functions of a Python file with their line numbers."""

import re

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.tools.definition import FILE, Argument, Tool, Values

_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\s+\w+")


async def outline(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Every definition as `line: text`."""
    lines = (await environment.read_text(values["path"])).split("\n")
    found = [f"{number}: {line}" for number, line in enumerate(lines, 1) if _DEFINITION.match(line)]
    if not found:
        raise ToolFailure(f"{values['path']} defines nothing")
    return "\n".join(found)


TOOL = Tool(
    name="outline",
    description="List the classes and functions of a Python file.",
    arguments=(Argument("path", "file, relative to the repository", kind="path"),),
    run=outline,
    reads=(FILE,),
)
