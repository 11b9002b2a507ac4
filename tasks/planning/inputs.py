"""Inputs of a plan from outside the recipe: chips, rates, costs. `inputs.toml` names their sources."""

import subprocess
import tomllib
from pathlib import Path

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.decode.config import Precision
from ostinato.models.layout import ParallelLayout


class TrainingWork(Record):
    """One optimiser step of the trainer."""

    row_tokens: int = Field(gt=0, description="length of a row, which context parallelism divides")
    attended_tokens: float = Field(gt=0, description="mean length of the sequences in rows")
    microbatch_tokens: int = Field(gt=0, description="tokens of one pass of a data-parallel rank")
    step_tokens: float = Field(gt=0, description="over all ranks")
    fp8: bool = False
    recompute: bool = Field(default=False, description="each layer runs forward again in backward")
    forward_passes: int = Field(default=0, ge=0)
    """passes for log-probs before the step: policy, reference"""
    weight_copies: int = Field(default=1, ge=1)
    """models whose weights a rank holds: the trained one and, with a KL penalty, its reference"""
    is_reinforcement: bool = Field(default=False, description="a step of RL, which takes longer")

    def microbatches(self, layout: ParallelLayout) -> float:
        """Microbatches of one data-parallel rank per step."""
        return max(1.0, self.step_tokens / layout.data / self.microbatch_tokens)


class RolloutWork(Record):
    """Attempts of one optimiser step."""

    attempts: int = Field(gt=0)
    prompt_tokens: float = Field(ge=0, description="mean per attempt, tool results included")
    generated_tokens: float = Field(gt=0, description="mean per attempt")
    longest_generated_tokens: float = Field(gt=0)
    tool_seconds: float = Field(ge=0, description="seconds per attempt in its sandbox")
    publish_precision: Precision = Precision.BF16

    @property
    def context_tokens(self) -> float:
        """Mean length of an attempt at its end."""
        return self.prompt_tokens + self.generated_tokens


FILE = Path(__file__).with_name("inputs.toml")


class Chip(Record):
    """One GPU and its links by the vendor's figures. Links are per direction."""

    bf16_teraflops: float
    fp8_teraflops: float
    memory_gib: float
    memory_terabytes_per_second: float
    node_gigabytes_per_second: float
    network_gigabytes_per_second: float
    gpus_per_node: int
    linked_gpus: int = Field(description="GPUs that NVLink joins, of one node or of several")


class Rates(Record):
    """Achieved shares of a chip's peak rates, those of products at an infinite width."""

    hidden_half: float = Field(description="hidden size at which products reach half of their rate")
    expert_half: float = Field(description="the same for experts and their hidden size")
    bf16_products: float
    fp8_products: float
    bf16_grouped: float
    fp8_grouped: float
    attention: float
    copying: float
    node: float
    network: float
    decode: float


class AxisValues(Record):
    """A number for the transfers of each axis of a layout."""

    tensor: float
    expert: float
    context: float
    pipeline: float
    data: float


class Costs(Record):
    """Bytes, seconds and other constants of all plans."""

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
    rl_training_factor: float = Field(description="seconds of a step in RL over those outside")
    rl_fixed_seconds: float = Field(description="seconds of each RL step beside its parts")
    rl_switch_seconds: float = Field(description="seconds more if the parts share GPUs")
    tool_seconds: float
    changed_share: float
    delta_bytes: int


class Inputs(Record):
    """All inputs of a plan for one chip."""

    chip: Chip
    rates: Rates
    shares: AxisValues = Field(description="shares of the time that computation does not hide")
    costs: Costs

    @property
    def network_bytes_per_second(self) -> float:
        """Achieved rate of the network port of one GPU."""
        return self.chip.network_gigabytes_per_second * 1e9 * self.rates.network


def chip_names() -> list[str]:
    """Names of the chips that plans are made for."""
    return sorted(tomllib.loads(FILE.read_text())["chips"])


def load_inputs(chip: str) -> Inputs:
    """Inputs for a chip by name. ConfigError names the known chips."""
    values = tomllib.loads(FILE.read_text())
    chips = values.pop("chips")
    if chip not in chips:
        raise ConfigError(f"chip {chip!r} is not known, wanted one of {chip_names()}")
    return Inputs.model_validate({"chip": chips[chip], **values})


QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
QUERY_SECONDS = 30.0
# boards with slower memory and links than the SXM boards in inputs.toml
OTHER_BOARDS = frozenset({"pcie", "nvl"})


class MachineGpus(Record):
    """Equal GPUs of a known chip."""

    chip: str
    gpus: int


def find_gpus(options: str) -> MachineGpus:
    """The GPUs of this machine. ConfigError says why they are not known, and names the known chips and the
    `options` that give them instead.
    """
    wanted = f"wanted {options} with a chip of {chip_names()}"
    try:
        ran = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"no nvidia-smi on PATH, so the chip is unknown; {wanted}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi failed: {error}; {wanted}") from None
    if ran.returncode:
        said = (ran.stderr or ran.stdout).strip()
        raise ConfigError(f"nvidia-smi ended with {ran.returncode}: {said:.200}; {wanted}")
    names = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    chips = {_chip_of(name) for name in names}
    if len(chips) != 1 or None in chips:
        raise ConfigError(f"nvidia-smi names the GPUs {sorted(set(names))}; {wanted}")
    return MachineGpus(chip=str(chips.pop()), gpus=len(names))


def _chip_of(name: str) -> str | None:
    """The chip in a name such as "NVIDIA H100 80GB HBM3". None: not in inputs.toml."""
    words = name.lower().split()
    known = [chip for chip in chip_names() if chip in words]
    return known[0] if known and not OTHER_BOARDS & {*words} else None
