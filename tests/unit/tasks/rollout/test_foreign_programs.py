"""Attempts by programs in boxes: trained tokens are the sampled ones, and whatever a program does is an outcome."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer
from ostinato.tasks.records import Outcome, Problem, Trajectory
from tests.fakes.foreign_programs import LOOP, ForeignRollouts, open_rollouts, python_program


def attempts(
    program: Any,
    answer: Callable[[str], str],
    made_of: tuple[Renderer, PreparedRepository, Problem],
    count: int = 1,
    **limits: Any,
) -> tuple[list[Trajectory], ForeignRollouts]:
    async def run() -> tuple[list[Trajectory], ForeignRollouts]:
        rollouts = open_rollouts(program, answer, *made_of, **limits)
        try:
            return list(
                await asyncio.gather(*(rollouts.attempt(seed) for seed in range(count)))
            ), rollouts
        finally:
            await rollouts.worker.close()

    return asyncio.run(run())


@pytest.fixture
def made_of(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> tuple[Renderer, PreparedRepository, Problem]:
    return renderer, repository, problem


def repair(problem: Problem) -> Callable[[str], str]:
    """Puts the right line back, then says so."""
    edit = problem.edits[0]

    def answer(conversation: str) -> str:
        if conversation.count("<|assistant|>"):
            return "Fixed."
        return f"```sed -i '{edit.line_number}s/.*/{edit.gold_text}/' {edit.path}```"

    return answer


def test_a_program_solves_a_problem(made_of: Any, problem: Problem) -> None:
    (one, two), rollouts = attempts(python_program(LOOP), repair(problem), made_of, count=2)
    assert one.reason == "finished", one.reason
    assert one.verdict is not None
    assert one.verdict.passed
    assert one.transcript.final_message == "done: Fixed."
    assert len(one.transcript.turns) == 2
    assert len(one.transcript.segments) == 1
    assert two.outcome is Outcome.FINISHED
    assert len(rollouts.model.requests) == 4


def always(text: str) -> Callable[[str], str]:
    return lambda conversation: text


MISDEEDS = {
    "does not start": ("raise SystemExit('no licence')", "no answer of the model"),
    "never calls": ("print('I have no questions')", "no answer of the model"),
    "loops on refusals": (
        "while True: post('/v1/chat/completions', {'model': 'ostinato', 'messages': []})",
        "refused requests in a row",
    ),
    "calls another model": (
        "while True: post('/v1/chat/completions', {'model': 'gpt-9', 'messages': [user('x')]})",
        "model is 'gpt-9', wanted 'ostinato'",
    ),
    "asks for four answers": ("chat([user('x')], n=4)", "n is 4"),
    "sends 10 MB": (
        "print(post('/v1/chat/completions', b'x' * (10 << 20)))",
        "wanted at most 4194304",
    ),
    "has another key": ("KEY = 'guessed'\nchat([user('x')])", "API key is missing"),
    "fails after its work": ("chat([user('x')])\nraise SystemExit('out of ideas')", "out of ideas"),
    "leaves more than can be read": (
        "chat([user('x')])\nopen('/repo/pkg/core', 'wb').write(b'x' * (65 << 20))",
        "box_ruined: diff of over 67108864 bytes",
    ),
    "asks for more than its context": (
        "chat([user('x')])\nchat([user('word ' * 9000)])",
        "token_limit: program ended with code 1; its last request was refused: 400 messages are",
    ),
    "never ends": ("chat([user('x')])\nprint('waiting', flush=True)\ntime.sleep(600)", "waiting"),
}


@pytest.mark.parametrize(("source", "reason"), MISDEEDS.values(), ids=MISDEEDS)
@pytest.mark.sampled(2)
def test_a_misdeed_is_a_graded_failure_with_its_reason(
    source: str, reason: str, made_of: Any
) -> None:
    limits = {"attempt_time_limit_seconds": 15.0 if "600" in source else 120.0}
    (one,), _ = attempts(python_program(source), always("Yes."), made_of, **limits)
    assert one.verdict is not None
    assert not one.verdict.passed
    assert reason in one.reason, one.reason
    assert one.outcome in (Outcome.BROKEN, Outcome.TIMED_OUT, Outcome.TRUNCATED)
    assert len(one.transcript.turns) == source.startswith("chat([user('x')])")


def test_a_refusal_that_a_program_does_not_mind_is_in_its_reason(made_of: Any) -> None:
    source = "chat([user('x')])\nprint(post('/v1/embeddings', {})[0])"
    (one,), _ = attempts(python_program(source), always("Yes."), made_of)
    assert one.outcome is Outcome.FINISHED
    assert one.reason == "finished: its last request was refused: 404 Not Found"


def test_what_a_program_leaves_behind_ends_with_it(made_of: Any) -> None:
    source = (
        "chat([user('x')])\n"
        "loop = 'while true; do date >> /repo/pkg/code.py; done'\n"
        "subprocess.Popen(['setsid', 'sh', '-c', loop])\n"
        "for _ in range(500):\n"
        "    try: subprocess.Popen(['setsid', 'sleep', '600'])\n"
        "    except OSError: break\n"
    )
    (one,), _ = attempts(python_program(source), always("Yes."), made_of)
    assert one.verdict is not None
    assert one.outcome is Outcome.FINISHED, one.reason


def test_a_dropped_connection_costs_no_token(made_of: Any) -> None:
    source = (
        "try: post('/v1/chat/completions', {'model': 'ostinato', 'messages': [user('x')]}, 0.5)\n"
        "except OSError: print('gone')\n"
        "time.sleep(1)\n"  # clients wait before they try again
        "print(chat([user('x')])['content'])\n"
    )

    async def run() -> tuple[Trajectory, int]:
        rollouts = open_rollouts(python_program(source), always("Yes."), *made_of)
        rollouts.model.wait = lambda: asyncio.sleep(3.0)
        try:
            return await rollouts.attempt(), len(rollouts.model.requests)
        finally:
            await rollouts.worker.close()

    one, num_sampled = asyncio.run(run())
    assert one.transcript.final_message == "gone\nYes."
    assert num_sampled == 1
    assert len(one.transcript.turns) == 1


def test_attempts_at_the_same_time_have_sessions_of_their_own(made_of: Any) -> None:
    source = "for _ in range(3): print(chat([user(PROMPT)], max_tokens=50)['content'])"
    ended, _ = attempts(python_program(source), always("Yes."), made_of, count=3)
    assert [len(one.transcript.turns) for one in ended] == [3, 3, 3]
    assert all(len(one.transcript.segments) == 3 for one in ended)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_each_api_is_one_continued_segment(path: str, made_of: Any) -> None:
    source = f"""
fields = {{"messages": "max_tokens", "responses": "max_output_tokens"}}
limit = {{fields.get("{path}", "max_completion_tokens"): 40}}
name = "input" if "{path}" == "responses" else "messages"
said = [user("x")]
for number in range(3):
    status, answer = post("/v1/{path}", {{"model": "ostinato", name: said, **limit}})
    assert status == 200, answer
    if "{path}" == "messages":
        said.append({{"role": "assistant", "content": answer["content"]}})
    elif name == "input":
        said += answer["output"]
    else:
        said.append(answer["choices"][0]["message"])
    said.append(user(f"again {{number}}"))
"""
    (one,), rollouts = attempts(python_program(source), always("Yes."), made_of)
    assert one.outcome is Outcome.FINISHED, one.reason
    assert len(one.transcript.segments) == 1
    check_sampled(one.transcript, rollouts)


def test_the_rest_of_the_world_stays_closed(made_of: Any) -> None:
    source = (
        "chat([user('x')])\n"
        "for address in (('10.0.0.1', 80), ('1.1.1.1', 443)):\n"
        "    try: socket.create_connection(address, 2).close(); print('open', address)\n"
        "    except OSError as error: print('closed')\n"
        "print(os.listdir('/'))\n"
    )
    (one,), _ = attempts(python_program(source), always("Yes."), made_of)
    assert one.outcome is Outcome.FINISHED, one.reason
    assert one.transcript.final_message.startswith("closed\nclosed")


def check_sampled(transcript: Transcript, rollouts: ForeignRollouts) -> None:
    """The trained tokens are those that the model was asked for, behind what it was asked with."""
    requests = rollouts.model.requests
    runs = [
        (segment, int(start))
        for segment in transcript.segments
        for start in np.flatnonzero(np.diff(np.append(0, segment.loss_mask_T.astype(int))) == 1)
    ]
    assert len(runs) == len(requests) == len(transcript.turns)
    for (segment, start), request in zip(runs, requests, strict=True):
        assert tuple(segment.token_ids_T[:start].tolist()) == request.token_ids


def test_of_a_stream_that_its_client_leaves_the_sampled_part_is_trained(made_of: Any) -> None:
    source = (
        "body = {'model': 'ostinato', 'messages': [user('x')], 'stream': True}\n"
        "request = urllib.request.Request(\n"
        "    URL + '/v1/chat/completions', json.dumps(body).encode(),\n"
        "    {'Authorization': f'Bearer {KEY}', 'Content-Type': 'application/json'})\n"
        "stream = urllib.request.urlopen(request, timeout=60)\n"
        "while b'Yes' not in stream.readline(): pass\n"
        "os._exit(0)\n"
    )

    async def run() -> tuple[Trajectory, int]:
        rollouts = open_rollouts(python_program(source), always("Yes. " * 200), *made_of)
        rollouts.model.wait = lambda: asyncio.sleep(0.3)
        try:
            return await rollouts.attempt(), len(rollouts.model.requests)
        finally:
            await rollouts.worker.close()

    one, num_slices = asyncio.run(run())
    (turn,) = one.transcript.turns
    (segment,) = one.transcript.segments
    assert 0 < segment.sampled_tokens == turn.generated_tokens <= 8 * num_slices
