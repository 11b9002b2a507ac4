"""Records that are written can be read: no class takes a number that JSON has not, or bytes."""

import importlib
import json
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ostinato.infra.platform.ledger.rows import EventRow, Row
from ostinato.infra.platform.record import finite
from ostinato.infra.platform.telemetry import MetricsLog
from ostinato.models.record import Record
from ostinato.tasks.records import GateCheck, Metric, RewardReport

ROOT = Path(__file__).parents[2]
ODD = [math.nan, math.inf, -math.inf, "nan", "Infinity", "-inf", 10**400]


def _below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _below(inner)


def all_records() -> list[type[BaseModel]]:
    """Every record class of the product."""
    for layer in ("models", "infra", "tasks", "flows"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            if any(base in path.read_text() for base in ("Record):", "Row):")):
                parts = path.relative_to(ROOT).with_suffix("").parts
                importlib.import_module(".".join(("ostinato", *parts)))
    found = {kind for base in (Record, Row) for kind in _below(base)}
    ours = [kind for kind in found if kind.__module__.startswith("ostinato.")]
    return sorted(ours, key=lambda kind: (kind.__module__, kind.__qualname__))


def _sample(annotation: Any, number: Any) -> Any:
    """A value of the annotation with `number` at the place of its first float. None: it has no float."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is float:
        return number
    if origin is typing.Annotated:
        return _sample(inner[0], number)
    if origin in (tuple, list, set, frozenset):
        filled = [_sample(part, number) for part in inner if part is not Ellipsis]
        if all(part is None for part in filled):
            return None
        return tuple(1.0 if part is None else part for part in filled)
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        value = _sample(inner[1], number)
        return None if value is None else {"a": value}
    found = (_sample(part, number) for part in inner)
    return next((value for value in found if value is not None), None)


def _float_fields() -> Iterator[tuple[type[BaseModel], str]]:
    for kind in all_records():
        for name, field in kind.model_fields.items():
            if _sample(field.annotation, 0.5) is not None:
                yield kind, name


FLOAT_FIELDS = list(_float_fields())


def test_the_walk_finds_the_records() -> None:
    assert len(all_records()) > 250
    assert len(FLOAT_FIELDS) > 300


@pytest.mark.parametrize("number", ODD, ids=lambda number: str(number)[:9])
def test_no_field_takes_a_number_that_is_not_finite(number: float | str | int) -> None:
    """Each field of each class alone; what else the class wants is missing and does not matter."""
    taken: list[str] = []
    mixed = ["Progress.metrics", "ProblemsResult.yield_table"]  # of text and whole numbers too
    for kind, name in FLOAT_FIELDS:
        alias = kind.model_fields[name].alias or name
        given = {alias: _sample(kind.model_fields[name].annotation, number)}
        try:
            kind.model_validate(given)
            taken.append(f"{kind.__name__}.{name}")
        except ValidationError as error:
            if not any(fault["loc"][0] == alias for fault in error.errors()):
                taken.append(f"{kind.__name__}.{name}")
    assert [name for name in taken if isinstance(number, float) or name not in mixed] == []


@given(values=st.dictionaries(st.text(max_size=3), st.floats(), max_size=3), number=st.floats())
def test_rewards_and_checks_that_can_be_made_are_read_back(
    values: dict[str, float], number: float
) -> None:
    for make in (
        lambda: RewardReport(total=sum(values.values()), terms=values),
        lambda: Metric(mean=number, low=number, high=number, count=1),
        lambda: GateCheck(name="a", value=number, threshold=0, passed=True, detail=""),
        lambda: EventRow(event_id=1, source="a", name="b", payload={"x": finite(number)}, at=1.0),
    ):
        try:
            record = make()
        except ValidationError:
            assert not all(map(math.isfinite, (number, *values.values(), sum(values.values()))))
            continue
        assert type(record).model_validate_json(record.model_dump_json()) == record


@given(st.dictionaries(st.sampled_from("ab"), st.floats() | st.lists(st.floats())))
def test_metrics_are_json_and_unfinite_numbers_stay_readable(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    log = MetricsLog(tmp_path_factory.mktemp("metrics") / "metrics.jsonl")
    log.append(1, values)
    log.close()

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    row = json.loads(log.path.read_text(), parse_constant=refuse)
    wanted = {name: value for name, value in values.items() if isinstance(value, float)}
    assert all(str(float(row[name])) == str(value) for name, value in wanted.items())
