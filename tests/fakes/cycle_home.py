"""A home in which a real-time cycle can begin at once: a random model that serves nobody yet, and problems for
simulated users and for its gate. Every stage of the cycle is real.
"""

from pathlib import Path

from ostinato.flows.stages.stage import StageContext
from ostinato.tasks.records import Problem, Split
from tests.fakes.miniature import make_checkpoint, make_problem_set

LINE = "tests"  # the one that may serve a model that solves nothing
RECIPE = f"""
extends = "miniature"
name = "killed"

[serving]
line = "{LINE}"

[harness]
max_turns = 2
max_generated_tokens = 48
context_tokens = 256

[rollout]
boxes = "fleet"

[evaluation]
problems = 2
attempts_per_problem = 2

[cycle.learning]
world_size = 2

[cycle.gate]
margin = 1.0
floor = 0.0
minimum_problems = 2
"""
CONTEXT_TOKENS = 256


def make_cycle_home(directory: Path) -> dict[str, str]:
    """Parameters of the flow `realtime-cycle` on the home that the environment names."""
    path = directory / "killed.toml"
    path.write_text(RECIPE)
    context = StageContext.open(str(path))
    problems = context.ensure("problems", {"set": "killed"}, (), _problems)
    trained = context.ensure(
        "reinforcement",
        {"model": "random"},
        (problems,),
        lambda folder: (make_checkpoint(folder / "made", CONTEXT_TOKENS), {}),
    )
    context.ledger.close()
    return {"recipe": str(path), "problems": str(problems), "trained": str(trained)}


def _problems(folder: Path) -> tuple[Path, dict]:
    """Two problems that users bring, and two held out."""
    directory = make_problem_set(folder / "set")
    lines = directory / "problems.jsonl"
    problems = [Problem.model_validate_json(line) for line in lines.read_text().splitlines()]
    splits = (Split.USER, Split.USER, Split.HELD_OUT, Split.HELD_OUT)
    lines.write_text(
        "".join(
            problem.model_copy(update={"split": split}).model_dump_json() + "\n"
            for problem, split in zip(problems, splits, strict=True)
        )
    )
    return directory, {}
