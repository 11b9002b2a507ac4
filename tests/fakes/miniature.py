"""A problem set and a random model small enough to run the real chain on them in seconds."""

from pathlib import Path

from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import Split
from tests.fakes.one_line_problem import TESTS as TESTS_PATH
from tests.fakes.one_line_problem import break_line, write_package
from tests.fakes.small_spec import make_spec

SOURCE = "\n\n".join(f"def value_{index}():\n    return {index}\n" for index in range(4))
TESTS = "from pkg.code import *\n" + "".join(
    f"\n\ndef test_value_{index}():\n    assert value_{index}() == {index}\n" for index in range(4)
)


def make_problem_set(directory: Path, split: Split = Split.TRAIN) -> Path:
    """Four problems of one repository, in the files of the problems stage."""
    files = directory / "repositories" / "pkg" / "files"
    repository = write_package(files, SOURCE, TESTS)
    repository.save()
    problems = []
    for index in range(4):
        problem = break_line(
            repository,
            f"    return {index}",
            f"    return {index + 7}",
            symbol=f"value_{index}",
            failing=(f"{TESTS_PATH}::test_value_{index}",),
        ).model_copy(update={"problem_id": f"pkg-{index}", "split": split})
        problems.append(problem.model_dump_json())
    (directory / "problems.jsonl").write_text("\n".join(problems) + "\n")
    return directory


def make_checkpoint(directory: Path, context_tokens: int = 128) -> Path:
    """A tiny model with random weights and the tokenizer of the problem set."""
    renderer = Renderer(train_tokenizer([SOURCE, TESTS], vocab_size=384))
    spec = make_spec(renderer.vocab_size, 32, heads=(2, 1, 16), max_sequence_tokens=context_tokens)
    tokenizer = renderer.save(directory.with_name(f"{directory.name}-tokenizer"))
    weights = build_trainer_model(spec, seed=0).export_weights()
    return save_checkpoint(directory, spec, weights, tokenizer_path=tokenizer)
