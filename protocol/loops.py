"""A process's Kafka clients live on their own thread with their own event loop.

Invariant: nothing that generates, grades, trains or loads can starve a heartbeat; and a main loop
that has not answered for `main_wait` ends the process, so that no process is half alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

HUNG_EXIT_CODE = 70


class LoopThread:
    """An asyncio loop on a thread of its own."""

    def __init__(self, name: str = "kafka") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on this thread's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From another loop: start `work` on this thread's and wait for its result."""
        return await asyncio.wrap_future(self.submit(work))

    def run_blocking(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """From a thread without a loop: start `work` and wait for its result."""
        return self.submit(work).result(timeout)

    def stop(self) -> None:
        """Cancel what runs and end the thread."""

        async def cancel() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.submit(cancel()).result(10.0)
        except concurrent.futures.TimeoutError:
            log.warning("tasks of the Kafka thread did not end")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)


class MainWatch:
    """Ends the process when its main loop or main thread stops answering.

    The main side calls `alive` as it makes progress (or lets `watch_loop` do so from its loop); a
    plain thread checks, so that it works even while the main thread holds on to something else.
    """

    def __init__(self, wait: float, end: Callable[[int], None] = os._exit) -> None:
        """`wait`: seconds without a sign of life after which `end(70)` is called."""
        self._wait = wait
        self._end = end
        self._last = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._check, name="main-watch", daemon=True).start()

    def alive(self) -> None:
        """The main side made progress."""
        self._last = time.monotonic()

    @property
    def silent_for(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._last

    async def watch_loop(self) -> None:
        """Run as a task of the main loop: a loop that runs is alive."""
        while True:
            self.alive()
            await asyncio.sleep(min(1.0, self._wait / 4))

    def stop(self) -> None:
        """No longer watch."""
        self._stopped.set()

    def _check(self) -> None:
        while not self._stopped.wait(min(1.0, self._wait / 4)):
            if self.silent_for > self._wait:
                log.critical("main loop has not answered for %.0f s; leaving", self.silent_for)
                self._end(HUNG_EXIT_CODE)
                return
