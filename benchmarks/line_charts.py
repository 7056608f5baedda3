"""Line charts as SVG, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP = 330, 210, 52, 34
_STYLE = (
    "text{font:12px sans-serif;fill:#555}.t{font-weight:600}.y{text-anchor:end}"
    ".l{fill:none;stroke-width:1.8}.g{stroke:#ddd}rect{fill:#fff}"
)

Line = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Example: Chart("accuracy", {"r3": ([0, 50, 100], [0.1, 0.4, 0.7])}, "step 0", "100")"""

    title: str
    lines: Mapping[str, Line]  # x from 0, y
    first: str  # below the left end
    last: str  # below the right end


def svg(charts: Sequence[Chart], colors: Mapping[str, str]) -> str:
    """Draw the charts with one legend, of the lines in `colors`. Axes of y begin at 0, or below."""
    parts = [part for place, chart in enumerate(charts) for part in _drawn(chart, place, colors)]
    for place, (name, color) in enumerate(colors.items()):
        x = _LEFT + 90 * place
        parts.append(
            f'<line x1="{x}" x2="{x + 20}" y1="{_HEIGHT + 8}" y2="{_HEIGHT + 8}" '
            f'stroke="{color}" class="l"/>'
            f'<text x="{x + 26}" y="{_HEIGHT + 12}" class="x">{name}</text>'
        )
    size = f"{_WIDTH * len(charts)} {_HEIGHT + 22}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    )


def _drawn(chart: Chart, place: int, colors: Mapping[str, str]) -> list[str]:
    at, inner = place * _WIDTH, _HEIGHT - _TOP - 30
    farthest = max(max(x) for x, _ in chart.lines.values())
    high = 1.05 * max(max(y) for _, y in chart.lines.values())
    low = min(0.0, min(min(y) for _, y in chart.lines.values()))
    parts = [f'<text x="{at + _LEFT}" y="18" class="t">{chart.title}</text>']
    for share in (0, 0.5, 1):
        y = _TOP + inner * (1 - share)
        value = low + share * (high - low)
        parts.append(
            f'<line x1="{at + _LEFT}" x2="{at + _WIDTH - 14}" y1="{y:.1f}" y2="{y:.1f}" '
            f'class="g"/><text x="{at + _LEFT - 5}" y="{y + 4:.1f}" class="y">{value:.3g}</text>'
        )
    for name, (xs, ys) in chart.lines.items():
        points = " ".join(
            f"{at + _LEFT + (_WIDTH - 14 - _LEFT) * a / farthest:.1f},"
            f"{_TOP + inner * (1 - (b - low) / (high - low)):.1f}"
            for a, b in zip(xs, ys, strict=True)
        )
        parts.append(f'<polyline points="{points}" stroke="{colors[name]}" class="l"/>')
    parts.append(
        f'<text x="{at + _LEFT}" y="{_HEIGHT - 12}" class="x">{chart.first}</text>'
        f'<text x="{at + _WIDTH - 14}" y="{_HEIGHT - 12}" class="y">{chart.last}</text>'
    )
    return parts
