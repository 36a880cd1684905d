"""How the figures of the report are drawn: SVG text that takes the colours of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deploy.local.history import centred

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#3b7dd8",
    "#e08b2c",
    "#3a9d6e",
    "#d1495b",
    "#8a6fc0",
    "#8d99a6",
)
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, "#4aa3a2", "#b5838d", "#6b705c")
# Stand-ins that become the page's own colours, so that figures follow light and dark.
INK, FAINT = "#010203", "#040506"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.borderaxespad": 0,
    "lines.linewidth": 1.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
WIDE, TALL = 5.6, 3.1


def dots_and_mean(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[float | None],
    colour: str,
    label: str | None,
) -> None:
    """Every value as a faint dot, and their running mean as a line."""
    points = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
    means = [(a, b) for a, b in zip(x, centred(values), strict=True) if b is not None]
    if points:
        axes.scatter(*zip(*points, strict=True), s=7, color=colour, alpha=0.4, lw=0)
        axes.plot(*zip(*means, strict=True), color=colour, label=label)


def rollouts(axes: Axes) -> None:
    """The x axis counts rollouts."""
    axes.set_xlabel("rollouts")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: _thousands(value))


def _thousands(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def legend(axes: Axes) -> None:
    """Above the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 2 if max(map(len, labels)) > 16 else 4
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def draw(paint: Callable[[Axes], None], width: float = WIDE, height: float = TALL) -> str:
    """Paint one pair of axes; returns an <svg> element that scales to its place."""
    with mpl.rc_context({**STYLE, "axes.prop_cycle": mpl.cycler(color=CYCLE)}):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page sizes it and sets its font.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)
