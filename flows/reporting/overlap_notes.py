"""What of evaluated problems stands in text that a checkpoint's stages train on, for tables."""

from collections.abc import Iterator

from ostinato.flows.stages.scorecards import overlap_of
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.corpus.config import CorpusResult
from ostinato.tasks.corpus.overlap_records import AnswerOverlap
from ostinato.tasks.records import Split

UNKNOWN = "not known"  # of models of others, and of corpora made from other problems


def note_overlap(
    context: StageContext, checkpoint: ArtifactRef, problems: ArtifactRef, split: Split
) -> str:
    """Of the corpora that the checkpoint descends from and that were made from these problems."""
    found = overlap_of(context, checkpoint, problems, split)
    return "; ".join(describe_overlap(item) for item in found.corpora.values()) or UNKNOWN


def describe_overlap(found: AnswerOverlap) -> str:
    """Whole right lines, and by stage the problems of whose n-grams one holds words of a right line."""
    lines = f"right lines of {found.problems_with_answer} of {found.problems}"
    if not found.ngrams:
        return lines
    counts = ", ".join(f"{item.stage} {item.problems_with_answer}" for item in found.ngrams)
    first = found.ngrams[0]
    return f"{lines}; their {first.words}-grams: {counts} of {first.problems}"


def overlap_rows(result: CorpusResult) -> Iterator[dict[str, object]]:
    """A row per split and stage, and one per split for whole lines."""
    for found in result.overlap:
        yield {
            "split": found.split.value,
            "trained on": "all documents",
            "measured by": "right lines",
            "problems": found.problems,
            "with answer": found.problems_with_answer,
            "with any": "",
            "median": f"{found.median_documents:g} documents",
        }
        for item in found.ngrams:
            yield {
                "split": found.split.value,
                "trained on": item.stage,
                "measured by": f"{item.words}-grams",
                "problems": item.problems,
                "with answer": item.problems_with_answer,
                "with any": item.problems_with_text,
                "median": f"{item.median_share:.0%} of a problem's",
            }
