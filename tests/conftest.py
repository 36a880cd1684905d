"""The broker that tests talk to: the embedded one, or the one in REPRISE_TEST_BOOTSTRAP.

The same tests run on both. Topics carry a run id of their own, so tests never meet.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.local.broker import EmbeddedBroker
from protocol.config import EMBEDDED_FETCH_WAIT, KafkaConfig
from protocol.kafka import Kafka
from protocol.topics import Topics

OTHER_BROKER = "REPRISE_TEST_BOOTSTRAP"
KAFKA_WAIT = 20.0


@pytest.fixture(scope="session")
def kafka_section(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Section `kafka` of a config whose broker runs for the whole session."""
    if servers := os.environ.get(OTHER_BROKER):
        yield {"bootstrap_servers": servers, "replication_factor": 1}
        return
    with EmbeddedBroker(tmp_path_factory.mktemp("broker") / "broker.log") as broker:
        yield {
            "bootstrap_servers": broker.bootstrap_servers,
            "idempotence": False,
            "fetch_wait": EMBEDDED_FETCH_WAIT,
            "replication_factor": 1,
        }


@pytest.fixture
def topics() -> Topics:
    """Topic names that no other test uses; they exist when somebody creates them."""
    return Topics(f"test-{uuid.uuid4().hex[:12]}", 1)


@pytest.fixture
def kafka(kafka_section: dict[str, Any]) -> Kafka:
    """Makes clients of the session's broker."""
    return Kafka(KafkaConfig(**kafka_section), wait=KAFKA_WAIT, client_id="reprise-test")
