"""The chain over a real S3 protocol server that answers 500, 503, late, half or not at all."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from pydantic import SecretStr

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings
from ostinato.infra.serving.weights.manifest import list_versions
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.retrying_store import RetryingStore
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from tests.faults.faulty_s3 import Fault, FaultyS3, faulty_s3
from tests.faults.weight_chain_programs import weights_of
from tests.unit.infra.serving.weights.strategies import same_bits

BUCKET = "chains"


def settings_for(url: str) -> Settings:
    return Settings(
        s3_endpoint_url=url,
        s3_region="eu-west-1",
        s3_access_key_id="test",
        s3_secret_access_key=SecretStr("test"),
    )


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with faulty_s3(host, port) as proxy:
        files = fsspec.filesystem(
            "s3",
            key="test",
            secret="test",
            endpoint_url=proxy.url,
            client_kwargs={"region_name": "eu-west-1"},
        )
        files.mkdir(BUCKET)
        yield proxy
    server.stop()


@pytest.fixture
def store(s3: FaultyS3, tmp_path: Path) -> Iterator[ObjectStore]:
    s3.plan, s3.always, s3.injected = [], None, []
    yield ObjectStore.from_url(f"s3://{BUCKET}/{tmp_path.name}", settings_for(s3.url))
    s3.plan, s3.always = [], None


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.sampled(2)
def test_one_fault_of_each_kind_anywhere_is_survived(
    s3: FaultyS3, store: ObjectStore, fault: Fault
) -> None:
    generator = random.Random(fault.value)
    publisher = ChainPublisher(store, "c", anchor_every=2)
    follower = ChainSubscriber(store, "c", reader_id="r")
    publisher.publish(0, weights_of(0))
    s3.plan = [None] * generator.randrange(0, 5) + [fault]
    publisher.publish(1, weights_of(1))
    s3.plan = [None] * generator.randrange(0, 3) + [fault]
    assert same_bits(follower.fetch(1), weights_of(1))
    follower.acknowledge(1)
    assert s3.injected == [fault, fault]
    assert list_versions(store, "c") == [0, 1]


@pytest.mark.slow
def test_a_storm_of_faults_ends_in_sound_versions_or_a_typed_error(
    s3: FaultyS3, store: ObjectStore
) -> None:
    generator = random.Random(0)
    publisher = ChainPublisher(store, "c", anchor_every=2)
    follower = ChainSubscriber(store, "c")
    version = 0
    for _ in range(4):
        s3.plan = [
            generator.choice(list(Fault)) if generator.random() < 0.3 else None for _ in range(200)
        ]
        try:
            publisher.publish(version, weights_of(version))
            assert same_bits(follower.fetch(version), weights_of(version))
        except StorageError:
            s3.plan = []
        newest = list_versions(store, "c")
        version = newest[-1] + 1 if newest else 0
    s3.plan = []
    publisher.publish(version, weights_of(version))
    assert len(s3.injected) > 10
    for committed in list_versions(store, "c"):
        assert same_bits(ChainSubscriber(store, "c").fetch(committed), weights_of(committed))


def test_an_outage_is_reported_and_the_chain_goes_on_afterwards(
    s3: FaultyS3, store: ObjectStore
) -> None:
    hasty = RetryingStore(store, attempts=1)
    publisher = ChainPublisher(hasty, "c")
    follower = ChainSubscriber(hasty, "c")
    publisher.publish(0, weights_of(0))
    follower.fetch(0)
    s3.always = Fault.SLOW_DOWN
    with pytest.raises(StorageError):
        publisher.publish(1, weights_of(1))
    assert follower.held_version == 0
    s3.always = None
    assert publisher.publish(1, weights_of(1)).kind == "delta"
    assert same_bits(follower.fetch(1), weights_of(1))
