"""What docs/atlas.md shows beside its tables: a picture, how far each objective is from the first one in each grid, and
what papers claim, against the logs."""

import argparse
import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra import command_line
from tools import ablate, plot

NOTE = """\
small dots: seeds; large dot: their mean; bar: 95 % interval of the paired difference to grpo, drawn from grpo's mean
(dashed); blue: above grpo, orange: below, when all comparisons of a panel are taken together (Holm); grey: neither"""

PASS = "eval/pass@1:last"
# paper, claim, updates a rollout, figure, an objective, the one it is compared with, whose figure is lower
CLAIMS = [
    ("Dr. GRPO", "dividing by its own length lets a wrong completion grow", 1, "length_incorrect", "grpo", "dr_grpo"),
    ("Dr. GRPO", "without the std the outcome is as good or better", 1, PASS, "dr_grpo", "grpo"),
    ("DAPO", "a token's weight, clip-higher and groups with a signal: better", 8, PASS, "dapo", "grpo"),
    ("DAPO", "its entropy stays higher", 8, "entropy", "dapo", "grpo"),
    ("GSPO", "one ratio for a sequence: better off-policy", 8, PASS, "gspo", "grpo"),
    ("LUSPO", "without the length bias of GSPO, completions are longer", 8, "completion_length", "luspo", "gspo"),
    ("CISPO", "clipped tokens keep their gradient: better than DAPO", 8, PASS, "cispo", "dapo"),
    ("SAPO", "a soft gate: better off-policy", 8, PASS, "sapo", "grpo"),
    ("GMPO", "a geometric mean: better off-policy", 8, PASS, "gmpo", "grpo"),
    ("GMPO", "its entropy stays higher", 8, "entropy", "gmpo", "grpo"),
    ("DPPO", "a bound on the divergence, not on the ratio: better", 8, PASS, "dppo", "dapo"),
    ("MaxRL", "hard prompts weigh more: more of them solved in four tries", 1, "eval/pass@4:last", "maxrl", "grpo"),
    ("MaxRL", "its entropy stays higher", 1, "entropy", "maxrl", "grpo"),
    ("OPO", "the baseline of least variance: better", 1, PASS, "opo", "dr_grpo"),
    ("REINFORCE++", "scaled by the batch, not by the group: better", 1, PASS, "reinforce++-baseline", "grpo"),
]


def claims(grids: list[argparse.Namespace]) -> str:
    """In Markdown, a row for each claim and a column for each task."""
    of_grid = {}
    for task, updates, variants, runs in map(read_grid, grids):
        of_grid[task, updates] = {variant["algorithm"]: its for variant, its in zip(variants, runs)}
    tasks = dict.fromkeys(task for task, _ in of_grid)
    rows = []
    for paper, claim, updates, name, a, b in CLAIMS:
        cells = [paper, claim, f"{name.partition(':')[0]}, {a} minus {b}"]
        for task in tasks:
            ours, theirs = ([ablate.figure(lines, name) for lines in of_grid[task, updates][each]] for each in (a, b))
            differences = [x - y for x, y in zip(ours, theirs, strict=True)]
            mean, half = ablate.interval(differences)
            seen = "not seen"
            if abs(mean) > half:
                seen = "**seen**" if mean > 0 else "**opposite**"
            cells.append(f"{ablate.with_interval(differences, ablate.decimals(statistics.fmean(theirs)))}: {seen}")
        rows.append(cells)
    return ablate.markdown(["paper", "claim", "measure", *tasks], rows)


def read_grid(args: argparse.Namespace) -> tuple[str, int, list[ablate.Variant], list[list[ablate.Lines]]]:
    """-> its task, updates a rollout, variants, and the runs of each"""
    config = command_line.parse([*args.flags, *ablate.flags_of(args.variants[0])], on_gpu=False)
    variants = ablate.tuned(args)
    runs = ablate.read_runs(args.out, variants, args.seeds)
    return config.task, config.num_iterations * config.minibatches, variants, runs


def panels(grids: list[argparse.Namespace]) -> list[dict]:
    """What is drawn, in plain values."""
    drawn = []
    for args in grids:
        task, updates, variants, runs = read_grid(args)
        its = ablate.comparisons(variants, runs, args.decides, together=True)
        title = f"{task}, {updates} update{'s' if updates > 1 else ''} a rollout"
        drawn.append({"title": title, "decides": args.decides, "rows": [vars(each) for each in its]})
    return drawn


def draw(panels: list[dict]) -> Figure:
    columns = 2
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(9, 0.6 + 3.1 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels):
        draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(NOTE, fontsize=7, color="#444444")
    return figure


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
