"""MCP servers in the box of an attempt: their tools are the model's, and what they do wrong is a result."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.dialects.full.calls import call_from_json
from ostinato.infra.agent.dialects.published import forms
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure
from ostinato.infra.agent.extensions import PUBLISHED
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.loop.prompts import explain_tools
from ostinato.infra.agent.tools.mcp_servers import start_servers
from ostinato.infra.agent.transcript import CallStatus, EndReason, Transcript
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.repository import PreparedRepository
from tests.fakes.mcp_programs import GOOD
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.scripted_model import ScriptedModel

SUM = {"numbers": [1, 2.5], "unitName": "figs", "options": {"round": True}}
TOLD = "3.5 figs {'round': True}\n[image, 33 characters, not shown]"
BAD = {
    "absent": "nosuchprogram --stdio",
    "stillborn": "echo no licence >&2; exit 3",
    "silent": "sleep 60",
    "toolless": "exit 0",
}


def full_call(tool: str, **arguments: object) -> str:
    """A call in the full dialect."""
    told = "".join(f"<{key}>{json.dumps(value)}</{key}>" for key, value in arguments.items())
    return f'<call tool="{tool}">\n{told}\n</call>'


def attempt(
    directory: Path, renderer, answers: Sequence[str], *, seconds: float = 5.0, **settings
) -> tuple[Transcript, str]:
    """An attempt in a real box whose repository holds the server, and the text of the first prompt."""
    (directory / "sums.py").write_text(GOOD)
    config = HarnessConfig(
        **{"dialect": "full", "mcp_servers": {"sums": "python3 sums.py"}, **settings},
        tools=("read_file",),
        context_tokens=40_000,
        max_generated_tokens=20_000,
        call_time_limit_seconds=seconds,
    )

    async def run() -> tuple[Transcript, str]:
        repository = PreparedRepository.from_directory("sums", directory, (), ())
        async with open_box(repository) as sandbox:
            model = ScriptedModel(renderer, answers)
            environment = AgentEnvironment(sandbox)
            request = AgentRequest(prompt="Add up.", session_id="s")
            transcript = await run_agent(model, renderer, environment, request, config)
            return transcript, renderer.decode(model.requests[0].token_ids)

    return asyncio.run(run())


def statuses(transcript: Transcript) -> list[CallStatus]:
    return [call.status for turn in transcript.turns for call in turn.calls]


def results(transcript: Transcript) -> str:
    return "\n".join(text for turn in transcript.turns for text in turn.results)


def test_a_call_reaches_the_server_with_its_types(tmp_path: Path, renderer) -> None:
    call = (
        '<call tool="sums__add">\n<numbers>[1, 2.5]</numbers><unitName>figs</unitName>'
        '<options>{"round": true}</options>\n</call>'
    )
    transcript, prompt = attempt(tmp_path, renderer, [call, "Done."])
    assert statuses(transcript) == [CallStatus.OK]
    assert TOLD in results(transcript)
    assert transcript.end_reason is EndReason.FINISHED
    assert "## sums__add\nAdds numbers." in prompt
    assert "bad name" not in prompt


@pytest.mark.parametrize("dialect", PUBLISHED)
def test_every_published_dialect_calls_it(tmp_path: Path, renderer, dialect: str) -> None:
    answer = vars(forms)[dialect.upper()].write("sums__add", SUM)
    transcript, _ = attempt(tmp_path, renderer, [answer, "."], dialect=dialect)
    assert statuses(transcript) == [CallStatus.OK], results(transcript)
    assert TOLD in results(transcript)


def test_wrong_arguments_are_the_models_mistake(tmp_path: Path, renderer) -> None:
    answer = full_call("sums__add", numbers="one") + full_call("sums__add", unitName="figs")
    transcript, _ = attempt(tmp_path, renderer, [answer, "Done."])
    assert statuses(transcript) == [CallStatus.INVALID_ARGUMENTS] * 2
    assert "wanted JSON, array" in results(transcript)
    assert "sums__add.numbers is missing" in results(transcript)


def test_faults_of_a_call_are_results_with_the_reason(tmp_path: Path, renderer) -> None:
    answers = [full_call(f"sums__{name}") for name in ("fail", "die", "fail")]
    transcript, _ = attempt(tmp_path, renderer, [*answers, "Done."], seconds=3.0)
    assert transcript.end_reason is EndReason.FINISHED
    assert statuses(transcript) == [CallStatus.ENVIRONMENT] * 3
    told = [turn.results[0] for turn in transcript.turns[:3]]
    assert "no such table" in told[0]
    assert "exit code 1: out of beans" in told[1]
    assert "exit code 1: out of beans" in told[2]


def test_a_silent_call_ends_and_the_attempt_goes_on(tmp_path: Path, renderer) -> None:
    transcript, _ = attempt(tmp_path, renderer, [full_call("sums__hang"), "Done."], seconds=3.0)
    assert statuses(transcript) == [CallStatus.ENVIRONMENT]
    assert "no answer to tools/call within 2 seconds" in results(transcript)
    assert transcript.final_message == "Done."


def test_a_huge_result_is_refused_and_the_attempt_goes_on(tmp_path: Path, renderer) -> None:
    transcript, _ = attempt(tmp_path, renderer, [full_call("sums__huge"), "Done."])
    assert statuses(transcript) == [CallStatus.ENVIRONMENT]
    assert "more than 4194304 bytes" in results(transcript)
    assert transcript.final_message == "Done."


def test_servers_that_do_not_start_say_why_and_others_work(tmp_path: Path, renderer) -> None:
    servers = {"sums": "python3 sums.py", **BAD}
    answer = "".join(full_call(name) for name in BAD) + full_call("sums__add", numbers=[1])
    transcript, prompt = attempt(
        tmp_path, renderer, [answer, "Done."], seconds=3.0, mcp_servers=servers
    )
    assert statuses(transcript) == [CallStatus.ENVIRONMENT] * 4 + [CallStatus.OK]
    told = transcript.turns[0].results
    assert "nosuchprogram: not found" in told[0]
    assert "exit code 3: no licence" in told[1]
    assert "no answer to initialize within 3 seconds" in told[2]
    assert "the server ended with exit code 0" in told[3]
    assert "it did not start: MCP server silent: no answer" in prompt


# what a server, or an agent that changed the bridge in its box, may send instead of tools and results
WRONG_TOOLS = [
    *({"inputSchema": schema} for schema in ("x", [1], {"properties": 5}, {"properties": [5]})),
    *({"inputSchema": {"properties": {"x": {}}, "required": each}} for each in (5, "x", {"a": 1})),
    *({"inputSchema": {"properties": {"x": {"anyOf": each}}}} for each in (5, [5], {"a": 1})),
    *({"inputSchema": {"properties": {"x": {"type": each}}}} for each in (5, {"a": 1}, [{}])),
    *({"description": each} for each in (5, {"a": 1}, "\ud800")),
    *({"name": each} for each in (5, None, "\ud800")),
]
WRONG_RESULTS = {
    "5": "MCP server sums: 5",
    "{}": "MCP server sums: {}",
    '{"result": 5}': "MCP server sums: {",
    '{"result": {"content": 5}}': "5",
    '{"result": {"content": [{"type": "text", "text": "\\ud800"}]}}': "?",
    '{"result": {"structuredContent": {"sum": 3}}}': '{"sum": 3}',
    '{"result": {"content": [{"type": "resource", "resource": {"text": "all"}}]}}': "all",
}


def lying_bridge(answer: str) -> MemorySandbox:
    """A box in which every command prints this."""
    return MemorySandbox({}, lambda command: (0, answer.encode()))


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", WRONG_TOOLS, ids=str)
async def test_tools_of_any_form_are_offered_or_left_out(wrong: dict) -> None:
    config = HarnessConfig(dialect="full", mcp_servers={"sums": "x"})
    listed = [{"name": "add", **wrong}, {"name": "good"}]
    box = lying_bridge(json.dumps({"result": {"tools": listed}}))
    environment = AgentEnvironment(box)
    await start_servers(environment, config)
    assert "sums__good" in environment.tools
    explain_tools(environment.tools.values(), config).encode()
    for one in environment.tools.values():
        call_from_json(one.name, '{"x": [1]}', environment.tools, "id")


@pytest.mark.asyncio
@pytest.mark.parametrize(("answer", "told"), WRONG_RESULTS.items())
async def test_answers_of_any_form_are_results(answer: str, told: str) -> None:
    config = HarnessConfig(dialect="full", mcp_servers={"sums": "x"})
    environment = AgentEnvironment(lying_bridge('{"result": {"tools": [{"name": "add"}]}}'))
    await start_servers(environment, config)
    lying = AgentEnvironment(lying_bridge(answer))
    try:
        text = await environment.tools["sums__add"].run(lying, {}, config)
    except ToolFailure as failure:
        text = str(failure)
    assert text.startswith(told), text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mcp_servers": {"sums": "x"}}, "compact dialect"),
        ({"dialect": "full", "mcp_servers": {"Sums!": "x"}}, "'Sums!'"),
        ({"dialect": "full", "mcp_servers": {"grep": "x"}}, "'grep'"),
    ],
)
def test_names_that_no_model_could_call_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        HarnessConfig(**settings)
