"""A user's own conversations as fine-tuning documents: only answers are learned.

A published chat template writes the whole conversation, with calls and tools in its own form. If it
has no such form, and for our own tokens, the form of the gateway is learned.
"""

import json
from collections.abc import Sequence
from typing import Any

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.answers.tool_forms import ClientTools, ToolForm, form_of
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import FunctionCall, ToolCall, ToolDefinition
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.chat_template import TemplateRenderer
from ostinato.tasks.corpus.chat_rows import Call, ChatConversation, Message
from ostinato.tasks.corpus.repairs.transcripts import Document


def make_documents(
    conversations: Sequence[ChatConversation], renderer: Renderer, harness: HarnessConfig
) -> list[Document]:
    """Token ids and loss masks. Tokens of answers are learned, including the token that ends each.
    Raises ConfigError for a conversation that the model's template refuses or rewrites.
    """
    form = ClientTools(renderer) if isinstance(renderer, TemplateRenderer) else None
    form = form or form_of(harness, renderer)
    return [_make_document(item, renderer, form) for item in conversations]


def _make_document(conversation: ChatConversation, renderer: Renderer, form: ToolForm) -> Document:
    try:
        if isinstance(renderer, TemplateRenderer) and _is_shown(conversation, renderer):
            return _write_whole(conversation, renderer)
        return _grow(conversation, renderer, form)
    except ValueError as error:
        raise ConfigError(f"{conversation.place}: {error}") from None
    except ApiError as error:
        detail: Any = error.detail
        raise ConfigError(f"{conversation.place}: {detail['error']['message']}") from None


def _is_shown(conversation: ChatConversation, renderer: TemplateRenderer) -> bool:
    """Whether the template shows the whole conversation, including calls, tools and results."""
    calls = any(message.tool_calls for message in conversation.messages)
    results = any(message.role == "tool" for message in conversation.messages)
    states = renderer.shows_functions or not (calls or conversation.tools)
    return states and (renderer.shows_results or not results)


def _write_whole(conversation: ChatConversation, renderer: TemplateRenderer) -> Document:
    parts = render_whole(renderer, conversation.as_messages(), conversation.tools)
    document = Document([], [])
    for token_ids, answer in parts:
        is_learned = answer is not None and conversation.messages[answer].weight == 1
        document.token_ids.extend(token_ids)
        document.loss_mask.extend([is_learned] * len(token_ids))
    return document


def _grow(conversation: ChatConversation, renderer: Renderer, form: ToolForm) -> Document:
    messages = conversation.in_call_order
    system = messages.pop(0).content if messages[0].role == "system" else None
    tools = [ToolDefinition.model_validate(tool) for tool in conversation.tools]
    form.check(tools)
    ids = form.start(messages.pop(0).content, system, tools)
    mask = [False] * len(ids)
    results: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            added = renderer.encode_answer(_answer_text(message, form))
        elif message.role == "user":
            added = renderer.append_user(message.content)
        else:
            results.append(message.content)
            if messages[index + 1].role == "tool":
                continue
            added, results = renderer.append_results(results), []
        ids += added
        mask += [message.role == "assistant" and message.weight == 1] * len(added)
    return Document(ids, mask)


def _answer_text(message: Message, form: ToolForm) -> str:
    if message.reasoning_content:
        raise ValueError("reasoning_content is not shown by the model's form, wanted it in content")
    calls = "".join(form.write_call(_call_of(call)) for call in message.tool_calls)
    return message.content + calls if message.content else calls.lstrip("\n")


def _call_of(call: Call) -> ToolCall:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return ToolCall(
        id=call.id or "", function=FunctionCall(name=call.function.name, arguments=arguments)
    )


def render_whole(
    renderer: TemplateRenderer, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
) -> list[tuple[list[int], int | None]]:
    """Tokens of `messages`, the last of which is an answer, in parts. Each part comes with the
    index of its answer, which includes the end token, or None. Raises ValueError if the template
    renders an answer, or the text before it, differently than when that answer was to be given.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marked, marked_tools, mark = renderer.mark_contents(messages, tools)
    whole = renderer.show(marked, marked_tools, opens_answer=False)
    begins = []
    for index in answers:
        opened = renderer.show(marked[:index], marked_tools, opens_answer=True)
        if not whole.startswith(opened):
            raise ValueError(
                f"the chat template rewrites the text before message {index} once further messages "
                "follow (such as thoughts of earlier answers), wanted a history that only grows; leave "
                "out what it removes, or import the model with --chat-template chatml or a file"
            )
        begins.append(len(opened))
    parts: list[tuple[list[int], int | None]] = []
    before: list[int] = renderer.encode_shown(whole[: begins[0]], mark, is_first=True)
    ends = [*begins[1:], len(whole)]
    for index, begin, end in zip(answers, begins, ends, strict=True):
        token_ids = renderer.encode_shown(whole[begin:end], mark, is_first=False)
        if renderer.end_id not in token_ids:
            raise ValueError(f"the chat template does not end the answer of message {index}")
        size = token_ids.index(renderer.end_id) + 1
        _check_shown(messages[index], renderer.decode(token_ids[: size - 1]), index)
        parts += [(before, None), (token_ids[:size], index)]
        before = token_ids[size:]
    return parts


def _check_shown(message: dict[str, Any], shown: str, index: int) -> None:
    """Refuses an answer if the template does not show all its text, apart from white space."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    words = "".join(shown.split())
    for text in (message.get("reasoning_content", ""), message["content"], *calls):
        if "".join(text.split()) not in words:
            raise ValueError(
                f"the chat template shows {shown[:80]!r} of message {index}, wanted all of {text[:80]!r}; "
                "leave out what it removes, or import the model with --chat-template chatml or a file"
            )
