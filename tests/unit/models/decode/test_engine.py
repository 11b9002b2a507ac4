"""Laws of the decode engine: batching, reuse, chunking and swaps change no token."""

import dataclasses

import numpy as np
import pytest
import torch

from ostinato.models.decode.engine import CachePolicy, DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation, Priority, StopReason
from ostinato.models.decode.weights import DecodeWeights, prepare_weights
from tests.fakes.engine_runs import run
from tests.fakes.tiny_model import TINY, random_weights
from tests.numerics.plain_model import plain_logits

WEIGHTS = prepare_weights(TINY, random_weights(TINY), version=3)
LATER_WEIGHTS = prepare_weights(TINY, random_weights(TINY, seed=1), version=4)


def request(index: int, prompt: tuple[int, ...], **changes: object) -> GenerateRequest:
    base = GenerateRequest(f"request-{index}", f"session-{index}", prompt, 20, (), seed=index)
    return dataclasses.replace(base, **changes)


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [
        tuple(rng.integers(0, TINY.vocab_size, int(rng.integers(1, 30))).tolist())
        for _ in range(count)
    ]


def make_engine(weights: DecodeWeights = WEIGHTS, **changes: object) -> DecodeEngine:
    return DecodeEngine(TINY, weights, EngineConfig(**({"slots": 8} | changes)))  # type: ignore[arg-type]


def begun() -> tuple[DecodeEngine, GenerateRequest]:
    """An engine that has sampled five tokens of a request."""
    engine, one = make_engine(), request(0, (1, 2, 3))
    engine.submit(one)
    for _ in range(5):
        engine.step()
    return engine, one


def plain_logprobs(prompt: tuple[int, ...], generation: Generation, seed: int = 0) -> np.ndarray:
    context = torch.tensor(prompt + generation.token_ids)
    logprobs_TV = plain_logits(context, random_weights(TINY, seed), TINY).log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(context) - 1)
    return logprobs_TV[places, context[places + 1]].numpy()


def test_logprobs_of_a_mixed_batch_equal_the_plain_model() -> None:
    requests = [request(index, prompt) for index, prompt in enumerate(prompts(12))]
    finished = run(make_engine(prefill_tokens_per_step=16), requests)
    for one in requests:
        generation = finished[one.request_id]
        assert len(generation.token_ids) == 20
        np.testing.assert_allclose(
            generation.logprobs_T, plain_logprobs(one.token_ids, generation), atol=2e-5
        )


def test_samples_do_not_depend_on_the_batch() -> None:
    requests = [request(index, prompt) for index, prompt in enumerate(prompts(10))]
    together = run(make_engine(slots=8), requests)
    for one in requests:
        alone = run(make_engine(slots=1, prefill_tokens_per_step=5), [one])[one.request_id]
        assert alone.token_ids == together[one.request_id].token_ids


def test_greedy_takes_the_likeliest_token() -> None:
    one = request(0, (1, 2, 3), temperature=0.0)
    generation = run(make_engine(), [one])[one.request_id]
    context = torch.tensor(one.token_ids + generation.token_ids)
    best_T = plain_logits(context, random_weights(TINY), TINY).argmax(-1)
    assert generation.token_ids == tuple(best_T[2:-1].tolist())


def test_routes_cover_every_fed_position_and_match_a_fresh_pass() -> None:
    one = request(0, tuple(range(9)))
    generation = run(make_engine(), [one])[one.request_id]
    context = one.token_ids + generation.token_ids
    again = request(1, context[:-1], max_new_tokens=1)
    fresh = run(make_engine(), [again])[again.request_id]
    assert generation.routed_experts.shape == (
        len(context) - 1,
        TINY.num_layers,
        TINY.experts_per_token,
    )
    assert generation.route_offset == 0
    np.testing.assert_array_equal(np.sort(generation.routed_experts), np.sort(fresh.routed_experts))


def test_a_second_turn_feeds_only_new_tokens_and_equals_a_fresh_engine() -> None:
    engine = make_engine()
    first = request(0, tuple(range(10)))
    answer = run(engine, [first])[first.request_id]
    prompt = first.token_ids + answer.token_ids + (7, 8, 9)
    second = request(0, prompt, request_id="second")
    fed_before = engine.statistics.prefill_tokens
    generation = run(engine, [second])["second"]
    assert (
        engine.statistics.prefill_tokens - fed_before == 4
    )  # the last sampled token and three new ones
    assert generation.token_ids == run(make_engine(), [second])["second"].token_ids
    assert generation.route_offset == len(first.token_ids) + len(answer.token_ids) - 1
    rows = len(answer.routed_experts) + len(generation.routed_experts)
    assert rows == len(prompt) + len(generation.token_ids) - 1


def test_a_changed_history_reuses_only_the_common_start() -> None:
    engine = make_engine()
    run(engine, [request(0, tuple(range(20)))])
    changed = (*range(12), 31, 30)
    second = request(0, changed, request_id="second")
    generation = run(engine, [second])["second"]
    assert generation.route_offset == 12
    assert generation.token_ids == run(make_engine(), [second])["second"].token_ids


def test_attempts_at_one_problem_share_the_prompt() -> None:
    prompt = tuple(range(30))
    requests = [request(index, prompt) for index in range(6)]
    engine = make_engine()
    shared = run(engine, requests)
    assert (
        engine.statistics.prefill_tokens == 30
    )  # the last prompt token of each other attempt is a decode row
    apart = run(make_engine(share_prefixes=False), requests)
    for name, generation in apart.items():
        assert shared[name].token_ids == generation.token_ids
        assert shared[name].route_offset == 0
        np.testing.assert_array_equal(shared[name].routed_experts, generation.routed_experts)


def test_idle_sessions_are_evicted_oldest_first() -> None:
    engine = make_engine(slots=2, share_prefixes=False)
    for index in range(3):
        run(engine, [request(index, (index, 5, 6))])
    reused = engine.statistics.reused_tokens
    run(engine, [request(2, (2, 5, 6, 7), request_id="kept")])
    assert engine.statistics.reused_tokens == reused + 3
    run(engine, [request(0, (0, 5, 6, 7), request_id="gone")])
    assert engine.statistics.reused_tokens == reused + 3


def test_a_swap_in_flight_versions_each_token() -> None:
    engine, one = begun()
    engine.swap_weights(LATER_WEIGHTS)
    generation = run(engine, [])[one.request_id]
    assert generation.weight_versions_T.tolist() == [3] * 5 + [4] * 15
    unswapped = run(make_engine(), [one])[one.request_id]
    assert generation.token_ids[:5] == unswapped.token_ids[:5]


def test_exact_policy_computes_running_requests_again_and_keeps_recorded_routes() -> None:
    engine = make_engine(cache_policy=CachePolicy.EXACT)
    one = request(0, (1, 2, 3))
    engine.submit(one)
    for _ in range(5):
        engine.step()
    engine.swap_weights(LATER_WEIGHTS)
    generation = run(engine, [])[one.request_id]
    expected = plain_logprobs(one.token_ids, generation, seed=1)
    np.testing.assert_allclose(generation.logprobs_T[5:], expected[5:], atol=2e-5)
    unswapped = run(make_engine(), [one])[one.request_id]
    np.testing.assert_array_equal(generation.routed_experts[:7], unswapped.routed_experts[:7])


def test_exact_policy_never_reuses_a_cache_of_older_weights() -> None:
    engine = make_engine(cache_policy=CachePolicy.EXACT)
    run(engine, [request(0, (1, 2, 3))])
    engine.swap_weights(LATER_WEIGHTS)
    run(engine, [request(0, (1, 2, 3, 4), request_id="second")])
    assert engine.statistics.reused_tokens == 0


def test_prefixes_are_never_shared_across_versions() -> None:
    engine = make_engine()
    run(engine, [request(0, (1, 2, 3))])
    engine.swap_weights(LATER_WEIGHTS)
    run(engine, [request(1, (1, 2, 3, 4))])
    assert engine.statistics.reused_tokens == 0


def test_stop_token_ends_and_is_included() -> None:
    one = request(0, (1, 2, 3))
    tokens = run(make_engine(), [one])[one.request_id].token_ids
    stop = tokens[6]
    stopped = run(make_engine(), [dataclasses.replace(one, stop_token_ids=(stop,))])[one.request_id]
    assert stopped.token_ids == tokens[: tokens.index(stop) + 1]
    assert stopped.stop_reason is StopReason.STOP_TOKEN


def test_a_stop_sequence_ends_the_answer_and_is_part_of_it() -> None:
    one = request(0, (1, 2, 3), temperature=2.0)
    tokens = run(make_engine(), [one])[one.request_id].token_ids
    runs = [tokens[end - 3 : end] for end in range(3, len(tokens))]
    end = next(end for end in range(8, len(tokens)) if runs.index(tokens[end - 3 : end]) == end - 3)
    sequences = ((tokens[0], 31 - tokens[1]), tokens[end - 3 : end])
    stopped = run(make_engine(), [dataclasses.replace(one, stop_sequences=sequences)])
    generation = stopped[one.request_id]
    assert generation.token_ids == tokens[:end]
    assert len(generation.logprobs_T) == end
    assert generation.stop_reason is StopReason.STOP_SEQUENCE


def test_a_stop_sequence_never_begins_in_the_prompt() -> None:
    one = request(0, (1, 2, 3))
    tokens = run(make_engine(), [one])[one.request_id].token_ids
    reaching_back = dataclasses.replace(one, stop_sequences=((3, tokens[0]),))
    assert run(make_engine(), [reaching_back])[one.request_id].token_ids == tokens


def test_a_slot_forgets_the_stop_sequences_of_its_last_request() -> None:
    engine = make_engine(slots=1)
    one = request(0, (1, 2, 3))
    tokens = run(make_engine(), [one])[one.request_id].token_ids
    run(engine, [dataclasses.replace(one, stop_sequences=(tokens[3:5],))])
    again = dataclasses.replace(one, request_id="again", session_id="again")
    assert run(engine, [again])["again"].token_ids == tokens


def test_top_k_of_one_is_greedy_and_leaves_its_neighbours_alone() -> None:
    requests = [request(index, (1, 2, 3)) for index in range(4)]
    free = run(make_engine(), requests)
    limited = [dataclasses.replace(requests[0], top_k=1), *requests[1:]]
    mixed = run(make_engine(), limited)
    greedy = run(make_engine(), [dataclasses.replace(requests[0], temperature=0.0)])
    assert mixed["request-0"].token_ids == greedy["request-0"].token_ids
    assert np.all(mixed["request-0"].logprobs_T == 0)
    for one in requests[1:]:
        assert mixed[one.request_id].token_ids == free[one.request_id].token_ids
        np.testing.assert_allclose(
            mixed[one.request_id].logprobs_T, free[one.request_id].logprobs_T, atol=2e-5
        )


def test_sampled_tokens_are_told_while_the_request_runs() -> None:
    engine, one = begun()
    told = engine.sampled_tokens(one.request_id, 0)
    assert engine.sampled_tokens(one.request_id, 3) == told[3:]
    assert run(engine, [])[one.request_id].token_ids[: len(told)] == told
    assert len(told) == 5


def test_a_full_context_is_an_answer_not_an_error() -> None:
    requests = [
        request(0, (1,) * 90, max_new_tokens=50),
        request(1, (1,) * 96),
        request(2, (2,) * 95),
    ]
    finished = run(make_engine(), requests)
    assert [finished[one.request_id].stop_reason for one in requests] == [StopReason.CONTEXT] * 3
    assert [len(finished[one.request_id].token_ids) for one in requests] == [6, 0, 1]


def test_users_are_served_before_training() -> None:
    engine = make_engine(slots=1)
    engine.submit(request(0, (1, 2), priority=Priority.TRAINING))
    engine.submit(request(1, (1, 2), priority=Priority.USER))
    order = []
    while engine.has_work:
        order += [generation.request_id for generation in engine.step()]
    assert order == ["request-1", "request-0"]


def test_cancel_returns_what_was_sampled() -> None:
    engine = make_engine(slots=1)
    for index in range(2):
        engine.submit(request(index, (1, 2)))
    for _ in range(4):
        engine.step()
    running, waiting = engine.cancel("request-0"), engine.cancel("request-1")
    assert running is not None
    assert waiting is not None
    assert (len(running.token_ids), len(waiting.token_ids)) == (4, 0)
    assert running.stop_reason is waiting.stop_reason is StopReason.CANCELLED
    assert not engine.has_work
    assert engine.cancel("request-0") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": ()}, "0 tokens"),
        ({"token_ids": (1, 32)}, "wanted 0..31"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"stop_sequences": ((),)}, "stop sequence"),
        ({"stop_sequences": ((1, 32),)}, "stop sequence"),
        ({"stop_token_ids": (99,)}, "stop_token_ids"),
    ],
)
def test_a_wrong_request_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make_engine().submit(request(0, (1, 2), **change))
    assert "request-0" in str(caught.value)
