"""Laws of the room for a trainer's ranks."""

import pytest
import ray

from ostinato.infra.platform.cluster.placement import rank_options, release_ranks, reserve_ranks
from ostinato.infra.platform.errors import ClusterError

pytest_plugins = ["tests.fakes.ray_here"]


@pytest.mark.usefixtures("ray_here")
@pytest.mark.nightly
def test_each_rank_has_a_core_of_its_own_until_they_are_released() -> None:
    room = reserve_ranks(2, "cpu")
    assert [rank_options(room, rank)["num_cpus"] for rank in range(2)] == [1.0, 1.0]
    assert ray.available_resources().get("CPU", 0) == 0
    with pytest.raises(ClusterError, match="1 bundles of 1 CPU and 0 GPU"):
        reserve_ranks(1, "cpu", wait_seconds=0.5)
    release_ranks(room)
    release_ranks(reserve_ranks(1, "cpu", wait_seconds=10.0))


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(("ranks", "device"), [(3, "cpu"), (1, "cuda")])
def test_a_cluster_that_is_too_small_is_named_with_what_it_has(ranks: int, device) -> None:
    with pytest.raises(ClusterError, match=rf"no room for {ranks} trainer ranks within") as refused:
        reserve_ranks(ranks, device, wait_seconds=0.5)

    gpus = 0 if device == "cpu" else 1
    assert f"wanted {ranks} bundles of 1 CPU and {gpus} GPU" in str(refused.value)
    assert "(2 CPU and 0 GPU), of which" in str(refused.value)
