"""The style of figures, and figures as files: colors that a page can replace, SVG text, PNG bytes."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

INK, SOFT, LINE = "#1d2430", "#566272", "#d5dbe3"
# Readable on white and distinct for color-blind readers (after Okabe and Ito), darkened to a contrast of at least 3.
SERIES = ("#2166ac", "#c2502f", "#2b8163", "#8a569f", "#94700c", "#187f92", "#b03a74", "#5f6b7a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_VARIABLES = {INK: "ink", SOFT: "soft", LINE: "line", **{color: f"series-{i}" for i, color in enumerate(SERIES, start=1)}}
WIDE, NARROW = 460.0, 340.0  # small, so that text stays readable on a phone
_FONT_SIZE, _POINTS_PER_INCH = 12.5, 72.0
_STYLE: Any = {
    "font.size": _FONT_SIZE,
    "axes.labelsize": _FONT_SIZE,
    "xtick.labelsize": _FONT_SIZE - 1,
    "ytick.labelsize": _FONT_SIZE - 1,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Stroke:
    """How one series is drawn, and its label in the legend."""

    label: str
    color: str
    dash: int = 0  # an index of DASHES
    marker: str = ""  # "" none, "o", "s", "D": as in matplotlib
    filled: bool = False  # an area, not a line

    @property
    def variable(self) -> str:
        """The name of the page's CSS variable for the color."""
        return _VARIABLES[self.color]

    @property
    def line(self) -> dict[str, Any]:
        """The arguments of a plotted line."""
        return {"color": self.color, "linestyle": DASHES[self.dash], "marker": self.marker, "markersize": 5.0}


def stroke(label: str, color: int, dash: int = 0, marker: str = "") -> Stroke:
    """The stroke of the n-th color; after the last color, the colors repeat with another dash."""
    return Stroke(label, SERIES[color % len(SERIES)], (dash + color // len(SERIES)) % len(DASHES), marker)


@dataclass(frozen=True)
class Drawing:
    """A figure as a recipe: its file name, what it shows in words, the function that draws it, its legend."""

    name: str
    shows: str
    draw: Callable[[Any], None]
    legend: list[Stroke] = field(default_factory=list)
    height: float = 285.0
    width: float = WIDE
    names_its_only_line: bool = False  # else a single line has no legend: the page already names the run

    @property
    def has_legend(self) -> bool:
        """Whether the legend is worth showing."""
        return len(self.legend) > 1 or (self.names_its_only_line and bool(self.legend))

    def figure(self, *, legend: bool) -> Any:
        """Draw the figure. A page shows its own HTML legend; a file has the legend below the axes, never on the curves."""
        import matplotlib
        from matplotlib.figure import Figure

        extra = (0.25 + 0.24 * len(self.legend)) * _POINTS_PER_INCH if legend and self.has_legend else 0.0
        with matplotlib.rc_context(_STYLE):
            size = (self.width / _POINTS_PER_INCH, (self.height + extra) / _POINTS_PER_INCH)
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.add_subplot()
            self.draw(axes)
            if extra:
                handles = [_handle(entry) for entry in self.legend]
                figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=_FONT_SIZE - 1.5)
        return figure

    def files(self) -> dict[str, bytes]:
        """The figure as standalone files in the colors of a light page: SVG, and PNG on white."""
        figure, pixels = self.figure(legend=True), io.BytesIO()
        vector = _svg(figure, self.name).encode()
        figure.savefig(pixels, format="png", dpi=144, metadata={"Software": None})
        return {f"{self.name}.svg": vector, f"{self.name}.png": pixels.getvalue()}

    def inline(self) -> str:
        """The figure as an SVG element that uses the page's CSS variables: it contains no fixed color."""
        text = _svg(self.figure(legend=False), self.name)
        text = text[text.index("<svg") :].replace("xlink:href", "href")
        text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
        text = re.sub(r'<svg .*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
        text = re.sub(r"font-family:[^;]*;\s*", "", text)
        used = set(re.findall(r'(?:url\(|href=")#(\w+)', text))
        text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
        text = re.sub(r' (d|x|y)="([^"]*)"', _shorter, text)
        text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
        for color, variable in _VARIABLES.items():
            text = text.replace(color, f"var(--{variable})")
        return re.sub(r">\s+<", "><", text)


def _shorter(match: re.Match[str]) -> str:
    """Round coordinates to a hundredth of a point."""
    numbers = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", match[2])
    return f' {match[1]}="{" ".join(numbers.split())}"'


def _svg(figure: Any, salt: str) -> str:
    import matplotlib

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):  # the salt keeps element ids distinct if figures share a page
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return text.getvalue()


def _handle(entry: Stroke) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if entry.filled:
        return Patch(color=entry.color, alpha=0.75, linewidth=0, label=entry.label)
    return Line2D([], [], label=entry.label, **entry.line)
