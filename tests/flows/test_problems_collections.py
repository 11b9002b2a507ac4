"""`ostinato problems from` over tasks of others, and `problems export`, as a person types them."""

import json
from pathlib import Path

import pytest

from ostinato.flows.commands.problem_recipes import split_tasks
from ostinato.flows.recipe import load_recipe
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.records import Split
from tests.flows.test_problems_from import run_in
from tests.unit.tasks.problems.given.collections import instance, write_clone, write_harbor_task


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_tasks_of_harbor_become_problems_and_go_out_again(tmp_path: Path) -> None:
    write_harbor_task(tmp_path / "tasks" / "halve")
    write_harbor_task(tmp_path / "tasks" / "image", **{"environment/Dockerfile": "FROM nginx:1\n"})

    made = run_in(tmp_path, "problems", "from", "tasks", "--as", "people")

    told = made.stdout + made.stderr
    assert made.returncode == 0, told
    assert "image left out: its image is 'nginx:1'" in told
    [source] = load_recipe(str(tmp_path / "people.toml")).problems.given
    assert (source.name, source.distribution, source.split) == ("halve", "kit", Split.TRAIN)
    [published] = (tmp_path / "home" / "objects" / "artifacts" / "problems").rglob(PROBLEMS_FILE)
    problem = json.loads(published.read_text())
    assert problem["prompt"] == "Half of an odd number is rounded. Make it exact."

    sent = run_in(tmp_path, "problems", "export", "problems/people@1", "out")

    assert sent.returncode == 0, sent.stderr
    assert "1 tasks written" in sent.stdout
    assert (tmp_path / "out" / problem["problem_id"] / "task.toml").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_instances_of_swe_bench_become_problems(tmp_path: Path) -> None:
    commit = write_clone(tmp_path / "clones" / "kit")
    (tmp_path / "two.jsonl").write_text(
        json.dumps(instance(commit))
        + "\n"
        + json.dumps(instance(commit, instance_id="people__other-1", repo="people/other"))
    )

    made = run_in(tmp_path, "problems", "from", "two.jsonl", "--clones", "clones")

    told = made.stdout + made.stderr
    assert made.returncode == 0, told
    assert "people__other-1 left out: no clone of people/other" in told
    [published] = (tmp_path / "home" / "objects" / "artifacts" / "problems").rglob(PROBLEMS_FILE)
    assert json.loads(published.read_text())["operator"] == "swe-bench"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("from", "rows.jsonl"), "needs --clones DIR"),
        (("from", "tasks", "--clones", "."), "wanted it with SWE-bench"),
        (("from", "kit==1", "--clones", "."), "wanted it with SWE-bench instances"),
        (("export", "nothing", "out"), "wanted a folder with problems.jsonl"),
        (("export", "nothing", "out", "--format", "zip"), "wanted harbor"),
    ],
)
@pytest.mark.sampled(2)
def test_a_wrong_word_is_refused_before_anything_starts(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    write_harbor_task(tmp_path / "tasks" / "halve")
    (tmp_path / "rows.jsonl").write_text(json.dumps(instance("0" * 40)))

    made = run_in(tmp_path, "problems", *words)

    assert made.returncode == 2
    assert told in " ".join(made.stderr.split())
    assert not (tmp_path / "home").exists()


def test_every_fifth_task_is_held_out_whatever_the_order() -> None:
    names = [f"task-{number}" for number in range(10)]
    dealt = split_tasks(names)
    assert dealt == split_tasks(names[::-1])
    assert list(dealt.values()).count(Split.HELD_OUT) == 2
    assert split_tasks(["one"]) == {"one": Split.TRAIN}
