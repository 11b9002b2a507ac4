"""Trained tokens are sampled tokens, whatever a client does. Run: python -m tests.benchmarks.any_harness [--quick]

Four parts: turns of made-up clients that go on, edit, strip, repeat, compact and ask in parallel, whose every sampled
token must be trained once behind the tokens that it was sampled from; the same over nano's engine, with the trainer's
own log-probabilities of each branch; tokens that the trainer computes where each branch strips thoughts; and real
programs in boxes at the same time, with the time that the way out of a box adds to a call. Models are random weights
or made up: what is measured does not depend on what they say.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ostinato.infra.agent.transcript import Segment
from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.network.build import build_trainer_model
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import Outcome
from ostinato.tasks.reinforcement.learning.report import measure_mismatch
from tests.fakes.client_sessions import (
    STEPS,
    Sampler,
    ask,
    check_exact,
    ended,
    open_session,
    play,
    prefixes,
    said,
)
from tests.fakes.foreign_programs import open_rollouts, python_program
from tests.fakes.nano_spec import NANO
from tests.fakes.one_line_problem import write_package
from tests.fakes.rollouts import make_problem

TARGETS = {
    "retokenised_tokens": 0.0,
    "branch_k3_nats": 1e-6,
    "stripped_over_longest_ratio": 1.2,
    "forwarder_milliseconds": 2.0,
    "unfinished_agents": 0.0,
}
STEPS_PER_SESSION = 24
THOUGHT_SHARE = 0.5  # of an answer
SOURCE = "def one():\n    return 1\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"
# One call through the box's port and one to the socket itself, in turn. The fastest tenth of each is compared: on a
# busy machine the others wait for a processor.
TIMED = """
import http.client

def call(connection):
    started = time.perf_counter()
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    connection.getresponse().read()
    return (time.perf_counter() - started) * 1000

there = http.client.HTTPConnection("127.0.0.1", 8790)
direct = http.client.HTTPConnection("door")
direct.sock = socket.socket(socket.AF_UNIX)
direct.sock.connect("/door.sock")
through, beside = zip(*((call(there), call(direct)) for _ in range(100)))
chat([user("x")])
print(sorted(through)[10] - sorted(beside)[10])
"""
AGENT = "messages = [user(PROMPT)]\nfor _ in range(3):\n    messages += [chat(messages), user('more')]\n"


def play_clients(least_turns: int) -> dict[str, float]:
    """Sessions of made-up clients. AssertionError names the first token that is not exact."""
    chance, turns, tokens, branches = random.Random(3), 0, 0, 0
    started = time.perf_counter()
    while turns < least_turns:
        model = Sampler(chance=np.random.default_rng(turns))
        session = open_session(model, context_tokens=100_000, max_generated_tokens=100_000)
        steps = [(chance.choice(STEPS), chance.randrange(10)) for _ in range(STEPS_PER_SESSION)]
        asyncio.run(play(session, steps))
        transcript = ended(session)
        check_exact(model, transcript)
        turns += len(transcript.turns)
        tokens += model.num_sampled
        branches += len(transcript.segments)
    return {
        "turns": turns,
        "sampled_tokens": tokens,
        "branches": branches,
        "retokenised_tokens": 0.0,  # check_exact raised otherwise
        "turns_per_second": turns / (time.perf_counter() - started),
    }


def compare_branches(num_steps: int) -> dict[str, float]:
    """Mismatch of nano's engine and trainer over the branches of one session, the worst of them."""
    spec = NANO.model_copy(update={"max_sequence_tokens": 4096})
    trainer = build_trainer_model(spec, seed=0)
    config = EngineConfig(slots=4, max_context_tokens=4096)
    engine = LocalEngine(spec, trainer.export_weights(), 0, config)
    session = open_session(engine, max_turns=500)
    chance = random.Random(5)
    steps = [(chance.choice(STEPS), chance.randrange(10)) for _ in range(num_steps)]
    try:
        asyncio.run(play(session, steps))
    finally:
        engine.close()
    segments = ended(session).segments
    worst = max(branch_k3(one, trainer) for one in segments)
    return {"branch_k3_nats": worst, "engine_branches": len(segments)}


def branch_k3(segment: Segment, trainer: torch.nn.Module) -> float:
    """Mismatch KL of the tokens that a branch trains, each row of routes replayed."""
    tokens_BT = torch.from_numpy(segment.token_ids_T.astype(np.int64))[None]
    routes_BTLK = torch.from_numpy(segment.routed_experts_TLK.astype(np.int64))[None]
    with torch.no_grad():
        logprobs_T = trainer.token_logprobs(tokens_BT, routes_BTLK).numpy()[0]
    sampled = segment.loss_mask_T
    return measure_mismatch(logprobs_T[sampled], segment.logprobs_T[sampled]).k3_nats


def strip_thoughts(num_turns: int) -> dict[str, float]:
    """Tokens that the trainer computes of a client that takes the thoughts, half of each answer, out of it, over
    those of the longest branch. Results are some eight times as long as answers.
    """
    model = Sampler(longest=60)
    session = open_session(model, context_tokens=100_000, max_generated_tokens=100_000)

    async def run() -> None:
        history = []
        for number in range(num_turns):
            asked = [*history, said("user", f"the tool has said {number} " + "and more " * 40)]
            answer = (await ask(session, asked, max_tokens=60))[-1]
            history = [
                *asked,
                said("assistant", answer.text[int(len(answer.text) * THOUGHT_SHARE) + 1 :]),
            ]

    asyncio.run(run())
    segments = ended(session).segments
    computed = len(prefixes([one.token_ids_T.tolist() for one in segments]))
    longest = max(len(one.token_ids_T) for one in segments)
    return {
        "stripped_over_longest_ratio": computed / longest,
        "stripped_branches": len(segments),
        "stripped_unshared_ratio": sum(len(one.token_ids_T) for one in segments) / longest,
    }


async def run_boxes(num_agents: int) -> dict[str, float]:
    """Programs in real boxes: one that times its calls, then many at once."""
    folder = Path(tempfile.mkdtemp())
    repository = write_package(folder / "files", SOURCE, TESTS)
    fields = {"repository_fingerprint": repository.fingerprint}
    problem = make_problem("p0").model_copy(update=fields)
    made_of = (Renderer(train_tokenizer([SOURCE, TESTS], 400)), repository, problem)
    figures: dict[str, float] = {}
    for source, count in ((TIMED, 1), (AGENT, num_agents)):
        rollouts = open_rollouts(
            python_program(source),
            lambda _: "Yes.",
            *made_of,
            attempts_at_once=count,
            attempt_time_limit_seconds=600.0,
        )
        started = time.perf_counter()
        try:
            ended_ones = await asyncio.gather(*(rollouts.attempt(seed) for seed in range(count)))
        finally:
            await rollouts.worker.close()
        unfinished = [one.reason for one in ended_ones if one.outcome is not Outcome.FINISHED]
        figures["unfinished_agents"] = float(len(unfinished))
        for reason in unfinished[:3]:
            print(f"unfinished: {reason}")
        if count == 1:
            figures["forwarder_milliseconds"] = float(ended_ones[0].transcript.final_message)
        else:
            figures["agents_at_once"] = count
            figures["agents_per_second"] = count / (time.perf_counter() - started)
    return figures


def main() -> None:
    """Prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="500 turns, four agents at once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = play_clients(500 if options.quick else 10_000)
    figures |= compare_branches(20 if options.quick else 100)
    figures |= strip_thoughts(20 if options.quick else 60)
    figures |= asyncio.run(run_boxes(4 if options.quick else 64))
    for name, value in figures.items():
        target = f"   wanted at most {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:30} {value:12.6g}{target}")
    met = all(figures[name] <= target for name, target in TARGETS.items())
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(json.dumps({"name": "any_harness", "figures": rounded, "targets": TARGETS, "met": met}))


if __name__ == "__main__":
    main()
