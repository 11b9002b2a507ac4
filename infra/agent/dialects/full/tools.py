"""The full dialect's to-do list and question to the user, and the set of its twelve tools."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.extensions import TOOLS
from ostinato.infra.agent.tools.definition import Argument, Tool, Values, optional, tool

TODO_PATTERN = r"\[[ ~x]\] .+"


@tool(
    "Keep the list of what is to be done: [ ] open, [~] under way, [x] done.",
    Argument(
        "items",
        "one per line, each with its mark, for example: [ ] run the tests",
        kind="list",
        minimum=1,
        maximum=50,
        pattern=TODO_PATTERN,
    ),
    optional("merge", "keep items that are not named; default false: these are all", "boolean"),
    writes=("todo",),
)
async def todo_write(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Keeps the list and shows it."""
    items = {item[4:]: item[:3] for item in values["items"]}
    state = environment.state
    state.todos = state.todos | items if values.get("merge") else items
    state.todo = "\n".join(f"{mark} {item}" for item, mark in state.todos.items())
    num_open = sum(mark != "[x]" for mark in state.todos.values())
    return f"{num_open} of {len(state.todos)} open\n{state.todo}"


@tool(
    "Ask the user, when going on needs a decision that only the user can make.",
    Argument("question", "the question", kind="text"),
    optional("options", "answers to choose from, one per line", "list", maximum=9),
    writes=("user",),
)
async def ask_user(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """The user's answer, if there is a user."""
    if environment.ask_user is None:
        return "no user available: decide yourself and say what you assumed"
    options = [f"{number}. {text}" for number, text in enumerate(values.get("options", ()), 1)]
    return await environment.ask_user("\n".join([values["question"].strip(), *options]))


FULL_TOOLS: dict[str, Tool] = {name: TOOLS.load(name) for name in TOOLS.built_in}
EDIT_TOOLS = frozenset(tool.name for tool in FULL_TOOLS.values() if tool.edits_files)
"""Tools that change the file they name, including those of the compact dialect."""
