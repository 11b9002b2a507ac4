"""k3 between an engine and the trainer at equal weights: what the parity alarm's limits are set by.

Run: python -m tests.benchmarks.engine_parity [CHECKPOINT] [--engine vllm] [--precisions fp32 bf16].
CHECKPOINT is a checkpoint's directory, by default SmolLM2-135M. The engine answers pieces of this
project's code at temperature 1 with its weights in each precision; the trainer scores the sampled
tokens in fp32 with the weights before rounding and with routers of its own. Prints one JSON line per
precision. vLLM needs its own environment, as `.ci/vllm` builds it.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--engine", choices=["local", "vllm"], default="local")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    chosen = parser.parse_args()
    # here: vLLM's worker imports this file again, and fails where numba is among what that imports
    from tests.benchmarks.engine_parity_parts import measure_engine

    for precision in chosen.precisions:
        found = measure_engine(
            chosen.engine, precision, chosen.checkpoint, chosen.answers, chosen.new_tokens
        )
        figures = found.model_dump(exclude={"schema_version"})
        print(json.dumps({"engine": chosen.engine, "precision": precision, **figures}), flush=True)


if __name__ == "__main__":
    main()
