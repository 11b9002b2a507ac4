"""Published tool-call forms: what a template writes is read back, wherever it stands, and nothing else is."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.dialects.published.choice import find_dialect
from ostinato.infra.agent.dialects.published.forms import (
    DEEPSEEK_V3_FORM,
    DEEPSEEK_V31_FORM,
    GLM4_FORM,
    HARMONY_FORM,
    HERMES_FORM,
    KIMI_K2_FORM,
    LLAMA3_FORM,
    MISTRAL_FORM,
    QWEN3_CODER_FORM,
)
from ostinato.infra.agent.dialects.published.reading import CallForm
from ostinato.infra.agent.dialects.spans import no_calls
from ostinato.infra.agent.dialects.thoughts import parse_outside
from ostinato.infra.agent.extensions import DIALECTS, PUBLISHED
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.agent.transcript import CallStatus
from ostinato.models.rendering.template_environment import render_template
from tests.fakes.published_templates import GLM4_CALL, HARMONY_CALL, TEMPLATES

FORMS: dict[str, CallForm] = {
    "hermes": HERMES_FORM,
    "qwen3_coder": QWEN3_CODER_FORM,
    "llama3": LLAMA3_FORM,
    "deepseek_v3": DEEPSEEK_V3_FORM,
    "deepseek_v31": DEEPSEEK_V31_FORM,
    "kimi_k2": KIMI_K2_FORM,
    "glm4": GLM4_FORM,
    "mistral": MISTRAL_FORM,
    "harmony": HARMONY_FORM,
}
each_form = pytest.mark.parametrize("name", FORMS)
CALL_TEXTS = {name: template.text for name, template in TEMPLATES.items()}
CALL_TEXTS |= {"glm4": GLM4_CALL, "harmony": HARMONY_CALL}
PIECES = (
    '{"',
    "}}",
    '\\"',
    "</tool_call>",
    "```",
    "<parameter=",
    "é",
    "\n",
    " {1}",
    "[TOOL_CALLS]",
    "<|end|>",
    "日",
)
values = st.lists(st.sampled_from(PIECES) | st.text(max_size=4)).map("".join)
edits = st.fixed_dictionaries({"old": values, "new": values}).filter(
    lambda edit: edit["old"] and edit["old"] != edit["new"]
)
prose = st.text(alphabet="ab é.\n", max_size=12).map(lambda text: f"{text}\n")


def arguments_of(edit: dict[str, str]) -> dict[str, str]:
    return {"path": "a.py"} | edit


def outside(form: CallForm, text: str, *, is_opened: bool = False) -> ParsedAnswer:
    return parse_outside(
        text, form.find_calls, lambda rest: form.parse(rest, FULL_TOOLS), is_opened=is_opened
    )


def templates_words(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The answer that a template writes of some calls, without the token that ends it."""
    written = [
        {
            "type": "function",
            "id": f"functions.{tool}:{index}" if name == "kimi_k2" else f"{index:09d}",
            "function": {
                "name": tool,
                "arguments": json.dumps(given, ensure_ascii=False)
                if name.startswith("deepseek")
                else given,
            },
        }
        for index, (tool, given) in enumerate(calls)
    ]
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": written}

    def shown(messages: list[dict[str, Any]], *, opens: bool) -> str:
        wanted = {"messages": messages, "tools": None, "add_generation_prompt": opens}
        return render_template(CALL_TEXTS[name], {"bos_token": ""}, wanted)

    whole = shown([question, answer], opens=False).removeprefix(shown([question], opens=True))
    end = TEMPLATES[name].end if name in TEMPLATES else "<|call|>"
    return whole.removesuffix("\n").removesuffix(end)


@each_form
@settings(deadline=None, max_examples=25)
@given(edit=edits)
def test_what_a_template_writes_is_read_back(name: str, edit: dict[str, str]) -> None:
    calls = [("edit_file", arguments_of(edit)), ("read_file", {"path": "b.py", "offset": 3})]
    calls = calls[: None if FORMS[name].several else 1]
    parsed = FORMS[name].parse(templates_words(name, calls), FULL_TOOLS)
    assert [(call.tool, call.status) for call in parsed.calls] == [
        (tool, CallStatus.OK) for tool, _ in calls
    ]
    assert parsed.calls[0].values == calls[0][1]
    assert all(call.values == given for call, (_, given) in zip(parsed.calls, calls, strict=True))
    assert parsed.prose == ""


@each_form
@settings(deadline=None, max_examples=50)
@given(before=prose, edit=edits, between=prose, after=prose)
def test_a_call_is_read_out_of_any_prose(
    name: str, before: str, edit: dict[str, str], between: str, after: str
) -> None:
    form = FORMS[name]
    call = form.write("edit_file", arguments_of(edit))
    several = [call, between, form.write("glob", {"pattern": "*"})] if form.several else [call]
    parsed = outside(form, "".join([before, *several, "\n", after]))
    assert [one.status for one in parsed.calls] == [CallStatus.OK] * len(several[::2])
    assert parsed.calls[0].arguments == arguments_of(edit)
    said = "".join((before, between if form.several else "", after)).split()
    assert parsed.prose.split() == said


@each_form
@settings(deadline=None, max_examples=50)
@given(edit=edits, share=st.floats(0, 1))
def test_a_truncated_call_says_so_and_never_runs_otherwise(
    name: str, edit: dict[str, str], share: float
) -> None:
    form = FORMS[name]
    whole = form.write("edit_file", arguments_of(edit))
    begin = whole.index("old")  # from there on it can be nothing else than a call
    cut = whole[: begin + int(share * (len(whole) - begin))]
    calls = form.parse(cut, FULL_TOOLS).calls
    assert calls
    assert all(
        call.arguments == arguments_of(edit) for call in calls if call.status is CallStatus.OK
    )
    assert all(call.error for call in calls if call.status is not CallStatus.OK)


@each_form
@settings(deadline=None, max_examples=25)
@given(edit=edits, words=prose)
def test_nothing_is_read_out_of_thoughts(name: str, edit: dict[str, str], words: str) -> None:
    form = FORMS[name]
    call = form.write("edit_file", arguments_of(edit)).replace("<|end|>", "")
    assert outside(form, f"<think>{words}{call}\n</think>{words}").calls == ()
    assert outside(form, f"{words}{call}\n</think>{words}", is_opened=True).calls == ()
    assert outside(form, f"<think>{words}\n{call}").calls == ()
    if name == "harmony":
        assert (
            form.parse(f"<|channel|>analysis<|message|>{words}{call}<|end|>", FULL_TOOLS).calls
            == ()
        )


@each_form
def test_marks_of_thoughts_in_arguments_belong_to_the_call(name: str) -> None:
    form = FORMS[name]
    edit = {"path": "a.py", "old": "a </think> b", "new": '<think> {c} "d"'}
    (call,) = outside(form, f"I edit.\n{form.write('edit_file', edit)}").calls
    assert call.arguments == edit


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", "  {}"),
        ("hermes", "[{}]"),
        ("llama3", '{{"name": "glob", "parameters": {{"pattern": "*"}}}}; {}'),
        ("harmony", " to=functions.edit_file<|channel|>commentary json<|message|>{}<|call|>"),
    ],
)
def test_a_call_that_stands_elsewhere_keeps_its_marks_of_thoughts(name: str, written: str) -> None:
    edit = {"path": "a.py", "old": "a <think> b", "new": "c </think> d"}
    call = json.dumps({"name": "edit_file", "arguments": edit} if name != "harmony" else edit)
    *_, read = outside(FORMS[name], f"I edit.\n{written.format(call)}").calls
    assert read.arguments == edit


def test_a_thought_in_a_call_is_no_argument_of_it() -> None:
    """A form without a finder of whole calls, as a plug-in may be: what it reads is not what the model wrote."""
    form = HERMES_FORM
    call = form.write("edit_file", {"path": "a.py", "old": "a <think> b </think> c", "new": "d"})
    parsed = parse_outside(
        call, no_calls, lambda rest: form.parse(rest, FULL_TOOLS), is_opened=False
    )
    assert [(one.status, one.arguments) for one in parsed.calls] == [(CallStatus.MALFORMED, {})]
    assert "a thought stands in the call" in parsed.calls[0].error


@each_form
@settings(deadline=None, max_examples=50)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join), data=st.data())
def test_no_text_raises_and_every_call_runs_or_says_why(
    name: str, text: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    whole = form.write("edit_file", {"path": "a.py", "old": "x", "new": "y"})
    place = data.draw(st.integers(0, len(whole)))
    for call in form.parse(f"{whole[:place]}{text}{whole[place:]}", FULL_TOOLS).calls:
        assert (call.status is CallStatus.OK) == (call.error == "")


@each_form
def test_a_guide_is_no_call_and_a_template_tells_its_form(name: str) -> None:
    dialect: Dialect = DIALECTS.load(name)
    assert all(
        call.status is not CallStatus.OK for call in dialect.parse(dialect.guide, FULL_TOOLS).calls
    )
    assert find_dialect(CALL_TEXTS[name]) == name
    assert name in PUBLISHED
    assert PUBLISHED.keys() == FORMS.keys()


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.several])
def test_a_form_of_one_call_refuses_a_further_one(name: str) -> None:
    form = FORMS[name]
    calls = [form.write("glob", {"pattern": pattern}) for pattern in "ab"]
    first, second = form.parse("\n".join(calls), FULL_TOOLS).calls
    assert (first.status, second.status) == (CallStatus.OK, CallStatus.INVALID_ARGUMENTS)


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
@pytest.mark.parametrize(
    "form",
    [
        "```json\n{}\n```",
        "```\n{}\n```",
        "<tools>\n{}\n</tools>",
        "{}",
        "```json\n[{}]\n```",
        "{}\n</tool_call>",
    ],
)
def test_calls_of_models_that_do_not_know_the_tags_are_read(key: str, form: str) -> None:
    call = json.dumps({"name": "glob", key: {"pattern": "{*}.py"}}, indent=2)
    (read,) = HERMES_FORM.parse(
        f"I look:\n{form.replace('{}', call)}\nThen I go on.", FULL_TOOLS
    ).calls
    assert read.values == {"pattern": "{*}.py"}


def test_text_behind_arguments_in_a_string_is_not_lost() -> None:
    call = json.dumps({"name": "glob", "arguments": '{"pattern": "*"} {"pattern": "b"}'})
    (read,) = HERMES_FORM.parse(f"<tool_call>\n{call}\n</tool_call>", FULL_TOOLS).calls
    assert read.status is CallStatus.MALFORMED
    assert "follows the arguments" in read.error


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "demo", "version": "1"}\n```',
        "```python\nprint({'name': 1})\n```",
        'The object {"name": "glob", "arguments": {}} is a call.',
        "Tags such as <tool are no call.",
    ],
)
def test_other_json_and_code_are_prose(text: str) -> None:
    assert HERMES_FORM.parse(text, FULL_TOOLS) == ParsedAnswer((), text)


def test_typed_texts_are_read_as_the_schema_has_them() -> None:
    words = {"items": '["[ ] a", "[x] b"]', "merge": "True"}
    (call,) = QWEN3_CODER_FORM.parse(QWEN3_CODER_FORM.write("todo_write", words), FULL_TOOLS).calls
    assert call.values == {"items": ("[ ] a", "[x] b"), "merge": True}


def test_half_a_character_in_a_list_stays_an_escape() -> None:
    words = {"items": '["[ ] \\ud800"]', "merge": "true"}
    (call,) = QWEN3_CODER_FORM.parse(QWEN3_CODER_FORM.write("todo_write", words), FULL_TOOLS).calls
    assert "\ud800" not in str(call.arguments)


def test_kimis_ids_stay_with_the_calls() -> None:
    (call,) = KIMI_K2_FORM.parse(KIMI_K2_FORM.write("glob", {"pattern": "*"}), FULL_TOOLS).calls
    assert call.call_id == "functions.glob:0"


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]glob[ARGS]{"pattern": "*"}',
        '[TOOL_CALLS]glob[CALL_ID]abcdefghi[ARGS]{"pattern": "*"}',
        '[TOOL_CALLS]glob{"pattern": "*"}',
        '[TOOL_CALLS] [{"name": "glob", "arguments": {"pattern": "*"}, "id": "abcdefghi"}]',
    ],
)
def test_mistrals_older_and_newer_forms_are_read(text: str) -> None:
    assert [call.values for call in MISTRAL_FORM.parse(text, FULL_TOOLS).calls] == [
        {"pattern": "*"}
    ]
