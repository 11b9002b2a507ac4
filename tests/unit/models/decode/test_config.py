"""What a recipe says of decoding reaches the engine, and what contradicts itself is refused early."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from ostinato.models.decode.config import DecodingConfig, EngineConfig, Precision, configure_engine


def test_a_recipes_defaults_are_the_engines() -> None:
    assert configure_engine(DecodingConfig(), slots=3) == EngineConfig(slots=3)


def test_every_field_reaches_the_engine() -> None:
    said = {
        "engine": "vllm",
        "precision": "bf16",
        "gpus_per_replica": 2,
        "draft_layers": 1,
        "lookup_tokens": 7,
        "lookup_entries": 1024,
    }
    assert set(said) == set(DecodingConfig.model_fields)
    wanted = said | {"precision": Precision.BF16}
    for field, value in said.items():
        vllm = {"engine": "vllm"} if field == "gpus_per_replica" else {}
        engine = configure_engine(DecodingConfig(**vllm | {field: value}), slots=3)
        assert getattr(engine, field) == wanted[field]


def test_a_driver_may_decide_against_the_recipe() -> None:
    decoding = DecodingConfig(lookup_tokens=7, lookup_entries=1024)
    assert configure_engine(decoding, lookup_entries=0).lookup_entries == 0


def test_entries_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValidationError, match="lookup_entries is 1000, wanted 0 or a power of two"):
        DecodingConfig(lookup_entries=1000)


@pytest.mark.parametrize("config", [DecodingConfig, EngineConfig])
def test_native_is_another_spelling_of_the_local_engine(config: type[DecodingConfig]) -> None:
    decoding = config.model_validate({"engine": "native"})
    assert decoding == config()
    assert decoding.model_dump()["engine"] == "local"
    assert config.model_validate({"engine": "native", "precision": "bf16"}) == config(
        precision="bf16"
    )


@pytest.mark.parametrize("engine", [3, ["local"], None])
def test_an_engine_that_is_no_name_is_refused(engine: object) -> None:
    with pytest.raises(ValidationError, match=r"engine\n +Input should be a valid string"):
        DecodingConfig.model_validate({"engine": engine})


def test_flows_read_it_without_torch() -> None:
    code = "import ostinato.models.decode.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gpus_are_reserved_for_vllm_alone() -> None:
    assert DecodingConfig(engine="vllm", gpus_per_replica=4).gpus_per_replica == 4
    with pytest.raises(ValidationError, match="gpus_per_replica is 4 with engine 'local'"):
        DecodingConfig(gpus_per_replica=4)
