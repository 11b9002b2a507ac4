"""OpenAI's chats with calls and tools: written as the model's template writes them, refused by row and field."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import transformers

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.answers.tool_forms import ClientTools
from ostinato.infra.serving.gateway.schemas import ToolDefinition
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.models.rendering.chat_template import TemplateRenderer
from ostinato.tasks.corpus.chat_rows import read_conversations
from ostinato.tasks.corpus.conversations import make_documents
from tests.fakes.published_model import TEMPLATE, TOOL_TEMPLATE, small_tokenizer
from tests.fakes.thinking_template import THINKING_TEMPLATE, thinking_tokenizer

SETTINGS = {"eos_token": "<|im_end|>"}
OURS = {
    "tools": TemplateRenderer(small_tokenizer(), TOOL_TEMPLATE, SETTINGS),
    "thoughts": TemplateRenderer(thinking_tokenizer(), THINKING_TEMPLATE, SETTINGS),
}
USER = {"role": "user", "content": "What is 12 + 3?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "é", "parameters": {"type": "object"}},
    }
]


def calling(*ids: str, arguments: Any = '{"a": 12, "b": [3]}') -> dict[str, Any]:
    calls = [
        {"id": one, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for one in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}


def result(call: str | None, text: str = "15") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text, "name": "add"}


TOLD = [
    USER,
    calling("x", "y"),
    result("x"),
    result("y", "fifteen"),
    {"role": "assistant", "content": "15", "refusal": None},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "7?"}]},
    {"role": "assistant", "content": "22"},
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def learned_of(ours: Renderer, path: Path) -> tuple[list[int], list[str]]:
    """All tokens of the only conversation, and the texts that are learned."""
    (document,) = make_documents(read_conversations(path), ours, HarnessConfig())
    texts: list[list[int]] = [[]]
    for token, is_learned in zip(document.token_ids, document.loss_mask, strict=True):
        if is_learned:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return document.token_ids, [ours.decode(ids) for ids in texts if ids]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_calls_are_learned_as_the_template_writes_them(
    name: str, suffix: str, tmp_path: Path
) -> None:
    ours, row = OURS[name], {"messages": TOLD, "tools": TOOLS, "parallel_tool_calls": True}
    path = tmp_path / f"told{suffix}"
    if suffix == ".parquet":  # all parts of a column have one type
        plain = [
            message | {"content": "And 7?"} if message is TOLD[5] else message for message in TOLD
        ]
        table = pa.Table.from_pylist([{"id": 1, "messages": plain, "tools": json.dumps(TOOLS)}])
        pyarrow.parquet.write_table(table, path)
    else:
        write(path, row)
    tokens, learned = learned_of(ours, path)
    ours.tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = TOOL_TEMPLATE if name == "tools" else THINKING_TEMPLATE
    plain = json.loads(json.dumps(TOLD))
    plain[1]["content"], plain[5]["content"] = "", "And 7?"
    for call in plain[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    wanted = theirs.apply_chat_template(plain, tools=TOOLS, return_dict=True)["input_ids"]
    behind = len(ours.encode_content("\n"))  # what follows the last answer's end is left out
    assert tokens == wanted[:-behind]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": [3]}}\n</tool_call>'
    assert learned[0].replace("\n<tool", "<tool") == called + called + "<|im_end|>"
    assert learned[1:-1] == ["15<|im_end|>"]
    assert learned[-1].endswith("22<|im_end|>")


def test_calls_stand_as_behind_the_gateway_where_the_template_writes_none(tmp_path: Path) -> None:
    ours = TemplateRenderer(small_tokenizer(), TEMPLATE, SETTINGS)
    messages = [{"role": "developer", "content": "Be short."}, *TOLD[:2]]
    tokens, learned = learned_of(
        ours, write(tmp_path / "a.jsonl", {"messages": messages, "tools": TOOLS})
    )
    tools = [ToolDefinition.model_validate(tool) for tool in TOOLS]
    opened = ClientTools(ours).start(str(USER["content"]), "Be short.", tools)
    assert tokens[: len(opened)] == opened
    assert learned[0].startswith('<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": [3]}}')


def test_calls_of_our_own_tools_are_learned_in_our_own_tokens(tmp_path: Path) -> None:
    ours = Renderer(train_tokenizer(["def add(a, b): return a"], vocab_size=450))
    messages = json.loads(json.dumps([USER, calling("x", arguments='{"path": "a.py"}')]))
    messages[1]["tool_calls"][0]["function"]["name"] = "read_file"
    tokens, learned = learned_of(ours, write(tmp_path / "a.jsonl", {"messages": messages}))
    assert learned == ["<read_file>a.py</read_file><|end|>"]
    assert ours.tokenizer.token_to_id("<read_file>") in tokens
    with pytest.raises(ConfigError, match=r"row 1: tool call x names tool 'add', wanted one of"):
        learned_of(ours, write(tmp_path / "b.jsonl", {"messages": TOLD[:2]}))


def test_an_answer_of_no_weight_is_read_and_not_learned(tmp_path: Path) -> None:
    messages = [*TOLD[:4], TOLD[4] | {"weight": 0}, *TOLD[5:]]
    _, learned = learned_of(OURS["tools"], write(tmp_path / "a.jsonl", {"messages": messages}))
    assert learned[1] == "22<|im_end|>"


def test_thoughts_are_learned_where_the_template_keeps_them(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "<think>\nsum\n</think>\n\n15"}
    kept = [
        USER,
        calling("x") | {"content": "<think>\nsum\n</think>\n\nlook"},
        result("x"),
        thought,
    ]
    tokens, learned = learned_of(OURS["thoughts"], write(tmp_path / "a.jsonl", {"messages": kept}))
    assert learned[1] == "<think>\nsum\n</think>\n\n15<|im_end|>"
    assert tokens.count(OURS["thoughts"].tokenizer.token_to_id("<think>")) == 2
    for lost in ([USER, thought, *TOLD[-2:]], [*kept, *TOLD[-2:]]):
        path = write(tmp_path / "b.jsonl", {"messages": lost})
        with pytest.raises(
            ConfigError, match=r"row 1: the chat template .* message \d.*--chat-temp"
        ):
            learned_of(OURS["thoughts"], path)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": [USER, calling("x", arguments="{a")]},
            "1.tool_calls.0.function.arguments: no",
        ),
        ({"messages": [USER, calling("x", arguments="[1]")]}, "valid dictionary, not [1]"),
        ({"messages": [USER, calling("x", arguments='{"a": [NaN]}')]}, "a number is NaN or inf"),
        ({"messages": [USER, calling("x", arguments={"a": 1e400})]}, "wanted only finite ones"),
        ({"messages": [*TOLD[:2], result("z"), TOLD[4]]}, "'z', wanted one of 'x', 'y'"),
        ({"messages": [USER, TOLD[4], result("z"), TOLD[4]]}, "'z', wanted one of none"),
        (
            {"messages": [*TOLD[:3], TOLD[4]]},
            "message 3 is by 'assistant' and call 'y' has no result",
        ),
        ({"messages": [*TOLD[:2], result("x"), result("x"), TOLD[4]]}, "'x', wanted one of 'y'"),
        (
            {"messages": [USER, calling("x", "x"), result("x"), result("x"), TOLD[4]]},
            "message 1 has two calls with id 'x', wanted unique ids",
        ),
        ({"messages": [USER | {"tool_call_id": "x"}, TOLD[4]]}, "is in a user message"),
        ({"messages": [USER, TOLD[4] | {"audio": {}}]}, "messages.1.audio: Extra inputs"),
        (
            {"messages": [USER, TOLD[4] | {"content": 5}]},
            "content: Input should be a valid string, not 5",
        ),
        ({"messages": [USER, TOLD[4] | {"content": [{"type": "image_url"}]}]}, "a part is {'type'"),
        ({"messages": [USER, calling("x")], "tools": [{"name": "add"}]}, "tools.0.type: Field req"),
        ({"messages": [USER, calling("x")], "tools": "[{"}, "tools: no JSON"),
        (
            {
                "messages": [USER, calling("x")],
                "tools": [{"type": "function", "function": {"name": "look"}}],
            },
            "message 1 calls 'add', which tools does not declare, wanted one of look",
        ),
        (
            {"messages": TOLD, "functions": [{"name": "add"}]},
            "functions = [{'name': 'add'}], wanted",
        ),
    ],
)
def test_a_wrong_row_is_named(row: dict, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "told.jsonl", {"messages": TOLD}, row)
    with pytest.raises(ConfigError, match=r"told\.jsonl, row 2: ") as caught:
        read_conversations(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        [USER, {"role": "assistant", "content": "a \ud83d"}],
        [{"role": "user", "content": "\udc00 b"}, TOLD[6]],
        [USER, calling("x", arguments={"a": "\ud83d"})],
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_row(row: list, tmp_path: Path) -> None:
    for ours in OURS.values():
        path = write(tmp_path / "told.jsonl", {"messages": row})
        with pytest.raises(ConfigError, match=r"row 1: .*half of a surrogate pair"):
            learned_of(ours, path)


def test_a_message_that_the_template_leaves_out_is_refused_by_row(tmp_path: Path) -> None:
    short = TEMPLATE.replace("in messages %}", "in messages if message.role != 'system' %}")
    ours = TemplateRenderer(small_tokenizer(), short, SETTINGS)
    system = {"role": "system", "content": "Be brief."}
    path = write(tmp_path / "told.jsonl", {"messages": [system, USER, TOLD[6]]})
    with pytest.raises(ConfigError, match=r"row 1: .* the system message 'Be brief"):
        learned_of(ours, path)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("last", ["x", None])
def test_results_are_read_in_the_order_of_their_calls(
    name: str, last: str | None, tmp_path: Path
) -> None:
    ours = OURS[name]
    wanted, _ = learned_of(ours, write(tmp_path / "a.jsonl", {"messages": TOLD}))
    swapped = [*TOLD[:2], TOLD[3], TOLD[2] | {"tool_call_id": last}, *TOLD[4:]]
    told, _ = learned_of(ours, write(tmp_path / "b.jsonl", {"messages": swapped}))
    assert told == wanted
    again = [*swapped, USER, calling("y", "x"), result("x", "R2"), result("y", "R1"), TOLD[6]]
    told, _ = learned_of(ours, write(tmp_path / "c.jsonl", {"messages": again}))
    text = ours.decode(told)
    assert text.index("R1") < text.index("R2")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "told.parquet"
    pyarrow.parquet.write_table(pa.table({"messages": [[USER, TOLD[6]]] * 500}), path)
    content = bytearray(path.read_bytes())
    content[10:200] = bytes(range(190))
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"told\.parquet is not read as parquet: OSError"):
        read_conversations(path)
    odd = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    pyarrow.parquet.write_table(pa.table({"messages": odd}), path)
    with pytest.raises(ConfigError, match="is not read as parquet: UnicodeDecodeError"):
        read_conversations(path)
