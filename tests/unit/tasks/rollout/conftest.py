"""A repository of one package with a test, and a problem of it."""

from pathlib import Path

import pytest

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import Problem
from tests.fakes.one_line_problem import write_package
from tests.fakes.rollouts import make_problem

SOURCE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer([SOURCE, TESTS], vocab_size=400))


@pytest.fixture
def repository(tmp_path: Path) -> PreparedRepository:
    return write_package(tmp_path / "files", SOURCE, TESTS)


@pytest.fixture
def problem(repository: PreparedRepository) -> Problem:
    return make_problem("p0").model_copy(update={"repository_fingerprint": repository.fingerprint})
