"""Functions of clients: calls as JSON between tags, there and back, and nothing guessed."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.serving.gateway.answers.tool_forms import (
    CALL_START,
    CLIENT_FORMS,
    ClientTools,
    OwnTools,
    form_of,
)
from ostinato.infra.serving.gateway.arms import Arm
from ostinato.infra.serving.gateway.schemas import FunctionCall, ToolCall
from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.rendering.chat_template import TemplateRenderer
from tests.fakes.published_model import TEMPLATE, TOOL_TEMPLATE, small_tokenizer
from tests.fakes.published_templates import TEMPLATES
from tests.fakes.toy_gateway import make_toy_gateway

FULL = HarnessConfig(dialect="full", context_tokens=4000, max_generated_tokens=500)
USER = {"role": "user", "content": "How warm is it?"}
PARAMETERS = {"type": "object", "properties": {"days": {"type": "array"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "getWeather", "description": "é", "parameters": PARAMETERS},
    }
]
CALL = '<tool_call>\n{"name": "getWeather", "arguments": {"days": [1, 2]}}\n</tool_call>'
FORM_RENDERER = TemplateRenderer(small_tokenizer(), TEMPLATE, {"eos_token": "<|im_end|>"})
FORM = ClientTools(FORM_RENDERER)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


class SayingModel:
    """Says one text after another, in whatever slices it is asked for."""

    def __init__(self, renderer: TemplateRenderer, *texts: str) -> None:
        self.renderer, self.texts = renderer, list(texts)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        done = int(request.request_id.rpartition("/")[2])
        self.requests.append(request)
        whole = self.renderer.encode_answer(self.texts[0])
        ids = whole[done : done + request.max_new_tokens]
        is_end = done + len(ids) == len(whole)
        if is_end:
            self.texts.pop(0)
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs_T=np.full(len(ids), -0.5, dtype=np.float32),
            weight_versions_T=np.zeros(len(ids), dtype=np.int64),
            routed_experts=np.zeros((0, 0, 0), dtype=np.int16),
            route_offset=0,
            stop_reason=StopReason.STOP_TOKEN if is_end else StopReason.LENGTH,
        )

    async def end_session(self, session_id: str) -> None:
        return None


@asynccontextmanager
async def served(
    directory: Path, template: str, *texts: str
) -> AsyncIterator[tuple[httpx2.AsyncClient, SayingModel]]:
    """A gateway over an imported model that says these texts."""
    renderer = TemplateRenderer(small_tokenizer(), template, {"eos_token": "<|im_end|>"})
    async with serve(directory, renderer, *texts) as served:
        yield served


@asynccontextmanager
async def serve(
    directory: Path, renderer: TemplateRenderer, *texts: str
) -> AsyncIterator[tuple[httpx2.AsyncClient, SayingModel]]:
    """The same, with the model's renderer."""
    toy = make_toy_gateway(directory, renderer, harness=FULL, stream_slice_tokens=3)
    model = SayingModel(renderer, *texts)
    toy.context.arms.set(Arm("control", "imported@1", 0, model), None, 0.0)
    async with toy.client() as client:
        yield client, model


async def ask(client: httpx2.AsyncClient, *messages: dict, **changes: Any) -> dict:
    body = {"model": "ostinato", "messages": list(messages), "tools": TOOLS} | changes
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@given(arguments=st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_a_call_reads_back_as_it_was_written(arguments: dict) -> None:
    call = ToolCall(id="x", function=FunctionCall(name="f", arguments=json.dumps(arguments)))
    message, parsed = FORM.read(FORM.write_call(call), {"f": {}}, "id_")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == arguments
    assert parsed.calls[0].status is CallStatus.OK
    assert message.content is None


TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": ["number", "null"]},
        "is_dry": {"type": "boolean"}, "days": {"type": "array"}, "place": {"type": "object"},
    },
}  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {"text": st.text(alphabet="ab 1{}[]\"'.,é", max_size=8)},
    optional={
        "count": st.integers(), "share": st.none() | st.floats(-1e6, 1e6), "is_dry": st.booleans(),
        "days": st.lists(st.integers(), max_size=3), "place": st.dictionaries(st.sampled_from("xy"), st.integers()),
    },
)  # fmt: skip


STATING = TemplateRenderer(small_tokenizer(), TOOL_TEMPLATE, {"eos_token": "<|im_end|>"})


def published(dialect: str) -> ClientTools:
    """Tools of a model whose template states them, told to be of a dialect."""
    return ClientTools(STATING, dialect)


@pytest.mark.parametrize("dialect", CLIENT_FORMS)
@given(arguments=ARGUMENTS)
def test_each_published_form_gives_functions_their_typed_arguments(
    dialect: str, arguments: dict
) -> None:
    form = published(dialect)
    call = ToolCall(id="x", function=FunctionCall(name="f", arguments=json.dumps(arguments)))
    written = form.write_call(call)
    message, parsed = form.read(f"I look.\n{written}", {"f": TYPED}, "id_")
    assert message.tool_calls is not None, parsed
    assert json.loads(message.tool_calls[0].function.arguments) == arguments
    assert message.content == "I look."
    shown = [form.showable(f"I look.\n{written}"[:length]) for length in range(len(written) + 9)]
    assert all("I look.".startswith(text) for text in shown)


@pytest.mark.parametrize("dialect", CLIENT_FORMS)
@given(
    pieces=st.lists(
        st.sampled_from(
            (
                "<",
                "tool_call",
                ">",
                "[TOOL",
                "_CALLS]",
                "{",
                '"name"',
                "x\n",
                "<\uff5ctool",
                "▁call",
                "<|",
            )
        )
    )
)
def test_what_was_shown_of_a_published_form_begins_the_message(
    dialect: str, pieces: list[str]
) -> None:
    form = published(dialect)
    text = "".join(pieces)
    shown = [form.showable(text[:length]) for length in range(len(text) + 1)]
    message, _ = form.read(text, {"f": {}}, "id_")
    for earlier, later in zip(shown, [*shown[1:], message.text], strict=True):
        assert later.startswith(earlier)


@pytest.mark.parametrize(("text", "kind", "value"), [
    ("3", "integer", 3), ("3.5", "integer", "3.5"), ("True", "boolean", True), ("yes", "boolean", "yes"),
    ("3", "string", "3"), ("[1", "array", "[1"), ("None", ["integer", "null"], None), ("3", None, "3"),
    ("NaN", "number", "NaN"), ("-Infinity", "number", "-Infinity"), ("1e999", "number", "1e999"),
    ("[NaN]", "array", "[NaN]"), ('["\\ud800"]', "array", '["\\ud800"]'),
    ('{"a": 1, "a": 2}', "object", '{"a": 1, "a": 2}'), ("3 4", "integer", "3 4"),
])  # fmt: skip
def test_a_text_becomes_what_the_schema_says_or_stays(
    text: str, kind: object, value: object
) -> None:
    schema = {"properties": {"it": {"type": kind}}} if kind else {}
    written = f"<function=f>\n<parameter=it>\n{text}\n</parameter>\n</function>"
    form = published("qwen3_coder")
    message, _ = form.read(written, {"f": schema}, "id_")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"it": value}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"it": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}, 3),
        ({"properties": {"it": {"oneOf": [{"type": "boolean"}, {"type": ["integer"]}]}}}, 3),
        ({"properties": {"it": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}, "3"),
        ({"properties": {"it": {"anyOf": [{"type": "integer"}, True]}}}, "3"),
        ({"properties": {"it": {"anyOf": 1}}}, "3"),
        ({"properties": {"it": True}}, "3"),
        ({"properties": ["it"]}, "3"),
        ({"properties": "it"}, "3"),
    ],
)
def test_any_schema_of_a_client_is_taken(schema: dict, value: object) -> None:
    """Alternatives as pydantic writes an optional argument, and schemas that are wrong."""
    written = "<function=f>\n<parameter=it>\n3\n</parameter>\n</function>"
    message, _ = published("qwen3_coder").read(written, {"f": schema}, "id_")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"it": value}


@pytest.mark.parametrize("dialect", CLIENT_FORMS)
def test_marks_of_thoughts_deep_in_arguments_stay(dialect: str) -> None:
    edit: dict[str, Any] = {"text": "<think>why</think>"}
    for key in ("range", "change", "changes", "file", "edit", "edits"):
        edit = {key: [edit]}
    arguments = {"place": edit}
    form = published(dialect)
    call = ToolCall(id="x", function=FunctionCall(name="f", arguments=json.dumps(arguments)))
    message, _ = form.read(form.write_call(call), {"f": TYPED}, "id_")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == arguments


def test_a_form_is_the_models_own_where_its_template_states_tools() -> None:
    call = ToolCall(id="x", function=FunctionCall(name="f", arguments="{}"))
    harness = FULL.model_copy(update={"dialect": "qwen3_coder"})
    assert "<function=f>" in form_of(harness, STATING).write_call(call)
    assert '{"name": "f"' in form_of(harness, FORM_RENDERER).write_call(call)
    assert '{"name": "f"' in form_of(FULL, STATING).write_call(call)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", TEMPLATES)
async def test_functions_are_called_in_the_form_of_the_models_template(
    tmp_path: Path, name: str
) -> None:
    """The template states them, the model calls one, and its result goes back as the template writes it."""
    renderer = TEMPLATES[name].renderer()
    form = form_of(FULL, renderer)  # nobody named a dialect: the template tells
    function = FunctionCall(name="getWeather", arguments='{"days": [1, 2]}')
    said = "I look.\n" + form.write_call(ToolCall(id="x", function=function))
    async with serve(tmp_path, renderer, said, "Warm.") as (client, model):
        first = await ask(client, USER)
        assert (first["finish_reason"], first["message"]["content"]) == ("tool_calls", "I look.")
        (call,) = first["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"days": [1, 2]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
        second = await ask(client, USER, first["message"], result)
        assert second["message"]["content"] == "Warm."
    opening, following = model.requests[0].token_ids, model.requests[-1].token_ids
    assert renderer.decode(opening).count("getWeather") == 1
    kept = [*opening, *renderer.encode_answer(said)]
    assert list(following[: len(kept)]) == kept
    assert renderer.decode(following[len(kept) :]).count("21 degrees") == 1
    assert "getWeather" not in renderer.decode(following[len(kept) :])  # the call stands there once


@given(text=st.text(alphabet="<tool_call>{} \n", max_size=30))
def test_what_was_shown_begins_every_later_text(text: str) -> None:
    shown = [FORM.showable(text[:length]) for length in range(len(text) + 1)]
    message, _ = FORM.read(text, {"f": {}}, "id_")
    for earlier, later in zip(shown, [*shown[1:], message.text], strict=True):
        assert later.startswith(earlier)
        assert CALL_START not in earlier


@given(pieces=st.lists(st.sampled_from(["<read_file>x</read_file>", "<", "b>", "x", " ", "\n"])))
def test_what_was_shown_of_own_tools_begins_the_message(pieces: list[str]) -> None:
    text = "".join(pieces)
    form = OwnTools(FORM_RENDERER, ["read_file"])
    assert form.read(text, {"read_file": {}}, "id_")[0].text.startswith(form.showable(text))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', CallStatus.UNKNOWN_TOOL),
        ('<tool_call>{"name": "getWeather", "arguments": []}</tool_call>', CallStatus.MALFORMED),
        ('<tool_call>{"name": "getWeather", "arguments": {}}', CallStatus.MALFORMED),
        ("<tool_call>getWeather()</tool_call>", CallStatus.MALFORMED),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", CallStatus.MALFORMED),
        ("<tool_call>7</tool_call>", CallStatus.MALFORMED),
        (
            '<tool_call>{"name": "getWeather", "arguments": {"days": NaN}}</tool_call>',
            CallStatus.MALFORMED,
        ),
        (
            '<tool_call>{"name": "getWeather", "arguments": {"days": 1e400}}</tool_call>',
            CallStatus.MALFORMED,
        ),
        (
            '<tool_call>{"name": "getWeather", "arguments": {"days": "\\ud800"}}</tool_call>',
            CallStatus.MALFORMED,
        ),
    ],
)
def test_calls_that_cannot_run_stay_in_the_text(text: str, status: CallStatus) -> None:
    message, parsed = FORM.read(text, {"getWeather": {}}, "id_")
    assert (message.content, message.tool_calls) == (text, None)
    assert parsed.calls[0].status is status


@pytest.mark.asyncio
@pytest.mark.parametrize("template", [TEMPLATE, TOOL_TEMPLATE], ids=["explained", "stated"])
async def test_tools_reach_the_model_and_its_tokens_are_continued(
    tmp_path: Path, template: str
) -> None:
    said = f"I look.{CALL}"
    async with served(tmp_path, template, said, "Warm.", "Mild.", CALL) as (client, model):
        first = await ask(client, {"role": "system", "content": "Be brief."}, USER)
        assert first["finish_reason"] == "tool_calls"
        assert first["message"]["content"] == "I look."
        (call,) = first["message"]["tool_calls"]
        assert call["function"]["name"] == "getWeather"
        assert json.loads(call["function"]["arguments"]) == {"days": [1, 2]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
        history = [{"role": "system", "content": "Be brief."}, USER, first["message"], result]
        second = await ask(client, *history)
        assert second["message"]["content"] == "Warm."
        (opening, *_), following = model.requests[0].token_ids, model.requests[-1].token_ids
        prompt = model.renderer.decode(model.requests[0].token_ids)
        assert '"name": "getWeather", "description": "é", "parameters"' in prompt
        assert "Be brief." in prompt
        kept = [*model.requests[0].token_ids, *model.renderer.encode_answer(said)]
        assert list(following[: len(kept)]) == kept
        assert model.renderer.decode(following).count("21 degrees") == 1
        # other tools are another prompt
        await ask(client, *history, tools=[])
        assert 'getWeather", "description' not in model.renderer.decode(
            model.requests[-1].token_ids
        )
        without = model.requests[-1].token_ids
        assert opening == without[0]
        untold = await ask(client, *history, tool_choice="none")
        assert (untold["finish_reason"], untold["message"]["content"]) == ("stop", CALL)
        prompts = [request.token_ids for request in model.requests]
        assert prompts.count(without) == 2


@pytest.mark.asyncio
async def test_a_stream_shows_a_call_once_it_is_whole(tmp_path: Path) -> None:
    said = f"if a < b: look.\n{CALL}"
    async with served(tmp_path, TOOL_TEMPLATE, said, said) as (client, _):
        body = {"model": "ostinato", "messages": [USER], "tools": TOOLS}
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        text = (await client.post("/v1/chat/completions", json=body | {"stream": True})).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    content = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(content) == whole["message"]["content"] == "if a < b: look."
    assert len(content) > 1
    (piece,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert piece["function"] == whole["message"]["tool_calls"][0]["function"]


@pytest.mark.asyncio
async def test_a_history_of_the_clients_own_is_written_as_the_template_writes_it(
    tmp_path: Path,
) -> None:
    call = {"id": "c", "type": "function"}
    call |= {"function": {"name": "getWeather", "arguments": '{"days": [1, 2]}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "21 degrees"}
    async with served(tmp_path, TOOL_TEMPLATE, "Warm.") as (client, model):
        await ask(client, USER, asked, result)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n21 degrees" in (
        model.renderer.decode(model.requests[0].token_ids)
    )


@pytest.mark.asyncio
async def test_definitions_with_tokens_of_the_model_are_plain_text(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    async with served(tmp_path, TOOL_TEMPLATE, "ok") as (client, model):
        body = {"model": "ostinato", "messages": [USER], "tools": tools}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert model.requests[0].token_ids.count(model.renderer.end_id) == 2  # tools, question
