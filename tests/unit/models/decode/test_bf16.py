"""Decoding in bf16: matrices of half the size, and else what fp32 computes of the rounded weights, bit for bit."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.infra.serving.engine.start import start_engine
from ostinato.models.decode.compiled.packed import PANEL, pack_matrix
from ostinato.models.decode.config import CachePolicy, EngineConfig, Precision
from ostinato.models.decode.engine import DecodeEngine
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.weights import DecodeWeights, prepare_weights
from ostinato.models.spec import ModelSpec
from tests.fakes.engine_runs import run, run_in_order
from tests.fakes.small_spec import make_spec
from tests.fakes.tiny_model import random_weights

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles

EXPERTS = make_spec(70, 48, heads=(4, 2, 16), experts=(6, 2, 16), drafts=(2, 32))
# heads as SmolLM2's, a bias and a head of its own
DENSE = make_spec(200, 144, heads=(9, 3, 16)).model_copy(
    update={
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_hidden_size": 0,
        "num_dense_layers": 2,
        "dense_hidden_size": 96,
        "qk_norm": False,
        "qkv_bias": True,
        "tied_embeddings": False,
    }
)
SOFTMAX = make_spec(90, 64, heads=(6, 2, 32)).model_copy(
    update={"router_score": "softmax", "router_normalizes": False}
)
FAMILIES = pytest.mark.parametrize("spec", [EXPERTS, DENSE, SOFTMAX], ids=["moe", "dense", "soft"])
WAYS = pytest.mark.parametrize(
    "changes",
    [
        {"slots": 1},
        {"slots": 8},
        {"slots": 8, "draft_layers": 2, "always_drafts": True},
    ],
    ids=["one", "batch", "drafts"],
)


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a weight is stored in bf16: all but norms, biases and the router."""
    return tensor.ndim > 1 and not name.endswith("mlp.gate.weight")


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in fp32, their matrices rounded to bf16."""
    return {
        name: tensor.bfloat16().float() if is_matrix(name, tensor) else tensor
        for name, tensor in weights.items()
    }


def widened(weights: DecodeWeights) -> DecodeWeights:
    """The same numbers in fp32, norms apart as there."""

    def widen(array: np.ndarray) -> np.ndarray:
        if array.dtype == np.float32:
            return array
        return (array.astype(np.uint32) << 16).view(np.float32)

    return replace(
        weights,
        trunk=type(weights.trunk)(*map(widen, weights.trunk)),
        drafts=tuple(type(draft)(*map(widen, draft)) for draft in weights.drafts),
    )


def requests(spec: ModelSpec, count: int = 9, new_tokens: int = 20) -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    return [
        GenerateRequest(
            f"r{index}",
            f"s{index}",
            tuple(rng.integers(0, spec.vocab_size, int(rng.integers(1, 30))).tolist()),
            new_tokens,
            (),
            temperature=(1.0, 0.7, 0.0)[index % 3],
            seed=index,
        )
        for index in range(count)
    ]


def decode(
    spec: ModelSpec, first: DecodeWeights, later: DecodeWeights, changes: dict[str, object]
) -> list[Generation]:
    """Answers that live through a swap, at the same tokens in every run."""
    config = EngineConfig(prefill_tokens_per_step=24, **changes)  # type: ignore[arg-type]
    engine = DecodeEngine(spec, first, config)
    wanted = requests(spec)
    for request in wanted:
        engine.submit(request)
    finished = {}
    for _ in range(12):
        finished |= {generation.request_id: generation for generation in engine.step()}
    engine.swap_weights(later)
    finished |= run(engine, [])
    return [finished[request.request_id] for request in wanted]


def assert_equal(answers: list[Generation], expected: list[Generation]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        np.testing.assert_array_equal(answer.logprobs_T, wanted.logprobs_T)
        np.testing.assert_array_equal(answer.routed_experts, wanted.routed_experts)


@FAMILIES
@WAYS
@pytest.mark.sampled(4)
def test_bf16_engine_computes_bit_for_bit_what_fp32_loops_do_on_its_numbers(
    spec: ModelSpec, changes: dict[str, object]
) -> None:
    versions = [
        prepare_weights(spec, random_weights(spec, seed), seed, Precision.BF16) for seed in (0, 1)
    ]
    answers = decode(spec, *versions, changes)
    assert {0, 1} == {int(v) for answer in answers for v in answer.weight_versions_T}
    assert_equal(answers, decode(spec, *map(widened, versions), changes))


@FAMILIES
@WAYS
@pytest.mark.sampled(4)
def test_bf16_engine_answers_as_the_fp32_engine_with_rounded_weights(
    spec: ModelSpec, changes: dict[str, object]
) -> None:
    """Bit for bit with norms of 1, which fp32 folds into matrices without a rounding."""
    weights = {
        name: torch.ones_like(tensor) if "norm" in name else tensor
        for name, tensor in random_weights(spec).items()
    }
    bf16 = prepare_weights(spec, weights, 0, Precision.BF16)
    fp32 = prepare_weights(spec, rounded(weights), 0)
    assert_equal(decode(spec, bf16, bf16, changes), decode(spec, fp32, fp32, changes))


@FAMILIES
def test_norms_that_are_not_folded_in_move_logprobs_by_rounding_alone(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    bf16 = prepare_weights(spec, weights, 0, Precision.BF16)
    fp32 = prepare_weights(spec, rounded(weights), 0)
    answers, expected = (
        run_in_order(DecodeEngine(spec, one, EngineConfig(slots=8)), requests(spec, 3, 12))
        for one in (bf16, fp32)
    )
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        np.testing.assert_allclose(answer.logprobs_T, wanted.logprobs_T, atol=3e-5)


@FAMILIES
def test_matrices_take_half_the_memory(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    bf16, fp32 = (
        prepare_weights(spec, weights, 0, precision)
        for precision in (Precision.BF16, Precision.FP32)
    )
    for coarse, fine in zip((bf16.trunk, *bf16.drafts), (fp32.trunk, *fp32.drafts), strict=True):
        for name in coarse._fields:
            one, other = getattr(coarse, name), getattr(fine, name)
            if name in (
                "norms",
                "norm_D",
                "final_norm_D",
                "gate",
                "gate_bias",
                "qk_scale",
                "qkv_bias",
            ):
                assert one.dtype == np.float32
            else:
                assert 2 * one.nbytes == other.nbytes
            assert one.ctypes.data % 64 == 0


@FAMILIES
def test_weights_that_arrive_in_bf16_are_taken_as_they_are(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    arriving = {
        name: tensor.bfloat16() if is_matrix(name, tensor) else tensor
        for name, tensor in weights.items()
    }
    taken = prepare_weights(spec, arriving, 0, Precision.BF16)
    made = prepare_weights(spec, weights, 0, Precision.BF16)
    for one, other in zip((taken.trunk, *taken.drafts), (made.trunk, *made.drafts), strict=True):
        for array, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, same)
    np.testing.assert_array_equal(
        taken.trunk.embedding, pack_matrix(arriving["model.embed_tokens.weight"].t())
    )


def test_rounding_is_to_nearest_even() -> None:
    weights = random_weights(DENSE)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 2**-130])
    weights["model.embed_tokens.weight"][0, :4] = ties
    packed = prepare_weights(DENSE, weights, 0, Precision.BF16).trunk.embedding[: 4 * PANEL : PANEL]
    seen = (packed.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(seen, np.float32([1, 1 + 2**-6, -1 - 2**-7, 2**-130]))


def test_recipes_engine_keeps_first_and_swapped_weights_in_bf16() -> None:
    config = EngineConfig(slots=4, precision=Precision.BF16, cache_policy=CachePolicy.EXACT)
    versions = [random_weights(EXPERTS, seed) for seed in (0, 1)]
    (request,) = requests(EXPERTS, 1)

    async def answer() -> list[Generation]:
        engine = start_engine(EXPERTS, versions[0], 0, config, "bf16")
        answers = [await engine.generate(request)]
        await engine.swap_weights(versions[1], 1)
        answers.append(await engine.generate(request))
        engine.close()
        return answers

    expected = [
        run_in_order(
            DecodeEngine(EXPERTS, prepare_weights(EXPERTS, one, 0, Precision.BF16), config),
            [request],
        )[0]
        for one in versions
    ]
    assert_equal(asyncio.run(answer()), expected)


def test_an_engine_of_fp32_compiles_no_loops_of_bf16() -> None:
    program = """if True:
        from tests.unit.models.decode.test_bf16 import *
        weights = prepare_weights(EXPERTS, random_weights(EXPERTS), 0)
        decode(EXPERTS, weights, weights, {"slots": 4, "draft_layers": 2, "always_drafts": True})
        from ostinato.models.decode.compiled import kernels, tiles, trunk
        for loop in (tiles.accumulate, kernels.multiply_packed, kernels.copy_floats, trunk.run_trunk):
            assert "uint16" not in str(loop.signatures), loop.signatures
        """
    subprocess.run([sys.executable, "-c", program], check=True)
