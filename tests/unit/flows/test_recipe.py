"""Recipes: shipped ones load, mistakes name key, value and what is wanted."""

import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from ostinato.flows.recipe import Recipe, load_recipe, recipe_names
from ostinato.flows.recipe_text import describe_recipe, meaning_of
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.training.config import PLACEMENT
from ostinato.tasks.grading.rewards import term_weights


@pytest.mark.parametrize("name", recipe_names())
def test_load_recipe_every_shipped_recipe_is_complete(name: str) -> None:
    assert load_recipe(name).name == name


def test_load_recipe_unknown_key_names_it_and_the_close_one() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.group_sise: unknown key; did you mean 'group_size'"
    ):
        load_recipe("nano", overrides=["rollout.group_sise=3"])


def test_load_recipe_key_that_belongs_to_the_section_above_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key; did you mean 'cycle.deadline_seconds'"):
        load_recipe("nano", overrides=["cycle.feedback.deadline_seconds=3"])


def test_load_recipe_wrong_value_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size = 1: .*greater than or equal to 2"):
        load_recipe("nano", overrides=["rollout.group_size=1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mtp.after_phase=transcripts"], r"wanted .* before the last, one of \['bulk', 'long"),
        (["mtp.after_phase=bulk", "mtp.depth=0"], r"'bulk' with mtp\.depth=0, wanted draft"),
        (["learning.trains_drafts=true", "mtp.depth=0"], r"trains_drafts=true with mtp\.depth=0"),
        (
            ["mtp.after_phase=bulk", "pretraining.layout.expert=2"],
            r"mtp\.after_phase is 'bulk' with pretraining\.layout \{'expert': 2\}",
        ),
    ],
)
def test_load_recipe_draft_layers_that_cannot_learn_with_the_trunk_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("nano", overrides=overrides)


def test_load_recipe_that_does_not_exist_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="nano"):
        load_recipe("nanno")


def test_load_recipe_broken_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"mine.toml is not TOML"):
        load_recipe(str(path))


def test_load_recipe_seed_reaches_everything_that_is_drawn() -> None:
    recipe = load_recipe("nano", seed=7)
    drawn = (
        recipe.problems,
        recipe.corpus,
        recipe.pretraining,
        recipe.mtp,
        recipe.rollout,
        recipe.retrieval,
        recipe.evaluation,
        recipe.cycle.gate,
        recipe.cycle.simulated_users,
    )
    assert [part.seed for part in drawn if part] == [7] * len(drawn)
    assert load_recipe("problems_16", seed=7).problems.seed == 7
    assert load_recipe("nano", seed=7, overrides=["corpus.seed=3"]).corpus.seed == 3


def test_a_model_beside_a_base_checkpoint_that_differs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "nano"\nname = "mine"\n[model]\nnum_layers = 6\n')
    with pytest.raises(ConfigError, match=r"model\.num_layers = 6, but 4 in .*nano_base"):
        load_recipe(str(path))
    path.write_text('extends = "nano"\nname = "mine"\n[model]\nnum_layers = 4\n')
    assert load_recipe(str(path)).model == load_recipe("nano").model
    assert load_recipe("nano_base", overrides=["model.num_layers=6"]).model.num_layers == 6


def test_a_word_needs_no_quotes_in_an_override() -> None:
    plain = load_recipe("nano", overrides=["rollout.boxes=fleet"])
    assert plain == load_recipe("nano", overrides=['rollout.boxes="fleet"'])
    assert plain.rollout.boxes == "fleet"
    with pytest.raises(ConfigError, match=r"rollout\.boxes: value 'two words' is not TOML"):
        load_recipe("nano", overrides=["rollout.boxes=two words"])


def test_adapters_beside_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pretraining\.lora without base_checkpoint"):
        load_recipe("nano_base", overrides=["pretraining.lora.rank=4"])


def test_a_base_checkpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"base_checkpoint 'models/none'.*spec\.json"):
        load_recipe("nano", overrides=['base_checkpoint="models/none"'])


@pytest.mark.parametrize("name", [n for n in recipe_names() if not n.startswith(("nano", "mini"))])
def test_recipes_of_large_problems_repeat_passes_and_weigh_every_term(name: str) -> None:
    grading = load_recipe(name).grading
    assert grading.second_runner_share == 1.0
    assert grading.asks_oracle
    assert set(grading.harms.charges.values()) == {"refuse"}  # which has no weight of its own
    weights = term_weights(grading)
    assert all(weight or term.startswith("harm") for term, weight in weights.items()), weights


def test_a_recipe_of_ones_own_extends_a_shipped_one_or_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "nano"\n[reinforcement]\nmax_steps = 3\n')
    (tmp_path / "nano.toml").write_text('extends = "mine"\nname = "neighbour"\n')
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "nano.toml").write_text('extends = "nano"\nname = "alone"\n')
    alone = load_recipe(str(tmp_path / "alone" / "nano.toml"))
    assert (alone.name, alone.reinforcement) == ("alone", load_recipe("nano").reinforcement)
    with pytest.raises(ConfigError, match=r"nano\.toml extends .* in a circle"):
        load_recipe(str(tmp_path / "mine.toml"))
    (tmp_path / "nano.toml").unlink()
    mine = load_recipe(str(tmp_path / "mine.toml"))
    assert (mine.reinforcement.max_steps, mine.model) == (3, load_recipe("nano").model)


def test_a_recipe_that_extends_nothing_known_names_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "nanno"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: extends 'nanno', wanted .*'nano'"):
        load_recipe(str(path))


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_as_shown_is_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    shown = tmp_path / "shown.toml"
    shown.write_text(describe_recipe(recipe))
    assert load_recipe(str(shown)) == recipe


def _fields_without_meaning(annotation: object, place: str) -> Iterator[str]:
    """Settings of the tables in an annotation, however deep, that say nothing; their tables say it in a docstring."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        for part in typing.get_args(annotation):
            yield from _fields_without_meaning(part, place)
        return
    for name, field in annotation.model_fields.items():
        if not meaning_of(annotation, name):
            yield f"{place}.{name}"
        yield from _fields_without_meaning(field.annotation, f"{place}.{name}")


def test_every_setting_and_every_table_of_a_recipe_says_what_it_means() -> None:
    assert list(_fields_without_meaning(Recipe, "recipe")) == []


def test_a_recipe_as_shown_says_what_each_table_and_setting_means() -> None:
    shown = describe_recipe(load_recipe("nano"))
    assert "\n# Rules that a candidate must meet to become a problem.\n[problems.rules]\n" in shown
    assert "real traffic only\n[cycle.simulated_users]\n# concurrent users" in shown
    said = [line for line in shown.splitlines() if line]
    bare = [line for above, line in pairwise(said) if line[0] != "#" and above[0] != "#"]
    assert bare == []


def test_credit_per_edit_is_refused_where_there_are_no_groups() -> None:
    assert load_recipe("nano", overrides=["learning.objective.credit=edit"])
    with pytest.raises(ConfigError, match="wanted 'trajectory'"):
        load_recipe("nano", overrides=["cycle.learning.objective.credit=edit"])


def test_a_layout_that_does_not_fit_is_refused_with_the_recipe() -> None:
    ranks = "pretraining.world_size=4"
    fitting = load_recipe("nano", overrides=[ranks, "pretraining.layout.tensor=2"])
    assert fitting.pretraining.parallel_layout.data == 2

    with pytest.raises(ConfigError, match=r"  pretraining: .*wanted a divisor of the 4 ranks"):
        load_recipe("nano", overrides=[ranks, "pretraining.layout.tensor=3"])
    with pytest.raises(ConfigError, match=r"  the whole: .*tensor=4 does not divide num_query"):
        load_recipe("nano", overrides=[ranks, "pretraining.layout.tensor=4"])
    shared = ["learning.world_size=2", "learning.layout.expert=2"]
    with pytest.raises(ConfigError, match=r"parity.earlier_versions is 2, wanted 0"):
        load_recipe("nano", overrides=shared)
    allowed = load_recipe("nano", overrides=[*shared, "learning.parity.earlier_versions=0"])
    assert allowed.learning.parallel_layout.expert == 2


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("interleave=2", "learning.layout.interleave: unknown key; known keys: context, expert"),
        ("pipeline=3", "pipeline x interleave = 3 x 1 = 3 does not divide num_layers=4"),
        ("context=3", r"128 of packing\.bucket_tokens, wanted a multiple of 6"),
        ("pipeline=4", "wanted a divisor of the 3 ranks"),
    ],
)
def test_a_layout_that_rl_does_not_have_is_refused_with_the_recipe(layout: str, says: str) -> None:
    alone = ["learning.parity.earlier_versions=0", "learning.world_size=3"]
    with pytest.raises(ConfigError, match=says):
        load_recipe("nano", overrides=[*alone, f"learning.layout.{layout}"])


def test_ranks_and_layout_are_no_part_of_what_pretraining_makes() -> None:
    other = load_recipe(
        "nano", overrides=["pretraining.world_size=4", "pretraining.layout.tensor=2"]
    )
    made, same = (
        recipe.pretraining.model_dump(mode="json", exclude=PLACEMENT)
        for recipe in (load_recipe("nano"), other)
    )
    assert made == same


def test_a_recipe_without_phases_needs_a_checkpoint_and_no_draft_layers() -> None:
    without = "pretraining.phases=[]"
    assert load_recipe("smollm2_quick", overrides=[without]).pretraining.phases == ()
    with pytest.raises(ConfigError, match=r"phases is empty without base_checkpoint"):
        load_recipe("nano_base", overrides=[without])
    with pytest.raises(ConfigError, match=r"mtp\.phases is empty with mtp\.depth=2"):
        load_recipe("nano", overrides=["mtp.phases=[]"])
