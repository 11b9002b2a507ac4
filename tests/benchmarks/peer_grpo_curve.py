"""TRL's GRPO trainer on prompts of a file, run by the Python it is installed in.

It samples, trains and steps as TRL does by itself. Whoever started it grades: for each batch of answers a line of
problems and token ids goes out, a line of rewards comes in, and after each step its wall seconds go out. It imports
nothing of this project. Run: PYTHON peer_grpo_curve.py MODEL GIVEN
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peer_grpo import dr_grpo, open_model
from transformers import TrainerCallback
from trl import GRPOTrainer


def tell(message):
    """One line to whoever started this."""
    sys.stdout.write(f"@{json.dumps(message)}\n")
    sys.stdout.flush()


def grade(completion_ids, problem, **_):
    """Rewards of a batch, from whoever started this."""
    tell({"problems": problem, "completions": completion_ids})
    return json.loads(sys.stdin.readline())


class StepClock(TrainerCallback):
    """Tells how long each step took, sampling and grading with it."""

    def on_step_begin(self, args, state, control, **more):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        tell({"step_seconds": time.perf_counter() - self.started})


def check_tokens(tokenizer, prompts):
    """TRL tokenises texts itself: what it makes of them has to be what the other side begins with."""
    made = tokenizer(text=[prompt["text"] for prompt in prompts])["input_ids"]
    changed = sum(ids != prompt["tokens"] for ids, prompt in zip(made, prompts, strict=True))
    if changed:
        raise ValueError(f"{changed} of {len(prompts)} prompts have other tokens here, wanted none")


def main():
    """Trains, one step after another."""
    model_directory, given_file = sys.argv[1:]
    torch.set_num_threads(1)
    given = json.loads(Path(given_file).read_text())
    tokenizer, model = open_model(model_directory)
    check_tokens(tokenizer, given["prompts"])
    rows = {
        "prompt": [prompt["text"] for prompt in given["prompts"]],
        "problem": [prompt["problem"] for prompt in given["prompts"]],
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model,
            reward_funcs=grade,
            args=dr_grpo(
                directory,
                given["steps"],
                given["attempts_per_step"],
                given["microbatch"],
                num_generations=given["group_size"],
                max_completion_length=given["completion_tokens"],
                learning_rate=given["learning_rate"],
                max_grad_norm=given["gradient_clip_norm"],
                adam_beta1=given["adam_betas"][0],
                adam_beta2=given["adam_betas"][1],
                weight_decay=given["weight_decay"],
                beta=0.0,
                temperature=given["temperature"],
                shuffle_dataset=False,
                seed=given["seed"],
            ),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            callbacks=[StepClock()],
        )
        if set(trainer.eos_token_ids) != set(given["stop_token_ids"]):
            raise ValueError(f"stops at {trainer.eos_token_ids}, wanted {given['stop_token_ids']}")
        trainer.train()


main()
