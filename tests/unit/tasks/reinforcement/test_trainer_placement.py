"""Laws of the placement that is set aside for the trainer's ranks, and of the parity limit that it is given."""

from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.models.decode.config import DecodingConfig, Precision
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ParityConfig,
    RouterReplayConfig,
    trainer_config,
)
from ostinato.tasks.reinforcement.services import trainer_placement


def test_a_single_rank_on_cpus_takes_no_core_for_itself(tmp_path: Path) -> None:
    assert trainer_placement(1, "cpu", Settings(home=tmp_path)) is None


def test_trainer_of_more_ranks_than_cores_is_refused_by_field_and_fix(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, cpu_limit=2)
    with pytest.raises(ConfigError, match=r"\[learning\] world_size is 3, wanted at most 2"):
        trainer_placement(3, "cpu", settings)


def test_parity_limit_is_that_of_the_coarser_of_trainer_and_engine() -> None:
    fine, coarse = DecodingConfig(), DecodingConfig(engine="vllm", precision=Precision.BF16)
    limits = [
        trainer_config(LearningConfig(precision=precision), decoding).parity
        for precision in ("fp32", "bf16", "mx128")
        for decoding in (fine, coarse)
    ]
    assert [one.alarm_k3 for one in limits] == [1e-6, 1e-2, 5e-3, 1e-2, 5e-2, 5e-2]
    assert [one.alarm_kept_cache_k3 for one in limits] == [1e-3, 1e-3, 5e-3, 5e-3, 5e-2, 5e-2]
    named = LearningConfig(precision="bf16", parity=ParityConfig(alarm_k3=0.5))
    assert trainer_config(named, fine).parity.alarm_k3 == 0.5


def test_our_engine_in_bf16_has_a_limit_of_its_own_and_another_where_routers_are_free() -> None:
    decoding = DecodingConfig(precision=Precision.BF16)
    replayed = trainer_config(LearningConfig(), decoding).parity
    assert (replayed.alarm_k3, replayed.alarm_kept_cache_k3) == (5e-4, 1e-3)
    free = LearningConfig(router_replay=RouterReplayConfig(enabled=False))
    limits = trainer_config(free, decoding).parity
    assert (limits.alarm_k3, limits.alarm_kept_cache_k3) == (2e-2, 2e-2)
    assert trainer_config(free, DecodingConfig()).parity.alarm_k3 == 1e-6


@pytest.mark.parametrize("precision", list(Precision))
def test_an_engine_of_another_package_has_the_limits_of_vllm(precision: Precision) -> None:
    for replay in (True, False):
        learning = LearningConfig(router_replay=RouterReplayConfig(enabled=replay))
        other, vllm = (
            trainer_config(learning, DecodingConfig(engine=engine, precision=precision))
            for engine in ("timed", "vllm")
        )
        assert other == vllm
