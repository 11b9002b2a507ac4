"""The other engines of the decode benchmark, run by the Python they are installed in.

One process that loads a model directory into vLLM, transformers or llama.cpp and then answers lines on
standard input: a batch size in, one JSON line with the seconds of generating out. It imports nothing
of this repository. Run: PYTHON peer_generate.py KIND DTYPE DIRECTORY PROMPTS NEW_TOKENS
"""

import json
import sys
import time
from pathlib import Path


def load_vllm(directory, new_tokens, dtype):
    """Greedy generation by vLLM's offline engine, defaults of its CPU build."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=directory,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )

    def generate(prompts):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = model.generate(requests, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate


def load_transformers(directory, new_tokens, dtype):
    """Greedy generation by transformers on two threads."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def generate(prompts):
        with torch.inference_mode():
            tokens = torch.tensor(prompts)
            answers = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return answers[:, tokens.shape[1] :].tolist()

    return generate


def load_llama_cpp(directory, new_tokens, dtype):
    """Greedy generation by llama.cpp on two threads: all prompts as one batch, then a token of each."""
    from cyllama.llama import llama_cpp

    llama_cpp.disable_logging()
    llama_cpp.ggml_backend_load_all()
    model = llama_cpp.LlamaModel(f"{directory}/model.gguf", llama_cpp.LlamaModelParams())

    def decode(context, tokens):
        batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for token, place, sequence, is_last in tokens:
            batch.add(token, place, [sequence], is_last)
        context.decode(batch)

    def generate(prompts):
        parameters = llama_cpp.LlamaContextParams()
        length = len(prompts[0])
        parameters.n_ctx = len(prompts) * (length + new_tokens)
        parameters.n_batch = parameters.n_ubatch = max(512, len(prompts))
        parameters.n_seq_max = len(prompts)
        parameters.n_threads = parameters.n_threads_batch = 2
        context = llama_cpp.LlamaContext(model, parameters)
        sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
        sampler.add_greedy()
        answers = []
        for sequence, prompt in enumerate(prompts):
            decode(context, [(t, i, sequence, i == length - 1) for i, t in enumerate(prompt)])
            answers.append([sampler.sample(context, -1)])
        for place in range(length, length + new_tokens - 1):
            decode(context, [(answer[-1], place, i, True) for i, answer in enumerate(answers)])
            for index, answer in enumerate(answers):
                answer.append(sampler.sample(context, index))
        return answers

    return generate


LOADERS = {"vllm": load_vllm, "transformers": load_transformers, "llama_cpp": load_llama_cpp}


def main():
    """Loads, says ready, answers batch sizes until the input ends."""
    kind, dtype, directory, prompts_file, new_tokens = sys.argv[1:]
    prompts = json.loads(Path(prompts_file).read_text())
    generate = LOADERS[kind](directory, int(new_tokens), dtype)
    generate(prompts[:2])
    sys.stdout.write("@ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        batch = int(line)
        started = time.perf_counter()
        answers = generate(prompts[:batch])
        seconds = time.perf_counter() - started
        report = {"seconds": seconds, "answers": answers}
        sys.stdout.write("@" + json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
