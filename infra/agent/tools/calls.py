"""A call as parsed from an answer, the same for all dialects."""

from dataclasses import dataclass, field

from ostinato.infra.agent.tools.definition import Value
from ostinato.infra.agent.transcript import CallStatus


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call. `status` is OK when it may run. Otherwise `error` says why not."""

    tool: str
    arguments: dict[str, str] = field(default_factory=dict)
    status: CallStatus = CallStatus.OK
    error: str = ""
    values: dict[str, Value] = field(default_factory=dict)  # typed arguments
    call_id: str = ""  # given by an API or the model; empty: numbered by turn and place
    note: str = ""  # first line of the result


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The calls in order and the text outside of them."""

    calls: tuple[ParsedCall, ...]
    prose: str
