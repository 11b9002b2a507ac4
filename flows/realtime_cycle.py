"""Flow: collect, distil, train, evaluate, ship."""

import time

from prefect import flow

from ostinato.flows import chain, realtime, showing
from ostinato.flows.problem_building import problem_building
from ostinato.flows.recipe import load_recipe
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.records import Split


@flow(name="realtime-cycle")
def realtime_cycle(
    recipe: str = "nano",
    seed: int | None = None,
    problems: ArtifactRef | None = None,
    trained: ArtifactRef | None = None,
) -> realtime.CycleReport:
    """Learns from what users did with the serving checkpoint and ships the result if it is not worse.

    Args:
        recipe: name of a shipped recipe or path of a TOML file.
        seed: overrides the recipe's seed.
        problems: a built problem set; built when absent.
        trained: serves first if nothing serves yet; made when absent.
    """
    started = time.monotonic()
    context = StageContext.open(load_recipe(recipe, seed=seed))
    problems = problems or problem_building(recipe, seed)
    served = realtime.serving_checkpoint(
        context, problems, trained or reinforcement(recipe, seed, problems)
    )
    users = realtime.serve_simulated_users(context, problems, served)
    champion = chain.evaluate(context, problems, served, Split.HELD_OUT)
    cycle = realtime.open_cycle(context, served)
    report = realtime.CycleReport(
        cycle_id="", served=str(served), users=users, champion_scorecard=champion
    )
    if cycle is not None:
        training, candidate = realtime.train_candidate(context, cycle, served)
        card = chain.evaluate(context, problems, candidate, Split.HELD_OUT)
        promotion = realtime.ship(context, cycle, card, champion)
        report = report.model_copy(
            update={
                "cycle_id": cycle.cycle_id,
                "training": training,
                "candidate": str(candidate),
                "candidate_scorecard": card,
                "promotion": promotion,
            }
        )
    report = report.model_copy(update={"seconds": time.monotonic() - started})
    showing.show_cycle(report)
    return report
