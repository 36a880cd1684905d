"""The `reprise` command.

Exit codes: 0 as it should be, 1 a run that failed, 2 bad input (each mistake one line on stderr),
128 + n stopped by signal n.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from protocol import __version__
from protocol.config import Config, ConfigError, load_config

BAD_INPUT = 2

app = typer.Typer(
    name="reprise",
    help="RL post-training for language models that replays the prompt, never the rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as run.steps=5."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"reprise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """RL post-training for language models that replays the prompt, never the rollout."""


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Name of the run; default: name and time.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Redraw one picture, in a terminal.")
    ] = True,
) -> None:
    """Check the config, train, and write the report."""
    from deploy.local.launch import StartError, launch

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    loaded = _load(config, overrides)
    _check(loaded, offline=False, verbose=False)
    try:
        sets = [word for each in overrides or [] for word in ("--set", each)]
        code = launch(loaded, ["reprise", "run", str(config), *sets], run_id, live=live)
    except StartError as error:
        _refuse([str(error)])
    raise typer.Exit(code)


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Reach for no broker and no model hub.")
    ] = False,
) -> None:
    """Find every mistake that can be known before any money is spent."""
    loaded = _load(config, overrides)
    _check(loaded, offline=offline, verbose=True)
    typer.echo(f"{config}: ok")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="As runs/<id>.")],
) -> None:
    """Make report.html and summary.json of a run again."""
    from deploy.local.rebuild import rebuild
    from deploy.local.report import ReportError

    try:
        path = rebuild(run_dir)
    except (ReportError, ConfigError) as error:
        _refuse(str(error).splitlines())
    typer.echo(path)


@app.command(hidden=True)
def docs() -> None:
    """Print docs/configuration.md."""
    from deploy.local.reference import page

    typer.echo(page(), nl=False)


def _load(path: Path, overrides: list[str] | None) -> Config:
    try:
        return load_config(path, parse_overrides(overrides or []))
    except ConfigError as error:
        _refuse(str(error).splitlines())


def parse_overrides(given: list[str]) -> dict[str, Any]:
    """`a.b=value` by name; the value is read as YAML. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip("."):
            raise ConfigError(f"--set {text}: must be FIELD=VALUE, as run.steps=5")
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {text}: {value!r} is not YAML") from None
    return parsed


def _check(config: Config, *, offline: bool, verbose: bool) -> None:
    from deploy.local.check import check as find

    found = find(config, offline=offline)
    for line in found.warnings:
        typer.echo(f"warning: {line}", err=True)
    if found.mistakes:
        _refuse(found.mistakes)
    if verbose:
        for line in found.facts:
            typer.echo(line)


def _refuse(lines: list[str]) -> NoReturn:
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    raise typer.Exit(BAD_INPUT)


def main() -> None:
    """Entry point of the `reprise` script."""
    app()


if __name__ == "__main__":
    sys.exit(main())
