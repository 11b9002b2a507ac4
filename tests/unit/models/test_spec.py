"""Shapes of models."""

import pytest
from pydantic import ValidationError

from ostinato.models.presets import KIMI_K2, NANO, PRESETS, QWEN3_30B_A3B, find_preset
from ostinato.models.spec import ModelSpec, check_shapes


def test_spec_survives_json() -> None:
    for spec in PRESETS.values():
        assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


def test_presets_have_the_published_sizes() -> None:
    assert 1.9e6 < NANO.num_parameters() < 2.3e6
    assert 29e9 < QWEN3_30B_A3B.num_parameters() < 32e9
    assert 0.95e12 < KIMI_K2.num_parameters() < 1.1e12


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


def test_find_preset_unknown_name_lists_known_ones() -> None:
    with pytest.raises(ValueError, match="nano"):
        find_preset("micro")


def test_check_shapes_names_missing_unknown_and_misshapen_weights() -> None:
    shapes = NANO.weight_shapes()
    check_shapes(NANO, shapes)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        check_shapes(
            NANO, {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
        )
    with pytest.raises(ValueError, match=r"unknown \['extra'\]"):
        check_shapes(NANO, shapes | {"extra": (1,)})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(7,\), wanted \(128,\)"):
        check_shapes(NANO, shapes | {"model.norm.weight": (7,)})
