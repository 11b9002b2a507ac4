"""Rows of the report on held-out code: base, continued pretraining, fine-tuning."""

from ostinato.flows.reporting.run_report import codebase_rows
from ostinato.tasks.pretraining.config import Perplexity, PhaseResult, PretrainingResult


def trained(*bits: float | None) -> PretrainingResult:
    evaluations = tuple(
        Perplexity(step=10 * index, perplexity=9.0 - index, bits_per_byte=one, by_source={})
        for index, one in enumerate(bits)
    )
    phases = tuple(
        PhaseResult.model_construct(name=name, steps=10, tokens=100)
        for name in ("code", "transcripts")
    )
    return PretrainingResult.model_construct(
        before=evaluations[0], after=evaluations[-1], evaluations=evaluations, phases=phases
    )


def test_bits_per_byte_stand_before_and_after_each_stage() -> None:
    rows = codebase_rows(trained(1.5, 1.25, 1.3))
    assert [(row.stage, row.before, row.after) for row in rows] == [
        ("pretraining", "9.00", "8.00"),
        ("pretraining", "1.500", "1.250"),
        ("SFT", "1.250", "1.300"),
    ]


def test_an_older_result_has_its_perplexity_alone() -> None:
    assert [row.measure for row in codebase_rows(trained(None, None, None))] == [
        "held-out codebase perplexity"
    ]
