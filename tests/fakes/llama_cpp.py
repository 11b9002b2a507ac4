"""llama.cpp on a GGUF file: token ids of a text and the logits after each of them."""

from pathlib import Path

import torch
from cyllama.llama import llama_cpp
from torch import Tensor

_FP32 = 0  # GGML_TYPE_F32, of the KV cache too, which has half of that by default
_NO_FLASH_ATTENTION = 0


class _Model(llama_cpp.LlamaModel):
    """A model that knows the size of its vocabulary, which cyllama 0.2 asks of it and lacks."""

    @property
    def n_vocab(self) -> int:
        return self.get_vocab().n_vocab


def read_with_llama_cpp(path: Path, text: str) -> tuple[list[int], Tensor]:
    """Token ids, special ones by their names, and logits_TV in fp32."""
    llama_cpp.disable_logging()
    llama_cpp.ggml_backend_load_all()
    model = _Model(str(path), llama_cpp.LlamaModelParams())
    ids = model.get_vocab().tokenize(text, False, True)
    parameters = llama_cpp.LlamaContextParams()
    parameters.n_ctx = parameters.n_batch = len(ids)
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = _FP32
    parameters.flash_attn_type = _NO_FLASH_ATTENTION
    context = llama_cpp.LlamaContext(model, parameters)
    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for place, token in enumerate(ids):
        batch.add(token, place, [0], True)
    context.decode(batch)
    return ids, torch.tensor([context.get_logits_ith(place) for place in range(len(ids))])
