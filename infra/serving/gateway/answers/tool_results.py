"""Results of tool calls, matched to their calls by id, in any API.

A template shows results in the order of the calls, without ids. Clients may send them in the order in which
the tools ended.
"""

from collections.abc import Sequence
from itertools import groupby

from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import ChatMessage

_SYSTEM_ROLES = ("system", "developer")


def arrange(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages as a template can show them. Behind each answer come the results of its calls, in call
    order, then what else was said. A system message behind other messages is the user's: templates have
    one place for the system's, the start. ApiError for a call without one result, and a result without
    a call. An answer with its calls in its text is followed by results without ids, in their order.
    """
    arranged: list[ChatMessage] = []
    call_ids: list[str] | None = None  # of the last answer
    for is_answer, group in groupby(messages, key=lambda message: message.role == "assistant"):
        said = list(group)
        if is_answer:
            call_ids = [call.id for message in said for call in message.tool_calls or ()]
            arranged += said
            continue
        arranged += _match(call_ids, [message for message in said if message.role == "tool"])
        for message in said:
            if message.role in _SYSTEM_ROLES and not _is_start(arranged):
                arranged.append(message.model_copy(update={"role": "user"}))
            elif message.role != "tool":
                arranged.append(message)
    return arranged


def _is_start(arranged: Sequence[ChatMessage]) -> bool:
    return not arranged or arranged[-1].role in _SYSTEM_ROLES


def _match(call_ids: list[str] | None, results: list[ChatMessage]) -> list[ChatMessage]:
    """The results in call order. None: no answer comes before them."""
    if call_ids == [] and all(result.tool_call_id is None for result in results):
        return results
    calls = call_ids or []
    wanted = f"one of {', '.join(map(repr, calls))}" if calls else "none, since no call is open"
    by_id: dict[str, ChatMessage] = {}
    for result in results:
        call_id = result.tool_call_id
        if call_id is None or call_id not in calls:
            raise _wrong(f"a tool result has the call id {call_id!r}, wanted {wanted}")
        if call_id in by_id:
            raise _wrong(f"two tool results have the call id {call_id!r}, wanted one of each call")
        by_id[call_id] = result
    for place, call_id in enumerate(calls):
        if call_id in calls[:place]:
            raise _wrong(f"two calls of one answer have the id {call_id!r}, wanted ids that differ")
        if call_id not in by_id:
            raise _wrong(
                f"call {call_id!r} has no result, wanted a tool result of each call of an answer "
                "before the next answer"
            )
    return [by_id[call_id] for call_id in calls]


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
