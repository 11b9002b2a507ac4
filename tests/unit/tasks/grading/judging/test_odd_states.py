"""A box in any state ends in a verdict; oddities beside a right fix do not take its pass."""

import pytest

from ostinato.infra.sandbox.environment import open_box
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import grade
from tests.unit.tasks.grading.conftest import PATH

HARMLESS = {
    "pipes": "mkfifo pipe wordkit/pipe.py",
    "a socket": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('wordkit/s.py')\"",
    "names that are no text": "touch \"$(printf 'note\\377')\" \"$(printf 'wordkit/n\\377.py')\"",
    "links": "ln -s / link; ln -s nowhere wordkit/link.py; rm -rf tests",
    "a folder too deep for a path": (
        'python3 -c "import os\n'
        "for _ in range(60):\n"
        "    os.mkdir('d' * 100); os.chdir('d' * 100)\""
    ),
}
RUINOUS = {
    "a file over the limit": "truncate -s 2200M big.py",
    "a folder in place of the file": f"rm {PATH}; mkdir {PATH}",
    "nothing may be read": f"chmod 000 {PATH} wordkit",
    "nothing left": "rm -rf /repo/* /tmp/*",
}


@pytest.fixture
def judged(runner, problem, repository, server, make_transcript):
    async def judge_after(command, start):
        async with open_box(repository, start) as box:
            await box.exec(command, 20.0)
            changed = await box.diff()
        verdict, _ = await grade(problem, changed, make_transcript(), server, GradingConfig())
        assert verdict.model_dump_json()
        return verdict

    return lambda command, start: runner.run(judge_after(command, start))


@pytest.mark.parametrize("name", [*HARMLESS, *RUINOUS])
@pytest.mark.sampled(5)
def test_state_of_a_box_that_repairs_nothing_is_a_failed_verdict(judged, problem, repository, name):
    broken = problem.break_files(repository.files)
    assert not judged({**HARMLESS, **RUINOUS}[name], broken).passed


def test_right_fix_beside_odd_files_passes(judged):
    assert judged("; ".join(HARMLESS.values()), {}).passed
