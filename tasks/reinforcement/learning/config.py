"""Settings of the learning stage, and the request that opens a trainer.

The rollout stage's settings say how many groups make a step and how stale they may be.
"""

from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.record import Record, Share
from ostinato.models.decode.config import DecodingConfig, Precision
from ostinato.models.layout import ParallelLayout
from ostinato.models.training.config import RECOMPUTE, LayoutConfig, LoraConfig, TrainingPrecision
from ostinato.models.training.optimizer_config import OptimizerConfig

# k3 at equal weights above which there is an alarm, by engine and number format. Measured with our engine: at most 1e-10 in
# fp32; in bf16 8e-5 for SmolLM2 and 4e-5 for nano after RL with router replay (lab log, 2026-11-26). Measured with vLLM on a
# CPU for SmolLM2: 5e-11 in fp32 and 1.4e-3 in bf16, in which it also computes (lab log, 2026-11-27). vLLM's fp32 on a GPU
# was not measured. Engines of other packages get the limits of vLLM.
PARITY_ALARM_K3 = {
    ("local", Precision.FP32): 1e-6,
    ("local", Precision.BF16): 5e-4,
    ("vllm", Precision.FP32): 1e-3,
    ("vllm", Precision.BF16): 1e-2,
}
# The same without router replay: few tokens go to other experts, but each of them is far off. Measured for nano with our
# engine: up to 2.6e-3 in a step.
_FREE_ROUTERS_ALARM_K3 = {("local", Precision.BF16): 2e-2, ("vllm", Precision.BF16): 2e-2}
# Lower bounds by the trainer's precision, for every engine: 6 to 8 times the k3 of nano after RL against fp32, on its own
# samples without router replay, which is 6e-4 in bf16 and 9e-3 in MXFP8 (lab log, 2026-11-26).
TRAINER_ALARM_K3 = {"fp32": 0.0, "bf16": 5e-3, "mx32": 5e-2, "mx128": 5e-2}


GROUP_MEAN = "group_mean"
_LEARNING = "ostinato.tasks.reinforcement.learning"
ADVANTAGES = PluginGroup(
    "ostinato.advantages",
    "learning.objective.advantages",
    {GROUP_MEAN: f"{_LEARNING}.batches.advantages:group_mean"},
)
"""Functions of a group's attempts (trajectories) to one number per attempt."""
LOSSES = PluginGroup(
    "ostinato.losses",
    "learning.objective.loss",
    {"policy_gradient": f"{_LEARNING}.objective:policy_loss"},
)
"""Functions of log-probabilities of trainer and rollout, advantages and ObjectiveConfig to a PolicyLoss."""


class PolicyOptimizerConfig(OptimizerConfig):
    """Optimiser of the policy."""

    kind: Literal["muon", "adamw"] = Field(
        default="adamw",
        description="muon: matrices by Muon, the rest by AdamW; adamw: all by AdamW",
    )
    learning_rate: PositiveFloat = Field(
        default=3e-4, description="learning rate of AdamW after the warm-up"
    )
    muon_learning_rate: PositiveFloat = Field(
        default=3e-3, description="learning rate of Muon after the warm-up; unused with adamw"
    )
    warmup_steps: NonNegativeInt = Field(
        default=4, description="steps over which the rates rise linearly from near 0; 0: none"
    )
    gradient_clip_norm: PositiveFloat | None = Field(
        default=1.0, description="largest norm of the whole gradient; None: not clipped"
    )


class ClipBand(Record):
    """Range of the importance ratio. A token gives no gradient if its update would move further out, as in PPO."""

    low_ratio: float = Field(
        default=0.8, gt=0, lt=1, description="least ratio of trainer to rollout probability"
    )
    high_ratio: float = Field(
        default=1.25, gt=1, description="largest ratio of trainer to rollout probability"
    )


class ObjectiveConfig(Record):
    """The policy-gradient loss: minus the sum over sampled tokens of advantage times log-probability, divided by a constant."""

    loss_divisor_tokens: PositiveFloat = Field(
        default=4096.0,
        description="constant that the sum over a step's tokens is divided by, whatever their number",
    )
    kl_coefficient: NonNegativeFloat = Field(
        default=0.0,
        description="factor on k1 = log q(rollout) - log p(reference) of a trajectory, which is subtracted from its "
        "reward; 0: off",
    )
    kl_estimator: Literal["k1_in_reward", "k3_in_loss"] = Field(
        default="k1_in_reward",
        description="k1_in_reward: as above; k3_in_loss: the factor times r - 1 - log r, with r = p(reference) / "
        "p(policy), is added to the loss at each sampled token, as in GRPO (arXiv:2402.03300)",
    )
    kl_refresh_steps: PositiveInt | None = Field(
        default=None,
        description="optimiser steps after which the current policy becomes the reference; None: the reference stays "
        "the initial model",
    )
    importance_cap: PositiveFloat | None = Field(
        default=None,
        description="cap of the token weight min(trainer / rollout probability, cap), which is detached; None: weight 1",
    )
    clip_band: ClipBand | None = Field(default=None, description="None: no token is clipped")
    credit: Literal["trajectory", "edit"] = Field(
        default="trajectory",
        description="trajectory: one advantage for all tokens of an attempt; edit: the tokens up to each edit are "
        "compared with those up to the same edit of the group's other attempts "
        "(tasks/reinforcement/learning/batches/credit.py). For rollouts, not for a cycle",
    )
    edit_discount: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="factor on a positive reward for each edit that followed, with credit 'edit'",
    )
    advantages: str = Field(
        default=GROUP_MEAN,
        description="name of what gives each attempt of a group its advantage. group_mean: the reward minus the group's "
        "mean; packages add more through the entry point group ostinato.advantages. For rollouts, not for a cycle",
    )
    loss: str = Field(
        default="policy_gradient",
        description="name of the loss of sampled tokens. policy_gradient: with the settings of this table; packages add "
        "more through the entry point group ostinato.losses",
    )
    divide_by_deviation: bool = Field(
        default=False,
        description="advantages are divided by the standard deviation of the group's rewards, as in GRPO "
        "(arXiv:2402.03300)",
    )
    divide_by_length: bool = Field(
        default=False,
        description="an attempt's advantage is divided by its number of sampled tokens relative to the group's mean, so "
        "that all attempts have equal weight, as in GRPO; false: all tokens have equal weight, as in Dr. GRPO "
        "(arXiv:2503.20783)",
    )
    hint_coefficient: NonNegativeFloat = Field(
        default=0.0,
        description="factor on KL(policy || the same policy after a hint), summed over the turn of the first edit of "
        "attempts that this edit did not solve, and divided by the same constant; the hint names the wrong line. "
        "Self-distillation as in SDPO (arXiv:2601.20802) and Composer 2.5; 0: off. For rollouts, not for a cycle",
    )
    entropy_floor_nats: PositiveFloat | None = Field(
        default=None,
        description="mean surprise of a step's sampled tokens below which the step gets an entropy bonus, as in the "
        "adaptive entropy control of Skywork-OR1 (arXiv:2505.22312); None: never",
    )
    entropy_coefficient: PositiveFloat = Field(
        default=0.01,
        description="factor on the entropy's gradient at each sampled token, in steps below the floor",
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="samples with an advantage of exactly 0 are not computed; the gradient is the same",
    )

    @property
    def has_kl_loss(self) -> bool:
        """Whether the loss holds a KL term, which gives tokens without an advantage a gradient too."""
        return self.kl_coefficient > 0 and self.kl_estimator == "k3_in_loss"

    @model_validator(mode="after")
    def _known_plugins(self) -> Self:
        ADVANTAGES.refuse_unknown([self.advantages])
        LOSSES.refuse_unknown([self.loss])
        return self

    @model_validator(mode="after")
    def _division_of_whole_attempts(self) -> Self:
        is_own = self.advantages != GROUP_MEAN
        if is_own and (self.credit == "edit" or self.divide_by_deviation or self.divide_by_length):
            raise ValueError(
                f"advantages is {self.advantages!r} with credit {self.credit!r}, divide_by_deviation "
                f"{self.divide_by_deviation} and divide_by_length {self.divide_by_length}, wanted credit 'trajectory' "
                f"and false, which change {GROUP_MEAN!r} alone"
            )
        if self.credit == "edit" and (self.divide_by_deviation or self.divide_by_length):
            raise ValueError(
                f"divide_by_deviation is {self.divide_by_deviation} and divide_by_length is "
                f"{self.divide_by_length}, wanted false with credit 'edit', whose parts have their own baselines"
            )
        return self


class RouterReplayConfig(Record):
    """Replay in the trainer of the experts that the engine chose."""

    enabled: bool = Field(
        default=True,
        description="each token goes to the experts that the engine chose; false: the trainer's router chooses",
    )
    plausibility_ratio: Share = Field(
        default=0.5,
        description="share of the score of the router's weakest own choice; replayed experts that score below it are "
        "replaced",
    )
    compared_tokens: NonNegativeInt = Field(
        default=0,
        description="least number of a step's sampled tokens that are scored again without replay; 0: none",
    )


class PackingConfig(Record):
    """Packing of samples into microbatches of few fixed shapes."""

    bucket_tokens: tuple[int, ...] = Field(
        default=tuple(range(96, 513, 32)),
        description="row lengths, ascending; a longer sample gets a multiple of the longest",
    )
    microbatch_tokens: PositiveInt = Field(
        default=1536,
        description="most tokens that a microbatch computes, unless one row alone has more; with `shares_prefixes` "
        "shared tokens count once, without it rows times row length count",
    )
    shares_prefixes: bool = Field(
        default=True,
        description="common prefixes of attempts, with equal tokens and routes, are computed once; only attention reads "
        "them row by row. Off where ranks share a row (layout.context)",
    )

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if not self.bucket_tokens or list(self.bucket_tokens) != sorted(set(self.bucket_tokens)):
            raise ValueError(f"bucket_tokens is {self.bucket_tokens}, wanted ascending lengths")
        return self


class ParityConfig(Record):
    """Comparison of engine and trainer at equal weights."""

    earlier_versions: NonNegativeInt = Field(
        default=2,
        description="earlier weight versions that stay in memory, one copy each, so that their tokens can be compared; "
        "tokens of older versions are not measured",
    )
    tokens: PositiveInt = Field(
        default=512,
        description="approximate number of sampled tokens of each earlier version that a step scores again",
    )
    alarm_k3: PositiveFloat | None = Field(
        default=None,
        description="k3 above which a step raises an alarm, for tokens from a KV cache of one version; None: 1e-6 where "
        "our engine and `precision` are fp32, 5e-4 where our engine is bf16, 1e-3 for vLLM in fp32 and 1e-2 in bf16 (2e-2 "
        "for both engines in bf16 without router replay), at least 5e-3 with `precision` bf16 and 5e-2 with mx32 and mx128; "
        "with `publish_precision` bf16, those of an engine in bf16",
    )
    alarm_kept_cache_k3: PositiveFloat = Field(
        default=1e-3,
        description="the same for tokens from a cache that was kept across a weight update, with the same lower bounds",
    )


class LearningLayout(LayoutConfig):
    """Degrees of parallelism over the ranks. The remaining factor is data parallelism."""

    pipeline: int = Field(default=1, ge=1, description="stages, each with some of the layers")
    context: int = Field(default=1, ge=1, description="ranks that share each row in all layers")


class LearningConfig(Record):
    """The learning stage."""

    world_size: PositiveInt = Field(
        default=1,
        description="processes that share each step's microbatches and the publishing of its weights",
    )
    layout: LearningLayout = LearningLayout()
    recompute: bool = Field(default=False, description=RECOMPUTE)
    precision: TrainingPrecision = "fp32"
    """number format, as in pretraining; fp32 keeps the trainer's log-probabilities nearest to those of an engine in fp32"""
    optimizer: PolicyOptimizerConfig = PolicyOptimizerConfig()
    lora: LoraConfig | None = Field(
        default=None,
        description="train only adapters of attention, dense MLPs and shared experts on top of the initial weights, at "
        "the rate of AdamW; None: all parameters",
    )
    trains_drafts: bool = Field(
        default=False,
        description="draft layers learn the trunk's distribution at the sampled tokens of each step, at the policy's "
        "learning rates; the trunk gets no gradient from them. False: they keep their initial weights",
    )
    objective: ObjectiveConfig = ObjectiveConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    packing: PackingConfig = PackingConfig()
    parity: ParityConfig = ParityConfig()
    publish_precision: Precision = Field(
        default=Precision.FP32,
        description="number format of the matrices that engines get. bf16: rounded once for each version, so that a delta "
        "holds only elements with another rounded value. Norms, biases, routers and training stay in fp32",
    )
    anchor_every_versions: PositiveInt = Field(
        default=25, description="versions between full copies on the weight chain"
    )
    keep_chain_versions: PositiveInt = Field(
        default=8, description="newest versions that stay on the weight chain"
    )
    keep_checkpoints: PositiveInt = Field(
        default=2, description="newest step checkpoints that stay on disk"
    )
    keep_for_replay: bool = Field(
        default=False,
        description="keep all step checkpoints, so that `ostinato replay` can compute any step again; each takes about "
        "16 bytes per parameter",
    )

    @property
    def parallel_layout(self) -> ParallelLayout:
        """Layout of all `world_size` ranks."""
        return self.layout.over(self.world_size)

    @property
    def row_packing(self) -> PackingConfig:
        """Packing that this layout supports: context parallelism does not share prefixes."""
        is_sharing = self.packing.shares_prefixes and self.layout.context == 1
        return self.packing.model_copy(update={"shares_prefixes": is_sharing})

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.lora is not None and self.trains_drafts:
            raise ValueError(
                "trains_drafts is true, wanted false with lora, which freezes all weights"
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if not self.parallel_layout.is_cut:
            return self
        one_rank_only = {  # these need the whole model on one rank
            "objective.hint_coefficient": self.objective.hint_coefficient,
            "parity.earlier_versions": self.parity.earlier_versions,
            "router_replay.compared_tokens": self.router_replay.compared_tokens,
            "trains_drafts": self.trains_drafts,
        }
        for name, value in one_rank_only.items():
            if value:
                raise ValueError(f"{name} is {value}, wanted 0 where ranks share the model")
        if self.lora is not None:
            raise ValueError(
                "lora is set, wanted none where ranks share the model: adapters are not sharded"
            )
        tensor, context = self.layout.tensor, self.layout.context
        parts = tensor * (2 * context if context > 1 else 1)
        for tokens in self.packing.bucket_tokens:
            if tokens % parts:
                raise ValueError(
                    f"{tokens} of packing.bucket_tokens, wanted a multiple of {parts}: ranks share each row, with "
                    f"layout.tensor={tensor} in as many parts and with layout.context={context} in twice as many"
                )
        return self


def trainer_config(learning: LearningConfig, decoding: DecodingConfig) -> LearningConfig:
    """Settings of the trainer, with the parity limits of its precision and of the sampling engine."""
    parity = learning.parity
    # published in bf16, weights are rounded as an engine in bf16 rounds them
    is_rounded = learning.publish_precision is Precision.BF16
    precision = Precision.BF16 if is_rounded else decoding.precision
    engine = ("local" if decoding.engine == "local" else "vllm", precision)
    rounding = TRAINER_ALARM_K3[learning.precision]
    if not learning.router_replay.enabled:
        rounding = max(rounding, _FREE_ROUTERS_ALARM_K3.get(engine, 0.0))
    limits = {"alarm_kept_cache_k3": max(parity.alarm_kept_cache_k3, rounding)}
    if parity.alarm_k3 is None:
        limits["alarm_k3"] = max(PARITY_ALARM_K3[engine], rounding)
    return learning.model_copy(update={"parity": parity.model_copy(update=limits)})


class TrainerRequest(Record):
    """Everything that a trainer process needs to start or to resume."""

    config: LearningConfig
    checkpoint_directory: str = Field(description="checkpoint of the initial model")
    work_directory: str = Field(description="step checkpoints; the newest one is resumed")
    chain_id: str = Field(description="weight chain that the engines follow")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="kind of device that every rank trains on"
    )
