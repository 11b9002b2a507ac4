"""Shapes of models."""

import pytest
from pydantic import ValidationError

from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import check_shapes, num_parameters, weight_shapes
from tests.fakes.nano_spec import NANO


def test_spec_survives_json() -> None:
    assert ModelSpec.model_validate_json(NANO.model_dump_json()) == NANO


def test_parameters_are_counted() -> None:
    assert 1.9e6 < num_parameters(NANO) < 2.3e6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_query_groups", 3),
        ("head_dim", 31),
        ("experts_per_token", 9),
        ("mtp_hidden_size", 0),
        ("vocab_size", 0),
    ],
)
def test_spec_impossible_shape_names_the_field(field: str, value: int) -> None:
    with pytest.raises(ValidationError, match=field):
        ModelSpec.model_validate(NANO.model_dump() | {field: value})


def test_check_shapes_names_missing_unknown_and_misshapen_weights() -> None:
    shapes = weight_shapes(NANO)
    check_shapes(NANO, shapes)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        check_shapes(
            NANO, {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
        )
    with pytest.raises(ValueError, match=r"unknown \['extra'\]"):
        check_shapes(NANO, shapes | {"extra": (1,)})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(7,\), wanted \(128,\)"):
        check_shapes(NANO, shapes | {"model.norm.weight": (7,)})
