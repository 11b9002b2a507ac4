"""What of its problems in training text stands beside a scorecard: in tables and as a file."""

from pathlib import Path

import pytest

from ostinato.flows.reporting.evaluations import (
    UNKNOWN,
    evaluation_as_markdown,
    note_overlap,
    overlap_rows,
)
from ostinato.flows.stages import chain
from ostinato.flows.stages.chain import (
    OVERLAP_FILE,
    ROWS_FILE,
    SCORECARD_FILE,
    TrainingOverlap,
    keep_scorecard,
    overlap_of,
)
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.tasks.corpus.config import AnswerOverlap, CorpusResult, NgramOverlap
from ostinato.tasks.evaluation.checkpoint.records import EvaluationResult
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import add_checkpoint, add_problems, make_scorecard, open_context
from tests.fakes.scorecards import report_of

RESULT = CorpusResult(
    directory="",
    vocab_size=1,
    shards=(),
    demonstrations=0,
    demonstration_tokens=0,
    demonstrations_by_plan={},
    files_read=0,
    files_dropped={},
    documents_decontaminated=0,
    licences={},
    overlap=(
        AnswerOverlap(
            split=Split.HELD_OUT,
            problems=9,
            problems_with_answer=7,
            median_documents=3.0,
            ngrams=tuple(
                NgramOverlap(
                    stage=stage,
                    words=13,
                    problems=8,
                    problems_with_text=6,
                    problems_with_answer=count,
                    median_share=0.25,
                )
                for stage, count in (("pretraining", 5), ("RL", 0))
            ),
        ),
        AnswerOverlap(
            split=Split.HELD_OUT_FUNCTION, problems=4, problems_with_answer=0, median_documents=0.0
        ),
    ),
)
NOTE = "right lines of 7 of 9; their 13-grams: pretraining 5, RL 0 of 8"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    return open_context(tmp_path, "mine")


def trained_on(context: StageContext, problems: ArtifactRef) -> ArtifactRef:
    """A checkpoint whose corpus was made from these problems."""

    def build(directory: Path) -> tuple[Path, dict]:
        place = chain.one_file(directory, "content.json", "{}")
        return place, {chain.SUMMARY: RESULT.model_dump(mode="json")}

    corpus = context.ensure("corpus", {}, (problems,), build)
    return add_checkpoint(context, corpus, "trained")


def test_overlap_is_that_of_the_corpus_the_checkpoint_descends_from(context: StageContext) -> None:
    problems, others = add_problems(context, "a"), add_problems(context, "b")
    checkpoint = trained_on(context, problems)
    assert note_overlap(context, checkpoint, problems, Split.HELD_OUT) == NOTE
    whole = note_overlap(context, checkpoint, problems, Split.HELD_OUT_FUNCTION)
    assert whole == "right lines of 0 of 4"  # of a corpus from before n-grams were counted
    assert note_overlap(context, checkpoint, others, Split.HELD_OUT) == UNKNOWN
    untrained = add_checkpoint(context, problems, "of others")
    assert note_overlap(context, untrained, problems, Split.HELD_OUT) == UNKNOWN


def test_it_is_a_file_beside_the_scorecard_rows_and_trajectories(
    context: StageContext, tmp_path: Path
) -> None:
    problems, others = add_problems(context, "a"), add_problems(context, "b")
    checkpoint = trained_on(context, problems)
    card = make_scorecard(str(checkpoint), "p", 0.5)
    said = tmp_path / "trajectories.jsonl"
    said.write_text('{"attempt": 0}\n')
    result = EvaluationResult(
        scorecard=card, rows=(), trajectories_path=str(said), wall_seconds=1.0
    )
    for asked, known in ((problems, RESULT.overlap[:1]), (others, ())):
        place = tmp_path / asked.name / str(asked.version)
        overlap = overlap_of(context, checkpoint, asked, Split.HELD_OUT)
        keep_scorecard(context, checkpoint, result, overlap, place)
        read = TrainingOverlap.model_validate_json((place / OVERLAP_FILE).read_bytes())
        assert (read.checkpoint, read.problems) == (str(checkpoint), str(asked))
        assert tuple(read.corpora.values()) == known
        assert {path.name for path in place.iterdir()} == {
            OVERLAP_FILE, ROWS_FILE, SCORECARD_FILE, said.name,
        }  # fmt: skip


def test_it_is_a_column_beside_each_scorecard_and_a_table_of_the_corpus() -> None:
    cards = tuple(make_scorecard(name, "p", 0.5) for name in ("first", "second"))
    report = report_of(*cards, in_training_text=(NOTE, UNKNOWN))
    heads, _, first, second = [
        line.split(" | ")
        for line in evaluation_as_markdown(report).split("\n")
        if line.startswith("|")
    ][:4]  # of the first table
    assert heads[-1].startswith("in training text")
    assert first[-1].startswith(NOTE)
    assert second[-1].startswith(UNKNOWN)
    rows = [*overlap_rows(RESULT)]
    assert [row["trained on"] for row in rows] == [
        "all documents", "pretraining", "RL", "all documents",
    ]  # fmt: skip
    assert [row["with answer"] for row in rows] == [7, 5, 0, 0]
