"""Metric files: readable while written, whole after a kill."""

from pathlib import Path

from ostinato.infra.platform.telemetry import (
    MetricsLog,
    fields,
    open_lines,
    read_lines,
    read_metrics,
)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"loss": 2.5})
    log.append(2, {"loss": 2.25, "phase": "bulk"})

    assert read_metrics(log.path) == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25, "phase": "bulk"},
    ]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_torn_line_of_a_killed_writer_is_skipped_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"loss":2.0}\n{"step":2,"lo')
    MetricsLog(path).append(2, {"loss": 1.0})

    assert read_metrics(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


def test_every_writer_of_lines_ends_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "requests.jsonl"
    for text in (b'{"a":1}\n{"a"', b'{"a":2}\n'):
        with open_lines(path) as file:
            file.write(text)

    assert read_lines(path) == [{"a": 1}, {"a": 2}]


def test_steps_repeated_after_a_resume_count_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, loss in [(1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5), (3, 1.5)]:
        log.append(step, {"loss": loss})

    assert [row["loss"] for row in read_metrics(log.path)] == [3.0, 2.5, 1.5]


def test_fields_are_key_value_pairs() -> None:
    assert fields(run="r", step=3, loss=0.123456789, note="two words") == (
        "run=r step=3 loss=0.123457 note='two words'"
    )
