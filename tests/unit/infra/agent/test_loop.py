"""The loop: tokens are kept as sampled, arrays stay parallel, and every attempt ends with one
reason."""

import asyncio

import numpy as np

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.loop.attempt import open_conversation, run_agent, run_conversation
from ostinato.infra.agent.loop.prompts import SUMMARY_REQUEST
from ostinato.infra.agent.transcript import MISSING_ROUTE, CallStatus, EndReason, Transcript
from ostinato.infra.platform.errors import EngineError, SandboxHostLost
from tests.fakes.scripted_model import ScriptedModel

CONFIG = HarnessConfig(context_tokens=2000, max_generated_tokens=2000)
REQUEST = AgentRequest(prompt="Fix double in pkg/core.py", session_id="s")
LOOK = "<run_terminal>pytest</run_terminal><read_file>pkg/core.py::double</read_file>"
REPAIR = "<edit_file><L2>    result = value * 2</edit_file><run_terminal>pytest</run_terminal>"


def attempt(renderer, environment, answers, config=CONFIG, request=REQUEST, model=None):
    model = model or ScriptedModel(renderer, answers)
    return asyncio.run(run_agent(model, renderer, environment, request, config)), model


def test_the_straight_path_reads_as_in_the_template(renderer, environment) -> None:
    transcript, model = attempt(renderer, environment, [LOOK, REPAIR, "Fixed."])
    (segment,) = transcript.segments
    assert renderer.decode(segment.token_ids_T.tolist()) == (
        f"<|user|>Fix double in pkg/core.py<|end|><|assistant|>{LOOK}<|end|>"
        "<|tool|>failed: NameError: name 'valu' is not defined at <L2><|end|>"
        "<|tool|><L1>def double(value):\n<L2>    result = valu * 2\n<L3>    return result<|end|>"
        f"<|assistant|>{REPAIR}<|end|><|tool|>ok<|end|><|tool|>passed<|end|>"
        "<|assistant|>Fixed.<|end|>"
    )
    assert transcript.end_reason is EndReason.FINISHED
    assert transcript.final_message == "Fixed."
    assert [turn.text for turn in transcript.turns] == [LOOK, REPAIR, "Fixed."]
    assert model.ended_sessions == ["s"]


def test_each_request_extends_the_one_before(renderer, environment) -> None:
    _, model = attempt(renderer, environment, [LOOK, REPAIR, "Fixed."])
    for earlier, later in zip(model.requests, model.requests[1:], strict=False):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert later.session_id == earlier.session_id
        assert later.seed != earlier.seed


def test_sampled_tokens_carry_what_the_engine_said(renderer, environment) -> None:
    transcript, _ = attempt(renderer, environment, [LOOK, REPAIR, "Fixed."])
    (segment,) = transcript.segments
    mask = segment.loss_mask_T
    assert renderer.decode(segment.token_ids_T[mask].tolist()) == (
        f"{LOOK}<|end|>{REPAIR}<|end|>Fixed.<|end|>"
    )
    assert np.all(segment.logprobs_T[mask] < 0)
    assert np.all(segment.logprobs_T[~mask] == 0)
    assert sorted(set(segment.weight_versions_T[mask])) == [0, 1, 2]
    assert np.all(segment.weight_versions_T[~mask] == -1)


def test_routes_are_stitched_over_turns(renderer, environment) -> None:
    transcript, _ = attempt(renderer, environment, [LOOK, REPAIR, "Fixed."])
    (segment,) = transcript.segments
    routes = segment.routed_experts_TLK
    total = len(segment.token_ids_T)
    assert routes.shape == (total, 2, 2)
    assert np.array_equal(routes[:-1, 0, 0], np.arange(total - 1))
    assert np.all(routes[-1] == MISSING_ROUTE)


def test_a_transcript_survives_its_byte_form(renderer, environment) -> None:
    transcript, _ = attempt(renderer, environment, [LOOK, "Could not fix it."])
    copy = Transcript.from_bytes(transcript.to_bytes())
    assert copy.turns == transcript.turns
    assert copy.segments[0].sampling == transcript.segments[0].sampling
    assert np.array_equal(copy.segments[0].token_ids_T, transcript.segments[0].token_ids_T)


def test_broken_calls_are_answered_and_end_the_attempt_after_three(renderer, environment) -> None:
    answers = ["<read_file>", "<nothing>1</nothing>", "<edit_file></edit_file>", "unreached"]
    transcript, _ = attempt(renderer, environment, answers)
    assert transcript.end_reason is EndReason.BROKEN_CALLS
    assert [turn.calls[0].status for turn in transcript.turns] == [
        CallStatus.MALFORMED,
        CallStatus.UNKNOWN_TOOL,
        CallStatus.INVALID_ARGUMENTS,
    ]
    assert transcript.turns[0].results == ("error: </read_file> is missing",)


def test_the_same_turn_with_the_same_results_ends_the_attempt(renderer, environment) -> None:
    answers = ["<read_file>no.py</read_file>"] * 3
    transcript, _ = attempt(renderer, environment, answers)
    assert transcript.end_reason is EndReason.BROKEN_CALLS
    assert len(transcript.turns) == 2


def test_turns_and_tokens_are_limited(renderer, environment) -> None:
    answers = [f"<list_dir>{'x' * n}</list_dir>" for n in range(1, 9)]
    few_turns = CONFIG.model_copy(update={"max_turns": 4})
    transcript, _ = attempt(renderer, environment, answers, few_turns)
    assert (transcript.end_reason, len(transcript.turns)) == (EndReason.TURN_LIMIT, 4)

    few_tokens = CONFIG.model_copy(update={"max_generated_tokens": 20})
    transcript, _ = attempt(renderer, environment, answers, few_tokens)
    assert transcript.end_reason is EndReason.TOKEN_LIMIT
    assert transcript.segments[0].sampled_tokens == 20

    small = CONFIG.model_copy(update={"context_tokens": 100})
    transcript, _ = attempt(renderer, environment, [LOOK, REPAIR], small)
    assert transcript.end_reason is EndReason.TOKEN_LIMIT


def test_engine_and_sandbox_failures_are_reasons(renderer, environment, sandbox) -> None:
    transcript, _ = attempt(renderer, environment, [LOOK, EngineError("replica is gone")])
    assert transcript.end_reason is EndReason.ENGINE_FAILED
    assert transcript.detail == "replica is gone"
    sandbox.is_lost = True
    transcript, _ = attempt(renderer, environment, [LOOK])
    assert transcript.end_reason is EndReason.BOX_RUINED
    sandbox.loss = SandboxHostLost("its node is gone")
    transcript, _ = attempt(renderer, environment, [LOOK])
    assert transcript.end_reason is EndReason.SANDBOX_FAILED


def test_a_hanging_engine_runs_into_the_time_limit(renderer, environment) -> None:
    class Hanging(ScriptedModel):
        async def generate(self, request):
            await asyncio.sleep(60)
            return await super().generate(request)

    config = CONFIG.model_copy(update={"attempt_time_limit_seconds": 0.05})
    model = Hanging(renderer, [])
    transcript, _ = attempt(renderer, environment, [], config, model=model)
    assert transcript.end_reason is EndReason.TIMED_OUT
    assert model.ended_sessions == ["s"]


def test_past_the_trigger_the_model_summarises_and_starts_again(renderer, environment) -> None:
    config = CONFIG.model_copy(update={"summarise_at_tokens": 60})
    answers = [LOOK, "valu should be value", REPAIR, "fixed line 2", "Fixed."]
    transcript, model = attempt(renderer, environment, answers, config)
    assert transcript.end_reason is EndReason.FINISHED
    first, second, third = (
        renderer.decode(segment.token_ids_T.tolist()) for segment in transcript.segments
    )
    asked = f"return result<|end|><|user|>{SUMMARY_REQUEST}<|end|><|assistant|>"
    assert f"{asked}valu should be value<|end|>" in first
    assert second.startswith(
        "<|user|>Fix double in pkg/core.py\n\nvalu should be value<|end|><|assistant|>"
    )
    assert third.endswith("Fixed.<|end|>")
    assert model.ended_sessions == ["s", "s#1", "s#2"]
    assert sum(segment.sampled_tokens for segment in transcript.segments) == sum(
        turn.generated_tokens for turn in transcript.turns
    )


def test_an_attempt_starts_over_with_its_files_put_back(renderer, environment) -> None:
    config = CONFIG.model_copy(update={"max_restarts": 1})
    wrong = "<edit_file><L3>    return 0</edit_file><run_terminal>pytest</run_terminal>"
    note = "Start over: <L3> is right"
    given = dict(environment.sandbox.files)
    seen = []

    class Watching(ScriptedModel):
        async def end_session(self, session_id):
            seen.append(dict(environment.sandbox.files))
            await super().end_session(session_id)

    model = Watching(renderer, [LOOK, wrong, note, LOOK, REPAIR, note])
    transcript, _ = attempt(renderer, environment, [], config, model=model)
    assert seen[0] == given  # at the end of the first segment
    second = renderer.decode(transcript.segments[1].token_ids_T.tolist())
    assert second.startswith(
        f"<|user|>Fix double in pkg/core.py\n\n{note}<|end|><|assistant|>{LOOK}"
    )
    assert transcript.turns[4].results == ("ok", "passed")
    assert [turn.is_summary for turn in transcript.turns] == [False, False, True] + [False] * 3
    # the second time none is left: the same words end the attempt
    assert transcript.end_reason is EndReason.FINISHED
    assert transcript.final_message == note
    assert sum(segment.sampled_tokens for segment in transcript.segments) == sum(
        turn.generated_tokens for turn in transcript.turns
    )


def test_jobs_are_numbered_on_after_a_start_over(environment) -> None:
    environment.state.num_jobs, environment.state.todo = 2, "[ ] test"
    asyncio.run(environment.restore_files())
    assert (environment.state.num_jobs, environment.state.todo) == (2, "")


def test_a_follow_up_extends_the_earlier_conversation(renderer, environment) -> None:
    first, _ = attempt(renderer, environment, [LOOK, "Which one?"])
    earlier = tuple(first.segments[0].token_ids_T.tolist())
    request = AgentRequest(prompt="Line 2", session_id="s", earlier_token_ids=earlier)
    second, model = attempt(renderer, environment, [REPAIR, "Fixed."], request=request)
    assert second.end_reason is EndReason.FINISHED
    assert second.turns[0].results == ("ok", "passed")
    assert model.requests[0].token_ids[: len(earlier)] == earlier


def test_turns_are_reported_as_they_complete(renderer, environment) -> None:
    heard = []

    async def listen(turn) -> None:
        heard.append(turn.text)

    model = ScriptedModel(renderer, [LOOK, "Fixed."])
    conversation = open_conversation(model, renderer, environment, REQUEST, CONFIG)
    asyncio.run(run_conversation(conversation, environment, REQUEST.prompt, CONFIG, on_turn=listen))
    assert heard == [LOOK, "Fixed."]
