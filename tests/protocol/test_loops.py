"""The Kafka thread answers whatever the main thread does, and a hung main loop ends the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from protocol.loops import HUNG_EXIT_CODE, LoopThread, MainWatch


@pytest.fixture
def thread() -> LoopThread:
    return LoopThread()


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


async def wrong() -> None:
    raise ValueError("wrong")


def test_results_and_errors_come_back_to_a_plain_thread(thread: LoopThread) -> None:
    assert thread.run_blocking(value(3), 5.0) == 3
    with pytest.raises(ValueError, match="wrong"):
        thread.run_blocking(wrong(), 5.0)
    thread.stop()


async def test_results_and_errors_come_back_to_another_loop(thread: LoopThread) -> None:
    assert await thread.run(value(3)) == 3
    with pytest.raises(ValueError, match="wrong"):
        await thread.run(wrong())
    thread.stop()


def test_the_thread_runs_while_the_main_thread_is_busy(thread: LoopThread) -> None:
    beats: list[float] = []
    enough = threading.Event()

    async def beat() -> None:
        while len(beats) < 20:
            beats.append(time.monotonic())
            await asyncio.sleep(0.01)
        enough.set()

    thread.submit(beat())
    busy_until = time.monotonic() + 5
    while not enough.is_set() and time.monotonic() < busy_until:
        sum(range(10_000))
    assert len(beats) == 20
    thread.stop()


def test_stop_cancels_what_runs(thread: LoopThread) -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    thread.submit(forever())
    assert begun.wait(5)
    thread.stop()
    assert cancelled.is_set()
    assert not thread.loop.is_running()


def test_a_silent_main_side_is_ended_with_the_code_for_hung() -> None:
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watch = MainWatch(0.2, end)
    assert ended.wait(5)
    assert codes == [HUNG_EXIT_CODE] == [70]
    assert watch.silent_for > 0.2


async def test_a_loop_that_runs_is_alive_and_one_that_is_blocked_is_not() -> None:
    ended = threading.Event()
    watch = MainWatch(0.4, lambda code: ended.set())
    watching = asyncio.create_task(watch.watch_loop())
    await asyncio.sleep(1.0)
    assert not ended.is_set()
    deadline = time.monotonic() + 5
    while not ended.is_set() and time.monotonic() < deadline:
        sum(range(1000))
    assert ended.is_set()
    watching.cancel()


def test_a_watch_that_is_stopped_ends_nothing() -> None:
    ended = threading.Event()
    watch = MainWatch(0.1, lambda code: ended.set())
    watch.stop()
    assert not ended.wait(0.5)


def test_a_real_process_whose_main_thread_hangs_exits_with_70() -> None:
    program = (
        "import threading; from protocol.loops import MainWatch; MainWatch(0.2);"
        "threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert done.returncode == 70
    assert b"main loop has not answered" in done.stderr
