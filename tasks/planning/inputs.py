"""Numbers that a plan takes from outside the recipe: chips, rates, costs. `inputs.toml` names sources."""

import tomllib
from pathlib import Path

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record

FILE = Path(__file__).with_name("inputs.toml")


class Chip(Record):
    """One GPU and its links, as the vendor states them. Links in one direction."""

    bf16_teraflops: float
    fp8_teraflops: float
    memory_gib: float
    memory_terabytes_per_second: float
    node_gigabytes_per_second: float
    network_gigabytes_per_second: float
    gpus_per_node: int


class Rates(Record):
    """Shares of a chip's peak that are reached."""

    bf16_products: float
    fp8_products: float
    bf16_grouped: float
    fp8_grouped: float
    attention: float
    copying: float
    node: float
    network: float
    decode: float


class ExposedShares(Record):
    """Shares of a transfer's time that computation does not hide."""

    tensor: float
    expert: float
    context: float
    pipeline: float
    data: float


class Costs(Record):
    """Bytes and seconds of things that every plan has."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    optimizer_traffic_bytes: int
    activation_passes: float
    reserved_gib: float
    kernel_microseconds: float
    dense_layer_kernels: int
    moe_layer_kernels: int
    engine_memory_share: float
    engine_step_seconds: float
    engine_slots: int
    tool_seconds: float
    changed_share: float
    delta_bytes: int


class Inputs(Record):
    """All inputs of a plan for one chip."""

    chip: Chip
    rates: Rates
    shares: ExposedShares
    costs: Costs


def load_inputs(chip: str) -> Inputs:
    """Inputs for a chip by name. ConfigError names the chips there are."""
    values = tomllib.loads(FILE.read_text())
    chips = values.pop("chips")
    if chip not in chips:
        raise ConfigError(f"chip {chip!r} is not known, wanted one of {sorted(chips)}")
    return Inputs.model_validate({"chip": chips[chip], **values})
