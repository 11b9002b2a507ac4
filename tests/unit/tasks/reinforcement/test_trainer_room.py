"""Laws of the room that is set aside for the trainer's ranks."""

from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.reinforcement.services import trainer_room


def test_a_single_rank_on_cpus_takes_no_core_for_itself(tmp_path: Path) -> None:
    assert trainer_room(1, "cpu", Settings(home=tmp_path)) is None


def test_trainer_of_more_ranks_than_cores_is_refused_by_field_and_fix(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, cpu_limit=2)
    with pytest.raises(ConfigError, match=r"\[learning\] world_size is 3, wanted at most 2"):
        trainer_room(3, "cpu", settings)
