"""Conversations as agents hold them, each through the three APIs, whole and streamed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.serving.gateway.arms import Arm
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.fakes.published_model import TOOL_TEMPLATE
from tests.fakes.thinking_template import THINKING_TEMPLATE, thinking_tokenizer
from tests.fakes.three_apis import APIS, Api, ScriptedModel
from tests.fakes.toy_gateway import Toy, make_toy_gateway

pytestmark = [pytest.mark.asyncio, pytest.mark.parametrize("api", APIS.values(), ids=APIS)]
each_way = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
# Numbers of `sampled` below choose each case by day, and each API whole and streamed: APIs vary fastest, so a number
# that divides the cases of one list would choose one API alone.

EXPLAINED = HarnessConfig(dialect="full", context_tokens=4000, max_generated_tokens=900)
USER = {"role": "user", "content": "Look at a.py"}
NAMES = ["read", "write"]
SETTINGS = {"eos_token": "<|im_end|>"}
# Opens a thought in each answer's header, as QwQ's and DeepSeek R1's do.
OPENING_TEMPLATE = TOOL_TEMPLATE.replace(
    "\n{{ message['content'] }}",
    "\n{% if message.role == 'assistant' %}<think>\n{% endif %}{{ message['content'] }}",
).replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
TEMPLATES = {"thinking": THINKING_TEMPLATE, "opening": OPENING_TEMPLATE}


def call(name: str, key: str = "arguments", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, key: arguments})}\n</tool_call>"


READ, WRITE = call("read", path="a.py"), call("write", path="a.py", text="x")
READS, WRITES = ("read", {"path": "a.py"}), ("write", {"path": "a.py", "text": "x"})


def renderer(template: str = "thinking", **files: Any) -> TemplateRenderer:
    written = {name: json.dumps(content).encode() for name, content in files.items()}
    return TemplateRenderer(thinking_tokenizer(), TEMPLATES[template], SETTINGS, written)


def gateway(
    directory: Path, model: ScriptedModel, *, ping_seconds: float = 10.0, slice_tokens: int = 1
) -> Toy:
    toy = make_toy_gateway(
        directory,
        model.renderer,
        harness=EXPLAINED,
        stream_slice_tokens=slice_tokens,
        ping_seconds=ping_seconds,
    )
    toy.context.arms.set(Arm("control", "imported@1", 0, model), None, 0.0)
    return toy


@asynccontextmanager
async def over_a_socket(toy: Toy) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": "Bearer key-of-team"}
    async with (
        running_server(toy.app, "127.0.0.1", 0) as url,
        httpx2.AsyncClient(base_url=url, headers=headers) as client,
    ):
        yield client


def transcripts(toy: Toy) -> list[Transcript]:
    rows = toy.ledger.interactions.since(0)
    return [Transcript.from_bytes(toy.objects.get_bytes(row.object_key)) for row in rows]


@pytest.mark.parametrize(
    ("template", "said", "text", "calls"),
    [
        ("thinking", f"<think>I could {WRITE} but no.</think> Nothing.", None, []),
        ("thinking", f"<think>I use <tool_call> next.</think>\n{READ}", "behind", [READS]),
        ("thinking", f"<think>hm</think>\n\nI look.{READ}", "behind", [READS]),
        ("thinking", f"<think>a</think>{READ}<think>{WRITE}</think>", "around", [READS]),
        ("thinking", f"<think>a</think>{READ}<think>b</think>{WRITE}", "around", [READS, WRITES]),
        ("thinking", f"<think>a {WRITE} b </think> c {WRITE} d</think> Nothing.", None, []),
        ("thinking", f"I could {WRITE} but no.</think> Nothing.", None, []),
        ("thinking", f"<think>I could {WRITE} and never end", None, []),
        ("thinking", f"Well.\n<think>I could {WRITE} and never end", None, []),
        ("thinking", f"<thinking>{WRITE}</thinking>{READ}", "around", [READS]),
        ("thinking", f"[THINK]{WRITE}[/THINK]{READ}", "around", [READS]),
        ("thinking", f"<thought>{WRITE}</thought> No.", None, []),
        ("thinking", f"The tag `<think>` opens one.{READ}", "behind", [READS]),
        (
            "thinking",
            call("write", path="a.py", text="<think>x</think> </think>"),
            "behind",
            [("write", {"path": "a.py", "text": "<think>x</think> </think>"})],
        ),
        (
            "thinking",
            f"<think>{call('write', text='</think>')} no</think>{READ}",
            "around",
            [READS],
        ),
        ("opening", f"I could {WRITE} but no.</think>Nothing.", None, []),
        ("opening", f"I use <tool_call> next.</think>{READ}", "behind", [READS]),
        ("opening", f"I could {WRITE} and never end", None, []),
        ("opening", f"hm</think>{READ}", "behind", [READS]),
        ("opening", f"<think>hm</think>{READ}", "behind", [READS]),
        ("opening", f"hm</think>a<think>{WRITE}</think> Nothing.", None, []),
    ],
)
@each_way
@pytest.mark.sampled(31)
async def test_nothing_is_taken_out_of_thoughts(
    tmp_path: Path,
    api: Api,
    streams: bool,
    template: str,
    said: str,
    text: str | None,
    calls: list[tuple[str, dict]],
) -> None:
    toy = gateway(tmp_path, ScriptedModel(renderer(template), said))
    async with toy.client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams)
    assert answer.calls == calls
    assert answer.ending == ("tool_calls" if calls else "stop")
    if text is None:
        assert answer.text == said
    elif text == "behind":  # the last call ends the answer
        assert answer.text == said[: said.rindex("<tool_call>")].rstrip()
    else:
        thought = said.partition("</")[0]
        assert answer.text.startswith(thought)


@each_way
async def test_an_unclosed_thought_at_the_limit_holds_no_call(
    tmp_path: Path, api: Api, streams: bool
) -> None:
    model = ScriptedModel(renderer(), f"<think>I could {WRITE} but no.</think> Nothing.")
    said = model.renderer.encode_answer(f"<think>I could {WRITE} but")[:-1]
    async with gateway(tmp_path, model).client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams, max_tokens=len(said))
    assert (answer.calls, answer.ending) == ([], "length")
    assert answer.text.startswith(f"<think>I could {WRITE}")


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
@pytest.mark.parametrize("is_text", [False, True], ids=["object", "text"])
@each_way
@pytest.mark.sampled(13)
async def test_arguments_by_another_name_are_read(
    tmp_path: Path, api: Api, streams: bool, key: str, is_text: bool
) -> None:
    arguments = {"path": "a.py", "days": [1]}
    given = json.dumps(arguments) if is_text else arguments
    said = f"<tool_call>{json.dumps({'name': 'read', key: given})}</tool_call>"
    async with gateway(tmp_path, ScriptedModel(renderer(), said)).client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams)
    assert answer.calls == [("read", arguments)]


@pytest.mark.parametrize(
    "inner",
    [
        '{"name": "read", "path": "a.py"}',
        '{"name": "read", "params": {"path": "a.py"}}',
        '{"name": "read", "arguments": {}, "parameters": {"path": "a.py"}}',
        '{"name": "read", "arguments": {"path": "a.py"}, "path": "b.py"}',
        '{"name": "read", "arguments": {"path": "a.py"}, "arguments": {}}',
        '{"name": "read", "arguments": "path a.py"}',
        '{"name": "read", "arguments": "[1]"}',
        '{"name": "read", "arguments": null}',
        '{"name": "read", "arguments": ["a.py"]}',
        '{"name": "read", "input": "{\\"x\\": NaN}"}',
        '{"type": "function", "function": {"name": "read", "arguments": {}}}',
        '[{"name": "read", "arguments": {}}, {"name": "read", "path": "a.py"}]',
    ],
)
@each_way
@pytest.mark.sampled(17)
async def test_no_call_loses_its_arguments(
    tmp_path: Path, api: Api, streams: bool, inner: str
) -> None:
    said = f"I look.<tool_call>{inner}</tool_call>"
    async with gateway(tmp_path, ScriptedModel(renderer(), said)).client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams)
    assert (answer.text, answer.calls, answer.ending) == (said, [], "stop")


def asked(*ids: str) -> dict[str, Any]:
    calls = [
        {"id": each, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        for each in ids
    ]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


LATER = {"role": "user", "content": "Go on"}
SYSTEM = {"role": "system", "content": "Today is Friday"}
DONE = {"role": "assistant", "content": "Done."}
ODD = ("toolu_é'\"\\\n\u2028", " ", "call:1|x", "x" * 300)


@pytest.mark.parametrize(
    ("history", "order"),
    [
        ([USER, asked("a", "b"), result("a", "R1"), result("b", "R2")], "R1 R2"),
        ([USER, asked("a", "b"), result("b", "R2"), result("a", "R1")], "R1 R2"),
        ([USER, asked("a", "b"), result("b", "R2"), result("a", "R1"), LATER], "R1 R2 Go"),
        ([USER, asked("a", "b"), result("b", "R2"), LATER, result("a", "R1")], "R1 R2 Go"),
        ([USER, asked("a", "b"), result("b", "R2"), SYSTEM, result("a", "R1")], "R1 R2 Today"),
        ([USER, asked("a"), asked("b"), result("b", "R2"), result("a", "R1")], "R1 R2"),
        (
            [
                USER,
                asked("a", "b"),
                result("b", "R2"),
                result("a", "R1"),
                DONE,
                LATER,
                asked("b", "a"),
                result("a", "R4"),
                result("b", "R3"),
            ],
            "R1 R2 Go R3 R4",
        ),
        (
            [USER, asked(*ODD), *(result(ODD[place], f"R{place}") for place in (3, 1, 0, 2))],
            "R0 R1 R2 R3",
        ),
    ],
)
@each_way
@pytest.mark.sampled(13)
async def test_results_reach_the_model_in_the_order_of_their_calls(
    tmp_path: Path, api: Api, streams: bool, history: list, order: str
) -> None:
    model = ScriptedModel(renderer(), "Done.")
    async with gateway(tmp_path, model).client() as client:
        answer = await api.ask(client, history, NAMES, streams=streams)
    assert answer.text == "Done."
    places = [model.prompts[0].index(word) for word in order.split()]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("history", "named"),
    [
        ([USER, asked("a", "b"), result("a", "R1"), result("nobody", "R2")], "nobody"),
        ([USER, asked("a", "b"), result("a", "R1"), result("a", "R2")], "a"),
        ([USER, asked("a", "b"), result("a", "R1")], "b"),
        ([USER, asked("a", "b"), result("a", "R1"), DONE, LATER], "b"),
        ([USER, asked("a"), LATER], "a"),
        ([USER, asked("a", "a"), result("a", "R1")], "a"),
        ([USER, result("a", "R1"), asked("a")], "a"),
        ([USER, result("a", "R1")], "a"),
        ([USER, DONE, result("a", "R1")], "a"),
        ([USER, asked("a"), result("a", "1"), DONE, LATER, asked("b"), result("a", "2")], "a"),
        ([USER, asked(""), result("x", "R1")], "x"),
    ],
)
@each_way
@pytest.mark.sampled(17)
async def test_results_and_calls_without_each_other_are_refused_by_id(
    tmp_path: Path, api: Api, streams: bool, history: list, named: str
) -> None:
    toy = gateway(tmp_path, ScriptedModel(renderer(), "Done."))
    async with toy.client() as client:
        reply = await api.post(client, history, NAMES, stream=streams)
    assert reply.status_code == 400
    assert repr(named) in reply.json()["error"]["message"]
    assert not transcripts(toy)


@each_way
async def test_known_tokens_are_continued_whatever_the_order_of_results(
    tmp_path: Path, api: Api, streams: bool
) -> None:
    model = ScriptedModel(renderer(), f"Both.{READ}{WRITE}", "Done.", "Bye.")
    async with gateway(tmp_path, model).client() as client:
        first = await api.ask(client, [USER], NAMES, streams=streams)
        assert first.calls == [READS, WRITES]
        calls = [
            {"id": call_id, "type": "function"}
            | {"function": {"name": name, "arguments": json.dumps(arguments)}}
            for call_id, (name, arguments) in zip(first.ids, first.calls, strict=True)
        ]
        said = {"role": "assistant", "content": first.text, "tool_calls": calls}
        results = [result(first.ids[1], "R2"), result(first.ids[0], "R1")]
        history = [USER, said, *results]
        await api.ask(client, history, NAMES, streams=streams)
        history = [USER, said, *results[::-1], {"role": "assistant", "content": "Done."}, LATER]
        await api.ask(client, history, NAMES, streams=streams)
    firsts = [each.token_ids for each in model.requests if each.request_id.endswith("/0")]
    known = [*firsts[0], *model.renderer.encode_answer(f"Both.{READ}{WRITE}")]
    assert list(firsts[1][: len(known)]) == known
    assert list(firsts[2][: len(firsts[1])]) == list(firsts[1])
    assert model.prompts[1].index("R1") < model.prompts[1].index("R2")


@each_way
async def test_a_system_message_amid_a_conversation_is_the_users(
    tmp_path: Path, api: Api, streams: bool
) -> None:
    model = ScriptedModel(renderer(), "Done.")
    history = [SYSTEM, USER, DONE, SYSTEM | {"content": "Now Monday"}, LATER]
    async with gateway(tmp_path, model).client() as client:
        await api.ask(client, history, NAMES, streams=streams)
    assert "<|im_start|>user\nNow Monday\n\nGo on<|im_end|>" in model.prompts[0]
    assert "<|im_start|>system\nToday is Friday<|im_end|>" in model.prompts[0]


@pytest.mark.parametrize("place", ["first token", "within a call"])
async def test_a_stream_is_not_silent_for_long(tmp_path: Path, api: Api, place: str) -> None:
    model = ScriptedModel(renderer(), f"I look.{READ}")
    model.pauses = {0 if place == "first token" else len(model.scripts[0]) - 3: 0.5}
    toy = gateway(tmp_path, model, ping_seconds=0.1, slice_tokens=1000)
    async with toy.client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=True)
    assert 2 <= answer.pings <= 5
    assert (answer.text, answer.calls) == ("I look.", [READS])
    model.pauses = {}
    async with toy.client() as client:
        assert (await api.ask(client, [USER], NAMES, streams=True)).pings == 0


@pytest.mark.parametrize(
    "ends",
    [{"generation_config.json": {"eos_token_id": [2, 0]}}, {"config.json": {"eos_token_id": 0}}],
)
@each_way
async def test_each_end_of_the_model_ends_an_answer(
    tmp_path: Path, api: Api, streams: bool, ends: dict
) -> None:
    ours = renderer(**ends)
    script = [*ours.encode_content("Done."), 0, *ours.encode_answer(" and on and on")]
    model = ScriptedModel(ours, script, "Bye.")
    toy = gateway(tmp_path, model)
    async with toy.client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams)
        assert (answer.text, answer.ending) == ("Done.", "stop")
        history = [USER, {"role": "assistant", "content": "Done."}, LATER]
        await api.ask(client, history, NAMES, streams=streams)
    (tokens,) = {tuple(each.segments[0].token_ids_T[-6:].tolist()) for each in transcripts(toy)[:1]}
    assert tokens[-1] == 0


@pytest.mark.parametrize("is_waiting", [True, False], ids=["before a token", "amid the answer"])
async def test_a_stream_that_is_left_frees_its_slot_and_a_retry_is_clean(
    tmp_path: Path, api: Api, is_waiting: bool
) -> None:
    model = ScriptedModel(renderer(), "The answer is long enough.")
    model.never = 0 if is_waiting else 12
    toy = gateway(tmp_path, model, ping_seconds=0.05)
    async with over_a_socket(toy) as client:
        body = api.body([USER], NAMES, {"stream": True})
        async with client.stream("POST", api.path, json=body) as reply:
            seen = ""
            async for piece in reply.aiter_text():
                seen += piece
                if "ping" in seen:  # the model has come to where it stays
                    break
        for _ in range(200):
            if model.num_cancelled:
                break
            await asyncio.sleep(0.01)
        assert model.num_cancelled == 1
        model.never = None
        again = await api.ask(client, [USER], NAMES, streams=True)
    assert again.text == "The answer is long enough."
    assert model.prompts[0] == model.prompts[-1]
    rows = toy.ledger.interactions.since(0)
    left = [row for row in rows if any(e.signal == Signal.ABANDONED for e in row.feedback)]
    assert len(left) == (0 if is_waiting else 1)
    assert len(rows) == len(left) + 1
    lengths = sorted(each.segments[0].sampled_tokens for each in transcripts(toy))
    assert lengths == ([] if is_waiting else [12]) + [len(model.scripts[0])]


@each_way
async def test_a_repeated_request_is_answered_anew_and_alike(
    tmp_path: Path, api: Api, streams: bool
) -> None:
    model = ScriptedModel(renderer(), f"I look.{READ}")
    toy = gateway(tmp_path, model)
    async with toy.client() as client:
        answers = [await api.ask(client, [USER], NAMES, streams=streams) for _ in range(2)]
        ids = [each.ids[0] for each in answers]
        assert ids[0] != ids[1]
        for call_id in ids:  # either of them goes on
            history = [USER, asked(call_id), result(call_id, "R1")]
            await api.ask(client, history, NAMES, streams=streams)
    assert model.prompts[0] == model.prompts[1]
    assert answers[0].calls == answers[1].calls
    assert len(transcripts(toy)) == 4


@pytest.mark.parametrize(
    "said", ["é ü 漢字 🎈 done", "🎈", "a\u0301 \u2028 \x1b[0m", "<b>x</b> < y"]
)
@each_way
@pytest.mark.sampled(11)
async def test_characters_split_over_tokens_come_whole(
    tmp_path: Path, api: Api, streams: bool, said: str
) -> None:
    async with gateway(tmp_path, ScriptedModel(renderer(), said)).client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams)
        bare = await api.ask(client, [USER], [], streams=streams)
    assert answer.text == bare.text == said
    assert "\ufffd" not in answer.text


@pytest.mark.parametrize(
    ("said", "stop", "text", "calls"),
    [
        ("One two three", "two", "One ", []),
        ("One 漢字 three", "字", "One 漢", []),
        (f"I look.{READ} STOP {WRITE}", "STOP", "I look.", [READS]),
        (f"<think>STOP {WRITE}</think>", "STOP", "<think>", []),
    ],
)
@each_way
async def test_stop_strings_end_an_answer(
    tmp_path: Path, api: Api, streams: bool, said: str, stop: str, text: str, calls: list
) -> None:
    if api.name == "responses":
        return  # which has no stop strings
    async with gateway(tmp_path, ScriptedModel(renderer(), said)).client() as client:
        answer = await api.ask(client, [USER], NAMES, streams=streams, stop=[stop])
    assert (answer.text.rstrip(), answer.calls) == (text.rstrip(), calls)
