"""Attempts by a model served elsewhere: the agent loop over an OpenAI-style API."""

import time
from collections.abc import Callable

import httpx

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.dialects.dialect import enabled_tools
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import OnTurn, first_messages, run_conversation
from ostinato.infra.agent.loop.conversation import call_reader
from ostinato.infra.agent.loop.messages import MessageConversation
from ostinato.infra.agent.transcript import Transcript


async def run_agent_outside(
    client: httpx.AsyncClient,
    model_name: str,
    environment: AgentEnvironment,
    request: AgentRequest,
    config: HarnessConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_turn: OnTurn | None = None,
) -> Transcript:
    """Runs the attempt to its end, as `run_agent` does with a model of ours."""
    conversation = open_messages(client, model_name, environment, request, config)
    return await run_conversation(
        conversation, environment, request.prompt, config, clock=clock, on_turn=on_turn
    )


def open_messages(
    client: httpx.AsyncClient,
    model_name: str,
    environment: AgentEnvironment,
    request: AgentRequest,
    config: HarnessConfig,
    session_id: str = "",
    *,
    sends_max_tokens: bool = True,
) -> MessageConversation:
    """The attempt's conversation in messages, opened with the dialect's prompts. `session_id` is sent
    to the server in a header.
    """
    policy = environment.policy_under(config)
    tools = enabled_tools(config, policy)
    system, prompt = first_messages(request, config, tools, policy)
    return MessageConversation(
        client=client,
        model_name=model_name,
        tools=tools,
        read_calls=call_reader(config, tools),
        prompt=prompt,
        system_prompt=system,
        temperature=request.temperature,
        session_id=session_id,
        sends_max_tokens=sends_max_tokens,
    )
