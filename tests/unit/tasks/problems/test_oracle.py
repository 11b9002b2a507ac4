"""The oracle passes the original, and not an answer that only knows the arguments of the tests."""

import json
import re
from pathlib import Path

import pytest

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import format_call
from ostinato.tasks.grading.judging.verdicts import judge_by_oracle
from ostinato.tasks.problems.breaking.definitions import find_definitions
from ostinato.tasks.problems.config import OracleConfig
from ostinato.tasks.problems.proving.oracle import build_oracles, derive_arguments, record_calls
from tests.fakes.one_line_problem import PATH as PATH_OF_CODE
from tests.fakes.one_line_problem import write_package
from tests.fakes.repositories import WORDKIT, open_repository

PATH = "wordkit/shaping.py"
CONFIG = OracleConfig(max_calls_derived=12)
DIFFERS = r"differs from the original: (\d+) of (\d+) held-out calls agree; (.*)"


async def learn(sandbox, repository):
    definitions = find_definitions(PATH, repository.files[PATH].decode())
    recorded = await record_calls(sandbox, definitions, ["tests"])
    return {item.symbol: item for item in await build_oracles(sandbox, recorded, CONFIG, 0)}


def hard_coded(oracle, text):
    """A module whose function answers the visible calls from a table."""
    table = {call.arguments: call.result for call in oracle.visible}
    return text + (
        f"\n\n_TABLE = {table!r}\n\n"
        f"def {oracle.symbol}(text, width, fill=' '):\n"
        "    import json\n"
        "    key = json.dumps({'plain': [text, width, fill], 'named': {}})\n"
        "    return json.loads(_TABLE[key])['returns'] if key in _TABLE else ''\n"
    )


async def test_original_agrees_and_hard_coding_does_not():
    repository = open_repository(WORDKIT)
    async with open_box(repository) as sandbox:
        oracle = (await learn(sandbox, repository))["pad_center"]
        shown = {call.arguments for call in oracle.visible}
        assert shown
        assert not shown & {call.arguments for call in oracle.held_out}
        assert await judge_by_oracle(sandbox, oracle) == ""
        text = repository.files[PATH].decode()
        await sandbox.write(PATH, hard_coded(oracle, text).encode())
        visible = oracle.model_copy(update={"held_out": oracle.visible})
        assert await judge_by_oracle(sandbox, visible) == ""
        found = re.fullmatch(DIFFERS, await judge_by_oracle(sandbox, oracle))
        assert found
        assert int(found[1]) < int(found[2]) == len(oracle.held_out)
        assert found[3].startswith("pad_center(")
        await sandbox.write(PATH, b"import os\nos._exit(0)\n")
        found = re.fullmatch(DIFFERS, await judge_by_oracle(sandbox, oracle))
        assert found
        assert found[1] == "0"


SPEAKING = """language = "en"


def activate(name):
    global language
    language = name


def ordinal(number):
    return f"{number} {language}"
"""


async def test_what_one_function_leaves_behind_is_in_no_result_of_another(tmp_path: Path) -> None:
    repository = write_package(tmp_path, SPEAKING, "from pkg.code import ordinal\n")
    one, other = (json.dumps({"plain": [value], "named": {}}) for value in ("zh", 1))
    recorded = {(PATH_OF_CODE, "activate"): [one], (PATH_OF_CODE, "ordinal"): [other]}
    async with open_box(repository) as sandbox:
        oracles = {it.symbol: it for it in await build_oracles(sandbox, recorded, CONFIG, 0)}
        assert oracles["ordinal"].held_out
        assert await judge_by_oracle(sandbox, oracles["ordinal"]) == ""


@pytest.mark.parametrize("seed", ["a", "b"])
def test_derived_arguments_are_new_and_repeatable(seed):
    calls = ['{"plain": ["abc", 5], "named": {"fill": "*"}}', '{"plain": ["x", 9], "named": {}}']
    derived = derive_arguments(calls, 10, seed)
    assert derived == derive_arguments(calls, 10, seed)
    assert len(set(derived)) == len(derived) == 10
    assert not set(derived) & set(calls)


def test_calls_read_as_python():
    arguments = '{"plain": [{"tuple": [1]}, {"dict": [["a", null]]}], "named": {"key": "x"}}'
    assert format_call("f", arguments) == "f((1,), {'a': None}, key='x')"
