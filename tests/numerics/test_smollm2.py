"""The real SmolLM2-135M through import, trainer and export. It is fetched once."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ostinato.infra.platform.settings import load_settings
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.gguf_writing import GGUF_FILE
from ostinato.tasks.conversion.importing import import_model
from tests.fakes.llama_cpp import read_with_llama_cpp
from tests.fakes.logits import forward_logits

PROGRAM = Path(__file__).with_name("compared_text.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_smollm2_computes_in_the_trainer_what_it_computes_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = load_settings().cache_directory / "models"
    import_model("smollm2", tmp_path / "checkpoint", cache)
    export_model(
        tmp_path / "checkpoint", tmp_path / "out", name="x", lineage=[], dtype=None, with_gguf=True
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    ours = build_trainer_model(checkpoint.spec).eval()
    ours.import_weights(checkpoint.weights)
    tokens_BT = tokenizer(PROGRAM, return_tensors="pt").input_ids
    with torch.no_grad():
        wanted = theirs(input_ids=tokens_BT).logits
        seen = forward_logits(ours, tokens_BT)
        monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_any_dtype)
        exact = theirs.double()(input_ids=tokens_BT).logits
        exactly_seen = forward_logits(ours.double(), tokens_BT)
    # the same function: without fp32's rounding 3e-13 was seen, of logits that reach 45
    torch.testing.assert_close(exactly_seen, exact, atol=1e-9, rtol=0)
    # fp32 rounds both by up to 1.5e-4, in another order on each processor
    assert (seen - exact).abs().max() < 1.5 * (wanted - exact).abs().max()
    next_BT1 = tokens_BT[:, 1:, None]
    logprobs = [x[:, :-1].log_softmax(-1).gather(-1, next_BT1) for x in (seen, wanted)]
    torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)
    best = wanted.topk(2, dim=-1).values
    is_clear = best[..., 0] - best[..., 1] > 1e-3
    assert torch.equal(seen.argmax(-1)[is_clear], wanted.argmax(-1)[is_clear])
    ids, seen_TV = read_with_llama_cpp(tmp_path / "out" / GGUF_FILE, PROGRAM)
    assert ids == tokens_BT[0].tolist()
    # llama.cpp, fp32: 1.8e-4 from fp64 was seen
    torch.testing.assert_close(seen_TV.double(), exact[0], atol=3e-4, rtol=1e-5)
    assert torch.equal(seen_TV.argmax(-1)[is_clear[0]], wanted[0].argmax(-1)[is_clear[0]])


def norm_in_any_dtype(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    """transformers' norm, which else goes back to fp32."""
    return torch.nn.functional.rms_norm(
        hidden, hidden.shape[-1:], self.weight, self.variance_epsilon
    )
