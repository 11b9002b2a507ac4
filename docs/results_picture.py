"""Draws pictures/results.svg from the differences in results.md: `python docs/results_picture.py`."""

import os
from pathlib import Path

from matplotlib import pyplot

# what RL is compared with, points, lower and upper end of the interval
ROWS = [
    ("SmolLM2-135M, seed 0: its start", 7.4, 3.6, 11.6),
    ("SmolLM2-135M, seed 1: its start", 5.2, 2.5, 8.3),
    ("SmolLM2-135M, seed 1: fine-tuning for as long", 0.5, -2.7, 3.5),
    ("nano, functions seen, seed 0: its start", 8.8, 5.3, 12.1),
    ("nano, functions seen, seed 1: its start", 5.2, 1.6, 9.2),
    ("nano, functions seen, seed 2: its start", 6.8, 3.1, 10.5),
    ("nano, functions seen, seed 0: restarts", 3.2, -0.0, 6.4),
    ("", 4.5, 0.1, 9.0),
    ("", 5.9, 1.7, 9.9),
    ("nano_long, functions seen, seed 0: its start", 12.8, 9.5, 16.3),
]


def main() -> None:
    pyplot.rcParams["svg.hashsalt"] = "results"  # equal bytes each time
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for place, (_, mean, low, high) in enumerate(reversed(ROWS)):
        color = "tab:gray" if low <= 0 else "tab:blue"
        axes.errorbar(
            mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3
        )
        axes.annotate(
            f"{mean:+.1f}", (high, place), (6, -3), textcoords="offset points", fontsize=8
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(ROWS)), [row[0] for row in reversed(ROWS)])
    axes.set_xlabel("points of the solve rate, 95 % intervals")
    axes.set_xlim(-4, 19)
    axes.set_title("What RL adds, by model, seed and control", fontsize=10)
    path = Path(__file__).parent / "pictures" / "results.svg"
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + os.linesep)


if __name__ == "__main__":
    main()
