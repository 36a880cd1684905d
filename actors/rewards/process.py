"""One grader process as its parent sees it: start, ask with a deadline, kill.

Invariant: an answer comes within the deadline, or the process and its session are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgpack

START_SECONDS = 60.0
MAX_ANSWER_BYTES = 1024 * 1024
BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from actors.rewards.child import main; main(int(sys.argv[2]))"
)
# Thread pools of numeric libraries reserve memory for every core.
ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class GraderDied(Exception):
    """The process ended, broke the protocol or missed a deadline. Says which."""


class SetupRefused(Exception):
    """A reward function cannot be used: `index` in `grading.rewards`, and why."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class GraderProcess:
    """A running child; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> GraderProcess:
        """Start a child that has loaded its reward functions.

        Raises SetupRefused if one cannot be used, GraderDied if the child does not come up.
        """
        # -I: nothing of the environment and no directory of its own gets into sys.path.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            BOOT,
            # A user's module lies in the working directory, which a console script does not search.
            json.dumps([str(Path.cwd()), *filter(None, sys.path)]),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        self = cls(process)
        try:
            await self.send(setup)
            answer = await self.answer(START_SECONDS)
        except BaseException:
            await self.kill()
            raise
        if "error" in answer:
            await self.kill()
            raise SetupRefused(int(answer["index"]), str(answer["error"]))
        return self

    async def send(self, message: Any) -> None:
        """Send a request. Raises GraderDied."""
        body = msgpack.packb(message, use_bin_type=True)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(body).to_bytes(4, "little") + body)
        except (ConnectionError, RuntimeError) as error:
            raise GraderDied(f"grader process: {error!r}") from None

    async def answer(self, deadline: float) -> dict[str, Any]:
        """The next answer, within `deadline` seconds. Raises GraderDied."""
        try:
            async with asyncio.timeout(deadline):
                return await self._frame()
        except TimeoutError:
            raise GraderDied(f"no answer within {deadline:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise GraderDied(f"grader process died ({await self._status()})") from None
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise GraderDied(f"grader process answered nonsense: {error}") from None

    async def kill(self) -> None:
        """End the child and whatever it started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 10.0)

    async def _frame(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        size = int.from_bytes(await self._process.stdout.readexactly(4), "little")
        if size > MAX_ANSWER_BYTES:
            raise ValueError(f"{size} bytes, above the limit of {MAX_ANSWER_BYTES}")
        body = msgpack.unpackb(await self._process.stdout.readexactly(size), raw=False)
        if not isinstance(body, dict):
            raise TypeError(f"{type(body).__name__}, a map expected")
        return body

    async def _status(self) -> str:
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(self._process.wait(), 1.0)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "pipe closed"
