"""The compiled engine serves dense models and Qwen3-MoE: greedy tokens and log-probabilities are those of transformers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.engine.start import load_engine
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.decode.config import DecodingConfig
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.decode.supported import check_vectors
from ostinato.models.decode.weights import prepare_weights
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.engine_runs import run_in_order
from tests.fakes.published_model import write_published_model

BANDS = {
    "rope_theta": 500.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def decode(checkpoint: Path, prompts: list[list[int]], new_tokens: int) -> list[Generation]:
    """Greedy answers by the compiled engine, all prompts in one batch."""
    loaded = load_checkpoint(checkpoint)
    weights = prepare_weights(loaded.spec, loaded.weights, 0)
    limit = max(map(len, prompts)) + new_tokens
    config = EngineConfig(slots=len(prompts), max_context_tokens=limit, lookup_tokens=0)
    engine = DecodeEngine(loaded.spec, weights, config)
    answers = run_in_order(engine, greedy_requests(prompts, new_tokens))
    routes = loaded.spec.num_moe_layers, loaded.spec.experts_per_token
    assert all(answer.routed_experts.shape[1:] == routes for answer in answers)
    return answers


def decode_with_vllm(
    checkpoint: Path, prompts: list[list[int]], new_tokens: int
) -> list[Generation]:
    """The same by vLLM in fp32, as `[decoding] engine = "vllm"` starts it."""
    limit = max(map(len, prompts)) + new_tokens
    decoding = DecodingConfig(engine="vllm")
    engine = load_engine(
        checkpoint, "smollm2", decoding, slots=len(prompts), max_context_tokens=limit
    )

    async def answer() -> list[Generation]:
        return await asyncio.gather(*map(engine.generate, greedy_requests(prompts, new_tokens)))

    try:
        return asyncio.run(answer())
    finally:
        engine.close()


def greedy_requests(prompts: list[list[int]], new_tokens: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(index),
            session_id=str(index),
            token_ids=tuple(prompt),
            max_new_tokens=new_tokens,
            temperature=0.0,
            seed=0,
            stop_token_ids=(),
        )
        for index, prompt in enumerate(prompts)
    ]


def assert_same_answers(
    theirs: transformers.PreTrainedModel, prompts: list[list[int]], answers: list[Generation]
) -> None:
    """Every token is their choice or within rounding of it; log-probabilities agree."""
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens_T = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            logits_TV = theirs(input_ids=tokens_T).logits[0, len(prompt) - 1 : -1].float()
        chosen_T = tokens_T[0, len(prompt) :]
        gap_T = logits_TV.max(-1).values - logits_TV.gather(-1, chosen_T[:, None])[:, 0]
        assert float(gap_T.max()) <= 1e-3
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, chosen_T[:, None])[:, 0]
        seen_T = torch.from_numpy(answer.logprobs_T)
        torch.testing.assert_close(seen_T, logprobs_T, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": False, "rope_parameters": BANDS},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
    ],
    ids=["tied", "bands", "qwen2", "qwen3", "phi3"],
)
@pytest.mark.sampled(3)
def test_dense_model_decodes_as_in_transformers(fields: dict, tmp_path: Path) -> None:
    theirs = write_published_model(tmp_path / "in", **fields)
    import_model(str(tmp_path / "in"), tmp_path / "checkpoint", tmp_path)
    prompts = [[5, 9, 17, 200, 33], [7] * 20, [250, 3]]
    answers = decode(tmp_path / "checkpoint", prompts, 40)
    assert all(len(answer.token_ids) == 40 for answer in answers)
    assert_same_answers(theirs, prompts, answers)


@pytest.mark.parametrize("normalizes", [True, False])
def test_qwen3_moe_decodes_as_in_transformers(normalizes: bool, tmp_path: Path) -> None:
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": normalizes,
        "tie_word_embeddings": False,
    }
    theirs = write_published_model(tmp_path / "in", model_type="qwen3_moe", **experts)
    import_model(str(tmp_path / "in"), tmp_path / "checkpoint", tmp_path)
    prompts = [[5, 9, 17, 200, 33], [7] * 20, [250, 3]]
    assert_same_answers(theirs, prompts, decode(tmp_path / "checkpoint", prompts, 40))


def test_shape_that_the_compiled_trunk_lacks_is_refused(tmp_path: Path) -> None:
    write_published_model(tmp_path / "in")
    import_model(str(tmp_path / "in"), tmp_path / "checkpoint", tmp_path)
    spec = load_checkpoint(tmp_path / "checkpoint").spec
    with pytest.raises(ValueError, match=r"rotary_fraction=0.5, wanted 1.0 .* vLLM"):
        check_vectors(spec.model_copy(update={"rotary_fraction": 0.5}))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(decode, marks=pytest.mark.slow, id="local"),
        pytest.param(decode_with_vllm, marks=pytest.mark.vllm, id="vllm"),
    ],
)
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_smollm2_decodes_as_in_transformers(
    answer: Callable[[Path, list[list[int]], int], list[Generation]], tmp_path: Path
) -> None:
    import_model("smollm2", tmp_path / "checkpoint", load_settings().cache_directory / "models")
    export_model(tmp_path / "checkpoint", tmp_path / "out", name="x", lineage=[], dtype=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in ("fix the bug: def add(a, b): return a - b", "What is 12 + 3?")
    ]
    answers = answer(tmp_path / "checkpoint", prompts, 32)
    assert_same_answers(theirs, prompts, answers)
    assert "The bug is" in tokenizer.decode(answers[0].token_ids)
