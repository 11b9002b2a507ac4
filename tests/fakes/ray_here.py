"""Ray on this machine for the length of a test module: a plugin, named in the module's
`pytest_plugins`.
"""

from collections.abc import Iterator

import pytest
import ray

from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray


@pytest.fixture(scope="module")
def ray_here() -> Iterator[str]:
    """The address others may join at."""
    start_ray(num_cpus=2, object_store_bytes=100 * 2**20)
    yield ray.get_runtime_context().gcs_address
    stop_ray()
