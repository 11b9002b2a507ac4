"""Steps of RL with what attempts share computed once, beside the same steps row by row.

Run: python -m tests.benchmarks.shared_prefixes [--rounds N] [--models nano smollm2]

Groups of 8 attempts of one turn, random tokens, new weights, fp32, one thread, the allocator of our trainers. A step
is packing, forward, loss and backward of all groups. Both ways take turns; seconds are medians of processor time.
The gradients have to agree, or the figures mean nothing.
"""

import argparse
import json
import os
import sys
from itertools import count
from statistics import median
from time import process_time

import numpy as np
import torch

from ostinato.flows.recipe import load_recipe
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.learning.step import PolicyLearner
from tests.benchmarks.training import ALLOCATOR
from tests.unit.tasks.reinforcement.learning.samples import make_sample

GROUP_SIZE = 8
# Recipe, groups, tokens of a prompt and of an attempt; SmolLM2's are those of a file and a one-line edit.
CASES = {"nano": ("nano", 16, 140, 70), "smollm2": ("smollm2_quick", 2, 230, 40)}
GRADIENT_TOLERANCE = 1e-5  # fp32 sums in another order: 2e-6 was seen


def make_groups(name: str) -> list[Sample]:
    """Attempts whose advantages sum to 0 in each group."""
    recipe, groups, prompt_tokens, attempt_tokens = CASES[name]
    spec = load_recipe(recipe).model
    generator = np.random.default_rng(0)
    numbers = count()
    samples = []
    for _ in range(groups):
        prompt = generator.integers(0, spec.vocab_size, prompt_tokens).tolist()
        for attempt in range(GROUP_SIZE):
            answer = generator.integers(0, spec.vocab_size, attempt_tokens).tolist()
            mask = [False] * prompt_tokens + [True] * attempt_tokens
            advantage = 1.0 if attempt % 2 else -1.0
            samples.append(
                make_sample(next(numbers), prompt + answer, mask, advantage=advantage, spec=spec)
            )
    return samples


def measure(name: str, rounds: int) -> dict[str, float]:
    """Median seconds of both ways, their ratio and how far the gradients are apart."""
    recipe = load_recipe(CASES[name][0])
    model = build_trainer_model(recipe.model)
    samples = make_groups(name)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    gradients: dict[bool, dict[str, torch.Tensor]] = {}
    shared_ratio = 0.0
    for _ in range(rounds + 1):  # the first one takes the memory
        for shares in seconds:
            packing = recipe.learning.packing.model_copy(update={"shares_prefixes": shares})
            config = LearningConfig(packing=packing)
            still = torch.optim.SGD(model.parameters(), lr=0.0)
            began = process_time()
            report = PolicyLearner(model, still, config).step(samples, step=1, weight_version=0)
            seconds[shares].append(process_time() - began)
            shared_ratio = max(shared_ratio, report.shared_ratio)
            gradients[shares] = {
                key: weight.grad.clone()
                for key, weight in model.named_parameters()
                if weight.grad is not None
            }
    once, by_row = median(seconds[True][1:]), median(seconds[False][1:])
    difference = max(
        float((gradients[True][key] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        for key, wanted in gradients[False].items()
    )
    return {
        "seconds_once": once,
        "seconds_by_row": by_row,
        "ratio": by_row / once,
        "shared_ratio": shared_ratio,
        "gradient_difference": difference,
    }


def main() -> None:
    """Measures the named models; prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "tests.benchmarks.shared_prefixes", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)
    torch.set_num_threads(1)
    found = {name: measure(name, options.rounds) for name in options.models}
    met = all(figures["gradient_difference"] < GRADIENT_TOLERANCE for figures in found.values())
    print(json.dumps({"name": "shared_prefixes", "figures": found, "met": met}))


if __name__ == "__main__":
    main()
