"""Metrics of one or many runs -> a picture.

    python plot.py runs/addition-grpo-0
    python plot.py runs/a-* runs/b-* --out compare.png --panels reward eval/accuracy length

Runs that differ in the seed alone are drawn as one line, their mean, in a band from the lowest to the highest. The
legend names the settings that differ. Written as PNG and SVG. Colours are Okabe and Ito's, which colour-blind people
can tell apart; each line has a dash pattern of its own as well.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
# panel: its title, and the metrics in it
PANELS = {
    "reward": ("reward", ["reward"]),
    "accuracy": ("held-out accuracy, greedy", ["eval/accuracy"]),
    "length": ("completion length", ["completion_length"]),
    "length_correct": ("length of correct completions", ["length_correct"]),
    "length_incorrect": ("length of incorrect completions", ["length_incorrect"]),
    "entropy": ("entropy per token", ["entropy"]),
    "kl": ("KL to the reference", ["kl"]),
    "clipped": ("share of tokens clipped", ["clip_low", "clip_high"]),
    "grad_norm": ("gradient norm", ["grad_norm"]),
    "dead_groups": ("share of groups without signal", ["dead_groups"]),
    "loss": ("loss", ["loss"]),
}
NOT_A_DIFFERENCE = ("seed", "out", "overwrite", "report_to")
Run = tuple[dict, list[dict]]  # settings, lines of metrics.jsonl


def read(folder: Path) -> Run:
    settings = json.loads((folder / "config.json").read_text())["settings"]
    return settings, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def by_settings(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the seed alone, under a label of the settings in which they differ from others."""
    names = [name for name in runs[0][0] if name not in NOT_A_DIFFERENCE]
    differ = [name for name in names if len({str(settings.get(name)) for settings, _ in runs}) > 1]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        label = ", ".join(f"{name} {run[0].get(name)}" for name in differ) or run[0]["algorithm"]
        groups.setdefault(label, []).append(run)
    return groups


def series(runs: list[Run], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """-> steps (T,), values (runs, T); NaN where a run has none."""
    steps = sorted({line["step"] for _, lines in runs for line in lines if line.get(metric) is not None})
    table = [{line["step"]: line.get(metric) for line in lines} for _, lines in runs]
    values = [[np.nan if row.get(step) is None else row[step] for step in steps] for row in table]
    return np.array(steps), np.array(values, dtype=float).reshape(len(runs), len(steps))


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """A centred running mean over so many steps, NaN left out."""
    if width <= 1 or values.shape[1] <= 2 * width:
        return values
    half = width // 2
    windows = [values[:, max(0, t - half) : t + half + 1] for t in range(values.shape[1])]
    return np.stack([np.nanmean(window, axis=1) for window in windows], axis=1)


def draw(axes: Axes, groups: dict[str, list[Run]], panel: str, width: int) -> bool:
    """-> whether there was anything to draw"""
    title, metrics = PANELS[panel]
    drawn = False
    for i, (label, runs) in enumerate(groups.items()):
        for metric in metrics:
            steps, values = series(runs, metric)
            if not len(steps):
                continue
            values = smooth(values, 1 if metric.startswith("eval/") else width)
            dash = DASHES[i % len(DASHES)] if len(metrics) == 1 else DASHES[metrics.index(metric)]
            name = label if len(metrics) == 1 else f"{label}: {metric}"
            axes.plot(
                steps,
                np.nanmean(values, axis=0),
                dash,
                color=COLOURS[i % len(COLOURS)],
                label=name,
                linewidth=1.3,
                marker="o" if metric.startswith("eval/") else None,
                markersize=3,
            )
            if len(runs) > 1:
                low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
                axes.fill_between(steps, low, high, color=COLOURS[i % len(COLOURS)], alpha=0.15, linewidth=0)
            drawn = True
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def plot(folders: list[Path], out: Path, panels: list[str], width: int) -> None:
    groups = by_settings([read(folder) for folder in folders])
    shown = [
        panel for panel in panels if any(len(series(runs, m)[0]) for runs in groups.values() for m in PANELS[panel][1])
    ]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(2.4 * columns, 1.9 * rows + 0.5), squeeze=False)
    for axes, panel in zip(grid.flat, shown):
        draw(axes, groups, panel, width)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for column in range(columns):
        grid.flat[max(i for i in range(len(shown)) if i % columns == column)].set_xlabel("step", fontsize=8)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    seeds = {len(runs) for runs in groups.values()}
    note = f"  (mean of {max(seeds)} seeds, band: lowest to highest)" if max(seeds) > 1 else ""
    figure.legend(
        handles, [label + note if i == 0 else label for i, label in enumerate(labels)],
        loc="lower center", ncols=1 if len(labels) < 3 else 2, fontsize=7, frameon=False,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03 + 0.035 * -(-len(labels) // (1 if len(labels) < 3 else 2)), 1, 1))
    for suffix in (".png", ".svg"):
        figure.savefig(out.with_suffix(suffix), dpi=200, metadata={"Date": None} if suffix == ".svg" else None)
    print(f"{out.with_suffix('.png')}, {out.with_suffix('.svg')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("plot.png"))
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS), metavar="PANEL")
    parser.add_argument("--smooth", type=int, default=5, help="steps in the running mean")
    args = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "grpo"  # the same picture is the same file
    plot(args.runs, args.out, args.panels, args.smooth)


if __name__ == "__main__":
    main()
