"""The compact dialect: call and line tags are single tokens, and the set of tools is closed."""

from ostinato.infra.agent.dialects.compact.calls import WHOLE_CALL, parse_answer
from ostinato.infra.agent.dialects.compact.tools import TOOLS
from ostinato.infra.agent.dialects.dialect import Dialect

DIALECT = Dialect(parse=parse_answer, whole_call=WHOLE_CALL, tools=TOOLS)
