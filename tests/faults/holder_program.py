"""A holder in a process of its own: takes boxes, says so, and waits to be killed."""

import asyncio
import sys

import ray

from ostinato.infra.platform.cluster.ray_start import NAMESPACE
from ostinato.infra.sandbox.fleet.client import FleetClient


async def hold(fleet_name: str, num_boxes: int) -> None:
    client = FleetClient(fleet_name, lease_seconds=10.0)
    boxes = [await client.acquire("wordkit") for _ in range(num_boxes)]
    results = [await box.exec("sleep 600 & echo held", 120) for box in boxes]
    print(*(result.output.decode().strip() for result in results), flush=True)  # noqa: T201
    await asyncio.sleep(600)


def main() -> None:
    address, fleet_name, num_boxes = sys.argv[1:]
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    asyncio.run(hold(fleet_name, int(num_boxes)))


if __name__ == "__main__":
    main()
