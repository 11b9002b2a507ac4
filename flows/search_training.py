"""Flow: trains and measures a code-search encoder on the code of packages."""

from prefect import flow

from ostinato.flows.stages import chain
from ostinato.flows.stages.artifacts import show_table
from ostinato.flows.stages.forms import Options, RecipeName, Seed
from ostinato.flows.stages.naming import run_name
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.retrieval.config import RetrievalResult


@flow(name="search-training", flow_run_name=run_name)
def search_training(
    recipe: RecipeName = "nano", seed: Seed = None, options: Options = None
) -> ArtifactRef:
    """Trains the encoder on code and publishes it with the table of its measurements."""
    context = StageContext.open(recipe, seed, options)
    encoder = chain.train_encoder(context)
    result = chain.result_of(context, encoder, RetrievalResult)
    rows = [
        {
            "system": system,
            "queries": scores.queries,
            "MRR": f"{scores.mrr:.3f}",
            "recall@1": f"{scores.recall_1:.3f}",
            "recall@10": f"{scores.recall_10:.3f}",
        }
        for system, scores in result.held_out.items()
    ]
    weight = f"weight of the vectors {result.dense_weight}"
    show_table(rows, key="search-before-and-after", description=f"{encoder}, {weight}")
    return encoder
