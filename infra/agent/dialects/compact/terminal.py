"""The compact dialect's run_terminal: `pytest` goes to the test runner, the rest to a shell."""

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.tools import names
from ostinato.infra.agent.tools.definition import FILES, Argument, Output, Tool, Values
from ostinato.infra.agent.tools.searching import OUTPUT_CAP_BYTES
from ostinato.infra.agent.tools.testing import describe_report, is_pytest


async def run_terminal(
    environment: AgentEnvironment, arguments: Values, config: HarnessConfig
) -> Output:
    """Output of a command. A test report is worded after the turn, by the region read last."""
    command = arguments["command"]
    if environment.run_tests is not None and is_pytest(command):
        report = await environment.run_tests(environment.sandbox)
        return lambda: describe_report(report, environment.state.region)
    result = await environment.sandbox.exec(
        command,
        timeout_seconds=config.call_time_limit_seconds,
        output_cap_bytes=OUTPUT_CAP_BYTES,
    )
    if result.timed_out:
        raise TimeoutError
    output = result.output.decode(errors="replace").rstrip("\n")
    if result.exit_code == 0:
        return output or "ok"
    return f"exit code {result.exit_code}\n{output}".rstrip("\n")


RUN_TERMINAL = Tool(
    name=names.RUN_TERMINAL,
    description="Run a shell command in the repository; `pytest` runs the tests.",
    arguments=(Argument("command", "the command line"),),
    primary="command",
    writes=(FILES, "terminal"),
    run=run_terminal,
)
