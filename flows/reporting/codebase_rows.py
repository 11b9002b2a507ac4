"""Held-out code before and after each stage of training, in perplexity and in bits per byte."""

from ostinato.flows.stages.curves.report import ReportRow
from ostinato.tasks.pretraining.config import PretrainingResult

TRANSCRIPTS_PHASE = "transcripts"  # fine-tuning; phases of other names are continued pretraining


def codebase_rows(trained: PretrainingResult) -> list[ReportRow]:
    """Before and after the phases on code, and after those on transcripts."""
    continued_steps = sum(
        phase.steps for phase in trained.phases if phase.name != TRANSCRIPTS_PHASE
    )
    continued = next(item for item in trained.evaluations if item.step == continued_steps)
    phases = ", ".join(f"{phase.name} {phase.tokens / 1e6:.1f}M tokens" for phase in trained.phases)
    rows = [
        ReportRow(
            "pretraining",
            "held-out codebase perplexity",
            f"{trained.before.perplexity:.2f}",
            f"{continued.perplexity:.2f}",
            f"before the transcripts; {phases}",
        )
    ]
    for stage, before, after in (
        ("pretraining", trained.before, continued),
        ("SFT", continued, trained.after),
    ):
        if before.bits_per_byte is None or after.bits_per_byte is None or before == after:
            continue  # an older result, or a stage that took no step
        numbers = f"{before.bits_per_byte:.3f}", f"{after.bits_per_byte:.3f}"
        note = "the same text, so that tokenizers compare"
        rows.append(ReportRow(stage, "held-out codebase, bits per byte", *numbers, note))
    return rows
