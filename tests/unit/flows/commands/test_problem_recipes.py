"""Recipes of strangers' repositories: what the user types, checked and written."""

import tomllib

import pytest

from ostinato.flows.commands.problem_recipes import is_collection, recipe_text
from ostinato.tasks.problems.config import RepositorySource
from ostinato.tasks.problems.discovery.describing import DescribedSource

SOURCE = RepositorySource(name="kit", version="1", package_paths=("kit",), test_paths=("tests",))


def test_a_password_of_the_place_is_not_written() -> None:
    place = "https://reader:hunter2@example.org/kit.git"
    text = recipe_text(DescribedSource(repository=SOURCE), place, "problems_16", 20)
    assert "hunter2" not in text
    assert tomllib.loads(text)["description"] == "problems of https://example.org/kit.git"


@pytest.mark.parametrize("place", ["b/" + "a" * 300, "b/" * 3000, "~nobody-of-this-name/tasks"])
def test_a_place_that_no_file_system_can_have_is_no_collection(place: str) -> None:
    assert not is_collection(place)


def test_quotas_of_questions_and_no_edits_are_written_only_when_asked_for() -> None:
    described = DescribedSource(repository=SOURCE)
    asked = recipe_text(described, "kit", "problems_16", 20, {"question": 8})
    assert tomllib.loads(asked)["problems"]["quotas"] == {"question": 8}
    assert "quotas" not in recipe_text(described, "kit", "problems_16", 20)
