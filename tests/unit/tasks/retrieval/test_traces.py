"""Looking back: edited above read above ignored, over all solved attempts of a problem."""

import numpy as np

from ostinato.tasks.retrieval.config import TraceConfig
from ostinato.tasks.retrieval.traces import (
    ChunkedRepository,
    TraceRecord,
    make_examples,
    pool_of_examples,
)

FILES = {
    "pkg/a.py": b"def first():\n    return 1\n\n\ndef second():\n    return 2\n\n\ndef third():\n    return 3\n",
    "tests/test_a.py": b"class TestA:\n    def test_first(self):\n        assert first() == 1\n",
}
REPOSITORY = ChunkedRepository.read("repo", FILES, ("tests",))
CONFIG = TraceConfig(edited=4, read=2, retrieved=-1)


def record(number: int, **changes: object) -> TraceRecord:
    fields = {
        "trajectory_id": str(number),
        "problem_id": "p",
        "repository": "repo",
        "failing_tests": ("tests/test_a.py::TestA::test_first",),
        "report": "failed: AssertionError",
        "reads": (("pkg/a.py", 5, 6),),
        "edits": (("pkg/a.py", 2, 2),),
        "shown": (("pkg/a.py", 9, 10),),
        "solved": True,
    }
    return TraceRecord.model_validate(fields | changes)


def test_chunks_are_judged_by_what_was_done_with_them() -> None:
    [example] = make_examples([record(1)], {"repo": REPOSITORY}, CONFIG)

    assert [code.name for code in example.codes] == ["first", "second", "third"]
    assert example.helpfulness == (4, 2, -1)
    assert example.answer == 0


def test_judgements_are_means_over_the_solved_attempts() -> None:
    records = [record(1), record(2, reads=()), record(3, solved=False, edits=(("pkg/a.py", 9, 9),))]
    [example] = make_examples(records, {"repo": REPOSITORY}, CONFIG)

    assert example.helpfulness == (4, 1, -1)


def test_the_question_is_the_failing_test_and_its_report_not_the_path() -> None:
    [example] = make_examples([record(1)], {"repo": REPOSITORY}, CONFIG)

    assert "assert first() == 1" in example.query
    assert example.query.endswith("failed: AssertionError")
    assert "pkg/a.py" not in example.query


def test_attempts_that_solved_nothing_teach_nothing() -> None:
    assert make_examples([record(1, solved=False)], {"repo": REPOSITORY}, CONFIG) == []


def test_candidates_hold_every_judged_chunk() -> None:
    [example] = make_examples([record(1, shown=())], {"repo": REPOSITORY}, CONFIG)

    assert example.draw_candidates(2, np.random.default_rng(0)) == [0, 1]
    assert sorted(example.draw_candidates(9, np.random.default_rng(0))) == [0, 1, 2]


def test_examples_as_a_pool_ask_for_the_edited_chunk() -> None:
    pool = pool_of_examples(make_examples([record(1)], {"repo": REPOSITORY}, CONFIG))

    assert (pool.answers, pool.codes[pool.answers[0]].name) == ((0,), "first")
