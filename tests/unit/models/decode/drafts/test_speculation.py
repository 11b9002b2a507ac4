"""Speculation changes speed only: the same tokens, log-probs and routes as plain decoding; the gate
follows the clock.
"""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.compiled.loader import load_native_trunk
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, StopReason
from ostinato.models.decode.weights import DecodeWeights, prepare_weights
from tests.fakes.engine_runs import run_in_order
from tests.fakes.tiny_model import TINY, random_weights
from tests.numerics.plain_model import plain_draft, plain_logits

CANONICAL = random_weights(TINY)
WEIGHTS = prepare_weights(TINY, CANONICAL, 0)


def make_engine(depth: int, weights: DecodeWeights = WEIGHTS, slots: int = 4) -> DecodeEngine:
    return DecodeEngine(
        TINY, weights, EngineConfig(slots=slots, draft_layers=depth, always_drafts=True)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_speculative_decoding_equals_plain_decoding(temperature: float) -> None:
    requests = [
        GenerateRequest(
            *(f"r{i}", f"s{i}", (i + 1, 5, 2), 25 + i, (30,), temperature, 0.95),
            seed=i,
            top_logprobs=i % 3,  # for some of a step's requests
        )
        for i in range(9)
    ]
    plain, speculative = (
        run_in_order(make_engine(0), requests),
        run_in_order(make_engine(2), requests),
    )
    for expected, generation in zip(plain, speculative, strict=True):
        assert generation.token_ids == expected.token_ids
        assert generation.stop_reason == expected.stop_reason
        np.testing.assert_allclose(generation.logprobs_T, expected.logprobs_T, atol=2e-5)
        np.testing.assert_array_equal(
            np.sort(generation.routed_experts), np.sort(expected.routed_experts)
        )
        for mine, theirs in zip(generation.likeliest_T, expected.likeliest_T, strict=True):
            assert dict(mine) == pytest.approx(dict(theirs), abs=2e-5)
    accepted = sum(generation.draft_tokens_accepted for generation in speculative)
    assert accepted > 0 or temperature < 1  # random draft layers rarely guess a maximum


def test_a_stop_sequence_inside_a_speculative_step_ends_it_there() -> None:
    """Every run of one to three tokens of the plain answer, wherever drafts put the step ends."""
    one = GenerateRequest("r", "s", (3, 5, 2), 24, (), 0.8, seed=3)
    tokens = run_in_order(make_engine(0), [one])[0].token_ids
    requests = [
        dataclasses.replace(
            one,
            request_id=f"r{start}-{length}",
            session_id=f"s{start}-{length}",
            stop_sequences=(tokens[start : start + length],),
        )
        for start in range(20)
        for length in (1, 2, 3)
    ]
    plain, speculative = (
        run_in_order(make_engine(0), requests),
        run_in_order(make_engine(2), requests),
    )
    for expected, generation in zip(plain, speculative, strict=True):
        assert generation.token_ids == expected.token_ids
        assert generation.stop_reason is expected.stop_reason is StopReason.STOP_SEQUENCE
    assert sum(generation.draft_tokens_accepted for generation in speculative) > 0


def test_a_full_context_ends_speculation_too() -> None:
    request = GenerateRequest("r", "s", tuple([3] * 80), 60, (), seed=4)
    assert [g.token_ids for g in run_in_order(make_engine(2), [request])] == [
        g.token_ids for g in run_in_order(make_engine(0), [request])
    ]


def test_speculative_samples_follow_the_models_distribution() -> None:
    prompt = (3, 1, 4)
    requests = [
        GenerateRequest(f"r{seed}", f"s{seed}", prompt, 4, (), seed=seed) for seed in range(3000)
    ]
    generations = run_in_order(make_engine(2, slots=128), requests)
    first = np.bincount([g.token_ids[0] for g in generations], minlength=TINY.vocab_size).argmax()
    followers = [g.token_ids[1] for g in generations if g.token_ids[0] == first]
    logits_V = plain_logits(torch.tensor([*prompt, first]), CANONICAL, TINY)[-1]
    expected_V = torch.softmax(logits_V.double(), -1).numpy() * len(followers)
    counts_V = np.bincount(followers, minlength=TINY.vocab_size)
    common = expected_V >= 5
    observed = np.append(counts_V[common], counts_V[~common].sum())
    expected = np.append(expected_V[common], expected_V[~common].sum())
    assert len(followers) > 200
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_drafts_follow_the_draft_layers_formulae() -> None:
    native = load_native_trunk(TINY, SlotCache(TINY, 4, 16), 4)
    state_BD = torch.randn(3, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens, states = [4, 9, 30], [row.clone() for row in state_BD]
    for depth in range(TINY.mtp_depth):
        logits_BV = native.draft(WEIGHTS, depth, state_BD.numpy(), np.array(tokens))
        for row, token in enumerate(tokens):
            states[row], expected_V = plain_draft(states[row], token, CANONICAL, depth, TINY)
            found_V = torch.from_numpy(logits_BV[row])
            torch.testing.assert_close(found_V, expected_V, atol=1e-4, rtol=1e-4)


def test_a_perfect_draft_is_always_accepted() -> None:
    """With a trunk that only passes the embedding on and a draft layer that copies, both predict
    the same.
    """
    weights = {name: torch.zeros_like(tensor) for name, tensor in CANONICAL.items()}
    embedding = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))[0][
        :, :16
    ]
    weights["model.embed_tokens.weight"] = 3 * embedding
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = torch.ones_like(weights[name])
    for depth in range(2):
        weights[f"model.mtp.{depth}.in_proj.weight"][:, 16:] = torch.eye(16)
    engine = make_engine(2, prepare_weights(TINY, weights, 0))
    generation = run_in_order(engine, [GenerateRequest("r", "s", (5,), 61, (), seed=1)])[0]
    assert generation.draft_tokens_accepted == generation.draft_tokens_proposed == 40
    assert dataclasses.asdict(engine.statistics)["steps"] == 1 + 20  # the prompt, then drafts
