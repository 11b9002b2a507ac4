"""Our RL step beside that of TRL's GRPO trainer: same model, same attempts of one turn, one thread each.

    python -m tests.benchmarks.grpo_peer --trl-python PYTHON [--quick] [--steps N]

`nano_base`, exported for the other side (glm4_moe); 96 attempts in groups of 8 with mixed rewards,
prompts of 100 to 200 and answers of 50 to 250 tokens. Both take whole steps: scores, Dr. GRPO's
loss, backward, clipping and AdamW; attempts are given, so nobody generates. The sides alternate.
The norms of the first gradient have to agree, or the figures mean nothing. On a busy machine the
processor times are the ones to compare. Prints one JSON line at the end.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.checkpoint import load_spec
from ostinato.models.spec import ModelSpec
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.advantages import center_rewards
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PolicyOptimizerConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.benchmarks.decode_peers import next_line
from tests.unit.tasks.reinforcement.learning.samples import make_sample

START = Path(__file__).parents[2] / "models/pretrained/nano_base"
PEER_SCRIPT = Path(__file__).with_name("peer_grpo.py")
GROUP_SIZE = 8
MAX_COMPLETION_TOKENS = 256
TARGET_RATIO = 3.0
GRADIENT_TOLERANCE = 1e-5  # fp32 sums in another order: 1e-7 was seen


def make_attempts(spec: ModelSpec, count: int) -> dict:
    """Random tokens; every group has solved and unsolved attempts."""
    generator = np.random.default_rng(0)

    def tokens(low: int, high: int) -> list[int]:
        return generator.integers(64, spec.vocab_size, int(generator.integers(low, high))).tolist()

    prompts = [
        prompt for _ in range(count // GROUP_SIZE) for prompt in [tokens(100, 200)] * GROUP_SIZE
    ]
    completions = [tokens(50, 250) for _ in range(count)]
    return {
        "group_size": GROUP_SIZE,
        "most_completion_tokens": MAX_COMPLETION_TOKENS,
        "prompts": prompts,
        "completions": completions,
        "logprobs": [[-1.0] * len(completion) for completion in completions],
        "rewards": [
            float(index % GROUP_SIZE < 1 + index // GROUP_SIZE % 7) for index in range(count)
        ],
    }


def make_samples(spec: ModelSpec, attempts: dict) -> list[Sample]:
    """The same attempts as our trainer takes them."""
    samples = []
    rewards = attempts["rewards"]
    for index, (prompt, completion) in enumerate(
        zip(attempts["prompts"], attempts["completions"], strict=True)
    ):
        start = index - index % GROUP_SIZE
        advantages = center_rewards(rewards[start : start + GROUP_SIZE])
        samples.append(
            make_sample(
                index,
                [*prompt, *completion],
                [False] * len(prompt) + [True] * len(completion),
                advantage=advantages[index % GROUP_SIZE],
                logprobs=[-1.0] * (len(prompt) + len(completion)),
                group_id=f"g{start}",
                spec=spec,
            )
        )
    return samples


def open_trainer(directory: Path, count: int) -> RLTrainer:
    """Our trainer with TRL's divisor, so that the gradients are equal."""
    config = LearningConfig(
        objective=ObjectiveConfig(loss_divisor_tokens=float(count * MAX_COMPLETION_TOKENS)),
        optimizer=PolicyOptimizerConfig(learning_rate=3e-4, warmup_steps=0),
    )
    request = TrainerRequest(
        config=config,
        checkpoint_directory=str(START),
        work_directory=str(directory / "steps"),
        chain_id="chain",
    )
    return RLTrainer(request, ObjectStore.from_url(f"file://{directory}/objects"))


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="has trl installed")
    parser.add_argument("--quick", action="store_true", help="32 attempts")
    parser.add_argument("--steps", type=int, default=4, help="timed steps after a first one")
    parser.add_argument("--microbatch", type=int, default=8, help="attempts per pass of the peer")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    spec = load_spec(START)
    attempts = make_attempts(spec, 32 if arguments.quick else 96)
    samples = make_samples(spec, attempts)
    taken: dict[str, list[float]] = {
        "our wall": [],
        "our core": [],
        "peer wall": [],
        "peer core": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        export_model(START, directory / "model", name="nano_base", lineage=(), dtype="float32")
        (directory / "attempts.json").write_text(json.dumps(attempts))
        trainer = open_trainer(directory, len(samples))
        command = [
            *(str(arguments.trl_python), str(PEER_SCRIPT)),
            *(str(directory / "model"), str(directory / "attempts.json")),
            *(str(1 + arguments.steps), str(arguments.microbatch)),
        ]
        peer = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        )
        assert peer.stdin is not None
        if next_line(peer.stdout) != "ready":
            raise RuntimeError(f"{' '.join(command)} did not start")
        our_norm = 0.0
        for number in range(1 + arguments.steps):
            wall, core = time.perf_counter(), time.process_time()
            report = trainer.step(samples)
            ours = {"wall": time.perf_counter() - wall, "core": time.process_time() - core}
            peer.stdin.write("\n")
            peer.stdin.flush()
            theirs = json.loads(next_line(peer.stdout))
            if number == 0:
                our_norm = report.gradient_norm
                continue
            for clock in ("wall", "core"):
                taken[f"our {clock}"].append(ours[clock])
                taken[f"peer {clock}"].append(theirs[clock])
        norms = json.loads(next_line(peer.stdout))
        peer.stdin.close()
        peer.wait()
        trainer.close()
    difference = abs(our_norm - norms[0]) / norms[0]
    tokens = sum(len(sample.segment.token_ids_T) for sample in samples)
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    print(f"{len(samples)} attempts, {tokens} tokens; medians of {arguments.steps} steps")
    print(f"norm of the first gradient: {our_norm:.6g}, TRL {norms[0]:.6g}")
    for side in ("our", "peer"):
        print(
            f"{'ostinato' if side == 'our' else 'TRL':>9} {median[f'{side} wall']:.2f} s, processor "
            f"{median[f'{side} core']:.2f} s, {tokens / median[f'{side} core']:.0f} tokens per processor second"
        )
    figures = {
        "ratio_wall": median["peer wall"] / median["our wall"],
        "ratio_core": median["peer core"] / median["our core"],
        "our_tokens_per_core_second": tokens / median["our core"],
        "gradient_norm_difference": difference,
    }
    targets = {"ratio_core": TARGET_RATIO, "gradient_norm_difference": GRADIENT_TOLERANCE}
    is_met = figures["ratio_core"] >= TARGET_RATIO and difference <= GRADIENT_TOLERANCE
    print(json.dumps({"name": "grpo_peer", "figures": figures, "targets": targets, "met": is_met}))


if __name__ == "__main__":
    main()
