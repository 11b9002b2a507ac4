"""Flow: a recipe's problems built anew and compared with the set that is used."""

import hashlib
from typing import Annotated

from prefect import flow
from pydantic import Field

from ostinato.flows.reporting import showing
from ostinato.flows.stages import chain
from ostinato.flows.stages.console import say
from ostinato.flows.stages.forms import Described, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.run_options import Options
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.tasks.problems.config import ProblemsResult
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.problems.shipped import (
    SETS,
    agreed_lines,
    compare_with_shipped,
    find_set,
    ship_set,
    shipped_checksum,
)

Ships = Annotated[
    Annotated[bool, Field(title="Ships")],
    Described("puts the set into tasks/problems/sets for a commit, where none is for the recipe."),
]


@flow(name="problem-verification", flow_run_name=run_name)
def problem_verification(
    recipe: RecipeName = "problems_16",
    seed: Seed = None,
    options: Options = None,
    ships: Ships = False,
) -> ArtifactRef:
    """Proves the recipe's problems again: each of the set that ships for the recipe, or else of the one that was built
    before, is made again byte for byte, or ProblemError. With `ships` those on which both builds agree are put beside
    the code.
    """
    context = StageContext.open(recipe, seed, options)
    config = context.recipe.problems
    if ships and (checksum := shipped_checksum(config)) is not None:
        raise ConfigError(
            f"recipe {recipe}: {SETS} holds a set for it already, sha256 {checksum}; remove its two files to put "
            "another in its place"
        )
    wanted, name = _set_in_use(context)
    problems = chain.build_proven_problems(context, use_shipped=False)
    showing.show_problems(context, problems)
    directory = context.directory_of(problems)
    lines = (directory / PROBLEMS_FILE).read_bytes()
    if ships:
        result = chain.result_of(context, problems, ProblemsResult)
        agreed = agreed_lines(wanted, lines)
        card = ship_set(context.recipe.name, config, result, agreed)
        num_left_out = wanted.count(b"\n") - card.result.num_problems
        say(
            f"{SETS} now holds {context.recipe.name}: {card.result.num_problems} problems that two builds made alike, "
            f"sha256 {card.sha256}; {num_left_out} of one build are left out"
        )
        return problems
    if differences := compare_with_shipped(lines, wanted):
        raise ProblemError(f"recipe {recipe}, compared with {name}: " + "\n".join(differences))
    num_others = lines.count(b"\n") - wanted.count(b"\n")
    say(
        f"all problems of {name} were made again, byte for byte: sha256 {hashlib.sha256(wanted).hexdigest()}; "
        f"others beside: {num_others}"
    )
    return problems


def _set_in_use(context: StageContext) -> tuple[bytes, str]:
    """Lines of the set that the recipe's stages take, and what it is called."""
    shipped = find_set(context.recipe.problems)
    if shipped is not None:
        return shipped[1], "the shipped set"
    built = chain.build_proven_problems(context)
    return (context.directory_of(built) / PROBLEMS_FILE).read_bytes(), str(built)
