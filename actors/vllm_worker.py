"""Mixed into vLLM's worker processes: they end when the actor is gone, however it ended, and a
reload that failed leaves nothing to the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

CHECK_SECONDS = 1.0


class DiesWithActor:
    """Worker extension; methods are called through `collective_rpc`."""

    model_runner: Any

    def die_with_actor(self, actor: int) -> None:
        """Watch process `actor`; when it is gone, kill the engine above this worker, and this."""
        # Reloading tied embeddings warns at every update about modules that have no weights.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(
            logging.ERROR
        )
        parent = os.getppid()

        def watch() -> None:
            while os.getppid() == parent and (parent == actor or _parent_of(parent) == actor):
                time.sleep(CHECK_SECONDS)
            if os.getppid() == parent:
                with contextlib.suppress(OSError):
                    os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="die-with-actor", daemon=True).start()

    def end_reload(self) -> None:
        """After a reload that failed: close it, with the weights as they are.

        vLLM would count tensors that a layer got already towards the next reload, and leave out
        others of that.
        """
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)


def _parent_of(pid: int) -> int | None:
    """From /proc, for a dead actor that nobody has waited for still answers signals."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # pid (name) state ppid …; the name may hold spaces and brackets.
    return int(stat.rpartition(")")[2].split()[1])
