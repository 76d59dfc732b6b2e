"""Metrics of one or many runs -> a picture.

    python plot.py runs/addition-grpo-0
    python plot.py runs/a-* runs/b-* --out compare.png --panels reward accuracy length sampler_gap

Runs that differ in the seed alone are drawn as one line, their mean, in a band from the lowest to the highest. The
legend names the settings that differ. Written as PNG and SVG, 2.4 inches for each column of panels: three fill a page
of a paper, and --columns 1 or 2 suit one of its columns. Colours are Okabe and Ito's, which colour-blind people can
tell apart; each line has a dash pattern of its own as well.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # as many as do not divide the colours
# panel: its title, its metric. Any other metric of metrics.jsonl is a panel under its own name.
PANELS = {
    "reward": ("reward", "reward"),
    "accuracy": ("held-out accuracy, greedy", "eval/accuracy"),
    "length": ("completion length", "completion_length"),
    "length_correct": ("length of correct completions", "length_correct"),
    "length_incorrect": ("length of incorrect completions", "length_incorrect"),
    "entropy": ("entropy per token", "entropy"),
    "kl": ("KL to the reference", "kl"),
    "clip_high": ("share of tokens clipped above", "clip_high"),
    "clip_low": ("share of tokens clipped below", "clip_low"),
    "grad_norm": ("gradient norm", "grad_norm"),
    "dead_groups": ("share of groups without signal", "dead_groups"),
    "advantage_easy": ("share of |advantage|, easy groups", "advantage_easy"),
    "advantage_hard": ("share of |advantage|, hard groups", "advantage_hard"),
    "loss": ("loss", "loss"),
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


def style(i: int) -> dict:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": 1.3}


def draw(axes: Axes, groups: dict[str, list[Run]], panel: str, width: int) -> None:
    title, metric = PANELS.get(panel, (panel, panel))
    evaluation = metric.startswith("eval/")
    for i, runs in enumerate(groups.values()):
        steps, values = series(runs, metric)
        if not len(steps):
            continue
        values = smooth(values, 1 if evaluation else width)
        axes.plot(steps, np.nanmean(values, axis=0), marker="o" if evaluation else None, markersize=3, **style(i))
        if len(runs) > 1:
            low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
            axes.fill_between(steps, low, high, color=style(i)["color"], alpha=0.15, linewidth=0)
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def plot(folders: list[Path], out: Path, panels: list[str], width: int = 5, columns: int = 3) -> None:
    """Panels whose metric no run has are left out."""
    plt.rcParams["svg.hashsalt"] = "grpo"  # the same picture is the same file
    groups = by_settings([read(folder) for folder in folders])
    has = {name for runs in groups.values() for _, lines in runs for x in lines for name in x if x[name] is not None}
    shown = [panel for panel in panels if PANELS.get(panel, ("", panel))[1] in has]
    if not shown:
        raise SystemExit(f"no run has {', '.join(panels)}; there are {', '.join(sorted(has))}")
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    legend = [label if len(runs) == 1 else f"{label} ({len(runs)} seeds)" for label, runs in groups.items()]
    notes = ["line: mean over seeds, band: lowest to highest"] * any(len(runs) > 1 for runs in groups.values())
    notes += [f"running mean of {width} steps"] * (width > 1)
    note = ("\n" if columns == 1 else "; ").join(notes)
    above_note = 0.16 if columns > 1 else 0.26  # inches
    below = above_note + 0.14 * len(legend) + 0.04
    size = 2.4 * columns, 1.75 * rows + below
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of a step at which no run has the metric
        for axes, panel in zip(grid.flat, shown):
            draw(axes, groups, panel, width)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes in grid.flat[max(0, len(shown) - columns) : len(shown)]:
        axes.set_xlabel("step", fontsize=8)
    handles = [Line2D([], [], **style(i)) for i in range(len(legend))]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, above_note / size[1]), "borderpad": 0, "labelspacing": 0.2}
    figure.legend(handles, legend, fontsize=7, frameon=False, handlelength=3, **place)
    figure.text(0.5, 0.05 / size[1], note, fontsize=6, ha="center", color="#444444")
    figure.tight_layout(pad=0.5, rect=(0, below / size[1], 1, 1))
    for suffix in (".png", ".svg"):
        figure.savefig(out.with_suffix(suffix), dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    plt.close(figure)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("plot.png"))
    parser.add_argument("--panels", nargs="+", default=list(PANELS), metavar="PANEL", help=f"{', '.join(PANELS)}, ...")
    parser.add_argument("--smooth", type=int, default=5, help="steps in the running mean")
    parser.add_argument("--columns", type=int, default=3)
    args = parser.parse_args(words)
    folders = [path for path in args.runs if path.is_dir()]  # runs/* has the logs of a grid in it as well
    plot(folders, args.out, args.panels, args.smooth, args.columns)
    print(f"{args.out.with_suffix('.png')}, {args.out.with_suffix('.svg')}")


if __name__ == "__main__":
    main(sys.argv[1:])
