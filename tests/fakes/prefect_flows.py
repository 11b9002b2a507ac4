"""Flows that tests deploy: a finished sub-flow whose result is passed on, then a stage that counts."""

from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy

from ostinato.flows.stages.child_task import run_stage
from ostinato.infra.platform.artifacts import ArtifactRef
from tests.unit.infra.platform.cluster.entries import CountRequest, CountResult

COUNT = "tests.unit.infra.platform.cluster.entries:count"


@flow(name="made-before")
def made_before() -> ArtifactRef:
    """A reference as every flow of the project returns one."""
    return ArtifactRef(kind="problems", name="x", version=1, fingerprint="f", object_prefix="p")


@flow(name="counting")
def counting(
    directory: str, steps: int, seconds_per_step: float = 0.0, release_file: str = ""
) -> int:
    """Counts in a supervised child, which then waits for the release file; a run again goes on where it was."""
    found = made_before()
    assert str(found) == "problems/x@1"
    request = CountRequest(steps=steps, seconds_a_step=seconds_per_step, release_file=release_file)
    return run_stage("counting", COUNT, request, CountResult, Path(directory)).counted


def deploy(*tags: str, queue: str = "training", one_at_a_time: bool = False) -> str:
    """Deploys `counting` to the server of the environment; returns the deployment's id."""
    limit = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    root = Path(__file__).parents[2]
    deployment = counting.from_source(
        source=str(root), entrypoint="tests/fakes/prefect_flows.py:counting"
    )
    made = deployment.deploy(
        f"test-{queue}",
        work_pool_name="ostinato",
        work_queue_name=queue,
        concurrency_limit=limit if one_at_a_time else None,
        job_variables={"stream_output": False},
        tags=[*tags],
        print_next_steps=False,
    )
    return str(made)


if __name__ == "__main__":
    print(deploy())  # noqa: T201
