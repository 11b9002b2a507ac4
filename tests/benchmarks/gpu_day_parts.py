"""The parts of a GPU day that are timed or compared here: `python -m tests.benchmarks.gpu_day_parts PART ...`.

On the CPU every part runs at a small size, so that its code is walked where there is no GPU.
"""

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ostinato.flows.recipe import load_recipe
from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.device import DeviceKind, current_device
from ostinato.models.network.build import build_trainer_model
from ostinato.models.network.transformer_engine import refuse_engine, why_no_engine
from ostinato.models.process_groups import close_process_groups, open_process_groups
from ostinato.models.spec import ModelSpec
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    PackingConfig,
    PolicyOptimizerConfig,
)
from ostinato.tasks.reinforcement.learning.step import PolicyLearner
from tests.benchmarks.training_steps import megatron_step, our_step
from tests.fakes.nano_spec import NANO
from tests.fakes.small_spec import make_spec
from tests.fakes.tiny_model import random_weights
from tests.unit.tasks.reinforcement.learning.samples import make_sample

# 0.7 G parameters, 0.15 G of them active
MOE = make_spec(
    32_768,
    1024,
    heads=(16, 8, 64),
    experts=(32, 4, 512),
    max_sequence_tokens=2048,
    num_layers=12,
)
# config.json of Qwen/Qwen3-0.6B
QWEN3_600M = ModelSpec(
    vocab_size=151_936,
    hidden_size=1024,
    num_layers=28,
    num_attention_heads=16,
    num_query_groups=8,
    head_dim=128,
    num_experts=0,
    experts_per_token=0,
    expert_hidden_size=0,
    num_dense_layers=28,
    dense_hidden_size=3072,
    rope_base=1_000_000.0,
    max_sequence_tokens=8192,
)
SHAPES = {"moe": (MOE, (8, 2048)), "qwen3_600m": (QWEN3_600M, (2, 8192))}  # rows, tokens of each
SMALL = make_spec(64, 64, heads=(4, 2, 16), experts=(4, 2, 32), max_sequence_tokens=64)
# bf16, dense, of the data sheets; H200 computes as H100 does
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0}
STEPS = {"cuda": 10, "cpu": 2}
PARITY = 1e-3  # of loss and gradient norm; TF32 is off


def synchronize() -> None:
    """Waits for the device."""
    if current_device().type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], times: int) -> float:
    """Median seconds of a call, after two to warm up."""
    taken = []
    for number in range(times + 2):
        synchronize()
        began = perf_counter()
        work()
        synchronize()
        if number > 1:
            taken.append(perf_counter() - began)
    return median(taken)


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that meet a token, embedding left out: the head counts once."""
    idle = spec.num_moe_layers * (spec.num_experts - spec.experts_per_token)
    embedding = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    idle_size = idle * 3 * spec.hidden_size * spec.expert_hidden_size
    return num_parameters(spec) - embedding - idle_size


def parity(kind: DeviceKind) -> dict[str, Any]:
    """Loss and gradient norm of one step of nano and of SmolLM2's shape, on the CPU and on the device."""
    shapes = {"nano": NANO, "smollm2": load_recipe("smollm2_quick").model}
    if kind == "cpu":
        shapes = {"small": SMALL}
    found: dict[str, Any] = {}
    for name, spec in shapes.items():
        weights = random_weights(spec)
        tokens_BT = torch.randint(0, spec.vocab_size, (2, 64))
        sides = {}
        for one in dict.fromkeys(("cpu", kind)):
            close_process_groups()
            open_process_groups(kind=one)
            model = build_trainer_model(spec)
            model.import_weights(weights)
            model.draft.requires_grad_(False)
            optimizer = build_optimizer(model, OptimizerConfig(kind="muon"))
            gradients = LayoutGradients(model)
            gradients.clear()
            loss = -model.token_logprobs(tokens_BT.to(current_device())).mean()
            loss.backward()
            gradients.reduce()
            norm = gradients.clip(None)
            optimizer.step()
            is_finite = all(parameter.isfinite().all() for parameter in model.parameters())
            sides[one] = {"loss": loss.item(), "gradient_norm": norm, "is_finite": is_finite}
        wanted, seen = sides["cpu"], sides[kind]
        errors = [abs(seen[key] / wanted[key] - 1) for key in ("loss", "gradient_norm")]
        sides["is_equal"] = max(errors) < PARITY and seen["is_finite"]
        found[name] = sides
    return found


def machine(kind: DeviceKind) -> dict[str, Any]:
    """Copy bandwidth and the rate of a product in bf16."""
    elements, side = (1 << 30, 8192) if kind == "cuda" else (1 << 16, 128)
    source = torch.zeros(elements, dtype=torch.int16, device=current_device())
    target = torch.empty_like(source)
    copied = 4 * elements / seconds_of(lambda: target.copy_(source), STEPS[kind])
    left = torch.randn(side, side, device=current_device(), dtype=torch.bfloat16)
    right = torch.randn_like(left)
    product = 2 * side**3 / seconds_of(lambda: left @ right, STEPS[kind])
    return {
        "chip": chip(),
        "torch": torch.__version__,
        "copy_tb_per_second": copied / 1e12,
        "product_tflop_per_second": product / 1e12,
    }


def chip() -> str:
    """Name of the device."""
    is_cuda = current_device().type == "cuda"
    return torch.cuda.get_device_name() if is_cuda else "cpu"


def step(kind: DeviceKind, side: str, mode: str, model: str = "moe") -> dict[str, Any]:
    """Tokens a second and MFU of a training step: ours or Megatron's, in one precision."""
    spec, shape = SHAPES[model] if kind == "cuda" else (SMALL, (2, 64))
    engine: Any = mode.removeprefix("engine-") if mode.startswith("engine-") else None
    if (mode == "engine" or engine) and (
        reason := why_no_engine(current_device(), engine or "bf16")
    ):
        return {"not_run": reason}
    tokens_BT = torch.randint(0, spec.vocab_size, shape, device=current_device())
    if side == "megatron":
        work = megatron_step(spec, tokens_BT, engine=mode == "engine", dtype=torch.bfloat16)
    else:
        precision: Any = "bf16" if engine else mode
        refuse_engine(current_device(), engine, precision, spec)
        work = our_step(spec, None, tokens_BT, precision=precision, engine=engine)
    seconds = seconds_of(work, STEPS[kind])
    operations = 6 * active_parameters(spec) * tokens_BT.numel()
    # scores and mixing of half a row, forward and twice backward
    width = spec.num_attention_heads * spec.head_dim
    operations += 6 * spec.num_layers * shape[1] * width * tokens_BT.numel()
    peak = next((rate for name, rate in PEAK_TFLOPS.items() if name in chip()), None)
    rate = operations / seconds / 1e12
    return {
        "chip": chip(),
        "parameters": num_parameters(spec),
        "tokens_per_second": tokens_BT.numel() / seconds,
        "model_tflop_per_second": rate,
        "mfu": None if peak is None else rate / peak,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else None,
    }


def reinforcement(kind: DeviceKind, precision: PrecisionName = "fp32") -> dict[str, Any]:
    """Seconds of an RL step on SmolLM2's shape, random weights and attempts."""
    spec = load_recipe("smollm2_quick").model if kind == "cuda" else SMALL
    length = 512 if kind == "cuda" else 48
    packing = PackingConfig(bucket_tokens=(length,), microbatch_tokens=4 * length)
    optimizer = PolicyOptimizerConfig(kind="adamw", gradient_clip_norm=1.0)
    config = LearningConfig(packing=packing, optimizer=optimizer)
    model = build_trainer_model(spec, precision=precision)
    draw = random.Random(5)
    samples = [
        make_sample(
            index,
            [draw.randrange(spec.vocab_size) for _ in range(length)],
            [False] * 8 + [True] * (length - 8),
            advantage=1 - 2 * (index % 2),
            logprobs=[-math.log(spec.vocab_size)] * length,
            spec=spec,
        )
        for index in range(16)
    ]
    update = PolicyLearner(model, build_optimizer(model, optimizer), config)
    losses: list[float] = []

    def take() -> None:
        losses.append(update.step(samples, step=len(losses) + 1, weight_version=0).loss)

    seconds = seconds_of(take, STEPS[kind] // 2)
    tokens = sum(len(sample.segment.token_ids_T) for sample in samples)
    return {"chip": chip(), "seconds": seconds, "tokens": tokens, "losses": losses}


def main() -> None:
    """Runs one part and writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("parity", "machine", "step", "reinforcement"))
    parser.add_argument("more", nargs="*")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    open_process_groups(kind=options.device)
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "parity": parity,
        "machine": machine,
        "step": step,
        "reinforcement": reinforcement,
    }
    found = parts[options.part](options.device, *options.more)
    options.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    close_process_groups()


if __name__ == "__main__":
    main()
