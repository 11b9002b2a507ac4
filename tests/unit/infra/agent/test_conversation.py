"""Law of conversations in tokens: grown or written in one go, the tokens are the same."""

import asyncio
from itertools import groupby

import pytest

from ostinato.infra.agent.config import AgentRequest
from ostinato.infra.agent.loop.conversation import TokenConversation
from ostinato.infra.agent.tools.calls import ParsedAnswer
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.whole_history import HISTORIES, RENDERERS, USER, whole_tokens


@pytest.mark.parametrize("history", [*HISTORIES, [USER, USER]])
@pytest.mark.parametrize("name", RENDERERS)
def test_a_conversation_grows_to_its_whole_history(name: str, history: list) -> None:
    renderer = RENDERERS[name]
    answers = [message["content"] for message in history if message["role"] == "assistant"]
    conversation = TokenConversation(
        ScriptedModel(renderer, answers),
        renderer,
        AgentRequest(prompt="", session_id="s"),
        lambda text, is_opened: ParsedAnswer((), text),
        prompt=history[0]["content"],
        system_prompt=None,
    )
    for role, group in groupby(history[1:], key=lambda message: message["role"]):
        texts = [message["content"] for message in group]
        if role == "assistant":
            asyncio.run(conversation.answer(100))
        elif role == "tool":
            conversation.append_results(texts, None, None)
        else:
            conversation.append_user(texts[0])
    assert conversation.builder.token_ids == whole_tokens(name, history)
