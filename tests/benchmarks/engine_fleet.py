"""How near a fleet comes to its ideal under heavy-tailed answers. Run: python -m tests.benchmarks.engine_fleet [--quick]

4 replicas as Ray actors with a small model and closed-loop sessions, one per slot. The ideal is what the
same replicas make of the same answers when every player stays with one replica, so that each slot of
each replica is always taken and no context is ever fed twice: no router does better, and one that
sees only lengths so far has to come near it.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import psutil

from ostinato.infra.platform.cluster.actors import end_actor
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.fleet import EngineFleet
from ostinato.infra.serving.engine.replica import start_replicas
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from tests.fakes.small_spec import make_spec
from tests.fakes.tiny_model import random_weights

REPLICAS = 4
SESSIONS = 32
MEAN_ANSWER_TOKENS = 40
SMALL = make_spec(512, 64, experts=(4, 2, 64), max_sequence_tokens=512, drafts=(0, 16))
TARGETS = {
    "real_4_replicas_ideal_ratio": 0.95,
}


def answer_lengths(seed: int) -> np.ndarray:
    """Heavy-tailed (lognormal) lengths."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.2, 4096)
    return np.clip(drawn / drawn.mean() * MEAN_ANSWER_TOKENS, 1, 400).astype(int)


async def measure_real(
    fleets: Sequence[EngineFleet], seconds: float, seed: int
) -> tuple[float, float]:
    """Closed-loop sessions of four turns, each player's at one of the fleets; tokens a wall second, and a
    second of the replicas' processor time, over the second half of the time.
    """
    lengths = answer_lengths(seed)
    stop = asyncio.Event()
    tag = f"{len(fleets)}-{seed}"

    async def play(player: int) -> None:
        fleet = fleets[player % len(fleets)]
        rng, number = np.random.default_rng(seed * 1000 + player), 0
        while not stop.is_set():
            session, context = f"{tag}-{player}-{number}", tuple(rng.integers(0, 512, 16).tolist())
            for turn in range(4):
                limit = min(int(lengths[(player * 131 + number) % 4096]), 500 - len(context))
                number += 1
                if limit < 1 or stop.is_set():
                    break
                request = GenerateRequest(
                    f"{session}-{turn}", session, context, limit, (), seed=number
                )
                context += (await fleet.generate(request)).token_ids
            await fleet.end_session(session)

    healths = [await fleet.health() for fleet in fleets]
    processes = [
        psutil.Process(int(replica["process_id"]))
        for health in healths
        for replica in health.values()
    ]

    async def made() -> tuple[float, float, float]:
        totals = [await fleet.statistics() for fleet in fleets]
        tokens = sum(one["generated_tokens"] for total in totals for one in total.values())
        return tokens, time.perf_counter(), sum(sum(p.cpu_times()[:2]) for p in processes)

    players = [asyncio.create_task(play(index)) for index in range(SESSIONS)]
    await asyncio.sleep(seconds / 2)
    before = await made()
    await asyncio.sleep(seconds / 2)
    tokens, wall_seconds, processor_seconds = np.subtract(await made(), before)
    stop.set()
    await asyncio.gather(*players)
    return float(tokens / wall_seconds), float(tokens / processor_seconds)


async def real(seconds: float, rounds: int) -> dict[str, float]:
    """Routed and each player with its own replica in turn, on the same replicas."""
    with tempfile.TemporaryDirectory() as directory:
        objects = ObjectStore.from_url(f"file://{directory}")
        ChainPublisher(objects, "c").publish(0, random_weights(SMALL))
        config = EngineConfig(slots=SESSIONS // REPLICAS)
        names = [f"benchmark-{index}" for index in range(REPLICAS)]
        replicas = start_replicas(SMALL, config, names, num_cpus=0.1)
        routed = EngineFleet(replicas, steal_margin_tokens=400)
        await routed.follow(objects, "c")
        alone = [EngineFleet({name: actor}) for name, actor in replicas.items()]
        for fleet in alone:
            await fleet.follow(objects, "c")
        await measure_real([routed], 2.0, 99)
        wall, processor = [], []
        for round_index in range(rounds):
            order = (False, True, True, False) if round_index % 2 else (True, False, False, True)
            rates: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for number, is_routed in enumerate(order):
                fleets = [routed] if is_routed else alone
                seed = 10 * round_index + number // 2
                rates[is_routed].append(await measure_real(fleets, seconds, seed))
            ideal, reached = np.mean(rates[False], axis=0), np.mean(rates[True], axis=0)
            wall.append(reached[0] / ideal[0])
            processor.append(reached[1] / ideal[1])
            print(
                f"real, round {round_index}: ideal {ideal[0]:,.0f} tokens/s, routed {reached[0]:,.0f}; "
                f"a second of processor time {ideal[1]:,.0f} and {reached[1]:,.0f}"
            )
        for fleet in (routed, *alone):
            await fleet.close()
        for actor in replicas.values():
            end_actor(actor)
    return {
        "real_4_replicas_ideal_ratio": float(np.median(wall)),
        "real_4_replicas_processor_ratio": float(np.median(processor)),
    }


def main() -> None:
    """Prints the rounds and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    options = parser.parse_args()
    start_ray(num_cpus=2, object_store_bytes=100_000_000)
    try:
        figures = asyncio.run(real(4.0 if options.quick else 8.0, 3 if options.quick else 6))
    finally:
        stop_ray()
    met = all(figures[name] >= target for name, target in TARGETS.items())
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(json.dumps({"name": "engine_fleet", "figures": rounded, "targets": TARGETS, "met": met}))


if __name__ == "__main__":
    main()
