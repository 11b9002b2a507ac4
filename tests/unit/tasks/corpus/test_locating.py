"""Locating: what the demonstrator asks, when it believes to have found it, and whole demonstrations."""

import re
from pathlib import Path

import pytest

from infra.harness.config import HarnessConfig
from infra.harness.transcript import CallStatus
from tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    DemonstrationConfig,
    TokenBudgets,
)
from tasks.corpus.located_repairs import grep_files
from tasks.corpus.locating import Locating, choose_words, drive, locate, shows_function
from tasks.corpus.problem_sources import PROBLEMS_FILE
from tasks.descriptions import write_prompt
from tasks.records import Problem
from tests.unit.tasks.corpus.test_corpus_stage import build, read_demonstrations, read_shard

DESCRIBED = {
    "add_all": "Add up numbers from a start",
    "keep_even": "Keeps the numbers that are even",
    "largest_gap": "Widest distance between neighbours",
}
GENERAL = '''def open_box_{number}(path):
    """Open whatever box {number} stands at a path."""
    with open(path) as file:
        text = file.read()
    return text


def close_box_{number}(path, quietly=False):
    """Closes what number {number} has left open."""
    lines = [line for line in path if line]
    return lines if quietly else sorted(lines)
'''


@pytest.fixture
def described_directory(problems_directory: Path) -> Path:
    """The same problems, told by what their functions are for."""
    file = problems_directory / PROBLEMS_FILE
    problems = [Problem.model_validate_json(line) for line in file.read_text().splitlines()]
    lines = [
        problem.model_copy(
            update={"prompt": write_prompt("tiny", DESCRIBED[problem.symbol])}
        ).model_dump_json()
        for problem in problems
    ]
    file.write_text("\n".join(lines) + "\n")
    return problems_directory


def test_one_search_finds_a_function_or_ends_the_talk() -> None:
    hits = {True: "kit/a.py:3-9 def join(x):\nkit/b.py:1-2 def other():", False: "nothing found"}
    for is_found, result in hits.items():
        asked = []

        def answer(call: str, result: str = result, asked: list[str] = asked) -> str:
            asked.append(call)
            return result

        steps = drive(locate("search", "Joins lists", "kit/a.py", "join"), answer)
        assert asked == ["<codebase_search>Joins lists</codebase_search>"]
        assert (steps is not None) is is_found


def test_greps_go_on_word_by_word_until_the_definition_is_shown() -> None:
    files = {"kit/a.py": "def combine(x):\n    pass\n\n\ndef combine_lists(x):\n    pass\n"}

    def answer(call: str) -> str:
        return grep_files(files, call.removeprefix("<grep>").removesuffix("</grep>"))

    steps = drive(locate("grep", "Glues two lists with each", "kit/a.py", "combine_lists"), answer)
    assert steps is not None
    assert [call for call, _ in steps] == [
        "<grep>^def .*glues</grep>",
        "<grep>^def .*two</grep>",
        "<grep>^def .*lists</grep>",
    ]
    assert steps[-1][1] == "kit/a.py:5:def combine_lists(x):"
    assert drive(locate("grep", "Glues two", "kit/a.py", "combine_lists"), answer) is None


def test_a_function_is_shown_by_its_definition_in_its_file_only() -> None:
    assert shows_function("x\nkit/a.py:12:def join(a):", "kit/a.py", "join")
    assert shows_function("kit/a.py:12-14 def join(a):", "kit/a.py", "join")
    for result in (
        "kit/a.py:12:def join_all(a):",
        "other/kit/a.py:12:def join(a):",
        "kit/a.py:12:    return join(a)",
        "kit/b.py:12-14 def join(a):",
    ):
        assert not shows_function(result, "kit/a.py", "join")


def test_dull_words_are_not_grepped_and_none_twice() -> None:
    assert choose_words("Returns the first item, first of all") == ["first", "item"]


@pytest.mark.parametrize("way", ["search", "grep"])
def test_demonstrations_locate_with_the_tools_of_their_arm(
    way: Locating, described_directory: Path, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for number in range(12):
        (code / f"module_{number}.py").write_text(GENERAL.replace("{number}", str(number)))
    tool, other = ("codebase_search", "grep") if way == "search" else ("grep", "codebase_search")
    request = CorpusRequest(
        config=CorpusConfig(
            sources=(CodeSource(kind="directory", name="code", path=str(code), licence="MIT"),),
            vocab_size=500,
            budgets=TokenBudgets(
                code=2000, library=2000, repair=2000, repair_general=0, located=4000
            ),
            held_out_share=0.2,
            near_duplicate_ratio=1.0,
            demonstrations=DemonstrationConfig(
                count=6, wrong_first_share=0, give_up_share=0, locating=way
            ),
        ),
        problems_directory=str(described_directory),
        harness=HarnessConfig(
            tools=("read_file", "edit_file", "run_terminal", tool), context_tokens=2000
        ),
    )
    result, renderer = build(request, tmp_path / "out")
    texts = [text for text, _ in read_demonstrations(tmp_path / "out", renderer)]
    texts += read_shard(tmp_path / "out", "located_train", renderer)
    assert result.demonstrations > 0
    assert len(texts) > result.demonstrations
    for text in texts:
        assert f"<{other}>" not in text
        called, read = text.index(f"<{tool}>"), text.index("<read_file>")
        assert text.startswith("<|user|>This fails in ")
        assert called < read
        named = re.search(r"<read_file>(.+?)::(\w+)</read_file>", text)
        assert named is not None
        assert named[2] not in text[:called]  # neither prompt nor an earlier turn names it
        assert shows_function(text[called:read].replace("<|tool|>", "\n"), named[1], named[2])
        assert CallStatus.UNKNOWN_TOOL.value not in text
