"""The reward curve of our RL beside that of TRL's GRPO trainer: same start, same problems of one turn.

    python -m tests.benchmarks.grpo_peer_curve --trl-python PYTHON --start HOME --work FOLDER --steps N --seeds 0 1

HOME is one where `ostinato demo` has made nano's problems and the checkpoint from which RL begins; nothing is
written there. What one turn is: one_turn.py. Both trainers sample, have their attempts graded by our grader in boxes,
and step, N times each: groups of equal size on the same problems in the same order, Dr. GRPO with the same divisor, no
KL, AdamW with the same rate, betas and clipping, on policy. They share neither sampling nor chance. With `--visits` the
problems come again, so that a problem's own gain shows beside that of the thirds, which hold different ones. Ours is the engine,
orchestrator (staleness 0), trainer and weight chain of a run, in one process without Ray; TRL's is its own, with
Hugging Face's generation. One thread each, one after the other. With `--steps 1` both only sample from the start: their
rewards have to agree, or the rest means nothing.

A finished run of a side and a seed is a file of FOLDER and is not made again; interrupted, the same command goes on.
Intervals are of 95 %, by group; what differs from one run to another as a whole shows between the seeds only. Prints
one JSON line at the end.
"""

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import SecretStr

from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.platform.ledger.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.start import load_engine
from ostinato.models.training.optimizer import ADAM_BETAS
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.records import Problem, Trajectory
from ostinato.tasks.reinforcement.learning.batches.advantages import make_samples
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    TrainerRequest,
    trainer_config,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.rollout.config import RolloutConfig, StalenessConfig
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.orchestrator import Limits, Orchestrator
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.steps import RunProgress, StepRequest
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.benchmarks.decode_peers import next_line
from tests.benchmarks.one_turn import GivenAnswers, OneTurn, Passes, Sizes, judge_given
from tests.benchmarks.reward_curves import (
    DIFFERENCES,
    OURS,
    PEER,
    Curve,
    GroupRow,
    compare,
    show,
)

PEER_SCRIPT = Path(__file__).with_name("peer_grpo_curve.py")
MICROBATCH = 8  # attempts per pass of TRL


class OurRun:
    """Our RL in this process."""

    def __init__(self, turn: OneTurn, directory: Path) -> None:
        self._turn = turn
        self._rows: list[GroupRow] = []
        self._seconds: list[float] = []
        learning = trainer_config(learning_of(turn), turn.recipe.decoding)
        self._objective = learning.objective
        objects = ObjectStore.from_url(f"file://{directory}/objects")
        self._trainer = RLTrainer(
            TrainerRequest(
                config=learning,
                checkpoint_directory=str(turn.checkpoint),
                work_directory=str(directory / "steps"),
                chain_id="chain",
            ),
            objects,
        )
        self._engine = load_engine(
            turn.checkpoint,
            "curve",
            turn.recipe.decoding,
            slots=turn.recipe.reinforcement.engine_slots,
            max_context_tokens=turn.harness.context_tokens,
        )
        self._worker = turn.open_worker(partial(run_agent, self._engine, turn.renderer))
        ledger = Ledger(SecretStr(f"sqlite:///{directory}/ledger.db")).migrate()
        self._journal = RolloutJournal(ledger.journal, objects, "curve")
        self._orchestrator = Orchestrator(
            "curve",
            self._rollout(),
            curriculum=Passes(turn.problems, turn.sizes),
            journal=self._journal,
            attempt=self._attempt,
            train=self._train,
            limits=Limits(turn.sizes.steps),
            progress=RunProgress(),
        )

    async def run(self) -> Curve:
        """All steps."""
        self._began = time.perf_counter()
        try:
            await self._orchestrator.run()
        finally:
            await self._worker.close()
            self._engine.close()
            self._trainer.close()
        return Curve(
            side=OURS,
            seed=self._turn.seed,
            groups=tuple(self._rows),
            step_seconds=tuple(self._seconds),
        )

    def _rollout(self) -> RolloutConfig:
        sizes = self._turn.sizes
        return RolloutConfig(
            group_size=sizes.group_size,
            groups_per_step=sizes.groups_per_step,
            least_spread=0.0,
            concurrent_trajectories=sizes.boxes,
            temperature=self._turn.recipe.rollout.temperature,
            seed=self._turn.seed,
            staleness=StalenessConfig(max_staleness_versions=0, admission="cap"),
        )

    async def _attempt(self, request: AttemptRequest) -> Trajectory:
        return await self._worker.attempt(self._turn.begun(request))

    async def _train(self, step: StepRequest) -> int:
        """One step, and the engine with its weights."""
        samples = [
            sample
            for group in sorted(step.groups, key=lambda group: group.group_id)
            for sample in make_samples(group, self._objective)
        ]
        self._journal.mark_trained([group.group_id for group in step.groups], step.step)
        self._trainer.step(samples)
        version = self._trainer.publish().version
        await self._engine.swap_weights(self._trainer.export_weights(), version)
        self._orchestrator.engine_applied(version)
        self._rows += [
            GroupRow.of(step.step, group.problem_id, group.trajectories) for group in step.groups
        ]
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began = now
        return version


def learning_of(turn: OneTurn) -> LearningConfig:
    """nano's, with TRL's divisor and no warm-up."""
    sizes, learning = turn.sizes, turn.recipe.learning
    attempts = sizes.groups_per_step * sizes.group_size
    divisor = float(attempts * sizes.completion_tokens)
    return learning.model_copy(
        update={
            "objective": learning.objective.model_copy(update={"loss_divisor_tokens": divisor}),
            "optimizer": learning.optimizer.model_copy(update={"warmup_steps": 0}),
            "keep_for_replay": False,
        }
    )


class PeerRun:
    """TRL in a process of its own, with attempts graded here."""

    def __init__(self, turn: OneTurn, directory: Path, python: Path) -> None:
        self._turn = turn
        self._directory = directory
        self._python = python
        self._answers = GivenAnswers(turn.renderer)
        self._rows: list[GroupRow] = []
        self._problems = {problem.problem_id: problem for problem in turn.problems}

    async def run(self) -> Curve:
        """All steps."""
        turn, model, given = self._turn, self._directory / "model", self._directory / "given.json"
        export_model(turn.checkpoint, model, name="nano", lineage=(), dtype="float32")
        given.write_text(json.dumps(self._given()))
        worker = turn.open_worker(partial(run_agent, self._answers, turn.renderer))
        peer = subprocess.Popen(
            [str(self._python), str(PEER_SCRIPT), str(model), str(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        )
        assert peer.stdin is not None
        seconds: list[float] = []
        grading: list[float] = []
        try:
            while len(seconds) < turn.sizes.steps:
                line = await asyncio.to_thread(next_line, peer.stdout)
                if not line:
                    raise RuntimeError(f"TRL ended after {len(seconds)} steps: {peer.args}")
                said = json.loads(line)
                if "step_seconds" in said:
                    seconds.append(said["step_seconds"])
                    continue
                began = time.perf_counter()
                rewards = await self._grade(worker, len(seconds) + 1, **said)
                grading.append(time.perf_counter() - began)
                peer.stdin.write(json.dumps(rewards) + "\n")
                peer.stdin.flush()
        finally:
            peer.stdin.close()
            peer.terminate()
            peer.wait()
            await worker.close()
        return Curve(
            side=PEER,
            seed=turn.seed,
            groups=tuple(self._rows),
            step_seconds=tuple(seconds),
            grading_seconds=tuple(grading),
        )

    def _given(self) -> dict[str, Any]:
        """What TRL's side reads."""
        turn, sizes = self._turn, self._turn.sizes
        learning = learning_of(turn)
        prompts = [(problem.problem_id, turn.prompt(problem)) for problem in turn.problems]
        prompts *= sizes.visits
        return {
            "steps": sizes.steps,
            "group_size": sizes.group_size,
            "attempts_per_step": sizes.groups_per_step * sizes.group_size,
            "microbatch": MICROBATCH,
            "completion_tokens": sizes.completion_tokens,
            "stop_token_ids": turn.renderer.stop_token_ids,
            "learning_rate": learning.optimizer.learning_rate,
            "gradient_clip_norm": learning.optimizer.gradient_clip_norm,
            "weight_decay": learning.optimizer.weight_decay,
            "adam_betas": ADAM_BETAS,
            "temperature": turn.recipe.rollout.temperature,
            "seed": turn.seed,
            "prompts": [
                {"problem": name, "tokens": tokens, "text": turn.renderer.decode(tokens)}
                for name, tokens in prompts
            ],
        }

    async def _grade(
        self, worker: RolloutWorker, step: int, problems: list[str], completions: list[list[int]]
    ) -> list[float]:
        """Rewards of a step's answers. Those of a group follow one another."""
        sizes = self._turn.sizes
        slots = asyncio.Semaphore(sizes.boxes)

        async def judge(number: int, problem: Problem, answer: list[int]) -> Trajectory:
            name = f"trl.s{step}.t{number}"
            request = AttemptRequest(name, f"trl.s{step}", problem, number % sizes.group_size, 0, 0)
            async with slots:
                return await judge_given(worker, self._answers, self._turn.begun(request), [answer])

        attempts = await asyncio.gather(
            *(
                judge(number, self._problems[name], answer)
                for number, (name, answer) in enumerate(zip(problems, completions, strict=True))
            )
        )
        for start in range(0, len(attempts), sizes.group_size):
            members = attempts[start : start + sizes.group_size]
            self._rows.append(GroupRow.of(step, members[0].problem_id, members))
        return [attempt.reward.total for attempt in attempts]


async def make_curves(given: argparse.Namespace, seed: int) -> list[Curve]:
    """Both sides of one seed. A side that the folder holds is read."""
    sizes = Sizes(
        steps=given.steps,
        groups_per_step=given.groups,
        group_size=given.group_size,
        visits=given.visits,
        boxes=given.boxes,
    )
    turn = OneTurn(given.start.absolute(), given.work.absolute(), sizes, seed)
    shape = f"{sizes.steps}x{sizes.groups_per_step}x{sizes.group_size}-{sizes.visits}"
    folder = turn.folder / f"seed{seed}-{shape}"
    paths = {side: folder / f"{side}.json" for side in (OURS, PEER)}
    if not all(path.exists() for path in paths.values()):
        await turn.prepare()
        for side, path in paths.items():
            if path.exists():
                continue
            directory = folder / f"{side}-{time.time_ns()}"  # an interrupted run begins anew
            directory.mkdir(parents=True)
            is_ours = side == OURS
            run = OurRun(turn, directory) if is_ours else PeerRun(turn, directory, given.trl_python)
            path.write_text((await run.run()).model_dump_json())
    return [Curve.model_validate_json(path.read_text()) for path in paths.values()]


def main() -> None:
    """Makes what is missing and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", type=Path, required=True, help="has trl installed")
    parser.add_argument(
        "--start", type=Path, required=True, help="home that a demo of nano has filled"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is finished")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--groups", type=int, default=16, help="per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--visits", type=int, default=1, help="groups of each problem")
    parser.add_argument("--boxes", type=int, default=64, help="attempts judged at a time")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    curves = [curve for seed in given.seeds for curve in asyncio.run(make_curves(given, seed))]
    figures = compare(curves)
    show(curves, figures)
    targets = {name: 0.0 for name in DIFFERENCES if name in figures}
    is_met = all(figures[name]["low"] <= 0 <= figures[name]["high"] for name in targets)
    print(
        json.dumps(
            {"name": "grpo_peer_curve", "figures": figures, "targets": targets, "met": is_met}
        )
    )


if __name__ == "__main__":
    main()
