"""Bad values and files of recipes: one ConfigError that names the place, before anything starts."""

from pathlib import Path

import pytest

from ostinato.flows.recipe import load_recipe, recipe_names
from ostinato.infra.platform.errors import ConfigError

PHASE = (
    "name='all',tokens=100_000,sequence_tokens=1024,global_batch_tokens=6144,blend={code=[1.0,1.0]}"
)
FIRST_PHASE = f"pretraining.phases=[{{{PHASE}}}]"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learning.optimizer.learning_rate=inf", "learning.optimizer.learning_rate is inf"),
        ("learning.optimizer.learning_rate=nan", "learning.optimizer.learning_rate is nan"),
        ("grading.rewards={mine=inf}", "grading.rewards.mine is inf"),
        ("cycle.learning.optimizer.learning_rate=-inf", "is -inf, wanted a finite number"),
        ("seed=12345678901234567890123456789012", "seed has 104 bits, wanted at most 63"),
        ("problems.seed=12345678901234567890123456789012", "seed has 104 bits, wanted at most 63"),
        (f"rollout.group_size={10**400}", r"group_size has 1329 bits, wanted at most 63"),
        ("rollout.group_size=1" + "0" * 5000, "rollout.group_size: value .* is not TOML"),
        (
            "model.max_sequence_tokens=256",
            r"model.max_sequence_tokens = 256, but 512 in .*spec\.json",
        ),
        ("model.max_sequence_tokens=many", r"model.max_sequence_tokens = 'many', but 512 in"),
        ("name.first=3", "name.first: name is 'nano', wanted a section"),
        (
            'rollout.curriculum.probes="scorecard/nano@1"',
            r"curriculum\.probes = 'scorecard/nano@1': .*wanted probes/NAME@VERSION",
        ),
        ("grading=a", "grading = 'a': .* valid dictionary"),
        ("model=a", "model = 'a': .* valid dictionary"),
        ("cycle.gate=[1]", r"cycle.gate = \[1\]: .* valid dictionary"),
        ("grading=null", "grading = None: .* valid dictionary"),
        ("x=" + "[" * 3000 + "]" * 3000, "--set x: .* nested too deep"),
        ("x=" + "[" * 90 + "]" * 90, r"x\.0\.0.* more than 32 levels deep, wanted"),
        ("x" + ".y" * 3000 + "=1", r"x\.y\.y.* more than 32 levels deep, wanted"),
        (".=4", "--set '.=4': wanted section.key=value"),
        ('seed=1\nname="another"', "--set seed: value .* is not TOML"),
        ("=3", "--set '=3': wanted section.key=value"),
        ('name="../../evil"', "name = '../../evil'"),
        ('name=""', "name = ''"),
        ('name="a\\u0000b"', r"name = 'a\\x00b'"),
        (
            "harness.context_tokens=10_000_000",
            "harness.context_tokens=10000000, wanted at most model.max_sequence",
        ),
        (FIRST_PHASE, "sequence_tokens=1024.* model.max_sequence_tok"),
        (
            FIRST_PHASE.replace("code=", "coed=").replace("1024", "512"),
            "pretraining phase 'all': blend names 'coed', wanted one of code, library, repair",
        ),
        (
            "pretraining.phases=[{name='all',tokens=4096,sequence_tokens=32,microbatch_tokens=32,"
            "global_batch_tokens=64,blend={demonstrations=[1.0,1.0]}}]",
            "microbatch_tokens=32, wanted at least 64 with 'demonstrations'",
        ),
        ("learning.packing.microbatch_tokens=0", "microbatch_tokens = 0"),
    ],
)
def test_a_bad_value_is_named(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_recipe("nano", overrides=[override])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('rollout.boxes="fleet"', "rollout.boxes is 'fleet' .* wanted 'worker'"),
        ('rollout.sandbox="microvm"', "rollout.sandbox is .* wanted"),
        ("rollout.forked_share=0.5", "rollout.forked_share is 0.5 .* wanted 0.0"),
        ('harness.mcp_servers.notes="true"', r"mcp_servers is \['notes'\] with program"),
        ('harness.program="codexx"', "harness is 'codexx', wanted one of mini_swe_agent"),
        ('harness.program="command"', r"'command' with no table \[harness.command\]"),
        ('harness.command.command="true"', r"'mini_swe_agent' with a table \[harness.command\]"),
    ],
)
def test_what_does_not_go_with_a_foreign_program_is_named(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_recipe("mini_swe_agent", overrides=[override])


@pytest.mark.parametrize("name", ["", ".", "../../evil", "a\0b", "x" * 5000, "\udcff", "/dev/null"])
def test_what_is_no_file_is_no_recipe(name: str) -> None:
    with pytest.raises(ConfigError, match="not found, wanted one of"):
        load_recipe(name)


def test_a_recipe_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b'extends = "nano"\nname = "caf\xe9"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml is not UTF-8: .* position 28"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('grading = "a"', "grading = 'a': .* valid dictionary"),
        ("x = " + "[" * 3000 + "]" * 3000, r"'x = \[\[.* nested too deep"),
        ("x = " + "{y = " * 3000 + "1" + "}" * 3000, r"'x = \{y = .* nested too deep"),
    ],
)
def test_a_bad_line_of_a_file_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "nano"\nname = "mine"\n{line}\n')
    with pytest.raises(ConfigError, match=says):
        load_recipe(str(path))


def test_shipped_recipes_have_a_name_of_their_own() -> None:
    assert [load_recipe(name).name for name in recipe_names()] == recipe_names()


@pytest.mark.parametrize("name", ["\\u0000", "x" * 5000], ids=["null", "long"])
@pytest.mark.parametrize("key", ["extends", "base_checkpoint"])
def test_a_name_that_no_file_can_have_is_refused(key: str, name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "odd.toml"
    recipe.write_text(f'{key} = "{name}"\n')
    with pytest.raises(ConfigError, match=rf"{key} .*(wanted|has no)") as caught:
        load_recipe(str(recipe))
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("shape", [b"{", b"[]", b"5", b"\xff", b"[" * 5000])
def test_a_base_checkpoint_without_a_shape_is_refused(shape: bytes, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "spec.json").write_bytes(shape)
    recipe = tmp_path / "odd.toml"
    recipe.write_text(f'extends = "miniature"\nbase_checkpoint = "{tmp_path}/base"\n')
    with pytest.raises(ConfigError, match=r"base/spec\.json (is|holds) "):
        load_recipe(str(recipe))
