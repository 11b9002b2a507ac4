"""Simulated users over HTTP against a whole gateway: seeded, honest about errors, several at
once.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.infra.serving.gateway.answers.workplaces import RepositoryWorkplaces
from ostinato.infra.serving.gateway.app import build_app
from ostinato.infra.serving.gateway.arms import Arm, ArmTable
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS, Signal
from ostinato.tasks.realtime.config import SimulatedUsersConfig
from ostinato.tasks.realtime.feedback.simulated_users import (
    SimulatedRequest,
    SimulatedUsersReport,
    UserProblem,
    simulate_users,
)
from ostinato.tasks.records import LineEdit, Problem, Split
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.rollouts import make_problem
from tests.fakes.toy_gateway import BROKEN, PRISTINE, Toy, toy_repository

pytestmark = pytest.mark.asyncio

CERTAIN = SimulatedUsersConfig(
    users=3,
    requests_per_user=4,
    judgement_error_rate=0,
    abandon_probability=0,
    follow_up_probability=0,
    thumbs_probability=0,
    survival_probability=0,
)


def problems(count: int) -> list[UserProblem]:
    edit = LineEdit(
        path="pkg/first.py",
        line_number=2,
        gold_text="    return items[0]",
        broken_text="    return items[1]",
    )
    changes = {
        "repository": "toy",
        "path": "pkg/first.py",
        "symbol": "first",
        "prompt": "Fix first in pkg/first.py",
        "edits": (edit,),
        "fail_to_pass": ("tests/test_first.py::test_first",),
        "split": Split.USER,
    }
    return [
        UserProblem(
            problem=make_problem(f"p{index}").model_copy(update=changes),
            files={"pkg/first.py": BROKEN},
        )
        for index in range(count)
    ]


async def judge(problem: Problem, files: dict[str, str]) -> bool:
    return files["pkg/first.py"] == PRISTINE["pkg/first.py"].decode()


async def run(
    toy: Toy, config: SimulatedUsersConfig, count: int = 12, key: str = "key-of-team"
) -> SimulatedUsersReport:
    async with toy.client(key) as client:
        return await simulate_users(client, problems(count), judge, config)


def signals(toy: Toy) -> list[set[str]]:
    rows = toy.ledger.interactions.since(0)
    return [{said.signal for said in row.feedback} - GATEWAY_SIGNALS for row in rows]


async def test_solved_problems_are_kept_and_broken_ones_reverted(
    make_toy: Callable[..., Toy],
) -> None:
    report = await run(make_toy(), CERTAIN)
    assert report.counts["kept"] == report.counts["really_solved"] == 12
    assert report.label == "simulated users, not people"


async def test_useless_answers_are_reverted(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy(lambda conversation: "I would rather not.")
    report = await run(toy, CERTAIN)
    assert report.counts["reverted"] == 12
    assert report.counts["really_solved"] == 0
    assert signals(toy) == [{"edit_reverted"}] * 12


async def test_unhappy_users_ask_again_in_the_same_session(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy(lambda conversation: "I would rather not.")
    config = CERTAIN.model_copy(update={"follow_up_probability": 1.0, "maximum_follow_ups": 1})
    report = await run(toy, config, count=3)
    assert report.counts["interactions"] == 6
    rows = toy.ledger.interactions.since(0)
    assert len({row.session_id for row in rows}) == 3
    told = sorted(sorted(said) for said in signals(toy))
    assert told == [[Signal.DISSATISFIED_FOLLOW_UP]] * 3 + [[Signal.EDIT_REVERTED]] * 3


async def test_impatient_users_leave_without_a_verdict(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy()

    async def slow() -> None:
        toy.now[0] += 100

    toy.model.wait = slow
    report = await run(toy, CERTAIN, count=2)
    assert report.counts["abandoned"] == 2
    assert signals(toy) == [{"abandoned"}] * 2


async def test_same_seed_and_answers_give_the_same_users(make_toy: Callable[..., Toy]) -> None:
    config = SimulatedUsersConfig(users=3, requests_per_user=8, seed=7, judgement_error_rate=0.5)
    toy = make_toy()
    first, again, other = [
        [
            (done.problem_id, done.outcome, done.misjudged)
            for done in (await run(toy, chosen, count=24, key="key-of-private")).requests
        ]
        for chosen in (config, config, config.model_copy(update={"seed": 8}))
    ]
    assert first == again != other
    assert len({outcome for _, outcome, _ in first}) > 1


async def test_errors_of_judgement_come_at_their_rate(make_toy: Callable[..., Toy]) -> None:
    config = CERTAIN.model_copy(update={"requests_per_user": 40, "judgement_error_rate": 0.25})
    report = await run(make_toy(), config, count=120, key="key-of-private")
    assert report.counts["really_solved"] == 120
    assert abs(report.counts["misjudged"] / 120 - 0.25) < 0.1  # 2.5 standard errors
    assert report.counts["reverted"] == report.counts["misjudged"]


async def test_settled_requests_are_reported_and_not_made_again(
    make_toy: Callable[..., Toy],
) -> None:
    toy = make_toy()
    done: list[SimulatedRequest] = []
    async with toy.client() as client:
        few = CERTAIN.model_copy(update={"requests_per_user": 2})
        await simulate_users(client, problems(12), judge, few, on_request=done.append)
        resumed = await simulate_users(client, problems(12), judge, CERTAIN, settled=done)
    assert len(done) == 6
    assert resumed.counts["requests"] == 12
    assert len(toy.ledger.interactions.since(0)) == 12


async def test_requests_in_flight_at_a_kill_are_recorded_once(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy(lambda conversation: "I would rather not.")
    config = CERTAIN.model_copy(update={"follow_up_probability": 1.0, "maximum_follow_ups": 1})
    async with toy.client("key-of-team") as client:
        first = await simulate_users(client, problems(12), judge, config, run_name="one")
        # the journal was lost: every request of the run is asked again
        again = await simulate_users(client, problems(12), judge, config, run_name="one")
        rows = toy.ledger.interactions.since(0)
        assert again.requests == first.requests
        assert len(rows) == first.counts["interactions"] == 24
        assert all(len(row.feedback) == len({said.signal for said in row.feedback}) for row in rows)
        await simulate_users(client, problems(12), judge, config, run_name="two")
    assert len(toy.ledger.interactions.since(0)) == 48


async def test_gateway_that_is_down_is_a_failed_request_not_a_crash() -> None:
    async with httpx2.AsyncClient(base_url="http://127.0.0.1:9") as client:
        report = await simulate_users(client, problems(2), judge, CERTAIN)
    assert [done.outcome for done in report.requests] == ["failed", "failed"]


async def test_a_box_that_breaks_is_a_failed_request_and_ends_no_other(
    make_toy: Callable[..., Toy],
) -> None:
    async def broken(problem: Problem, files: dict[str, str]) -> bool:
        if problem.problem_id == "p0":
            raise SandboxError("box is gone")
        return await judge(problem, files)

    async with make_toy().client() as client:
        report = await simulate_users(client, problems(3), broken, CERTAIN)
    assert (report.counts["failed"], report.counts["kept"]) == (1, 2)
    [failed] = [request for request in report.requests if request.outcome == "failed"]
    assert (failed.problem_id, failed.detail) == ("p0", "SandboxError: box is gone")
    assert len(failed.interaction_ids) == 1


async def test_users_wait_when_the_gateway_says_so() -> None:
    codes = iter([429, 503, 200])

    def answer(request: httpx2.Request) -> httpx2.Response:
        body = {
            "session_id": "s",
            "interaction_id": "i",
            "latency_seconds": 1.0,
            "changed_files": {"pkg/first.py": PRISTINE["pkg/first.py"].decode()},
        }
        return httpx2.Response(next(codes, 200), json=body, headers={"Retry-After": "0"})

    async with httpx2.AsyncClient(
        base_url="http://g", transport=httpx2.MockTransport(answer)
    ) as client:
        report = await simulate_users(client, problems(1), judge, CERTAIN)
    assert report.counts["kept"] == 1


async def test_with_real_boxes_and_tests_users_keep_what_really_passes(
    make_toy: Callable[..., Toy], tmp_path: Path
) -> None:
    """Half of the users meet an agent that repairs, half one that only says so."""
    toy = make_toy()
    repository = toy_repository(tmp_path / "repository")
    server = TestServer(repository)
    workplaces = RepositoryWorkplaces(
        [repository], boxes_per_repository=2, test_limit_seconds=120.0
    )
    liar = AnsweringModel(toy.context.renderer, lambda conversation: "Fixed.", weight_version=5)
    control = toy.context.arms.control
    arms = ArmTable(control, Arm("candidate", "nano@2", 5, liar), share=0.5)
    app = build_app(dataclasses.replace(toy.context, workplaces=workplaces, arms=arms))

    async def run_own_tests(problem: Problem, files: dict[str, str]) -> bool:
        changed = {path: text.encode() for path, text in files.items()}
        return (await server.run(changed, problem.fail_to_pass)).passed

    try:
        transport = httpx2.ASGITransport(app=app)
        headers = {"Authorization": "Bearer key-of-team"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://g", headers=headers
        ) as client:
            report = await simulate_users(client, problems(8), run_own_tests, CERTAIN)
    finally:
        await workplaces.close()
        await server.close()
    assert report.counts["kept"] + report.counts["reverted"] == 8
    for row in toy.ledger.interactions.since(0):
        said = {event.signal for event in row.feedback} - GATEWAY_SIGNALS
        assert said == {"edit_kept" if row.arm == "control" else "edit_reverted"}
