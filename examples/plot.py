"""Draws curves over training steps."""

from __future__ import annotations

from pathlib import Path


def draw(out: Path, title: str, y_label: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    """Writes a picture of ``{label: [(step, value)]}``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(title=title, xlabel="step", ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
