"""The same attempt recorded by us and by verifiers: the same messages, tokens and masks.

The same environment and the same scripted model twice: through our rollout worker, and through verifiers' own loop and
its own OpenAI client, which asks our gateway over HTTP for answers with token ids, as it asks vLLM.

What differs, and is therefore not compared (docs/interoperability.md has the same list):
- one record per turn with its whole prompt there, one segment with all turns here: each turn is compared with the
  segment's beginning, because the segment is what is trained at once;
- ids of calls that the model wrote without one: they stand in no token of the template;
- the spelling of a call's JSON arguments: both write anew what was read, and the tokens are the model's own;
- the message that ends a game (`final_env_response`): it is in their completion, and no model reads it;
- the explanation of tools where a template states none: each has its own words, so this template states them.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.infra.serving.gateway.arms import Arm
from ostinato.tasks.records import Problem, Trajectory
from tests.contracts.test_verifiers import TOYS, WIDE, draw, roll_out
from tests.fakes.published_templates import HERMES
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.toy_gateway import make_toy_gateway

pytestmark = pytest.mark.verifiers
RENDERER = HERMES.renderer()
CALL = '<tool_call>\n{"name": "count", "arguments": {"thing": "%s"}}\n</tool_call>'
SCRIPTS = {
    "toy-words": ["pear", "plan ", "plum"],
    "toy-shelf": [
        f"I look.\n{CALL % 'figs'}\n{CALL % 'nuts'}",
        CALL % "plums",
        "12 figs, 3 plums.",
    ],
}


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOYS)


async def record_theirs(
    directory: Path, name: str, problem: Problem, model: ScriptedModel
) -> Mapping[str, Any]:
    import verifiers as vf
    from openai import AsyncOpenAI

    toy = make_toy_gateway(directory, RENDERER, harness=WIDE)
    toy.context.arms.set(Arm("control", "nano@1", 4, model))
    http = toy.client()
    asked = AsyncOpenAI(base_url="http://gateway/v1", api_key="key-of-team", http_client=http)
    environment = vf.load_environment(name)
    sampling = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    client = vf.OpenAIChatCompletionsClient(asked)
    row = json.loads(problem.facts["row"])
    state = await environment.rollout(row, client, "ostinato", sampling)
    await environment.rubric.score_rollout(state)
    return state


def record(directory: Path, name: str, answer: str) -> tuple[Trajectory, Mapping[str, Any]]:
    repository, problems = draw(
        directory, f"verifiers:{name}", train=2 if name == "toy-shelf" else 4, held_out=0
    )
    problem = next(each for each in problems if json.loads(each.facts["row"])["answer"] == answer)
    ours = roll_out(RENDERER, repository, problem, SCRIPTS[name])[0]
    theirs = asyncio.run(
        record_theirs(directory, name, problem, ScriptedModel(RENDERER, SCRIPTS[name]))
    )
    assert theirs["error"] is None
    return ours, theirs


def said(state: Mapping[str, Any]) -> list[str]:
    """What stands in the conversation beside the model's answers, as verifiers recorded it."""
    return [each.content for each in state["completion"] if each.role != "assistant"]


@pytest.mark.parametrize(("name", "answer"), [("toy-words", "plum"), ("toy-shelf", "12")])
def test_messages_tokens_and_masks_are_the_same(tmp_path: Path, name: str, answer: str) -> None:
    ours, theirs = record(tmp_path, name, answer)
    (segment,) = ours.transcript.segments
    steps = theirs["trajectory"]
    assert ours.transcript.end_reason == "finished"
    assert len(steps) == len(ours.transcript.turns) == len(SCRIPTS[name])
    for step in steps:
        tokens = step["tokens"]
        start, end = len(tokens["prompt_ids"]), len(tokens["prompt_ids"] + tokens["completion_ids"])
        assert segment.token_ids_T[:start].tolist() == tokens["prompt_ids"], text_of(
            segment, tokens
        )
        assert segment.token_ids_T[start:end].tolist() == tokens["completion_ids"]
        assert segment.loss_mask_T[start:end].astype(int).tolist() == tokens["completion_mask"]
        assert not any(tokens["prompt_mask"])
        assert np.allclose(segment.logprobs_T[start:end], tokens["completion_logprobs"])
    sampled = sum(len(step["tokens"]["completion_ids"]) for step in steps)
    assert segment.sampled_tokens == sampled
    told = [text for turn in ours.transcript.turns for text in turn.results]
    assert told == said(theirs)[: len(told)]
    assert ours.reward.total == pytest.approx(theirs["reward"])
    assert ours.transcript.score.metrics == pytest.approx(theirs["metrics"])


def text_of(segment: Any, tokens: Mapping[str, Any]) -> str:
    ours = RENDERER.decode(segment.token_ids_T.tolist())
    return f"OURS {ours!r}\nTHEIRS {RENDERER.decode(tokens['prompt_ids'])!r}"
