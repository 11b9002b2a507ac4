"""Calls in a box reach the repository's code, whatever its package is called."""

import asyncio
import json
from pathlib import Path

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CallRequest, make_calls
from tests.fakes.one_line_problem import write_package

LINE = "def f(number):\n    return number + 1\n"


def test_a_repository_that_is_called_as_this_project_is(tmp_path: Path) -> None:
    repository = write_package(tmp_path, LINE, "from pkg.code import f\n")
    path = "ostinato/infra/sandbox/code.py"
    files = {path: LINE.encode(), "ostinato/__init__.py": b"", "ostinato/infra/__init__.py": b""}
    call = CallRequest(path, "f", json.dumps({"plain": [41], "named": {}}))

    async def ask() -> list[str | None]:
        async with open_box(repository, files) as sandbox:
            return await make_calls(sandbox, [call], 1.0)

    with asyncio.Runner() as runner:
        assert runner.run(ask()) == [json.dumps({"returns": 42})]
