"""Training steps a second beside transformers and Megatron's local modules: same shape, tokens and optimiser.

Run: python -m tests.benchmarks.training [--rounds N] [--models nano moe smollm2]

A step is forward, loss, backward and AdamW over one fixed batch in fp32, in one thread. Sides take
turns within a round, so that a slow moment of the machine hits all; figures are medians of processor
time, which others on the machine disturb less than the clock. Allocator settings are those that the
product gives its trainers, and weights as a new model's are drawn, for every side. Megatron's local
modules are what megatron-core trains without Transformer Engine: dense attention, one expert after
another.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import process_time

import torch
import transformers
from torch import Tensor

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.child import CHILD_ENVIRONMENT
from ostinato.infra.serving.published_models import write_model_directory
from ostinato.models.network.build import build_trainer_model
from ostinato.models.spec import ModelSpec
from tests.benchmarks.decode_peers import REFERENCE
from tests.benchmarks.training_steps import LEARNING_RATE, Step, megatron_step, our_step
from tests.fakes.nano_spec import NANO

BATCHES = {"nano": (16, 256), "moe": (8, 256), "smollm2": (2, 512)}  # rows, tokens of each
TARGETS = {"nano": 2.0, "moe": 2.0, "smollm2": 1.2}  # times transformers
ALLOCATOR = {name: text for name, text in CHILD_ENVIRONMENT.items() if "MALLOC" in name}


def transformers_step(spec: ModelSpec, weights: dict[str, Tensor], tokens_BT: Tensor) -> Step:
    """A step of the same model in transformers, with torch's fused AdamW."""
    with tempfile.TemporaryDirectory() as directory:
        write_model_directory(Path(directory), spec, weights.__getitem__, torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens_BT, labels=tokens_BT).loss.backward()
        optimizer.step()

    return step


def measure(name: str, spec: ModelSpec, rounds: int) -> dict[str, float]:
    """Median tokens a second of each side, and ratios to ours."""
    rows, tokens = BATCHES[name]
    tokens_BT = torch.randint(0, spec.vocab_size, (rows, tokens))
    weights = build_trainer_model(spec).export_weights()
    sides = {
        "ours": our_step(spec, weights, tokens_BT),
        "transformers": transformers_step(spec, weights, tokens_BT),
        "megatron_local": megatron_step(spec, tokens_BT),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for step in sides.values():
        step()  # the first one takes the memory
    for _ in range(rounds):
        for side, step in sides.items():
            began = process_time()
            step()
            seconds[side].append(process_time() - began)
    found = {side: rows * tokens / median(taken) for side, taken in seconds.items()}
    ratios = {f"times_{side}": found["ours"] / found[side] for side in sides if side != "ours"}
    return {**{f"{side}_tokens_per_second": rate for side, rate in found.items()}, **ratios}


def main() -> None:
    """Measures the named models; prints a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds, without SmolLM2")
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "tests.benchmarks.training", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    smollm2 = load_recipe("smollm2_quick").model
    specs = {"nano": NANO, "moe": REFERENCE, "smollm2": smollm2}
    names = [name for name in options.models if not options.quick or name != "smollm2"]
    rounds = 2 if options.quick else options.rounds
    found = {name: measure(name, specs[name], rounds) for name in names}
    print(f"{'model':>8} {'ours':>10} {'transformers':>13} {'megatron local':>15}  tokens/s")
    for name, rates in found.items():
        ours, theirs, local = (
            rates[f"{side}_tokens_per_second"]
            for side in ("ours", "transformers", "megatron_local")
        )
        print(f"{name:>8} {ours:10.0f} {theirs:13.0f} {local:15.0f}")
    targets = {name: TARGETS[name] for name in found}
    met = all(found[name]["times_transformers"] >= least for name, least in targets.items())
    answer = {"name": "training", "figures": found, "targets": targets, "met": met}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
