"""The gateway's process follows the changes to a recipe that `ostinato up` was given."""

import os
import subprocess
from pathlib import Path

import pytest

from ostinato.flows.operating.local_prefect import gateway
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.infra.platform.settings import Settings


@pytest.mark.parametrize("line", ["mine", "other"])
def test_it_waits_for_a_checkpoint_of_the_line_that_a_change_names(
    tmp_path: Path, line: str
) -> None:
    settings = Settings(home=tmp_path)
    choice = RecipeChoice(name="nano", overrides=(f'serving.line="{line}"',))
    service = gateway(settings, settings.to_environment(), choice, line="")
    command = service.command[: service.command.index("--line")]  # the recipe's, changed
    with subprocess.Popen(
        command,
        env={**os.environ, **service.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = next((it for it in process.stdout if "waits_for" in it or "rror" in it), "")
        process.kill()
    assert f"line={line} waits_for" in said
