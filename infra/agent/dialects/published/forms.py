"""The table of published tool-call forms, and which of them a chat template is trained on.

Sources: the chat templates of the models named below, and the formats that their makers document.
"""

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.published.json_calls import ARGUMENT_KEYS
from ostinato.infra.agent.dialects.published.reading import CallForm, Way

_KEYS = "|".join(ARGUMENT_KEYS)
_FUNCTION = r'"type"\s*:\s*"function"\s*,\s*'
_CALL_AHEAD = rf'(?=\[?\s*\{{\s*(?:{_FUNCTION})?"name"\s*:\s*"[^"\n]*"\s*,\s*"(?:{_KEYS})"\s*:)'
_LINE = r"(?<![^\n])[ \t]*"
_TAGGED = Way(r"<tool_call>\s*", "call", r"\s*</tool_call>")

TAGGED_JSON = CallForm(
    ways=(_TAGGED,),
    marks="<tool_call>",
    wanted="a JSON object with name and arguments between <tool_call> and </tool_call>",
    written='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
)
"""Calls as Qwen's templates state them, and the gateway in the name of others."""

HERMES_FORM = CallForm(
    ways=(
        _TAGGED,
        # Qwen2.5-Coder was not trained on the tags that its template states
        Way(rf"```[a-z_]*[ \t]*\n\s*{_CALL_AHEAD}", "call", r"\s*```"),
        Way(rf"<tools>\s*{_CALL_AHEAD}", "call", r"\s*</tools>"),
        Way(_LINE + _CALL_AHEAD, "call", r"(?:\s*</tool_call>)?"),
    ),
    marks="</?tool_call>",
    wanted=TAGGED_JSON.wanted,
    written=TAGGED_JSON.written,
)


def _dialect(form: CallForm) -> Dialect:
    return Dialect(
        parse=form.parse,
        whole_call=form.whole_call,
        guide=f"A call is {form.wanted}.",
        is_published=True,
        several_calls=form.several,
    )


HERMES = _dialect(HERMES_FORM)
