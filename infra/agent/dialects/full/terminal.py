"""The full dialect's terminal: commands, tests, and background commands.

A background command writes below /tmp in the sandbox. Later calls refer to it by the name of its job.
"""

import re
import shlex

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolRefusal, ToolTimeout
from ostinato.infra.agent.tools.definition import FILES, Values, optional, tool
from ostinato.infra.agent.tools.searching import OUTPUT_CAP_BYTES
from ostinato.infra.agent.tools.testing import is_pytest, report_tests

JOBS_DIRECTORY = "/tmp/.jobs"
JOB_SECONDS = 10.0
STOP_SECONDS = 2
BACKGROUND_BYTES = (128 << 10) - 1  # the kernel's limit of one argument
_SHELL_SIGNS = re.compile(r"[;&|<>$`()\n\\{}]")
_JOB = re.compile(r"job-([0-9]{1,6})")


def _terminal_rule(values: Values) -> str:
    if ("command" in values) == ("job" in values):
        return "wanted either command or job"
    if "stop" in values and "job" not in values:
        return "stop is for a job"
    if values.get("background") and "job" in values:
        return "a job is in the background already"
    return ""


@tool(
    "Run a shell command in the repository. With background it goes on after the "
    "answer, which names its job; call again with job to see its output or stop it.",
    optional("command", "the command line", "text"),
    optional(
        "timeout_seconds",
        "longest wait; the limit is in the answer when it is reached",
        "integer",
        minimum=1,
        maximum=600,
    ),
    optional("background", "start it and answer at once", "boolean"),
    optional("job", "a background job"),
    optional("stop", "end the job", "boolean"),
    writes=(FILES, "terminal"),
    rule=_terminal_rule,
)
async def run_terminal(environment: AgentEnvironment, values: Values, config: HarnessConfig) -> str:
    """Output of a command, or the answer of a job that is started, shown or stopped."""
    if "job" in values:
        return await _ask_job(environment, values["job"], stop=values.get("stop", False))
    command = values["command"].strip()
    if not command:
        raise ToolRefusal("command is empty")
    _refuse_command(command, environment.policy_under(config))
    if values.get("background"):
        if len(command.encode()) > BACKGROUND_BYTES:
            raise ToolRefusal(
                f"the command has {len(command.encode())} bytes, wanted at most {BACKGROUND_BYTES} in the "
                "background: write a script with write_file and run that"
            )
        return await _start_job(environment, command)
    if environment.run_tests is not None and is_pytest(command):
        return report_tests(await environment.run_tests(environment.sandbox))
    if is_pytest(command) and command.startswith("pytest"):
        command = f"python -m {command}"
    limit_seconds = config.call_time_limit_seconds
    limit_seconds = min(limit_seconds, values.get("timeout_seconds", limit_seconds))
    result = await environment.sandbox.exec(
        command, timeout_seconds=limit_seconds, output_cap_bytes=OUTPUT_CAP_BYTES
    )
    output = result.output.decode(errors="replace").rstrip("\n")
    if result.timed_out:
        raise ToolTimeout(f"ran longer than {limit_seconds:g} seconds and was ended\n{output}")
    return f"exit code {result.exit_code}\n{output}".rstrip("\n")


async def _start_job(environment: AgentEnvironment, command: str) -> str:
    state = environment.state
    state.num_jobs += 1
    number = state.num_jobs
    place = f"{JOBS_DIRECTORY}/{number}"
    script = f'echo $$ > {place}.pid; sh -c "$1"; echo $? > {place}.exit'
    # The sandbox kills the rest of a command's process group, so wait until the job has its own.
    start = (
        f"mkdir -p {JOBS_DIRECTORY} && {{ setsid sh -c {shlex.quote(script)} sh "
        f"{shlex.quote(command)} > {place}.log 2>&1 < /dev/null & "
        f"while [ ! -s {place}.pid ]; do sleep 0.01; done; }}"
    )
    result = await environment.sandbox.exec(start, timeout_seconds=JOB_SECONDS)
    if result.exit_code != 0 or result.timed_out:
        raise ToolFailure(result.output.decode(errors="replace").strip() or "could not be started")
    return f"started job-{number}"


async def _ask_job(environment: AgentEnvironment, job: str, *, stop: bool) -> str:
    match = _JOB.fullmatch(job)
    number = int(match.group(1)) if match is not None else 0
    if not 1 <= number <= environment.state.num_jobs:
        known = environment.state.num_jobs
        raise ToolFailure(f"no job {job[:40]!r}; {known or 'none'} started so far, named job-1 on")
    place = f"{JOBS_DIRECTORY}/{number}"
    end = (
        f"[ -f {place}.exit ] || {{ kill -TERM -$(cat {place}.pid); "
        f"i=0; while kill -0 -$(cat {place}.pid) 2>/dev/null && [ $i -lt {STOP_SECONDS * 10} ]; "
        f"do sleep 0.1; i=$((i+1)); done; kill -KILL -$(cat {place}.pid); }} 2>/dev/null; "
    )
    show = (
        f"if [ -f {place}.exit ]; then echo ended with exit code $(cat {place}.exit); "
        f"elif kill -0 -$(cat {place}.pid) 2>/dev/null; then echo still running; "
        f"else echo ended by a signal; fi; cat {place}.log"
    )
    result = await environment.sandbox.exec(
        (end if stop else "") + show,
        timeout_seconds=JOB_SECONDS,
        output_cap_bytes=OUTPUT_CAP_BYTES,
    )
    return result.output.decode(errors="replace").rstrip("\n")


def _refuse_command(command: str, policy: ToolPolicy) -> None:
    if policy.allowed_commands is None:
        return
    first = command.split(maxsplit=1)[0]
    if _SHELL_SIGNS.search(command) or first not in policy.allowed_commands:
        allowed = ", ".join(policy.allowed_commands) or "none"
        raise ToolRefusal(f"command is {command[:60]!r}, wanted a plain one of: {allowed}")
