"""Random histories of an engine end alike in eager steps and in steps of fixed shapes."""

import dataclasses

import numpy as np
import pytest

from ostinato.models.decode.config import CachePolicy, EngineConfig
from ostinato.models.decode.engine import DecodeEngine
from ostinato.models.decode.gate import SpeculationGate
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.weights import prepare_weights
from tests.fakes.tiny_model import TINY, random_weights

WEIGHTS = [prepare_weights(TINY, random_weights(TINY, seed), 0) for seed in range(3)]
STEPS, SESSIONS = 130, 9


class EveryChoice(SpeculationGate):
    """Plain steps, copies and drafts in turn; measures nothing."""

    turn = 0

    def choose(self, batch: int, **_: object) -> int:
        self.turn += 1
        choices = [0, 1, 2] if self.max_depth else [0, 1]
        return choices[self.turn % len(choices)]

    def record(self, batch: int, choice: int, seconds: float, tokens: int, **_: object) -> None:
        """Nothing."""


def random_request(
    rng: np.random.Generator, number: int, session: str, context: tuple[int, ...]
) -> GenerateRequest:
    new = tuple(rng.integers(0, TINY.vocab_size, int(rng.integers(1, 40))).tolist())
    prompt = (context + new)[-80:] if rng.random() < 0.8 else tuple(range(1 + number % 32))
    return GenerateRequest(
        f"r{number}",
        session,
        prompt,
        int(rng.integers(1, 25)),
        (30,) if rng.random() < 0.3 else (),
        float(rng.choice([0.0, 0.7, 1.0, 1.5])),
        float(rng.choice([1.0, 0.9])),
        seed=number,
        top_k=int(rng.choice([0, 0, 4])),
        stop_sequences=((3, 4),) if rng.random() < 0.2 else (),
    )


def play(config: EngineConfig, seed: int) -> dict[str, Generation]:
    """Turns, cancellations, ended sessions and swaps, all from the seed and the answers."""
    rng = np.random.default_rng(seed)
    engine = DecodeEngine(TINY, WEIGHTS[0], config, clock=lambda: 0.0)
    if engine._speculator is not None:
        engine._speculator._copy_counts = (0, config.lookup_tokens)  # those of fixed shapes
        depth = engine._speculator.gate.max_depth
        has_lookup = config.lookup_tokens > 0
        engine._speculator.gate = EveryChoice(depth, config.slots, has_lookup=has_lookup)
    finished: dict[str, Generation] = {}
    held: dict[str, GenerateRequest] = {}  # by session
    contexts: dict[str, tuple[int, ...]] = {}
    number = 0

    def end(generation: Generation) -> None:
        finished[generation.request_id] = generation
        request = next(one for one in held.values() if one.request_id == generation.request_id)
        del held[request.session_id]
        contexts[request.session_id] = request.token_ids + generation.token_ids

    for step in range(STEPS):
        for _ in range(int(rng.integers(0, 3))):
            session = f"s{int(rng.integers(0, SESSIONS))}"
            if session not in held:
                context = contexts.get(session, ())
                held[session] = random_request(rng, number, session, context)
                engine.submit(held[session])
                number += 1
        chance, which = rng.random(), f"s{int(rng.integers(0, SESSIONS))}"
        if chance < 0.05 and which in held:
            cancelled = engine.cancel(held[which].request_id)
            assert cancelled is not None
            end(cancelled)
        elif chance < 0.1:
            engine.end_session(which)
        elif chance < 0.13:
            weights = WEIGHTS[int(rng.integers(0, len(WEIGHTS)))]
            engine.swap_weights(dataclasses.replace(weights, version=step + 1))
        for generation in engine.step():
            end(generation)
    while engine.has_work:
        for generation in engine.step():
            end(generation)
    return finished


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speculation_depth": 2},
        {"lookup_tokens": 3},
        {"cache_policy": CachePolicy.EXACT},
        {"slots": 5, "speculation_depth": 2, "cache_policy": CachePolicy.EXACT},
    ],
)
def test_random_histories_end_alike(changes: dict[str, object]) -> None:
    """Log-probs to 5e-5: some contexts mix keys of three versions, whose logits are larger."""
    for seed in range(2):
        config = EngineConfig(**({"slots": 6, "prefill_tokens_per_step": 9 + 31 * seed} | changes))  # type: ignore[arg-type]
        eager = play(config, seed)
        fixed = play(dataclasses.replace(config, fixed_shapes=True), seed)
        assert len(eager) > 30
        assert fixed.keys() == eager.keys()
        for name, expected in eager.items():
            got = fixed[name]
            assert got.token_ids == expected.token_ids
            assert (got.stop_reason, got.route_offset) == (
                expected.stop_reason,
                expected.route_offset,
            )
            np.testing.assert_array_equal(got.weight_versions_T, expected.weight_versions_T)
            np.testing.assert_allclose(got.logprobs_T, expected.logprobs_T, atol=5e-5)
            np.testing.assert_array_equal(
                np.sort(got.routed_experts), np.sort(expected.routed_experts)
            )
