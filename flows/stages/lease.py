"""A run outlives the lease of its deployment's slot.

Prefect ends a healthy run when that lease could not be renewed, for which an outage of five minutes
is enough, and has no setting against it. A lost slot harms nothing here: two runs that want the same
stage share one child (infra/platform/cluster/child.py).
"""

from contextlib import AbstractContextManager
from uuid import UUID

from prefect import flow_engine
from prefect.concurrency._leases import maintain_concurrency_lease


def keep_lease(
    lease_id: UUID, lease_duration: float, raise_on_lease_renewal_failure: bool = False
) -> AbstractContextManager[None]:
    """Prefect's own upkeep of a lease; a failed renewal is logged, whatever the caller asks."""
    return maintain_concurrency_lease(
        lease_id, lease_duration, raise_on_lease_renewal_failure=False
    )


def outlive_leases() -> None:
    """Makes the flow engine of this process use `keep_lease`."""
    flow_engine.maintain_concurrency_lease = keep_lease  # pyright: ignore[reportPrivateImportUsage]
