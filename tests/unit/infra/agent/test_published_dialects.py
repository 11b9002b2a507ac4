"""Dialects of published models: the template states tools and writes results, and the loop runs what is called."""

import asyncio

import pytest

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import CallStatus, EndReason, Transcript
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.published_templates import HERMES, TEMPLATES, PublishedTemplate
from tests.fakes.scripted_model import ScriptedModel
from tests.unit.infra.agent.test_published_forms import FORMS

READ = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
EDIT = '```json\n{\n  "name": "edit_file",\n  "arguments": {"path": "a.py", "old": "{1}", "new": "{2}"}\n}\n```'


def attempt(
    template: PublishedTemplate, answers: list[str], **settings: object
) -> tuple[Transcript, ScriptedModel, MemorySandbox]:
    """An attempt by a scripted model at a repository of one file."""
    renderer = template.renderer()
    sandbox = MemorySandbox({"a.py": b"x = {1}\n"})
    config = HarnessConfig.model_validate(
        {"dialect": "hermes", "context_tokens": 20_000, "max_generated_tokens": 4000} | settings
    )
    model = ScriptedModel(renderer, answers)
    request = AgentRequest(prompt="Set x to {2}", session_id="s")
    made = run_agent(model, renderer, AgentEnvironment(sandbox), request, config)
    return asyncio.run(made), model, sandbox


def test_an_attempt_in_the_templates_own_form_edits_and_finishes() -> None:
    said = [f"I look.\n{READ}{READ}", f"Now:\n{EDIT}\n", "Done."]
    transcript, model, sandbox = attempt(HERMES, said)
    assert sandbox.files["a.py"] == b"x = {2}\n"
    assert transcript.end_reason is EndReason.FINISHED
    assert transcript.final_message == "Done."
    assert [turn.text for turn in transcript.turns] == said
    assert [call.tool for turn in transcript.turns for call in turn.calls] == [
        "read_file",
        "read_file",
        "edit_file",
    ]
    text = model.renderer.decode(transcript.segments[0].token_ids_T.tolist())
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert text.count('"name": "write_file"') == 1  # stated once, by the template
    assert (
        f"<|im_start|>assistant\n{said[0]}<|im_end|>\n<|im_start|>user\n<tool_response>\n" in text
    )
    assert text.count("<|im_start|>user\n<tool_response>") == 2  # results of a turn together
    assert text.count("<tool_response>") == 3


def test_sampled_tokens_are_kept_as_sampled() -> None:
    transcript, model, _ = attempt(HERMES, [READ, EDIT, "Done."])
    (segment,) = transcript.segments
    sampled = segment.token_ids_T[segment.loss_mask_T].tolist()
    wanted = [model.renderer.encode_answer(answer) for answer in (READ, EDIT, "Done.")]
    assert sampled == [token for answer in wanted for token in answer]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_attempt_in_each_form_runs_its_calls_and_shows_their_results(name: str) -> None:
    form = FORMS[name]
    said = [
        form.write("read_file", {"path": "a.py"}),
        form.write("edit_file", {"path": "a.py", "old": "{1}", "new": "{2}"}),
        "Done.",
    ]
    transcript, model, sandbox = attempt(TEMPLATES[name], said, dialect=name)
    assert sandbox.files["a.py"] == b"x = {2}\n"
    assert transcript.end_reason is EndReason.FINISHED
    (segment,) = transcript.segments
    assert model.renderer.decode(segment.token_ids_T[segment.loss_mask_T].tolist()) == "".join(
        f"{text}{TEMPLATES[name].end}" for text in said
    )
    text = model.renderer.decode(segment.token_ids_T.tolist())
    assert text.count('"name": "write_file"') == 1
    assert "x = {1}" in text.split(said[0])[1].split(said[1])[0]  # the result of reading


def test_a_template_without_tools_has_them_explained() -> None:
    bare = PublishedTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        HERMES.tokens,
        HERMES.end,
    )
    transcript, model, sandbox = attempt(bare, [EDIT, "Done."])
    text = model.renderer.decode(list(model.requests[0].token_ids))
    assert "# Tools" in text
    assert '"name": "edit_file"' in text
    assert sandbox.files["a.py"] == b"x = {2}\n"
    assert transcript.end_reason is EndReason.FINISHED


@pytest.mark.parametrize(
    "thought", [f"<think>{READ}</think>", f"<think>{EDIT}</think>", f"{EDIT}</think>"]
)
def test_no_call_in_a_thought_runs(thought: str) -> None:
    transcript, _, sandbox = attempt(HERMES, [f"{thought}Nothing."])
    assert transcript.turns[0].calls == ()
    assert sandbox.files == sandbox.pristine


@pytest.mark.parametrize("begins", [True, False])
def test_a_turn_tells_whether_the_prompt_opened_its_thought(begins: bool) -> None:
    header = "<|im_start|>assistant\n" + "<think>\n" * begins
    opening = PublishedTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + header
        + "{% else %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}"
        + header
        + "{% endif %}",
        HERMES.tokens,
        HERMES.end,
    )
    transcript, _, _ = attempt(opening, ["It is a.py:1."])
    assert transcript.final_message == "It is a.py:1."
    assert transcript.turns[-1].begins_in_thought is begins


def test_a_thought_mark_in_an_argument_belongs_to_the_call() -> None:
    call = EDIT.replace("{2}", "{</think>}")
    _, _, sandbox = attempt(HERMES, [call, "Done."])
    assert sandbox.files["a.py"] == b"x = {</think>}\n"


def test_broken_calls_are_results_that_the_model_reads() -> None:
    answers = ['<tool_call>\n{"name": "read_file", "arguments": {"path": "a', EDIT, "Done."]
    transcript, model, _ = attempt(HERMES, answers)
    assert transcript.turns[0].calls[0].status is CallStatus.MALFORMED
    text = model.renderer.decode(list(model.requests[1].token_ids))
    assert "nothing behind it was read" in text
