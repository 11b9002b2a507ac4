"""The full dialect: calls in plain text, for templates without call tokens."""

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.full.calls import WHOLE_CALL, parse_calls, write_call

_EXAMPLE = {"path": "src/app.py", "old": "return a\nreturn b", "new": "return b"}

DIALECT = Dialect(
    parse=parse_calls,
    whole_call=WHOLE_CALL,
    guide=(
        f"A call is written like this:\n{write_call('edit_file', _EXAMPLE)}\n"
        "A value ends at the first closing tag of its own name; write that tag inside a value as "
        "<\\/name>. Nothing else stands between <call> and </call>."
    ),
)
