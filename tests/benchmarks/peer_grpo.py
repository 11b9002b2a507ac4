"""TRL's GRPO trainer on given attempts, run by the Python it is installed in.

It loads a model directory and answers each line on standard input with one step on the attempts of
a file: wall and processor seconds and the norm of the gradient. Generation is the file's: what is
timed is scores, loss, backward and optimiser. It imports nothing of this repository. Run: PYTHON
peer_grpo.py MODEL ATTEMPTS STEPS MICROBATCH
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def open_model(directory):
    """Tokenizer and model of an exported checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token_id = 0
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight  # the format has no word for one matrix
    return tokenizer, model


def dr_grpo(directory, steps, count, microbatch, **more):
    """Settings of a run of Dr. GRPO with `count` attempts per step."""
    return GRPOConfig(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=count // microbatch,
        loss_type="dr_grpo",
        scale_rewards="none",
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )


def main():
    """Trains as many steps as lines are written."""
    model_directory, attempts_file, steps, microbatch = sys.argv[1:]
    torch.set_num_threads(1)
    given = json.loads(Path(attempts_file).read_text())
    count, group_size = len(given["prompts"]), given["group_size"]
    started: list[tuple[float, float]] = []

    def tell():
        if started:
            wall, core = started.pop()
            seconds = {"wall": time.perf_counter() - wall, "core": time.process_time() - core}
            sys.stdout.write(f"@{json.dumps(seconds)}\n")
        else:
            sys.stdout.write("@ready\n")
        sys.stdout.flush()

    def replay(_prompts, _trainer):
        tell()
        sys.stdin.readline()
        started.append((time.perf_counter(), time.process_time()))
        return {
            "prompt_ids": given["prompts"],
            "completion_ids": given["completions"],
            "logprobs": given["logprobs"],
        }

    tokenizer, model = open_model(model_directory)
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: given["rewards"],
            args=dr_grpo(
                directory,
                int(steps),
                count,
                int(microbatch),
                num_generations=group_size,
                max_completion_length=given["most_completion_tokens"],
                learning_rate=3e-4,
                max_grad_norm=1.0,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * count}),
            processing_class=tokenizer,
            rollout_func=replay,
        )
        trainer.train()
    tell()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    sys.stdout.write(f"@{json.dumps(norms)}\n")


if __name__ == "__main__":
    main()
