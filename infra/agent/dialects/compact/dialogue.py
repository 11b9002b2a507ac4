"""The compact dialect's tools that keep a list or talk: todo_write, ask_user."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools import names
from ostinato.infra.agent.tools.definition import Argument, Tool, Values


async def todo_write(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> str:
    """Keeps the list."""
    environment.state.todo = arguments["text"]
    return "ok"


async def ask_user(environment: AgentEnvironment, arguments: Values, config: HarnessConfig) -> str:
    """The user's answer where there is a user."""
    if environment.ask_user is None:
        return "no user available"
    return await environment.ask_user(arguments["text"])


TODO_WRITE = Tool(
    name=names.TODO_WRITE,
    description="Write down what remains to be done.",
    arguments=(Argument("text", "the list, one item a line", kind="text"),),
    primary="text",
    writes=("todo",),
    run=todo_write,
)

ASK_USER = Tool(
    name=names.ASK_USER,
    description="Ask the user a question.",
    arguments=(Argument("text", "the question", kind="text"),),
    primary="text",
    writes=("user",),
    run=ask_user,
)
