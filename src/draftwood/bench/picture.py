"""A picture of the report: its colours, its axes, its forms.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; markers and
hatches differ as well, so that a grey print can be read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from draftwood.bench.contenders import PLAIN, TRANSFORMERS
from draftwood.bench.cost import plotting

FIXED = {
    PLAIN: ("#000000", "o", ""),
    TRANSFORMERS: ("#56B4E9", "v", ".."),
    "suffix": ("#E69F00", "^", "//"),
    "recycling": ("#CC79A7", "s", "\\\\"),
    "lookup": ("#D55E00", "D", "xx"),
    "auto": ("#0072B2", "P", "++"),
    "model": ("#009E73", "X", "oo"),
}
_SPARE = tuple(zip(("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"), "<>hpd*", strict=False))


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture.

    Attributes:
        name: for its file.
        caption: what it shows and how to read it; also its text for those who cannot see it.
        figure: matplotlib's.
    """

    name: str
    caption: str
    figure: Any

    def png(self, notes: Mapping[str, str] | None = None) -> bytes:
        """The picture, 160 points an inch; the file says what `notes` says, by its keys."""
        return self._saved("png", {"Software": None, **(notes or {})})

    def svg(self) -> bytes:
        """The picture, letters as outlines: it needs no font."""
        return self._saved("svg", {"Date": None})

    def _saved(self, form: str, notes: Mapping[str, str | None]) -> bytes:
        buffer = io.BytesIO()
        fixed = {"svg.fonttype": "path", "svg.hashsalt": self.name}
        with import_module("matplotlib").rc_context(fixed):
            self.figure.savefig(buffer, format=form, dpi=160, metadata=dict(notes))
        return buffer.getvalue()


def style(name: str, index: int) -> tuple[str, str, str]:
    """Colour, marker and hatch of a contender."""
    if name in FIXED:
        return FIXED[name]
    colour, marker = _SPARE[index % len(_SPARE)]
    return colour, marker, "--"


def make_axes(width: float = 6.8, height: float = 3.6, columns: int = 1) -> tuple[Any, Any]:
    """A figure, and its axes: one, or a row of them."""
    figure = plotting().Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
    return figure, axes


def log_ticks(axes: Any) -> None:
    """Makes the x axis logarithmic, with plain numbers at it."""
    ticker = import_module("matplotlib.ticker")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
