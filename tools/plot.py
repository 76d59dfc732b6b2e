"""Metrics of one or many runs -> a picture.

    python -m tools.plot runs/addition-grpo-0
    python -m tools.plot runs/a-* runs/b-* --out compare.png --panels reward accuracy length sampler_gap

Runs that differ in the seed alone are drawn as one line, their mean, in a band from the lowest to the highest. The
legend names the settings that differ. Written as PNG and SVG, or as another suffix of --out says, 2.4 inches for each
column of panels: three fill a page of a paper, and --columns 1 or 2 suit one of its columns. Colours are Okabe and
Ito's, which colour-blind people can tell apart; each line has a dash pattern of its own as well. In each file stands a
fingerprint of what it shows.
"""

import argparse
import hashlib
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
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


@dataclass
class Log:
    """Of a run."""

    settings: dict
    lines: list[dict]  # of metrics.jsonl


def read_log(folder: Path) -> Log:
    settings = json.loads((folder / "config.json").read_text())["settings"]
    return Log(settings, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def by_settings(logs: list[Log]) -> dict[str, list[Log]]:
    """Runs that differ in the seed alone, under a label of the settings in which they differ from others."""
    names = [name for name in logs[0].settings if name not in NOT_A_DIFFERENCE]
    differ = [name for name in names if len({str(log.settings.get(name)) for log in logs}) > 1]
    groups: dict[str, list[Log]] = {}
    for log in logs:
        label = ", ".join(f"{name} {log.settings.get(name)}" for name in differ) or log.settings["algorithm"]
        groups.setdefault(label, []).append(log)
    return groups


def series(logs: list[Log], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """-> steps (T,), values (runs, T); NaN where a run has none."""
    by_step = [{line["step"]: line[metric] for line in log.lines if line.get(metric) is not None} for log in logs]
    steps = sorted({step for values in by_step for step in values})
    values = [[its.get(step, np.nan) for step in steps] for its in by_step]
    return np.array(steps), np.array(values, dtype=float).reshape(len(logs), len(steps))


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """A centred running mean over so many steps, NaN left out."""
    if width <= 1 or values.shape[1] <= 2 * width:
        return values
    half = width // 2
    windows = [values[:, max(0, t - half) : t + half + 1] for t in range(values.shape[1])]
    return np.stack([np.nanmean(window, axis=1) for window in windows], axis=1)


def style(i: int) -> dict:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": 1.3}


def draw_panel(axes: Axes, groups: dict[str, list[Log]], panel: str, width: int) -> None:
    title, metric = PANELS.get(panel, (panel, panel))
    evaluation = metric.startswith("eval/")
    for i, logs in enumerate(groups.values()):
        steps, values = series(logs, metric)
        if not len(steps):
            continue
        values = smooth(values, 1 if evaluation else width)
        axes.plot(steps, np.nanmean(values, axis=0), marker="o" if evaluation else None, markersize=3, **style(i))
        if len(logs) > 1:
            low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
            axes.fill_between(steps, low, high, color=style(i)["color"], alpha=0.15, linewidth=0)
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw_picture(groups: dict[str, list[Log]], panels: list[str], width: int, columns: int) -> Figure:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    legend = [label if len(logs) == 1 else f"{label} ({len(logs)} seeds)" for label, logs in groups.items()]
    notes = []
    if any(len(logs) > 1 for logs in groups.values()):
        notes.append("line: mean over seeds, band: lowest to highest")
    if width > 1:
        notes.append(f"running mean of {width} steps")
    note = ("\n" if columns == 1 else "; ").join(notes)
    size = 2.4 * columns, 1.75 * rows + 0.15 * (len(legend) + len(note.splitlines()))  # inches
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of a step at which no run has the metric
        for axes, panel in zip(grid.flat, panels):
            draw_panel(axes, groups, panel, width)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid.flat[max(0, len(panels) - columns) : len(panels)]:
        axes.set_xlabel("step", fontsize=8)
    handles = [Line2D([], [], **style(i)) for i in range(len(legend))]
    place = {"loc": "outside lower center", "borderpad": 0, "labelspacing": 0.2, "handlelength": 3, "frameon": False}
    figure.legend(handles, legend, title=note, fontsize=7, title_fontsize=6, **place)
    return figure


def fingerprint(shown: object) -> str:
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def save(picture: Figure, fingerprint: str, out: Path) -> None:
    """The same picture is the same file."""
    matplotlib.rcParams["svg.hashsalt"] = "grpo"
    metadata = {".png": {"Description": fingerprint}, ".svg": {"Description": fingerprint, "Date": None}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in files_of(out):
        picture.savefig(file, dpi=160, metadata=metadata.get(file.suffix))


def files_of(out: Path) -> list[Path]:
    """PNG and SVG, or what another suffix says."""
    if out.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():  # a name with a dot in it
        return [out.with_name(out.name + suffix) for suffix in (".png", ".svg")]
    return [out.with_suffix(".png"), out.with_suffix(".svg")] if out.suffix in (".png", ".svg") else [out]


def without_replaced(folders: list[Path]) -> list[Path]:
    """Without the runs that --overwrite has moved aside."""
    return [path for path in folders if ".replaced-" not in path.name]


def read_logs(folders: list[Path]) -> list[Log]:
    """What is no run, as the logs of a grid in runs/*, is left out with a note."""
    logs = []
    for path in without_replaced(folders):
        try:
            logs.append(read_log(path))
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"note: {path} is left out, it is no run: {type(error).__name__}: {error}", file=sys.stderr)
    if not logs:
        sys.exit("error: there is no run to draw")
    return logs


def picture_of(args: argparse.Namespace) -> tuple[Figure, str]:
    """-> the picture and its fingerprint. Panels whose metric no run has are left out."""
    logs = read_logs(args.runs)
    has = {name for log in logs for line in log.lines for name in line if line[name] is not None}
    panels = [panel for panel in args.panels if PANELS.get(panel, ("", panel))[1] in has]
    if not panels:
        sys.exit(f"no run has {', '.join(args.panels)}; there are {', '.join(sorted(has))}")
    shown = [[vars(log) for log in logs], args.panels, args.smooth, args.columns]
    return draw_picture(by_settings(logs), panels, args.smooth, args.columns), fingerprint(shown)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="default: plot.png beside the first run")
    parser.add_argument("--panels", nargs="+", default=list(PANELS), metavar="PANEL", help=f"{', '.join(PANELS)}, ...")
    parser.add_argument("--smooth", type=int, default=5, help="steps in the running mean")
    parser.add_argument("--columns", type=int, default=3)
    args = parser.parse_args(words)
    args.out = args.out or args.runs[0].parent / "plot.png"
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    save(*picture_of(args), args.out)
    print(", ".join(map(str, files_of(args.out))))


if __name__ == "__main__":
    main(sys.argv[1:])
