"""Scripted locating: the same attempts behind two ways of finding the function."""

from pathlib import Path

import pytest

from flows.drivers.scripted_locating import ScriptedLocatingRequest, main
from infra.cluster.workspace import Workspace
from infra.settings import Settings
from tasks.corpus.locating import Locating
from tasks.descriptions import write_prompt
from tasks.evaluation.locating import LocatingRow
from tasks.records import Problem
from tests.fakes.miniature import make_checkpoint, make_problem_set

DESCRIPTIONS = {  # what each way can find in `def value_N(): return N`
    "pkg-0": "Give back val 0 whenever asked",
    "pkg-1": "Nothing any name speaks about",
}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    directory = make_problem_set(tmp_path / "problems")
    file = directory / "problems.jsonl"
    lines = []
    for line in file.read_text().splitlines():
        problem = Problem.model_validate_json(line)
        description = DESCRIPTIONS.get(problem.problem_id, "Some words that stand nowhere")
        prompt = write_prompt("pkg", description)
        lines.append(problem.model_copy(update={"prompt": prompt}).model_dump_json())
    file.write_text("\n".join(lines) + "\n")
    return directory


def rows() -> tuple[LocatingRow, ...]:
    """A model that is told the function solves every second attempt."""
    return tuple(
        LocatingRow(
            problem_id=name,
            attempt=attempt,
            function=name,
            solved=attempt == 0,
            located=True,
            turns=0,
            searches=0,
            generated_tokens=0,
            read_tokens=0,
        )
        for name in DESCRIPTIONS
        for attempt in (0, 1)
    )


@pytest.mark.parametrize("way", ["search", "grep"])
def test_only_what_is_found_can_be_solved_and_the_search_is_paid_for(
    way: Locating, problems: Path, tmp_path: Path
) -> None:
    request = ScriptedLocatingRequest(
        way=way,
        problems_directory=str(problems),
        tokenizer_directory=str(make_checkpoint(tmp_path / "model")),
        result_limit_characters=600,
        attempts=rows(),
    )
    (tmp_path / "work").mkdir()
    workspace = Workspace.open(tmp_path / "work", Settings(home=tmp_path / "home"))
    found = {(row.problem_id, row.attempt): row for row in main(request, workspace).rows}
    assert len(found) == len(rows())
    for (_name, attempt), row in found.items():
        assert row.solved is (row.located and attempt == 0)
        assert row.turns == row.searches > 0
        assert row.generated_tokens > 0
        assert row.read_tokens > 0
    assert found["pkg-0", 0].located
    searches = {"search": 1, "grep": 3}[way]
    assert found["pkg-1", 0].searches == searches
