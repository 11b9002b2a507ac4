"""Starts Ray on this machine, or joins a Ray cluster.

Only this module calls `ray.init`. Call it from the main thread of a supervised child, never from a Prefect process,
because Ray replaces signal handlers.
"""

import logging
import os
import platform
import secrets
import socket
import tempfile
import uuid

import ray
from ray._private import ray_constants
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from ostinato.infra.platform.errors import ClusterError, ConfigError, boundary
from ostinato.infra.platform.telemetry import fields

NAMESPACE = "ostinato"

_logger = logging.getLogger(__name__)
_ANSWER_SECONDS = 5.0
_START_TRIALS = 3  # Ray waits 30 seconds for its own processes, too short on a busy machine

# read by Ray when it starts its processes
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}
# for Ray on this machine alone: all its ports listen on 127.0.0.1
_ALONE_ENVIRONMENT = {
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # otherwise Ray replaces 127.0.0.1 by a public address
    "AUTOSCALER_METRIC_PORT": "-1",  # no such port, because it would answer any machine
}


def start_ray(num_cpus: int, object_store_bytes: int, address: str | None = None) -> None:
    """Starts Ray here, or joins the cluster at `address` (HOST:PORT). Does nothing if Ray is already running."""
    if ray.is_initialized():
        return
    os.environ.update(_RAY_ENVIRONMENT)
    if address is not None:
        _join(address)
        return
    os.environ.update(_ALONE_ENVIRONMENT)
    # Ray's own token would be in a file that other users may read
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray's default mode requires the token
    ray_constants.ENABLE_RAY_CLUSTER = False  # the variable comes too late for this process
    what = (
        f"Ray did not start on this machine with {num_cpus} CPUs and {object_store_bytes} bytes "
        "(`ostinato doctor --deep` shows what is missing)"
    )
    for trial in Retrying(
        retry=retry_if_exception_type(ClusterError),
        stop=stop_after_attempt(_START_TRIALS),
        after=lambda _: ray.shutdown(),
        reraise=True,
    ):
        with trial, boundary(ClusterError, what):
            # all users may write into a session's folder, so it is placed in a private one
            private = tempfile.mkdtemp(prefix="ostinato-ray-", dir="/tmp")
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=num_cpus,
                num_gpus=None,
                object_store_memory=object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=f"{private}/ray",
            )
    _logger.info("ray is up %s", fields(cpus=num_cpus, object_store_bytes=object_store_bytes))


def _join(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"OSTINATO_RAY_ADDRESS is {address!r}, wanted HOST:PORT of a head node")
    what = (
        f"Ray cluster {address} (OSTINATO_RAY_ADDRESS) cannot be joined with Ray {ray.__version__} "
        f"and Python {platform.python_version()}; all nodes need the same of both"
    )
    with boundary(ClusterError, what):
        # Ray itself would retry for minutes
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
        ray.init(
            address=address,
            # actors are found by name, and runs of the same name that share a cluster must not share actors
            namespace=f"{NAMESPACE}-{uuid.uuid4().hex}",
            log_to_driver=False,
            configure_logging=False,
        )
    nodes = sum(node["Alive"] for node in ray.nodes())
    _logger.info("ray cluster joined %s", fields(address=address, nodes=nodes))


def stop_ray() -> None:
    """Ends this process's Ray and everything it started. Does nothing without Ray."""
    if ray.is_initialized():
        ray.shutdown()
