"""Law of chat histories: their tokens are those that the template writes in one go."""

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.serving.gateway.answers.messages import render_messages
from ostinato.infra.serving.gateway.answers.tool_forms import form_of
from ostinato.infra.serving.gateway.schemas import ChatMessage
from tests.fakes.whole_history import ASSISTANT, HISTORIES, RENDERERS, TOOL, USER, whole_tokens

# OpenAI's own servers refuse the last: a result behind a user message.
CHATS = [*HISTORIES, [USER, ASSISTANT, TOOL, USER, TOOL]]


@pytest.mark.parametrize("history", CHATS)
@pytest.mark.parametrize("name", RENDERERS)
def test_tokens_of_a_history_are_the_templates(name: str, history: list) -> None:
    renderer = RENDERERS[name]
    form = form_of(HarnessConfig(), renderer)
    messages = [ChatMessage.model_validate(message) for message in history]
    tokens = whole_tokens(name, history)
    assert render_messages(renderer, messages, form) == tokens
    earlier = whole_tokens(name, history[:1])
    earlier += renderer.encode_answer(ASSISTANT["content"])
    assert render_messages(renderer, messages[2:], form, earlier=earlier) == tokens
