"""What a format trial counts and which attempts it shows."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ostinato.tasks.evaluation.formats.config import (
    ENDINGS,
    EXAMPLES,
    AnswerFormat,
    Ending,
    FormatAttempt,
    FormatTrialResult,
)
from ostinato.tasks.evaluation.formats.run import choose_examples, score_of

TOOL, WHOLE = AnswerFormat(dialect="hermes"), AnswerFormat(dialect="hermes", edits="whole_function")


def attempts_with(endings: Sequence[Ending], form: AnswerFormat = TOOL) -> list[FormatAttempt]:
    return [
        FormatAttempt(
            format=form, problem_id=f"p{index}", ending=ending, generated_tokens=10, text="text"
        )
        for index, ending in enumerate(endings)
    ]


@given(st.lists(st.sampled_from(ENDINGS)))
def test_what_came_further_counts_at_each_step_before(endings: list[Ending]) -> None:
    score = score_of(TOOL, [*attempts_with(endings), *attempts_with(["solved"], WHOLE)])
    assert score.attempts == len(endings)
    assert score.solved == endings.count("solved")
    assert score.changed == score.solved + endings.count("changed")
    assert score.parsed == score.changed + endings.count("parsed")
    assert score.generated_tokens == (10 if endings else 0)


@given(st.lists(st.sampled_from(ENDINGS), max_size=12))
def test_examples_show_each_ending_before_a_second_of_one(endings: list[Ending]) -> None:
    examples = choose_examples(attempts_with(endings))
    shown = [one.ending for one in examples]
    assert len(shown) == min(EXAMPLES, len(endings))
    assert len(set(shown)) == min(EXAMPLES, len(set(endings)))
    assert shown == sorted(shown, key=ENDINGS.index)
    assert len({one.problem_id for one in examples}) == len(examples)


def test_the_best_format_solves_the_largest_share_then_changes_then_reads() -> None:
    def best(tool: Sequence[Ending], whole: Sequence[Ending]) -> AnswerFormat:
        attempts = [*attempts_with(tool), *attempts_with(whole, WHOLE)]
        scores = tuple(score_of(form, attempts) for form in (TOOL, WHOLE))
        return FormatTrialResult(scores=scores, examples=(), wall_seconds=1.0).best.format

    assert best(["changed"] * 8, ["solved", *["unread"] * 7]) == WHOLE
    # fewer attempts ended in time, but a larger share of them solved
    assert best(["solved", "unread"], ["solved", *["unread"] * 3]) == TOOL
    assert (
        best(["solved"], [*["solved"] * 7, "unread"]) == WHOLE
    )  # seven of eight say more than one of one
    assert best([], ["solved", *["unread"] * 7]) == WHOLE
    assert best(["parsed"] * 4, ["changed", *["unread"] * 3]) == WHOLE
