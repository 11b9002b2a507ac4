"""Overlap of evaluated problems with training documents, in n-grams of 13 words."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.corpus.config import NgramOverlap
from ostinato.tasks.corpus.overlap import NGRAM_WORDS, measure_overlap
from ostinato.tasks.corpus.source_code.functions import ProblemSource, read_problem_source
from ostinato.tasks.records import Split
from tests.unit.tasks.corpus.conftest import MODULE

GAP = MODULE[MODULE.index("def largest_gap") :]  # the function that is held out whole
ANSWER = "return max(gaps, default=0)"


@pytest.fixture
def source(problems_directory: Path) -> ProblemSource:
    return read_problem_source(problems_directory)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer([MODULE], 400))


def overlap(source: ProblemSource, texts: Sequence[str], renderer: Renderer) -> NgramOverlap:
    """Of the held-out function with documents of pretraining."""
    documents = {"pretraining": [renderer.encode_content(text) for text in texts]}
    found = {item.split: item for item in measure_overlap(source, documents, renderer)}
    return found[Split.HELD_OUT_FUNCTION].ngrams[0]


def test_nothing_of_a_problem_stands_in_other_text(
    source: ProblemSource, renderer: Renderer
) -> None:
    found = overlap(source, [MODULE.replace(GAP, ""), "for value in values " * 30], renderer)
    assert (found.words, found.problems) == (NGRAM_WORDS, 1) == (13, 1)
    assert (found.problems_with_text, found.problems_with_answer, found.median_share) == (0, 0, 0.0)


def test_the_whole_function_in_other_layout_case_and_with_line_tags_is_found(
    source: ProblemSource, renderer: Renderer
) -> None:
    tagged = "\n".join(f"<L{number}>{line}" for number, line in enumerate(GAP.split("\n"), 1))
    for text in (GAP, " ".join(GAP.split()), GAP.upper(), tagged):
        found = overlap(source, ["x = 1", text], renderer)
        assert (found.problems_with_text, found.problems_with_answer) == (1, 1), text
        assert found.median_share == 1.0


def test_a_function_without_its_right_line_overlaps_in_text_alone(
    source: ProblemSource, renderer: Renderer
) -> None:
    found = overlap(source, [GAP.replace(ANSWER, "raise NotImplementedError")], renderer)
    assert (found.problems_with_text, found.problems_with_answer) == (1, 0)
    assert 0 < found.median_share < 1


def test_twelve_words_in_a_row_are_no_overlap_and_thirteen_are(
    source: ProblemSource, renderer: Renderer
) -> None:
    words = "largest_gap values ordered sorted values gaps later earlier for earlier later in zip"
    assert len(words.split()) == 13
    assert overlap(source, [words], renderer).problems_with_text == 1
    assert overlap(source, [words.rpartition(" ")[0]], renderer).problems_with_text == 0
    parts = [words[:30], words[30:]]  # of two documents
    assert overlap(source, parts, renderer).problems_with_text == 0


def test_wording_that_prompts_share_is_no_overlap(
    source: ProblemSource, renderer: Renderer
) -> None:
    wording = "please look at what is wrong here and repair it without touching any test at all"
    reworded = ProblemSource(
        tuple(item.model_copy(update={"prompt": wording}) for item in source.problems),
        source.repositories,
    )
    assert overlap(reworded, [wording], renderer).problems_with_text == 0


def test_problems_of_rl_and_of_users_count_as_documents_of_theirs(
    source: ProblemSource, renderer: Renderer
) -> None:
    [held_out] = [item for item in source.problems if item.split is Split.HELD_OUT]
    for stage, split in (("RL", Split.TRAIN), ("cycle", Split.USER)):
        same = held_out.model_copy(update={"split": split, "problem_id": "again"})
        both = ProblemSource((*source.problems, same), source.repositories)
        found = {item.split: item for item in measure_overlap(both, {}, renderer)}
        by_stage = {item.stage: item for item in found[Split.HELD_OUT].ngrams}
        assert by_stage[stage].problems_with_answer == 1
        assert by_stage[stage].median_share == 1.0
