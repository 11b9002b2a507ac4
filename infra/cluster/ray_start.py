"""Ray on this machine, or a connection to the cluster that the settings name.

Owns `ray.init` and its options; nobody else calls it. Call from the main thread of a supervised
child, never from a Prefect process: Ray replaces its signal handlers.
"""

import logging
import os

import ray

from infra.errors import ClusterError
from infra.telemetry import fields

NAMESPACE = "ostinato"

_logger = logging.getLogger(__name__)

# read by Ray when it starts its processes
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}


def start_ray(num_cpus: int, object_store_bytes: int, address: str | None = None) -> None:
    """Start Ray here, or join the cluster at `address`. A process that has Ray keeps it."""
    if ray.is_initialized():
        return
    os.environ.update(_RAY_ENVIRONMENT)
    try:
        if address is not None:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        else:
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
            )
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, OSError) as error:
        where = address or f"this machine with {num_cpus} CPUs and {object_store_bytes} bytes"
        raise ClusterError(
            f"Ray did not start on {where}: {type(error).__name__}: {error}; "
            "`ostinato doctor --deep` shows what is missing"
        ) from error
    _logger.info("ray is up %s", fields(cpus=num_cpus, object_store_bytes=object_store_bytes))


def stop_ray() -> None:
    """End Ray of this process and everything it started here; nothing happens without Ray."""
    if ray.is_initialized():
        ray.shutdown()
