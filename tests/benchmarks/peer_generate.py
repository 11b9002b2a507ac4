"""The other engines of the decode benchmark, run by the Python they are installed in.

One process that loads a model directory into vLLM or transformers and then answers lines on
standard input: a batch size in, one JSON line with the seconds of generating out. It imports nothing
of this repository. Run: PYTHON peer_generate.py vllm|transformers DIRECTORY PROMPTS NEW_TOKENS
"""

import json
import sys
import time
from pathlib import Path


def load_vllm(directory, new_tokens):
    """Greedy generation by vLLM's offline engine, defaults of its CPU build."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=directory,
        skip_tokenizer_init=True,
        dtype="bfloat16",
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


def load_transformers(directory, new_tokens):
    """Greedy generation by transformers on two threads."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

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


def main():
    """Loads, says ready, answers batch sizes until the input ends."""
    kind, directory, prompts_file, new_tokens = sys.argv[1:]
    prompts = json.loads(Path(prompts_file).read_text())
    loader = {"vllm": load_vllm, "transformers": load_transformers}[kind]
    generate = loader(directory, int(new_tokens))
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
