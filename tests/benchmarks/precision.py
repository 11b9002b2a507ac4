"""Loss curves by precision of the experts, on a real corpus.

Run: python -m tests.benchmarks.precision CORPUS [--tokens 300000]. CORPUS is a folder as the corpus
stage writes it. Trains nano from fresh weights several times over the same batches: in bf16, in
mx32, in mx128, in fp32, and in bf16 once more from other weights. Prints the mean loss of each
tenth of the run. The noise is the difference between the two bf16 runs' last tenths; a precision is
within noise when it differs from bf16, from the same weights, by no more.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.network.build import build_trainer_model
from ostinato.models.training.config import LoopConfig, PhaseConfig
from ostinato.models.training.loop import TrainingRun, Work
from ostinato.tasks.pretraining.run import next_token_loss
from tests.fakes.nano_spec import NANO

TENTHS = 10


def train(
    corpus: Path, tokens: int, precision: PrecisionName, seed: int
) -> tuple[list[float], float]:
    """Losses of all steps and tokens a second."""
    phase = PhaseConfig(
        name="bulk",
        blend={"library": (0.4, 0.1), "repair": (0.1, 0.5), "code": (0.5, 0.4)},
        tokens=tokens,
        sequence_tokens=256,
        microbatch_tokens=2048,
        global_batch_tokens=2048,
        warmup_steps=10,
        muon_learning_rate=0.01,
        adam_learning_rate=2e-3,
    )
    config = LoopConfig(phases=(phase,), precision=precision)
    model = build_trainer_model(NANO, 1, seed, precision)
    model.draft.requires_grad_(False)
    losses: list[float] = []

    def record(done: int, total: int, phase_name: str, **metrics: float) -> None:
        losses.append(metrics["loss"])

    work = Work(model, next_token_loss(model), lambda *_: {}, config, corpus)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        TrainingRun(work, Path(directory), "precision", record).run()
    return losses, phase.num_steps * phase.global_batch_tokens / (time.process_time() - started)


def tenths(losses: list[float]) -> list[float]:
    """Mean loss of each tenth of a run."""
    size = max(1, len(losses) // TENTHS)
    parts = [losses[start : start + size] for start in range(0, size * TENTHS, size)]
    return [sum(part) / len(part) for part in parts if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--only", nargs="*", default=["mx32", "mx128", "fp32"])
    chosen = parser.parse_args()
    runs: list[tuple[str, PrecisionName, int]] = [
        ("bf16", "bf16", 0),
        ("bf16, other seed", "bf16", 1),
    ]
    runs += [(name, name, 0) for name in chosen.only]
    last: dict[str, float] = {}
    for label, precision, seed in runs:
        losses, speed = train(chosen.corpus, chosen.tokens, precision, seed)
        curve = tenths(losses)
        last[label] = curve[-1]
        numbers = " ".join(f"{loss:6.3f}" for loss in curve)
        print(f"{label:18s} {numbers}   {speed:7.0f} tokens/s of CPU", flush=True)
    noise = abs(last["bf16"] - last["bf16, other seed"])
    figures = {name: round(abs(last[name] - last["bf16"]), 4) for name in chosen.only}
    targets = dict.fromkeys(figures, round(noise, 4))
    met = all(figures[name] <= noise for name in figures)
    print(json.dumps({"name": "precision", "figures": figures, "targets": targets, "met": met}))


if __name__ == "__main__":
    main()
