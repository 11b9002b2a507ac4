"""What a recipe says of decoding reaches the engine, and what contradicts itself is refused early."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from infra.engine.decoding import DecodingConfig
from infra.engine.local import configure_engine
from models.decode.engine import EngineConfig
from models.decode.weights import Precision


def test_a_recipes_defaults_are_the_engines() -> None:
    assert configure_engine(DecodingConfig(), slots=3) == EngineConfig(slots=3)


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"native": True}, "native", True),
        ({"device": "cuda"}, "device", "cuda"),
        ({"precision": "bf16"}, "precision", Precision.BF16),
    ],
)
def test_every_field_reaches_the_engine(said: dict, field: str, value: object) -> None:
    assert getattr(configure_engine(DecodingConfig(**said), slots=3), field) is value
    assert set(said) <= set(DecodingConfig.model_fields)


@pytest.mark.parametrize("said", [{"device": "cuda"}, {"precision": "bf16"}])
def test_compiled_loops_elsewhere_than_on_a_cpu_in_fp32_are_refused(said: dict) -> None:
    with pytest.raises(ValidationError, match="wanted native = false"):
        DecodingConfig(native=True, **said)


def test_flows_read_it_without_torch() -> None:
    code = "import infra.engine.decoding, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
