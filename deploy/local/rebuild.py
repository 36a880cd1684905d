"""`reprise report RUN_DIR`: the summary and the report of an earlier run, made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.local.exact import read_figures
from deploy.local.history import History
from deploy.local.report import ReportError, write_report
from deploy.local.summary import summarise, write_summary
from protocol.config import load_config
from protocol.rundir import RunDir


def rebuild(root: Path) -> Path:
    """Write both again; returns the path of the report. Raises ReportError, ConfigError."""
    run = RunDir(root.absolute())
    if not (run.root / "run.json").is_file():
        raise ReportError(f"{root}: holds no run.json; name a run directory, as runs/<id>")
    write_summary(run, summary_of(run))
    write_report(run)
    return run.report


def summary_of(run: RunDir) -> dict[str, Any]:
    """The summary of what lies in a run directory. Raises ReportError, ConfigError."""
    history = History.read(run.metrics)
    if not history.steps and not history.evals:
        raise ReportError(f"{run.metrics}: holds no record yet; nothing can be shown")
    return summarise(
        load_config(run.config),
        run,
        history,
        before=read_figures(run, "before"),
        after=read_figures(run, "after"),
        wall_seconds=_wall_seconds(run, history),
    )


def _wall_seconds(run: RunDir, history: History) -> float:
    """As the first summary says; the log time of the last record where there was none."""
    try:
        return float(json.loads(run.summary.read_text())["wall_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        records = [*history.steps, *history.evals]
        return max(record.seconds for record in records)
