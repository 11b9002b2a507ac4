"""Whatever a client does with its histories, trained tokens are the sampled ones, each once."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.attempts.session import MAX_AT_ONCE
from ostinato.infra.serving.gateway.failures import ApiError
from ostinato.infra.serving.gateway.schemas import ChatMessage
from ostinato.models.decode.protocol import StopReason
from tests.fakes.client_sessions import (
    RENDERER,
    STEPS,
    Sampler,
    ask,
    begin,
    check_exact,
    ended,
    open_session,
    play,
    prefixes,
    said,
    to_end,
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=1, max_size=12),
    st.sampled_from([StopReason.STOP_TOKEN, StopReason.LENGTH]),
)
def test_every_sampled_token_is_trained_once_where_it_was_sampled(
    steps: list[tuple[str, int]], end: StopReason
) -> None:
    model = Sampler(end)
    session = open_session(model)
    asyncio.run(play(session, steps))
    transcript = ended(session)
    check_exact(model, transcript)
    # the trainer computes what was sampled from and what was sampled, nothing twice and nothing else
    computed = prefixes([one.token_ids_T.tolist() for one in transcript.segments])
    seen = prefixes([(*request.token_ids, *made.token_ids) for request, made in model.asked])
    assert {computed[one] for one in computed.keys() - seen.keys()} <= {RENDERER.end_id}
    assert seen.keys() <= computed.keys()
    assert Transcript.from_bytes(transcript.to_bytes()).turns == transcript.turns


def test_a_history_that_goes_on_is_one_segment() -> None:
    async def run() -> None:
        history: list[ChatMessage] = []
        for number in range(5):
            history = await ask(session, [*history, said("user", f"it is said {number}")])

    model = Sampler()
    session = open_session(model)
    asyncio.run(run())
    assert len(ended(session).segments) == 1
    assert {request.session_id for request, _ in model.asked} == {model.asked[0][0].session_id}
    assert [turn.continues for turn in ended(session).turns] == [None] * 5


def test_branches_name_the_turn_that_they_go_on_from() -> None:
    async def run() -> None:
        one = await ask(session, [said("user", "a user asks")])
        two = await ask(session, [*one, said("user", "an answer")])
        await ask(session, [*one, said("user", "comes")])
        await ask(session, [*two, said("user", "again")])

    session = open_session(Sampler())
    asyncio.run(run())
    transcript = ended(session)
    assert len(transcript.segments) == 2
    # the branch that nothing followed comes first: turns 1 and 3, then 2 and 4
    assert [turn.continues for turn in transcript.turns] == [None, None, 0, None]


@pytest.mark.parametrize("is_gone", [True, False], ids=["retried", "asked twice"])
def test_a_repeated_request_is_a_retry_where_its_client_has_left(is_gone: bool) -> None:
    async def left() -> bool:
        return is_gone

    async def run() -> tuple[str, str]:
        model.wait = asyncio.Event()
        first = await begin(session, [said("user", "a user asks")])
        first.is_client_gone = left
        pending = asyncio.ensure_future(session.answer(first))
        await asyncio.sleep(0)
        second = await begin(session, [said("user", "a user asks")])
        model.wait.set()
        answers = await asyncio.gather(pending, session.answer(second))
        return answers[0].message.text, answers[1].message.text

    model = Sampler()
    session = open_session(model)
    first, second = asyncio.run(run())
    assert len(model.asked) == (1 if is_gone else 2)
    assert (first == second) == is_gone
    check_exact(model, ended(session))


def test_what_a_client_says_about_sampling_is_passed_over() -> None:
    async def run() -> None:
        fields = {
            "max_tokens": 6,
            "temperature": 0.0,
            "top_p": 0.1,
            "seed": 99,
            "logprobs": True,
            "top_logprobs": 5,
        }
        answering = await begin(session, [said("user", "a user asks")], **fields)
        finished = await session.answer(answering)
        assert finished.logprobs == ()

    model = Sampler()
    session = open_session(model)
    asyncio.run(run())
    ((request, _),) = model.asked
    assert (request.temperature, request.top_p, request.seed) == (1.0, 1.0, 5)
    assert request.top_logprobs == 0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 2}, EndReason.TURN_LIMIT),
        ({"max_generated_tokens": 1}, EndReason.TOKEN_LIMIT),
    ],
)
def test_a_limit_ends_the_attempt(limits: dict[str, int], reason: EndReason) -> None:
    async def run() -> None:
        for number in range(3):
            await ask(session, [said("user", f"it is said {number}")])

    session = open_session(Sampler(), **limits)
    with pytest.raises(ApiError) as refused:
        asyncio.run(run())
    assert refused.value.status_code == 403
    assert session.ending[0] is reason
    assert session.ended.is_set()


@pytest.mark.parametrize(("max_turns", "at_once"), [(500, MAX_AT_ONCE), (3, 3)])
def test_answers_at_once_are_limited_and_others_may_ask_again(max_turns: int, at_once: int) -> None:
    async def run() -> None:
        model.wait = asyncio.Event()
        asked = [
            asyncio.ensure_future(ask(session, [said("user", f"it is said {number}")]))
            for number in range(40)
        ]
        refused, _ = await asyncio.wait(asked, timeout=0.5)
        model.wait.set()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        refusals = [each for each in ended if isinstance(each, ApiError)]
        assert len(refusals) == len(refused) == 40 - at_once
        assert {each.status_code for each in refusals} == {429}

    model = Sampler()
    session = open_session(model, max_turns=max_turns)
    asyncio.run(run())
    assert not session.ended.is_set()
    assert len(session.graph.turns) == at_once
    check_exact(model, ended(session))


@pytest.mark.parametrize("is_stream", [True, False], ids=["streams", "whole"])
def test_answers_at_once_together_use_the_limit_of_tokens_and_no_more(is_stream: bool) -> None:
    async def run() -> None:
        answerings = [
            await begin(session, [said("user", f"it is said {number}")], stream=is_stream)
            for number in range(6)
        ]
        await asyncio.gather(*(to_end(session, answering) for answering in answerings))
        with pytest.raises(ApiError):
            await begin(session, [said("user", "again")])

    model = Sampler(StopReason.LENGTH)
    session = open_session(model, max_generated_tokens=1000)
    asyncio.run(run())
    assert model.num_sampled == 1000
    assert session.ending[0] is EndReason.TOKEN_LIMIT
    check_exact(model, ended(session))


def test_answers_at_once_that_need_few_tokens_are_all_whole() -> None:
    async def run() -> None:
        model.wait = asyncio.Event()
        asked = [
            asyncio.create_task(begin(session, [said("user", f"it is said {number}")]))
            for number in range(12)
        ]
        pending = [asyncio.create_task(session.answer(one)) for one in await asyncio.gather(*asked)]
        await asyncio.sleep(0.05)
        model.wait.set()
        finished = await asyncio.gather(*pending)
        assert [one.finish_reason for one in finished] == ["stop"] * 12

    model = Sampler()
    session = open_session(model, max_generated_tokens=80)  # 12 answers of at most 5 tokens
    asyncio.run(run())
    assert len(session.graph.turns) == 12
    assert not session.ended.is_set()
    check_exact(model, ended(session))


def test_tokens_of_an_answer_that_failed_are_free_again() -> None:
    async def run() -> None:
        model.failures = 1
        with pytest.raises(EngineError):
            await to_end(session, await begin(session, [said("user", "a user asks")]))
        await to_end(session, await begin(session, [said("user", "a user asks")]))

    model = Sampler(StopReason.LENGTH)
    session = open_session(model, max_generated_tokens=1000)
    asyncio.run(run())
    assert model.num_sampled == 1000


def test_streams_that_never_start_hold_no_place() -> None:
    async def run() -> None:
        for number in range(2 * MAX_AT_ONCE):
            history = [said("user", f"it is said {number}")]
            session.stream(await begin(session, history, stream=True))
        await ask(session, [said("user", "a user asks")])

    session = open_session(Sampler())
    asyncio.run(run())
    assert len(session.graph.turns) == 1


def test_the_engine_frees_the_sessions_of_answers_that_are_not_kept() -> None:
    async def run() -> None:
        model.wait = asyncio.Event()
        pending = asyncio.ensure_future(ask(session, [said("user", "a user asks")]))
        await asyncio.sleep(0.1)
        await session.close()
        await asyncio.gather(pending, return_exceptions=True)

    model = Sampler()
    session = open_session(model)
    asyncio.run(run())
    assert len(model.ended_sessions) == 1


def test_no_request_that_was_on_its_way_is_sampled_after_the_end() -> None:
    async def run() -> None:
        coming = asyncio.ensure_future(begin(session, [said("user", "a user asks")]))
        await asyncio.sleep(0)
        session.end(EndReason.TIMED_OUT, "")
        with pytest.raises(ApiError) as refused:
            await coming
        assert refused.value.status_code == 403

    session = open_session(Sampler())
    asyncio.run(run())


def test_a_full_context_is_known_until_a_shorter_prompt_comes() -> None:
    async def run() -> None:
        with pytest.raises(ApiError):
            await ask(session, [said("user", "it is said again " * 20)])
        assert session.is_context_full
        await ask(session, [said("user", "again")])
        assert not session.is_context_full

    session = open_session(Sampler(), context_tokens=40)
    asyncio.run(run())


def test_an_answer_that_its_client_wrote_on_is_rendered_as_one() -> None:
    async def run() -> None:
        one = await ask(session, [said("user", "a user asks")])
        await ask(session, [*one, said("assistant", " again"), said("user", "it is said")])

    model = Sampler()
    session = open_session(model)
    asyncio.run(run())
    first, second = (list(request.token_ids) for request, _ in model.asked)
    # one header per answer: the one that was written on, and the coming one
    assert second.count(RENDERER.assistant_id) == 2
    assert second.count(RENDERER.end_id) == first.count(RENDERER.end_id) + 2
    check_exact(model, ended(session))
