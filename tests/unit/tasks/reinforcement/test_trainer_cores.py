"""Laws of the cores that Ray sets aside for the trainer."""

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.reinforcement.services import trainer_cores


@pytest.mark.parametrize(
    ("world_size", "cpu_limit", "wanted"), [(1, 1, 0.0), (2, 2, 2.0), (3, 8, 3.0)]
)
def test_trainer_has_a_core_for_each_of_several_ranks(
    world_size: int, cpu_limit: int, wanted: float
) -> None:
    assert trainer_cores(world_size, cpu_limit) == wanted


def test_trainer_of_more_ranks_than_cores_is_refused_by_field_and_fix() -> None:
    with pytest.raises(ConfigError, match=r"\[learning\] world_size is 3, wanted at most 2"):
        trainer_cores(3, 2)
