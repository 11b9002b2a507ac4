"""Reinforcement learning on one page: problems -> attempts in boxes -> verdicts -> samples -> `step()`.

    python examples/loop.py PROBLEMS [--steps 2] [--groups 4] [--group-size 8] [--out DIRECTORY]

It trains the nano model in one process, and only calls shipped parts. PROBLEMS is a folder that `ostinato problems from`
made. `ostinato run reinforcement` joins the same parts in processes that do not wait for one another
(`tasks/reinforcement/run.py`). With several ranks, each rank makes the calls of `trainer` below.
"""

import argparse
import asyncio
import tempfile
from functools import partial
from pathlib import Path

from ostinato.flows.recipe import load_recipe
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.start import load_engine
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.rendering import load_renderer
from ostinato.tasks.problems.published import load_problems
from ostinato.tasks.records import Group, Problem, Split
from ostinato.tasks.reinforcement.learning.batches.credit import samples_of_step
from ostinato.tasks.reinforcement.learning.config import TrainerRequest, trainer_config
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.reinforcement.step_metrics import describe_groups
from ostinato.tasks.reinforcement.step_monitor import describe_parity
from ostinato.tasks.rollout.config import WorkerSetup
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.graded_worker import build_worker
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import INFRASTRUCTURE_OUTCOMES
from ostinato.tasks.rollout.worker import RolloutWorker

CHECKPOINT = Path(__file__).parents[1] / "models" / "pretrained" / "nano_base"
CHAIN = "loop"


async def attempt_group(
    worker: RolloutWorker, problem: Problem, number: int, size: int, temperature: float
) -> Group:
    """Attempts at one problem, each in its own box, judged and rewarded when it ends."""
    name, seed = f"g{number:06d}", 1000 * number
    requests = [
        AttemptRequest(f"{name}.{index}", name, problem, index, 0, seed + index, temperature)
        for index in range(size)
    ]
    attempts = await asyncio.gather(*(worker.attempt(request) for request in requests))
    # an attempt lost by the machine says nothing about the policy
    kept = tuple(one for one in attempts if one.outcome not in INFRASTRUCTURE_OUTCOMES)
    return Group(group_id=name, problem_id=problem.problem_id, trajectories=kept)


async def run(problems: Path, out: Path, steps: int, groups_per_step: int, group_size: int) -> None:
    """Builds the parts and runs the loop to the last step."""
    recipe = load_recipe("nano")  # each part uses its own section
    learning = trainer_config(recipe.learning, recipe.decoding)
    concurrent = groups_per_step * group_size

    # Curriculum: draws the next problem; problems that are solved sometimes come more often.
    curriculum = Curriculum(
        load_problems(problems, Split.TRAIN),
        recipe.rollout.curriculum,
        group_size=group_size,
        seed=recipe.rollout.seed,
    )

    # Trainer: the policy, its optimiser and a chain of weight versions in an object store.
    objects = ObjectStore.from_url(f"file://{out}/objects")
    trainer = RLTrainer(
        TrainerRequest(
            config=learning,
            checkpoint_directory=str(CHECKPOINT),
            work_directory=str(out / "steps"),
            chain_id=CHAIN,
        ),
        objects,
    )

    # Engine: answers with tokens and their log-probabilities and experts.
    engine = load_engine(
        CHECKPOINT,
        "loop",
        recipe.decoding,
        slots=concurrent,
        max_context_tokens=recipe.harness.context_tokens,
    )
    subscriber = ChainSubscriber(objects, CHAIN)

    # Worker: runs the agent's calls in boxes, then the hidden tests, then the reward terms.
    setup = WorkerSetup(
        tokenizer_directory=str(CHECKPOINT),
        problems_directory=str(problems),
        harness=recipe.harness,
        grading=recipe.grading,
        concurrent_trajectories=concurrent,
    )
    worker = build_worker(setup, partial(run_agent, engine, load_renderer(CHECKPOINT)))

    try:
        first, version = trainer.steps_taken + 1, trainer.weight_version
        for step in range(first, first + steps):
            await engine.swap_weights(subscriber.fetch(version), version)
            drawn = [curriculum.draw(()) for _ in range(groups_per_step)]
            groups = await asyncio.gather(
                *(
                    attempt_group(
                        worker, problem, step * 1000 + index, group_size, recipe.rollout.temperature
                    )
                    for index, problem in enumerate(drawn)
                )
            )
            for group in groups:
                solved = sum(one.is_solved for one in group.trajectories)
                size = len(group.trajectories)
                curriculum.observe(group.problem_id, attempts=size, solved=solved)

            # One sample per segment of each attempt; its advantage is the reward minus the group's mean.
            samples = samples_of_step(groups, learning.objective)
            report = trainer.step(samples)
            version = trainer.publish().version
            rate = describe_groups(groups)["solve_rate"]
            print(
                f"step {report.step}: {rate:.0%} solved, loss {report.loss:.4f}, gradient norm "
                f"{report.gradient_norm:.3f}, {describe_parity(report.parity)}, version {version}"
            )
        print(f"checkpoint: {trainer.save()}")
    finally:
        await worker.close()
        engine.close()
        trainer.close()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path, help="folder that `ostinato problems from` made")
    parser.add_argument("--steps", type=int, default=2, help="optimiser steps")
    parser.add_argument("--groups", type=int, default=4, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8, help="attempts per group")
    parser.add_argument("--out", type=Path, help="folder to go on from; none: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sizes = options.steps, options.groups, options.group_size
        asyncio.run(run(options.problems, options.out or Path(scratch), *sizes))


if __name__ == "__main__":
    main()
