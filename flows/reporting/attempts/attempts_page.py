"""Attempts as one HTML page that needs nothing else: prompt, calls, results, diff, verdict, reward, tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.flows.reporting.attempts.trajectories import (
    Attempt,
    TokenTexts,
    headline,
    say_terms,
    say_verdict,
    summarise,
)
from ostinato.flows.reporting.pages import render
from ostinato.infra.agent.transcript import Segment

MOST_SHOWN = 100  # attempts whole on one page; of the others only a line each
_COLD_NATS = 5.0  # a sampled token this unlikely has the full colour


class TokenView(NamedTuple):
    """One token of a sequence."""

    text: str
    logprob: float | None  # None: read, not sampled
    weight_version: int
    heat: float  # from 0 to 1, the less likely the higher


class AttemptView(NamedTuple):
    """One attempt as the template reads it."""

    anchor: str
    summary: str
    headline: dict[str, str]
    facts: dict[str, Any]
    diffs: list[list[tuple[str, str]]]  # class and text of each line
    verdict: str | None
    terms: list[str]
    segments: list[list[TokenView]]


def write_attempts(path: Path, title: str, attempts: Sequence[Attempt]) -> Path:
    """Writes the page, the newest attempts whole. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render(
        "attempts",
        title=title,
        listed=[summarise(attempt.facts) for attempt in attempts[:-MOST_SHOWN]],
        attempts=[_view(attempt) for attempt in attempts[-MOST_SHOWN:]],
        cold_nats=_COLD_NATS,
    )
    path.write_text(page)
    return path


def _view(attempt: Attempt) -> AttemptView:
    facts = attempt.facts
    whole = "transcript" in facts
    patches = facts.get("changed_files", {}).values()
    return AttemptView(
        anchor=facts["trajectory_id"],
        summary=summarise(facts),
        headline=headline(facts),
        facts=facts,
        diffs=[[(_line_class(line), line) for line in _shown_lines(patch)] for patch in patches],
        verdict=say_verdict(facts["verdict"]) if whole and facts.get("verdict") else None,
        terms=list(say_terms(facts["reward"])) if whole and facts.get("reward") else [],
        segments=[[*_tokens(segment, attempt.token_texts)] for segment in attempt.segments],
    )


def _shown_lines(patch: str) -> list[str]:
    """Lines of a patch with their carriage returns visible."""
    return patch.removesuffix("\n").replace("\r", "\u240d").split("\n")


def _line_class(line: str) -> str:
    if line.startswith(("+++", "---", "@@")):
        return "place"
    return {"+": "added", "-": "removed"}.get(line[:1], "kept")


def _tokens(segment: Segment, texts: TokenTexts | None) -> Iterator[TokenView]:
    for token, is_sampled, logprob, version in zip(
        segment.token_ids_T.tolist(),
        segment.loss_mask_T.tolist(),
        segment.logprobs_T.tolist(),
        segment.weight_versions_T.tolist(),
        strict=True,
    ):
        text = f"[{token}]" if texts is None else texts[token]
        heat = min(1.0, -min(logprob, 0.0) / _COLD_NATS)
        yield TokenView(text, logprob if is_sampled else None, version, heat)
