"""A problem set and a random model small enough to run the real chain on them in seconds."""

from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import LineEdit, Problem, Split
from tests.fakes.small_spec import make_spec

SOURCE = "\n\n".join(f"def value_{index}():\n    return {index}\n" for index in range(4))
TESTS = "from pkg.code import *\n" + "".join(
    f"\n\ndef test_value_{index}():\n    assert value_{index}() == {index}\n" for index in range(4)
)


def make_problem_set(directory: Path, split: Split = Split.TRAIN) -> Path:
    """Four problems of one repository, in the files of the problems stage."""
    files = directory / "repositories" / "pkg" / "files"
    for path, text in (
        ("pkg/__init__.py", ""),
        ("pkg/code.py", SOURCE),
        ("tests/test_code.py", TESTS),
    ):
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        (files / path).write_text(text)
    repository = PreparedRepository.from_directory("pkg", files, ("pkg",), ("tests",))
    repository.save()
    lines = SOURCE.split("\n")
    problems = []
    for index in range(4):
        number = lines.index(f"def value_{index}():") + 2
        edit = LineEdit(
            path="pkg/code.py",
            line_number=number,
            gold_text=f"    return {index}",
            broken_text=f"    return {index + 7}",
        )
        problem = Problem(
            problem_id=f"pkg-{index}",
            repository="pkg",
            repository_fingerprint=repository.fingerprint,
            kind="mutation",
            operator="integer",
            path="pkg/code.py",
            symbol=f"value_{index}",
            first_line=number - 1,
            last_line=number,
            prompt=f"Fix value_{index} in pkg/code.py",
            edits=(edit,),
            fail_to_pass=(f"tests/test_code.py::test_value_{index}",),
            pass_to_pass=(),
            split=split,
        )
        problems.append(problem.model_dump_json())
    (directory / "problems.jsonl").write_text("\n".join(problems) + "\n")
    return directory


def make_checkpoint(directory: Path) -> Path:
    """A tiny model with random weights and the tokenizer of the problem set."""
    renderer = Renderer(train_tokenizer([SOURCE, TESTS], vocab_size=384))
    spec = make_spec(renderer.vocab_size, 32, heads=(2, 1, 16), max_sequence_tokens=128)
    tokenizer = renderer.save(directory.with_name(f"{directory.name}-tokenizer"))
    weights = build_trainer_model(spec, seed=0).export_weights()
    return save_checkpoint(directory, spec, weights, tokenizer_path=tokenizer)
