"""Draw the metrics of one or several runs.

    python tools/plot.py runs/addition-grpo-0           (with the path of this file, from any folder)
    python tools/plot.py runs/a-* runs/b-* --out compare.png --panels reward accuracy length sampler_gap

Runs that differ only in their seed are drawn together: a line shows their mean, and a band reaches from the lowest to
the highest value. The legend names the settings that differ, and the code and the files of the runs if these do. The
picture is saved as PNG and SVG. If --out ends with the suffix of another format, only that one is saved. PNG and SVG
contain a fingerprint of the logs and flags that they were made from.
"""

import argparse
import hashlib
import itertools
import json
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # find this program from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ModuleNotFoundError:
    sys.exit("error: this needs the package matplotlib: pip install matplotlib")

from config import ALGORITHMS
from infra import run_folder
from tools.ablate import spent

matplotlib.rcParams.update({"svg.hashsalt": "grpo", "font.size": 7})  # makes SVG files reproducible
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # safe for the colour-blind
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
# As 7 and 5 have no common divisor, the 35 styles are all pairs of a colour and a dash.
STYLES = [{"color": COLOURS[i % 7], "linestyle": DASHES[i % 5], "linewidth": 1.3} for i in range(35)]
PANELS = "reward accuracy length length_correct length_incorrect entropy kl clip_high clip_low grad_norm equal_rewards"
METRICS = {"accuracy": "eval/accuracy", "length": "completion_length"}  # any other panel is a metric by its own name
# `made_by` has digests of the code and of files.
Log = namedtuple("Log", "settings lines made_by folder", defaults=[{}, Path()])


def read_log(folder: Path) -> Log:
    about = run_folder.config_json(folder)
    run_folder.still_there(about["settings"], folder)  # only for its note
    made_by = {"code": about.get("code")} | about.get("digests", {})
    return Log(about["settings"], run_folder.read_lines(folder / "metrics.jsonl"), made_by, folder)


def by_settings(logs: list[Log]) -> dict[str, list[Log]]:
    """Group the runs that differ only in their seed. The label of a group names the settings that vary, without those
    that follow from the algorithm if it varies. If the code or files vary, it has the names of the runs' folders."""
    # Runs of other code, or from other files, are told apart as those with other settings are.
    logs = [log._replace(settings=log.settings | log.made_by) for log in logs]
    settings = dict.fromkeys(name for log in logs for name in log.settings)  # in order, and each only once
    names = [name for name in settings if name not in ("seed", "out", "overwrite", "report_to")]
    differ = [name for name in names if len({str(log.settings.get(name)) for log in logs}) > 1]
    if "algorithm" in differ and all(
        log.settings[name] == x for log in logs for name, x in ALGORITHMS[log.settings["algorithm"]].items()
    ):
        differ = [name for name in differ if name not in ALGORITHMS["grpo"]]
    groups: dict[str, list[Log]] = {}
    for log in logs:
        label = ", ".join(f"{name} {log.settings.get(name)}" for name in differ) or log.settings["algorithm"]
        groups.setdefault(label, []).append(log)
    if any(name in log.made_by for log in logs for name in differ):  # a digest would tell a reader nothing
        by_name = {", ".join(dict.fromkeys(map(name_of, own))): own for own in groups.values()}
        by_path = {", ".join(str(log.folder) for log in own): own for own in groups.values()}
        groups = by_name if len(by_name) == len(groups) else by_path
    return groups


def name_of(log: Log) -> str:
    """Return the name of a run's folder, without its seed."""
    return log.folder.name.removesuffix(f"-{log.settings['seed']}")


def series(logs: list[Log], metric: str) -> tuple[list[int], np.ma.MaskedArray]:
    """Return the steps (T,) and the values (runs, T) of a metric. Missing values are masked."""
    by_step = [{line["step"]: line[metric] for line in log.lines if line.get(metric) is not None} for log in logs]
    steps = sorted({step for values in by_step for step in values})
    return steps, np.ma.masked_invalid([[values.get(step, np.nan) for step in steps] for values in by_step])


def smooth(values: np.ma.MaskedArray, width: int) -> np.ma.MaskedArray:
    """Return the centred running mean over `width` steps. Masked values do not count."""
    windows = [values[:, max(0, t - width // 2) : t + width // 2 + 1] for t in range(values.shape[1])]
    return np.ma.stack([window.mean(axis=1) for window in windows], axis=1)


def draw_panel(axes: matplotlib.axes.Axes, groups: dict[str, list[Log]], panel: str, width: int, x: str) -> None:
    metric = METRICS.get(panel, panel)
    for style, logs in zip(itertools.cycle(STYLES), groups.values()):
        steps, values = series(logs, metric)
        if steps:
            marker, values = ("o", values) if metric.startswith("eval/") else (None, smooth(values, width))
            after = [spent(log.lines, x) for log in logs]
            places = [np.mean([one[step] for one in after if step in one]) for step in steps]  # means over the seeds
            axes.plot(places, values.mean(axis=0), marker=marker, markersize=3, **style)
            axes.fill_between(places, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15, lw=0)
    axes.set(title=panel.replace("_", " "), xlabel=x)
    axes.grid(alpha=0.3, linewidth=0.5)


def seeds(logs: list[Log]) -> str:
    """Say how many seeds there are, and how many of their runs have fewer steps: later, the line is a mean without
    them."""
    steps = [log.lines[-1]["step"] if log.lines else 0 for log in logs]
    shorter = sum(n < max(steps) for n in steps)
    return f"{len(logs)} seeds" + (f", {shorter} shorter" if shorter else "")


def draw_picture(groups: dict[str, list[Log]], panels: list[str], width: int, columns: int, x: str) -> Figure:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    legend = [label if len(logs) == 1 else f"{label} ({seeds(logs)})" for label, logs in groups.items()]
    legend = [textwrap.fill(label, 36 * columns) for label in legend]  # not wider than the panels
    lines = sum(label.count("\n") + 1 for label in legend)
    figure = Figure(figsize=(2.4 * columns, 1.9 * rows + 0.15 * (lines + 2)), layout="constrained")
    for i, panel in enumerate(panels):
        draw_panel(figure.add_subplot(rows, columns, i + 1), groups, panel, width, x)
    note = f"line: mean over seeds, band: lowest to highest\nrunning mean of {width} steps"
    place = {"loc": "outside lower center", "title": note, "title_fontsize": 6, "handlelength": 3, "frameon": False}
    figure.legend([Line2D([], [], **style) for style, _ in zip(itertools.cycle(STYLES), legend)], legend, **place)
    return figure


def save(picture: Figure, fingerprint: str, out: Path) -> list[Path]:
    files = [out.with_suffix(".png"), out.with_suffix(".svg")] if out.suffix in ("", ".png", ".svg") else [out]
    metadata = {".png": {"Description": fingerprint}, ".svg": {"Description": fingerprint, "Date": None}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        picture.savefig(file, dpi=160, metadata=metadata.get(file.suffix))
    return files


def picture_of(args: argparse.Namespace) -> tuple[Figure, str]:
    """Return the picture and its fingerprint. Panels without data are skipped. So are folders without a run, and runs
    that --overwrite has renamed."""
    runs = [run for run in args.runs if (run / "metrics.jsonl").exists() and ".replaced-" not in run.name]
    logs = [read_log(run) for run in runs if run_folder.config_json(run)]
    has = {name for log in logs for line in log.lines for name in line if line[name] is not None}
    panels = [panel for panel in args.panels if METRICS.get(panel, panel) in has]
    if unknown := [panel for panel in args.panels if panel not in panels]:
        print(f"skipped, because no run has it: {', '.join(unknown)}", file=sys.stderr)
    if not panels:
        sys.exit(f"error: no run has {', '.join(args.panels)}; the logs have {', '.join(sorted(has)) or 'no metrics'}")
    # The default x is left out, so that the fingerprints of older pictures are still right.
    how = [args.panels, args.smooth, args.columns, *([args.x] if args.x != "step" else [])]
    shown = [[{"settings": log.settings, "lines": log.lines} for log in logs], *how]
    fingerprint = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
    return draw_picture(by_settings(logs), panels, args.smooth, args.columns, args.x), fingerprint


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="default: plot.png next to the first run")
    parser.add_argument("--panels", nargs="+", default=PANELS.split(), metavar="PANEL", help="default: %(default)s")
    parser.add_argument("--smooth", type=int, default=5, help="width of the running mean, in steps")
    parser.add_argument("--columns", type=int, default=3)
    parser.add_argument("--x", choices=("step", "tokens", "seconds"), default="step", help="what was spent")
    args = parser.parse_args(words)
    args.out = args.out or args.runs[0].parent / "plot.png"
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    print(*save(*picture_of(args), args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
