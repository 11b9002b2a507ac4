"""Whole conversations in a published template's form, split where answers begin and end."""

from collections.abc import Sequence
from typing import Any

from ostinato.models.rendering.chat_template import Message, TemplateRenderer


def render_whole(
    renderer: TemplateRenderer, messages: list[Message], tools: Sequence[dict[str, Any]] = ()
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


def _check_shown(message: Message, shown: str, index: int) -> None:
    """Refuses an answer if the template does not show all its text, apart from white space."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    words = "".join(shown.split())
    for text in (message.get("reasoning_content", ""), message["content"], *calls):
        if "".join(text.split()) not in words:
            raise ValueError(
                f"the chat template shows {shown[:80]!r} of message {index}, wanted all of {text[:80]!r}; "
                "leave out what it removes, or import the model with --chat-template chatml or a file"
            )
