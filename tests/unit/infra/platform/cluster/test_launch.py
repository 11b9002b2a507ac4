"""Stages under torchrun: another number of processes than ranks is refused before they meet."""

from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.launch import join_stage
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Launch


def test_another_number_of_processes_is_refused_with_a_setting_that_exists() -> None:
    launch = Launch(
        rank=0,
        world_size=4,
        local_world_size=4,
        master_addr="127.0.0.1",
        master_port=1,
        torchelastic_restart_count=0,
    )
    with pytest.raises(ConfigError, match=r"started 4 .* is 2, .* --set pretraining\.world_size=4"):
        join_stage(launch, Path("runs/nano-seed0/pretrained-1a2b"), 2)
