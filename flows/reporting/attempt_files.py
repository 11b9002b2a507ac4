"""Attempts as files: an HTML page, parquet with a row per attempt, Harbor's ATIF with a document per attempt."""

import importlib
import importlib.metadata
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ostinato.flows.reporting.attempts import (
    Attempt,
    TokenTexts,
    branches_of,
    headline,
    network_lines,
    reward_lines,
    summarise,
    total_reward,
    verdict_text,
)
from ostinato.flows.reporting.pages import render
from ostinato.infra.agent.transcript import Segment
from ostinato.infra.platform.errors import ConfigError

MAX_SHOWN = 100  # attempts shown in full on a page; each further one gets a line
_COLD_NATS = 5.0  # negative log-prob from which a sampled token has the full colour
ATIF = "ATIF-v1.7"  # Agent Trajectory Interchange Format; the first version with trajectory_id
_ARRAYS = {  # column -> array of a segment, and its type in the file
    "token_ids": ("token_ids_T", "int32"),
    "loss_mask": ("loss_mask_T", "bool_"),
    "logprobs": ("logprobs_T", "float32"),
    "weight_versions": ("weight_versions_T", "int64"),
}
_TEXTS = ("trajectory_id", "group_id", "problem_id", "evaluation", "prompt", "outcome", "reason")
_AS_JSON = ("transcript", "verdict", "reward", "changed_files", "network", "journal", "interaction")


def save(path: Path, name: str, attempts: Sequence[Attempt]) -> Path:
    """Writes attempts in the format of the path's suffix. Returns the path."""
    if path.suffix == ".html":
        return write_attempts(path, name, attempts)
    if path.suffix == ".parquet":
        return write_parquet(path, attempts)
    if path.suffix or path.is_file():
        raise ConfigError(
            f"--output is {path}, wanted NAME.html, NAME.parquet or a folder for ATIF"
        )
    return write_atif(path, attempts)


def write_parquet(path: Path, attempts: Sequence[Attempt]) -> Path:
    """Writes a row per attempt: ids and outcome as columns, records as JSON, tokens as lists."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"parquet is not available: {error}; wanted pyarrow: pip install 'ostinato[parquet]'"
        ) from None
    arrays = [(name, arrow.list_(getattr(arrow, kind)())) for name, (_, kind) in _ARRAYS.items()]
    schema = arrow.schema(
        [
            *((name, arrow.string()) for name in (*_TEXTS, *_AS_JSON)),
            ("passed", arrow.bool_()),
            ("reward_total", arrow.float64()),
            ("segments", arrow.list_(arrow.struct(arrays))),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_parquet_row(attempt) for attempt in attempts]
    parquet.write_table(arrow.Table.from_pylist(rows, schema=schema), path)
    return path


def _parquet_row(attempt: Attempt) -> dict[str, Any]:
    """Values of the columns. None: unknown, or not stored."""
    facts = attempt.facts
    return {
        **{name: facts.get(name) for name in _TEXTS},
        **{name: json.dumps(facts[name]) if name in facts else None for name in _AS_JSON},
        "passed": (facts.get("verdict") or {}).get("passed"),
        "reward_total": total_reward(facts),
        "segments": [
            {column: getattr(segment, name).tolist() for column, (name, _) in _ARRAYS.items()}
            for segment in attempt.segments
        ],
    }


def write_atif(directory: Path, attempts: Sequence[Attempt]) -> Path:
    """Writes TRAJECTORY.json for each attempt stored with its transcript. ConfigError when none was."""
    whole = [attempt for attempt in attempts if _is_whole(attempt)]
    if not whole:
        raise ConfigError(
            f"none of the {len(attempts)} attempts was stored with its transcript, wanted one"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for attempt in whole:
        path = directory / f"{attempt.facts['trajectory_id']}.json"
        path.write_text(json.dumps(to_atif(attempt), indent=1))
    return directory


def to_atif(attempt: Attempt) -> dict[str, Any]:
    """The attempt as an ATIF document. Facts without an ATIF field are under `extra`."""
    facts = attempt.facts
    turns = facts["transcript"]["turns"]
    answers = _sampled_tokens(attempt.segments, turns)
    started = facts.get("started_at")
    opening: dict[str, Any] = {"step_id": 1, "source": "user", "message": facts["prompt"] or ""}
    if started is not None:
        opening["timestamp"] = datetime.fromtimestamp(started, UTC).isoformat()
    steps = [
        _agent_step(number, turn, answer)
        for number, (turn, answer) in enumerate(zip(turns, answers, strict=True), 2)
    ]
    extra = ("problem_id", "outcome", "reason", "verdict", "reward", "changed_files", "journal")
    others = ("network", "evaluation", "interaction")
    kept = {name: facts[name] for name in (*extra, *others) if name in facts}
    return {
        "schema_version": ATIF,
        "session_id": facts["group_id"],
        "trajectory_id": facts["trajectory_id"],
        "agent": {"name": "ostinato", "version": importlib.metadata.version("ostinato")},
        "steps": [opening, *steps],
        "final_metrics": {
            "total_completion_tokens": sum(turn["generated_tokens"] for turn in turns),
            "total_steps": len(steps) + 1,
        },
        "extra": kept,
    }


def _agent_step(
    number: int, turn: dict[str, Any], answer: tuple[int, Segment, slice] | None
) -> dict[str, Any]:
    metrics: dict[str, Any] = {"completion_tokens": turn["generated_tokens"]}
    if answer is not None:
        num_read, segment, sampled = answer
        metrics |= {
            "prompt_tokens": num_read,
            "completion_token_ids": segment.token_ids_T[sampled].tolist(),
            "logprobs": segment.logprobs_T[sampled].tolist(),
            "extra": {"weight_versions": segment.weight_versions_T[sampled].tolist()},
        }
    step: dict[str, Any] = {
        "step_id": number,
        "source": "agent",
        "message": turn["text"],
        "metrics": metrics,
        "llm_call_count": 1,
    }
    if turn["calls"]:
        ids = [call["call_id"] or f"call-{index}" for index, call in enumerate(turn["calls"])]
        step["tool_calls"] = [
            {
                "tool_call_id": call_id,
                "function_name": call["tool"],
                "arguments": call["arguments"],
                "extra": {"status": call["status"], "wall_seconds": call["wall_seconds"]},
            }
            for call_id, call in zip(ids, turn["calls"], strict=True)
        ]
        # a turn that ended the attempt has calls without results
        paired = zip(ids, turn["results"], strict=False)
        results = [{"source_call_id": call_id, "content": text} for call_id, text in paired]
        if results:
            step["observation"] = {"results": results}
    return step


def _sampled_tokens(
    segments: Sequence[Segment], turns: Sequence[dict[str, Any]]
) -> list[tuple[int, Segment, slice] | None]:
    """For each turn, the number of tokens before it, its segment, and its slice of sampled tokens. None for
    all turns when the segments do not hold exactly one run of sampled tokens per turn.
    """
    found = [
        (run.start, segment, run) for segment in segments for run in _runs(segment.loss_mask_T)
    ]
    lengths = [run.stop - run.start for _, _, run in found]
    if lengths != [turn["generated_tokens"] for turn in turns]:
        return [None] * len(turns)
    return list(found)


def _runs(mask_T: np.ndarray) -> Iterator[slice]:
    """Slices of consecutive true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask_T, [False])).astype(np.int8)))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(start), int(stop))


class TokenView(NamedTuple):
    """A token of a sequence as the page shows it."""

    text: str
    logprob: float | None  # None: read, not sampled
    weight_version: int
    heat: float  # from 0 to 1, higher for less likely tokens


def write_attempts(path: Path, title: str, attempts: Sequence[Attempt]) -> Path:
    """Writes a page with the newest attempts in full. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(attempts_page(title, attempts))
    return path


def attempts_page(title: str, attempts: Sequence[Attempt]) -> str:
    """A page with the newest attempts in full and a line for each older one."""
    return render(
        "attempts",
        title=title,
        listed=[summarise(attempt.facts) for attempt in attempts[:-MAX_SHOWN]],
        attempts=[_view(attempt) for attempt in attempts[-MAX_SHOWN:]],
        cold_nats=_COLD_NATS,
    )


def group_page(title: str, attempts: Sequence[Attempt]) -> str:
    """A page with the attempts of one group side by side, best reward first."""
    ordered = sorted(attempts, key=lambda one: -(one.reward or 0.0))
    return render(
        "group",
        title=title,
        prompt=ordered[0].facts.get("prompt"),
        attempts=[_view(attempt) for attempt in ordered],
        num_same_turns=count_same_turns(
            [attempt.facts["transcript"]["turns"] for attempt in ordered if _is_whole(attempt)]
        ),
    )


def count_same_turns(attempts: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Number of leading turns in which all attempts wrote the same text and read the same results. 0 for fewer than
    two attempts.
    """
    if len(attempts) < 2:
        return 0
    written = [[(turn["text"], turn["results"]) for turn in turns] for turns in attempts]
    by_turn = zip(*written, strict=False)  # attempts have different numbers of turns
    same = itertools.takewhile(lambda turns: turns.count(turns[0]) == len(turns), by_turn)
    return sum(1 for _ in same)


def _is_whole(attempt: Attempt) -> bool:
    """Whether the attempt was stored with its transcript."""
    return "transcript" in attempt.facts


def _view(attempt: Attempt) -> dict[str, Any]:
    """Values of the template for an attempt."""
    facts = attempt.facts
    verdict, reward = facts.get("verdict"), facts.get("reward")
    is_whole = _is_whole(attempt)
    patches = facts.get("changed_files", {}).values()
    return {
        "anchor": facts["trajectory_id"],
        "summary": summarise(facts),
        "headline": headline(facts),
        "facts": facts,
        "branches": branches_of(facts),
        "diffs": [[(_line_class(line), line) for line in _shown_lines(patch)] for patch in patches],
        "network": list(network_lines(facts)),
        "verdict": verdict_text(verdict) if is_whole and verdict else None,
        "terms": list(reward_lines(reward)) if is_whole and reward else [],
        "segments": [[*_tokens(segment, attempt.token_texts)] for segment in attempt.segments],
    }


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
