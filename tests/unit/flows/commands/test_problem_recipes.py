"""Recipes of strangers' repositories: what the user types, checked and written."""

import tomllib

import pytest

from ostinato.flows.commands.problem_recipes import is_collection, recipe_text, write_recipe
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems.config import RepositorySource
from ostinato.tasks.problems.discovery.describing import DescribedSource
from ostinato.tasks.records import Split
from tests.fakes.repositories import WORDKIT, open_repository

SOURCE = RepositorySource(name="kit", version="1", package_paths=("kit",), test_paths=("tests",))


def test_a_password_of_the_place_is_not_written() -> None:
    place = "https://reader:hunter2@example.org/kit.git"
    text = recipe_text(DescribedSource(repository=SOURCE), place, "problems_16", 20, {})
    assert "hunter2" not in text
    assert tomllib.loads(text)["description"] == "problems of https://example.org/kit.git"


@pytest.mark.parametrize("place", ["b/" + "a" * 300, "b/" * 3000, "~nobody-of-this-name/tasks"])
def test_a_place_that_no_file_system_can_have_is_no_collection(place: str) -> None:
    assert not is_collection(place)


def test_a_split_gives_the_repository_every_kind_of_the_recipe(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=tmp_path / "home")
    place = str(open_repository(WORDKIT).directory)
    written = write_recipe(settings, place, "words", "problems_large", 20, 0, Split.TRAIN, {})
    problems = load_recipe(str(written)).problems
    (source,) = problems.repositories
    assert source.split is Split.TRAIN
    assert problems.quotas.deleted_feature
    assert problems.quotas.multi_place
    assert problems.feature_ways == ("subject", "skeleton")
    assert problems.wording.terse_characters == 80
    assert not problems.wording.vague_names


def test_large_problems_keep_the_packages_and_splits_of_problems_16() -> None:
    large, small = (load_recipe(name).problems for name in ("problems_large", "problems_16"))
    assert large.repositories == small.repositories


def test_quotas_of_further_kinds_are_written_only_when_asked_for() -> None:
    described = DescribedSource(repository=SOURCE)
    asked = {"refactoring": 0, "question": 8, "no_edit": 0}
    text = recipe_text(described, "kit", "problems_16", 20, asked)
    assert tomllib.loads(text)["problems"]["quotas"] == {"question": 8}
    assert "quotas" not in recipe_text(described, "kit", "problems_16", 20, {"question": 0})
