"""Thoughts in the harness's own dialects: no call in them runs, and those behind them do."""

from typing import Any

import pytest

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.dialects.spans import calls_like
from ostinato.infra.agent.dialects.thoughts import part_answer
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.contracts.test_conversations import renderer
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.three_apis import ScriptedModel

CALLS = {
    "full": (
        '<call tool="write_file"><path>{}</path><text>a </think> b</text></call>',
        '<call tool="write_file">',
    ),
    "compact": ("<write_file><path>{}</path>a </think> b</write_file>", "<write_file>"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize(
    ("template", "said", "written"),
    [
        ("thinking", "<think>I could {A} but no.</think> {B}", ["b.txt"]),
        ("thinking", "<think>I use {START} next.</think>{B}", ["b.txt"]),
        ("thinking", "{A} but no.</think>", []),
        ("thinking", "<think>{A} and never end", []),
        ("thinking", "{A}<think>hm</think>{B}", ["a.txt", "b.txt"]),
        ("thinking", "{A}{B}", ["a.txt", "b.txt"]),
        ("opening", "I use {START} next.</think>{B}", ["b.txt"]),
        ("opening", "{START} and never end", []),
    ],
)
async def test_calls_in_thoughts_do_not_run(
    dialect: str, template: str, said: str, written: list[str]
) -> None:
    call, start = CALLS[dialect]
    text = said.format(A=call.format("a.txt"), B=call.format("b.txt"), START=start)
    ours: TemplateRenderer = renderer(template)
    sandbox: Any = MemorySandbox({"x.txt": b""})
    model = ScriptedModel(ours, text)
    config = HarnessConfig(dialect=dialect, context_tokens=9000, max_turns=1)
    request = AgentRequest(prompt="Do it", session_id="s", seed=0)
    transcript = await run_agent(model, ours, AgentEnvironment(sandbox), request, config)
    assert transcript.turns[0].text == text
    assert sorted(path for path in await sandbox.diff()) == written


@pytest.mark.parametrize(
    "name",
    [
        "think",
        "Thinking",
        "THOUGHTS",
        "reason",
        "REASONING",
        "seed:think",
        "mm:think",
        "longcat_think",
        "antThinking",
        "SCRATCHPAD",
        "scratch_pad",
        "INNER_MONOLOGUE",
        "reflection",
    ],
)
@pytest.mark.parametrize("is_opened", [False, True])
def test_marks_of_thoughts_are_known_in_each_spelling(name: str, is_opened: bool) -> None:
    """Hermes 3 has them in capitals, Seed OSS, MiniMax and LongCat with a name before."""
    thought = f"CALL</{name}>" if is_opened else f"<{name}>CALL</{name}>"
    parts = part_answer(f"{thought}CALL", calls_like("CALL"), is_opened=is_opened)
    assert parts.thoughts == ((0, len(thought)),)


@pytest.mark.parametrize("tag", ["<rethink>", "<thinker>", "<b>", "<reasons>"])
def test_other_tags_are_no_thoughts(tag: str) -> None:
    assert part_answer(f"{tag}CALL", calls_like("<CALL"), is_opened=False).thoughts == ()
