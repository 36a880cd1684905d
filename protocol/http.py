"""Every process serves /metrics (Prometheus) and /healthz (JSON: what it does now).

Invariant: trouble here never stops the work: a handler that fails answers 500 and no more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

log = logging.getLogger(__name__)

# How soon a stop is noticed.
POLL_SECONDS = 0.1

Health = Callable[[], tuple[bool, dict[str, Any]]]
"""Returns (alive by own progress, facts such as `state`, `version`, `seconds_in_state`)."""


class MonitorServer:
    """A small HTTP server on a thread of its own."""

    def __init__(self, registry: CollectorRegistry, health: Health, host: str, port: int) -> None:
        """Raises OSError with the address in its text when the port cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, kind, body = self._answer()
                except Exception:
                    log.exception("%s failed", self.path)
                    status, kind, body = 500, "text/plain", b"internal error\n"
                # Whoever asked may have given up waiting.
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def _answer(self) -> tuple[int, str, bytes]:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
                if path == "/healthz":
                    alive, facts = health()
                    body = json.dumps({"alive": alive, **facts}).encode() + b"\n"
                    return (200 if alive else 503), "application/json", body
                return 404, "text/plain", b"/metrics and /healthz are served here\n"

            def log_message(self, format: str, *args: Any) -> None:
                log.debug(format, *args)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise OSError(f"metrics.host {host}, port {port}: {error.strerror}") from None
        self._server.daemon_threads = True
        serving = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="monitor", daemon=True
        )
        serving.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
