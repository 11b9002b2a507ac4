"""Flow: installed code and agents' trajectories in, a measured code-search encoder out."""

from prefect import flow
from prefect.artifacts import create_table_artifact

from ostinato.flows import search_chain
from ostinato.flows.problem_building import problem_building
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.retrieval.config import RankingScores


@flow(name="search-training")
def search_training(
    recipe: str = "nano",
    seed: int | None = None,
    run_ids: tuple[str, ...] = (),
    problems: ArtifactRef | None = None,
) -> ArtifactRef:
    """Trains the encoder on code, then on what helped agents, and publishes it with its table.

    Args:
        recipe: name of a shipped recipe or path of a TOML file.
        seed: overrides the recipe's seed.
        run_ids: runs whose trajectories teach; without any the newest reinforcement run of the recipe.
        problems: the problem set of those runs; built when absent. Without runs none is needed.
    """
    context = StageContext.open(load_recipe(recipe, seed=seed))
    run_ids = run_ids or search_chain.newest_runs(context)
    if run_ids and problems is None:
        problems = problem_building(recipe, seed)
    traces = search_chain.collect_traces(context, problems, run_ids)
    encoder = search_chain.train_encoder(context, problems, traces)
    result = search_chain.encoder_result(context, encoder)
    for key, scores in (("search", result.held_out), ("localisation", result.localisation)):
        create_table_artifact(
            [_row(name, found) for name, found in scores.items()],
            key=f"{key}-before-and-after",
            description=f"{encoder}, weight of the vectors {result.dense_weight}",
        )
    return encoder


def _row(system: str, scores: RankingScores) -> dict[str, str | int]:
    return {
        "system": system,
        "queries": scores.queries,
        "MRR": f"{scores.mrr:.3f}",
        "recall@1": f"{scores.recall_1:.3f}",
        "recall@10": f"{scores.recall_10:.3f}",
    }
