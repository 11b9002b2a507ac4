"""Whether an attempt does what the original does where no test looks.

The results wanted never enter the sandbox. It rewards nothing.
"""

from pydantic import Field

from ostinato.infra.sandbox.function_calls import FunctionCall, format_call, make_calls
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.tasks.records import FunctionOracle, StageRecord

CALL_SECONDS = 0.5


class OracleVerdict(StageRecord):
    """Agreement of a change with the original on held-out arguments."""

    num_calls: int
    num_agreeing: int
    first_difference: str = Field(default="", description="a call, its result, the one wanted")

    @property
    def passed(self) -> bool:
        """Whether it agrees everywhere."""
        return self.num_calls > 0 and self.num_agreeing == self.num_calls


async def judge_by_oracle(sandbox: Sandbox, oracle: FunctionOracle) -> OracleVerdict:
    """Compare what the sandbox holds with the original on the held-out calls."""
    calls = [FunctionCall(oracle.path, oracle.symbol, call.arguments) for call in oracle.held_out]
    results = await make_calls(sandbox, calls, CALL_SECONDS)
    difference, num_agreeing = "", 0
    for call, result in zip(oracle.held_out, results, strict=True):
        if result == call.result:
            num_agreeing += 1
        elif not difference:
            shown = format_call(oracle.symbol, call.arguments)
            difference = f"{shown} gives {result}, wanted {call.result}"
    return OracleVerdict(
        num_calls=len(calls), num_agreeing=num_agreeing, first_difference=difference
    )
