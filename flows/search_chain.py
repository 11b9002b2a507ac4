"""The stages of search training as functions from a context and parents to artifacts.

What each is asked, what identifies it and what is published: traces of finished runs, and the
encoder trained on code and on them. Flows call these; no stage knows another.
"""

from pathlib import Path

from ostinato.flows.chain import SUMMARY, summary_of
from ostinato.flows.child_task import run_stage
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.ledger.rows import JournalState
from ostinato.tasks.retrieval.config import (
    RetrievalRequest,
    RetrievalResult,
    TraceRequest,
    TraceResult,
)


def newest_runs(context: StageContext) -> tuple[str, ...]:
    """The run behind the recipe's newest reinforced checkpoint; none before there is one.

    A run is called after the directory it works in (flows/chain.py), which is kind and fingerprint.
    """
    rows = context.ledger.artifacts.list("reinforced", context.recipe.name)
    newest = max(rows, key=lambda row: row.version, default=None)
    return () if newest is None else (f"{newest.kind}-{newest.fingerprint}",)


def collect_traces(
    context: StageContext, problems: ArtifactRef | None, run_ids: tuple[str, ...]
) -> ArtifactRef | None:
    """Committed trajectories of these runs -> what agents read and edited; None without any."""
    if problems is None or not any(_num_committed(context, run_id) for run_id in run_ids):
        return None

    def build(directory: Path) -> tuple[Path, dict]:
        request = TraceRequest(
            run_ids=run_ids, problems_directory=str(context.directory_of(problems))
        )
        entry = "ostinato.flows.drivers.search_traces:main"
        result = run_stage("search traces", entry, request, TraceResult, directory)
        return Path(result.directory), {SUMMARY: result.model_dump(mode="json")}

    # a run that went on has more to tell, so how far it is belongs to the identity
    identity = {run_id: _num_committed(context, run_id) for run_id in run_ids}
    return context.ensure("search-traces", identity, (problems,), build)


def train_encoder(
    context: StageContext, problems: ArtifactRef | None, traces: ArtifactRef | None
) -> ArtifactRef:
    """Installed code, and traces where there are any -> the published encoder."""
    config = context.recipe.retrieval
    parents = () if problems is None or traces is None else (problems, traces)

    def build(directory: Path) -> tuple[Path, dict]:
        directories = [str(context.directory_of(ref)) for ref in parents] or [None, None]
        request = RetrievalRequest(
            config=config,
            problems_directory=directories[0],
            traces_directory=directories[1],
        )
        entry = "ostinato.tasks.retrieval.run:main"
        result = run_stage("retrieval", entry, request, RetrievalResult, directory)
        return Path(result.directory), {SUMMARY: result.model_dump(mode="json")}

    return context.ensure("search-encoder", config, parents, build)


def encoder_result(context: StageContext, encoder: ArtifactRef) -> RetrievalResult:
    """Measurements of the stage that made the encoder."""
    return RetrievalResult.model_validate(summary_of(context, encoder))


def _num_committed(context: StageContext, run_id: str) -> int:
    done = {JournalState.COMMITTED, JournalState.TRAINED}
    return sum(row.state in done for row in context.ledger.journal.rows(run_id))
