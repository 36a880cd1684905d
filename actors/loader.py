"""Which published weights to load next, and loading them with a deadline.

Invariant: only the newest published version is ever loaded, only after its files were checked; an
engine that did not take it in time, or could not take what lies there complete, is taken for dead.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from actors.engine import Engine, EngineDead, LoadFailed
from actors.weights import WeightsError, verify
from protocol.config import Config
from protocol.messages import WeightsPublished
from protocol.versions import Version

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
REMIND_SECONDS = 60.0


class Loader:
    """Keeps the newest publication; used on the main loop alone."""

    def __init__(self, config: Config, root: Path, engine: Engine) -> None:
        self._wait = config.waits.loading
        self._root = root
        self._engine = engine
        self._newest: WeightsPublished | None = None
        self._came = asyncio.Event()
        self.loaded: Version | None = None
        self.applying = False
        """The engine is paused for new weights now."""

    def published(self, message: WeightsPublished) -> None:
        """A record of `weights` came in."""
        if self._newest is None or message.version > self._newest.version:
            self._newest = message
            self._came.set()

    async def next_verified(self) -> tuple[Version, Path]:
        """The newest version above the loaded one, and where it lies.

        Waits for one. Raises WeightsRefused at once, and WeightsError where the files have not
        become complete within waits.loading and nothing newer was published meanwhile.
        """
        loop = asyncio.get_running_loop()
        failing: tuple[Version, float] | None = None
        while True:
            message = await self._next()
            try:
                return message.version, await asyncio.to_thread(verify, message, self._root)
            except WeightsError as error:
                if failing is None or failing[0] != message.version:
                    failing = (message.version, loop.time())
                if message is self._newest:
                    if loop.time() - failing[1] > self._wait:
                        raise
                    log.warning("%s; trying again", error)
                    await asyncio.sleep(RETRY_SECONDS)

    async def load(self, path: Path, version: Version) -> Version:
        """Put the weights into the engine; where the learner removed them under it, newer ones.

        Returns the version that is loaded. Raises EngineDead, and what `next_verified` raises.
        """
        self.applying = True
        try:
            while not await self._try(path, version):
                # The engine stays paused meanwhile: a whole load overwrites what a broken one left.
                version, path = await self.next_verified()
        finally:
            self.applying = False
        self.loaded = version
        return version

    async def _try(self, path: Path, version: Version) -> bool:
        """One load; False where it failed and newer weights may be had. Raises EngineDead."""
        try:
            await asyncio.wait_for(self._engine.load(path, version), self._wait)
        except TimeoutError:
            raise EngineDead(
                f"weights {version} are not loaded after {self._wait:g} s (waits.loading)"
            ) from None
        except LoadFailed as error:
            newer = self._newest is not None and self._newest.version > version
            if not newer and path.exists():
                raise EngineDead(str(error)) from None
            log.warning("%s; weights %s are superseded, loading newer ones", error, version)
            return False
        return True

    async def _next(self) -> WeightsPublished:
        while self._newest is None or (
            self.loaded is not None and self._newest.version <= self.loaded
        ):
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), REMIND_SECONDS)
            except TimeoutError:
                if self.loaded is None:
                    log.info("waiting for the learner's first weights")
        return self._newest
