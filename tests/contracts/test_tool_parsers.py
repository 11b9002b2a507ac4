"""Published tool-call forms beside vLLM's tool parsers: the same calls out of the same texts, or a listed reason."""

import importlib.util
import json
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken

from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.tools.definition import tool_schemas
from ostinato.infra.agent.transcript import CallStatus
from tests.fakes.published_model import small_tokenizer
from tests.fakes.published_templates import TEMPLATES
from tests.unit.infra.agent.test_published_forms import FORMS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM"),
]
# Ours by vLLM's names. gpt-oss is read from tokens there, and needs openai_harmony's.
PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3_json",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "glm4": "glm45",
    "mistral": "mistral",
}
EDIT = {"path": "a.py", "old": "x = 1", "new": "x = 2"}
BRACES = {"path": "a.py", "old": 'd = {"a": {"b": 1}}', "new": 'd = {"a": "}}"}'}
LINES = {"path": "src/a.py", "old": "é = 1\n\n    日 = 2", "new": 'é = "\\n"'}
SCENES = ("plain", "braces", "lines", "two", "before", "after", "truncated")
Calls = list[tuple[str, Any]]
# (form, scene) -> why vLLM reads something else
DIFFERENCES = {
    (
        "qwen3_coder",
        "truncated",
    ): "it leaves out the argument that was cut; here a cut edit does not run",
    ("glm4", "truncated"): "the same",
    ("kimi_k2", "truncated"): "it hands on arguments that are no JSON; here the call is malformed",
    ("llama3", "two"): "it reads both; Llama's templates refuse two, so here the second is refused",
    ("mistral", "two"): "it reads one list of calls; here a second list is read too",
}


def text_of(name: str, scene: str) -> str:
    form = FORMS[name]
    plain = form.write("edit_file", EDIT)
    texts = {
        "plain": plain,
        "braces": form.write("edit_file", BRACES),
        "lines": form.write("edit_file", LINES),
        "two": f"{plain}\n{form.write('glob', {'pattern': '*'})}",
        "before": f"I change it.\n{plain}",
        "after": f"{plain}\nThen I test.",
        "truncated": plain[: plain.index("x = 2")],
    }
    return texts[scene]


def ours(name: str, text: str) -> Calls:
    calls = FORMS[name].parse(text, FULL_TOOLS).calls
    return [(call.tool, dict(call.arguments)) for call in calls if call.status is CallStatus.OK]


def theirs(name: str, text: str) -> Calls:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = small_tokenizer()
    tokens = TEMPLATES[name].tokens if name in TEMPLATES else ()
    tokens = (
        *tokens,
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<arg_key>",
        "</arg_key>",
    )
    tokens = (*tokens, "<arg_value>", "</arg_value>", "<|observation|>", "<|user|>")
    tokenizer.add_tokens([AddedToken(token) for token in tokens])
    request = ChatCompletionRequest(
        model="m", messages=[], tools=tool_schemas(FULL_TOOLS.values()), tool_choice="auto"
    )
    parser = ToolParserManager.get_tool_parser(PARSERS[name])(
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer), request.tools
    )
    read = parser.extract_tool_calls(text, request)
    return [(call.function.name, decoded(call.function.arguments)) for call in read.tool_calls]


def decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_those_that_vllm_reads(name: str, scene: str) -> None:
    text = text_of(name, scene)
    is_equal = ours(name, text) == theirs(name, text)
    assert is_equal == ((name, scene) not in DIFFERENCES), (ours(name, text), theirs(name, text))
