"""The encoder of code search as an artifact: trained once by whichever flow needs it first."""

from pathlib import Path

from ostinato.flows.chain import SUMMARY, summary_of
from ostinato.flows.child_task import run_stage
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.retrieval.config import RetrievalRequest, RetrievalResult


def train_encoder(context: StageContext) -> ArtifactRef:
    """The code of the recipe's packages -> the published encoder."""
    config = context.recipe.retrieval

    def build(directory: Path) -> tuple[Path, dict]:
        request = RetrievalRequest(config=config)
        entry = "ostinato.tasks.retrieval.run:main"
        result = run_stage("retrieval", entry, request, RetrievalResult, directory)
        return Path(result.directory), {SUMMARY: result.model_dump(mode="json")}

    return context.ensure("retrieval", config, (), build)


def encoder_result(context: StageContext, encoder: ArtifactRef) -> RetrievalResult:
    """The measurements made when the encoder was trained."""
    return RetrievalResult.model_validate(summary_of(context, encoder))
