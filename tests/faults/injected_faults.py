"""The 25 faults and stalls that `ostinato status` must name, written down before it was taught to.

Each row: the finding, the part that it is told of, what the test does, and words of the likely cause.
`test_status.py` injects each one; docs/troubleshooting.md has the same findings with their remedy.
"""

from typing import NamedTuple


class InjectedFault(NamedTuple):
    """One fault and what must be said of it."""

    name: str
    part: str  # how the part's name begins
    injected: str
    cause: str  # in the likely cause


FAULTS = (
    InjectedFault(
        "silent-server", "server", "SIGSTOP to the Prefect server", "is stopped by a signal"
    ),
    InjectedFault(
        "dead-service", "gateway", "a service of `ostinato up` that ends at once", "ended with code"
    ),
    InjectedFault(
        "silent-worker", "worker", "a worker whose heartbeats end", "no heartbeat of the worker"
    ),
    InjectedFault(
        "late-run", "flow run", "a run that is due in a pool without a worker", "no worker"
    ),
    InjectedFault(
        "leaked-lease", "lease", "a slot of a deployment taken by nobody", "no run holds them"
    ),
    InjectedFault("lost-run", "flow run", "a run set to Running without a process", "no process"),
    InjectedFault(
        "stuck-run", "flow run", "a run set to Pending that nobody starts", "did not start"
    ),
    InjectedFault(
        "silent-gateway", "gateway", "a port that accepts and never answers", "does not answer"
    ),
    InjectedFault("slow-store", "store", "an S3 server that answers after a minute", "no answer"),
    InjectedFault("unusable-store", "store", "an S3 server that is not there", "unreachable"),
    InjectedFault("full-disk", "disk", "a home on a full tmpfs", "free at"),
    InjectedFault(
        "held-lock", "ledger", "another process in a write transaction", "holds its lock"
    ),
    InjectedFault(
        "unusable-ledger", "ledger", "a ledger file with other bytes", "not a database"
    ),
    InjectedFault(
        "wedged-upload", "chain", "weights on the chain without a manifest", "without its manifest"
    ),
    InjectedFault(
        "lost-checkpoint", "champion", "a file of the champion removed", "is missing or damaged in the store"
    ),
    InjectedFault("failed-stage", "run", "a child that raises", "no space left"),
    InjectedFault("killed-stage", "run", "SIGKILL to a stage", "was killed"),
    InjectedFault("stopped-process", "run", "SIGSTOP to a process of a stage", "kill -CONT"),
    InjectedFault("silent-stage", "run", "a stage whose heartbeat ends", "no heartbeat for"),
    InjectedFault(
        "stalled-stage", "run", "a stage that beats, computes nothing and makes no progress",
        "no progress for",
    ),
    InjectedFault("dead-rank", "run", "SIGKILL to a rank of a trainer", "rank 1"),
    InjectedFault("dead-replica", "run", "a replica that is lost to its fleet", "ActorDiedError"),
    InjectedFault(
        "starved-engine", "run", "replicas that generate nothing while attempts run", "no token"
    ),
    InjectedFault("starved-boxes", "run", "attempts that wait for a box", "wait for a box"),
    InjectedFault("forgotten-cycle", "cycle", "a cycle left open by its run", "continues it"),
)  # fmt: skip
