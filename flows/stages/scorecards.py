"""Outputs of a finished evaluation: a row of the ledger, and the files of its artifact."""

import shutil
import time
from pathlib import Path

from pydantic import Field

from ostinato.flows.stages.declared import CORPUS, SUMMARY
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.ledger.rows import ScorecardRow
from ostinato.infra.platform.record import Record
from ostinato.tasks.corpus.config import AnswerOverlap, CorpusResult
from ostinato.tasks.evaluation.checkpoint.records import EvaluationResult
from ostinato.tasks.records import Split

SCORECARD_FILE = "scorecard.json"
ROWS_FILE = "rows.jsonl"  # one line per attempt
OVERLAP_FILE = "overlap.json"


class TrainingOverlap(Record):
    """Overlap of evaluated problems with text that the checkpoint's stages train on."""

    checkpoint: str
    problems: str
    split: Split
    corpora: dict[str, AnswerOverlap] = Field(
        description="overlaps by corpus, for corpora of these problems that the checkpoint descends from; empty: "
        "unknown, as for other people's models"
    )


def overlap_of(
    context: StageContext, checkpoint: ArtifactRef, problems: ArtifactRef, split: Split
) -> TrainingOverlap:
    """Overlap of a split's problems with training text, as measured when the checkpoint's corpora were built."""
    corpora = {
        str(corpus): found
        for corpus in context.artifacts.lineage(checkpoint)
        if corpus.kind == CORPUS.kind and problems in context.artifacts.manifest(corpus).parents
        for found in CorpusResult.model_validate(
            context.artifacts.metadata(corpus)[SUMMARY]
        ).overlap
        if found.split is split
    }
    return TrainingOverlap(
        checkpoint=str(checkpoint), problems=str(problems), split=split, corpora=corpora
    )


def keep_scorecard(
    context: StageContext,
    checkpoint: ArtifactRef,
    result: EvaluationResult,
    overlap: TrainingOverlap,
    place: Path,
) -> None:
    """Adds the scorecard to the ledger and writes the files to publish: the scorecard, a row and a trajectory
    per attempt, and the problems' overlap with training text.
    """
    card = result.scorecard
    row = ScorecardRow(
        scorecard_id=card.scorecard_id,
        checkpoint_id=str(checkpoint),
        suite=card.suite,
        payload=card.model_dump(mode="json"),
        created_at=time.time(),
    )
    context.ledger.scorecards.add(row)
    place.mkdir(parents=True, exist_ok=True)
    (place / SCORECARD_FILE).write_text(card.model_dump_json())
    (place / ROWS_FILE).write_text("\n".join(row.model_dump_json() for row in result.rows))
    (place / OVERLAP_FILE).write_text(overlap.model_dump_json(indent=1))
    shutil.copy(result.trajectories_path, place)
