"""`ostinato plan`: degrees are read, and a plan tells ranks, memory, time and replicas."""

import io

import pytest
from rich.console import Console

from ostinato.flows.commands.planning import parse_degrees, show_plan
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.planning.inputs import load_inputs


def _plan(gpus: int, degrees: dict[str, int]) -> str:
    text = io.StringIO()
    recipe = load_recipe("qwen3_30b_a3b")
    show_plan(recipe, gpus, load_inputs("h200"), degrees, Console(file=text, width=160))
    return text.getvalue()


def test_degrees_are_axes_with_numbers() -> None:
    assert parse_degrees(["tensor=2", "expert=8"]) == {"tensor": 2, "expert": 8}
    for wrong in ("data=2", "tensor", "tensor=0", "tensor=two"):
        with pytest.raises(ConfigError, match=f"--layout '{wrong}', wanted AXIS=NUMBER"):
            parse_degrees([wrong])


def test_a_plan_tells_both_stages_and_the_replicas() -> None:
    shown = _plan(16, {"tensor": 2, "context": 4, "expert": 8})

    for part in (
        "pretraining: TP 2, CP 4, PP 1",
        "reinforcement: ",
        "GiB a rank, of 139.8",
        "replicas of",
    ):
        assert part in shown
    assert shown.count("MFU") == 2


def test_too_few_gpus_are_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"needs .* GiB a rank, wanted at most 139\.8"):
        _plan(2, {})
