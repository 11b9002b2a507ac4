"""A repository of one package with a test, and a problem of it."""

from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import Problem
from tests.fakes.rollouts import make_problem

SOURCE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer([SOURCE, TESTS], vocab_size=400))


@pytest.fixture
def repository(tmp_path: Path) -> PreparedRepository:
    for path, text in (
        ("pkg/__init__.py", ""),
        ("pkg/code.py", SOURCE),
        ("tests/test_code.py", TESTS),
    ):
        (tmp_path / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / path).write_text(text)
    return PreparedRepository.from_directory("pkg", tmp_path / "files", ("pkg",), ("tests",))


@pytest.fixture
def problem(repository: PreparedRepository) -> Problem:
    return make_problem("p0").model_copy(update={"repository_fingerprint": repository.fingerprint})
