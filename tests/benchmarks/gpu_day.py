"""Everything that waits for a GPU, in one command of at most nine minutes, most valuable first.

Run: python -m tests.benchmarks.gpu_day --out DIR [--device cpu] [--parts NAME ...]

Each part is a process with a limit of its own; DIR/NAME.json and DIR/NAME.log hold what it found and
said, DIR/summary.json all of them so far, so a run that is cut leaves what it had. A part without its
device or library is "not run", with the reason. `--device cpu` walks the parts at small sizes: its
figures say nothing. Exit codes: 0 all parts ran, 1 one failed, 3 no CUDA device.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TOTAL_SECONDS = 540.0
NO_DEVICE = 3  # exit code


class Part(NamedTuple):
    """One process."""

    name: str
    limit_seconds: float
    command: tuple[str, ...]
    """Arguments of Python. DEVICE and JSON stand for the device and the file to write."""


def _measured(name: str, limit_seconds: float, *more: str) -> Part:
    module = "tests.benchmarks.gpu_day_parts"
    command = ("-m", module, name, *more, "--device", "DEVICE", "--json", "JSON")
    return Part("-".join((name, *more)), limit_seconds, command)


PARTS = (
    _measured("parity", 60),
    _measured("machine", 20),
    _measured("step", 45, "ours", "bf16"),
    _measured("step", 45, "megatron", "local"),
    _measured("step", 45, "ours", "mx128"),
    Part("kernels", 120, ("-m", "tests.benchmarks.kernels_gpu", "--quick", "--json", "JSON")),
    _measured("step", 40, "megatron", "engine"),
    _measured("step", 40, "ours", "engine-bf16"),
    _measured("step", 40, "ours", "engine-blockwise"),
    _measured("step", 40, "ours", "bf16", "qwen3_600m"),
    _measured("step", 60, "megatron", "engine", "qwen3_600m"),
    _measured("step", 30, "ours", "mx32"),
    _measured("reinforcement", 60, "fp32"),
    _measured("reinforcement", 60, "bf16"),
    Part(
        "gpu-tests",
        120,
        ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/unit"),
    ),
    Part(
        "vllm",
        120,
        ("-m", "pytest", "-q", "-m", "vllm", "-p", "no:cacheprovider", "tests/contracts"),
    ),
)
CUDA_ALONE = ("kernels", "gpu-tests", "vllm")
NEEDS_VLLM = "import vllm"


def why_not_run(part: Part, device: str, has_cuda: bool) -> str | None:
    """Why a part cannot run here. None: it can."""
    if (device == "cuda" or part.name in CUDA_ALONE) and not has_cuda:
        return "no CUDA device"
    if part.name == "vllm":
        answer = subprocess.run([sys.executable, "-c", NEEDS_VLLM], capture_output=True, text=True)
        if answer.returncode:
            return (answer.stderr.strip().splitlines() or ["vllm cannot be imported"])[-1]
    return None


def run_part(part: Part, device: str, out: Path, limit_seconds: float) -> dict[str, Any]:
    """What a part found, and how it ended."""
    found = (out / f"{part.name}.found.json").resolve()
    found.unlink(missing_ok=True)
    words = {"DEVICE": device, "JSON": str(found)}
    command = [sys.executable, *(words.get(word, word) for word in part.command)]
    began = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_seconds, check=False
            ).returncode
            status = "ok" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"failed: longer than {limit_seconds:.0f} s"
    figures = json.loads(found.read_text()) if found.exists() else {}
    found.unlink(missing_ok=True)
    if isinstance(figures, dict) and figures.get("not_run"):
        status = f"not run: {figures['not_run']}"
    return {"status": status, "seconds": time.monotonic() - began, "figures": figures}


def run_day(
    out: Path, device: str, parts: tuple[Part, ...], *, has_cuda: bool, total_seconds: float
) -> int:
    """Runs the parts in order within the total. Exit code."""
    out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + total_seconds
    summary: dict[str, Any] = {}
    for part in parts:
        left = ends_at - time.monotonic()
        reason = why_not_run(part, device, has_cuda)
        if reason is None and left < 1:
            reason = f"the {total_seconds:.0f} s were over"
        if reason is None:
            result = run_part(part, device, out, min(part.limit_seconds, left))
        else:
            result = {"status": f"not run: {reason}", "seconds": 0.0, "figures": {}}
        summary[part.name] = result
        (out / f"{part.name}.json").write_text(json.dumps(result, indent=1))
        (out / "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"{part.name:24s} {result['seconds']:6.1f} s  {result['status']}", flush=True)
    if device == "cuda" and not has_cuda:
        return NO_DEVICE
    return int(any(result["status"].startswith("failed") for result in summary.values()))


def main() -> None:
    """Runs the day and exits with its code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    options = parser.parse_args()
    parts = tuple(part for part in PARTS if options.parts is None or part.name in options.parts)
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    has_cuda = subprocess.run([sys.executable, "-c", asks], check=False).returncode == 0
    code = run_day(
        options.out, options.device, parts, has_cuda=has_cuda, total_seconds=TOTAL_SECONDS
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
