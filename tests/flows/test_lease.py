"""The lease of a deployment's slot: a run that lost it goes on."""

import time
from uuid import uuid4

from prefect import flow_engine

from ostinato.flows.stages import child_task

LEASE_SECONDS = 0.2


def test_run_goes_on_when_its_lease_is_gone(prefect_server: None) -> None:
    assert child_task.run_stage.retries == 2  # imported, as every flow imports it
    began = time.monotonic()
    with flow_engine.maintain_concurrency_lease(
        uuid4(), LEASE_SECONDS, raise_on_lease_renewal_failure=True
    ):
        while time.monotonic() - began < 10:
            time.sleep(0.1)  # where the watcher's cancellation would arrive
