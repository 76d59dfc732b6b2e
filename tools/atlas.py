"""The picture of docs/atlas.md: how far each objective is from the first one, a panel for each tuned grid."""

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from infra import command_line
from tools import ablate, plot

NOTE = """\
small dots: seeds; large dot: their mean; bar: 95 % interval of the paired difference to grpo, drawn from grpo's mean
(dashed); blue: above grpo, orange: below, when all comparisons of a panel are taken together (Holm); grey: neither"""


def panels(grids: list[argparse.Namespace]) -> list[dict]:
    """What is drawn, in plain values."""
    drawn = []
    for args in grids:
        variants = ablate.tuned(args)
        its = ablate.comparisons(variants, ablate.read_runs(args.out, variants, args.seeds), args.decides)
        config = command_line.parse([*args.flags, *ablate.flags_of(variants[0])], on_gpu=False)
        updates = config.num_iterations * config.minibatches
        title = f"{config.task}, {updates} update{'s' if updates > 1 else ''} a rollout"
        drawn.append({"title": title, "decides": args.decides, "rows": [vars(each) for each in its]})
    return drawn


def draw(panels: list[dict], out: Path) -> None:
    columns = 2
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(9, 0.6 + 3.1 * lines), squeeze=False, layout="constrained")
    for axes, panel in zip(grid.flat, panels):
        draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(NOTE, fontsize=7, color="#444444")
    plot.save_picture(figure, out, plot.fingerprint(panels))


def draw_panel(axes: Axes, panel: dict) -> None:
    centre = statistics.fmean(panel["rows"][0]["values"])
    axes.axvline(centre, color="#444444", linestyle="--", linewidth=0.8)
    for y, row in enumerate(panel["rows"]):
        mean, half = ablate.interval(row["differences"])
        colour = "#888888"
        if row["holds"]:
            colour = plot.COLOURS[0] if mean > 0 else plot.COLOURS[1]
        axes.plot(row["values"], [y] * len(row["values"]), ".", color=colour, alpha=0.35, markersize=4, zorder=1)
        axes.errorbar(
            centre + mean, y, xerr=half or None, fmt="o", color=colour, markersize=5, capsize=2.5, linewidth=1.4
        )
    labels = [" at ".join(row["variant"].values()) for row in panel["rows"]]
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_title(panel["title"], fontsize=9)
    axes.set_xlabel(panel["decides"].partition(":")[0].removeprefix("eval/") + " on held-out prompts", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
