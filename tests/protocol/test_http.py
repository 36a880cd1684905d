"""/metrics and /healthz: true answers, and trouble there never stops the work."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from protocol.http import MonitorServer
from protocol.metrics import ActorMetrics, LearnerMetrics, SchedulerMetrics

RESERVED = {"pod", "job", "instance", "namespace", "container", "endpoint", "service"}


class Health:
    """What the process says of itself."""

    def __init__(self) -> None:
        self.alive = True
        self.facts: dict[str, Any] = {"state": "generating", "seconds": 1.5, "version": "0.3"}
        self.broken = False

    def __call__(self) -> tuple[bool, dict[str, Any]]:
        if self.broken:
            raise RuntimeError("broken")
        return self.alive, self.facts


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server(registry: CollectorRegistry, health: Health) -> Iterator[MonitorServer]:
    server = MonitorServer(registry, health, "127.0.0.1", 0)
    yield server
    server.stop()


def get(server: MonitorServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_healthz_says_what_the_process_does(server: MonitorServer, health: Health) -> None:
    status, body = get(server, "/healthz")
    assert status == 200
    assert json.loads(body) == {
        "alive": True, "state": "generating", "seconds": 1.5, "version": "0.3",
    }  # fmt: skip
    health.alive = False
    status, body = get(server, "/healthz")
    assert status == 503
    assert json.loads(body)["alive"] is False


def test_metrics_are_in_the_text_format(server: MonitorServer, registry: CollectorRegistry) -> None:
    metrics = SchedulerMetrics(registry)
    metrics.issued.labels("train", "heap").inc(3)
    status, body = get(server, "/metrics?x=1")
    assert status == 200
    families = {f.name: f for f in text_string_to_metric_families(body)}
    (sample,) = [s for s in families["reprise_tasks_issued"].samples if s.name.endswith("_total")]
    assert (sample.labels, sample.value) == ({"purpose": "train", "reason": "heap"}, 3.0)


def test_another_path_is_not_found(server: MonitorServer) -> None:
    status, body = get(server, "/")
    assert status == 404
    assert "/metrics and /healthz" in body


def test_a_handler_that_fails_answers_500_and_the_next_one_works(
    server: MonitorServer, health: Health
) -> None:
    health.broken = True
    assert get(server, "/healthz")[0] == 500
    health.broken = False
    assert get(server, "/healthz")[0] == 200


def test_a_taken_port_is_named(server: MonitorServer, health: Health) -> None:
    with pytest.raises(OSError, match=rf"127.0.0.1, port {server.port}: Address already in use"):
        MonitorServer(CollectorRegistry(), health, "127.0.0.1", server.port)


@pytest.mark.parametrize("role", [SchedulerMetrics, ActorMetrics, LearnerMetrics])
def test_names_have_the_prefix_and_labels_leave_those_of_scraping_alone(role: Any) -> None:
    registry = CollectorRegistry()
    role(registry)
    for name, metric in registry._names_to_collectors.items():
        assert name.startswith("reprise_")
        assert not RESERVED & set(metric._labelnames), name
        assert metric._documentation.endswith("."), name
