"""The atlas of objectives: its grids, and the tables and the picture of README.md, made from the logs in this folder.

    python -m results.atlas.atlas                                    writes every table and draws the picture
    python -m results.atlas.atlas --check                            only reports what does not match the logs
    python -m results.atlas.atlas --run chain_on --out runs/atlas    runs a grid and prints its table
    python -m results.atlas.atlas --run chain_on --out runs/again --algorithms grpo,maxrl
    python -m results.atlas.atlas --keep chain_on --out runs/atlas   adds its runs to the log, chain_on.jsonl.gz

A grid with several learning rates is tuned: each objective gets the rate with the best pass@1 on seeds that are not
reported. In the tables of grids, only pass@1 is tested: a difference "holds" if it is significant after Holm's
correction over all comparisons of the table. The table of claims uses intervals without this correction. The table that
--run prints also has a column for each of the other figures.
"""

import argparse
import functools
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import evidence, logs
from config import Config, resolve
from tools import ablate, plot
from tools.ablate import Lines

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
PICTURE = HERE / "atlas.png"
PASS = "eval/pass@1:last"  # objectives are tuned and compared by the last value of this metric
TUNE_SEEDS = ["101", "102"]
NOTE = """\
small dots: seeds; large dot: their mean; bar: 95 % interval of the paired difference to grpo, added to grpo's mean
(dashed); blue: significantly above grpo; orange: significantly below (both after Holm's correction); grey: neither"""


# ---- The grids ----


@dataclass
class Grid:
    algorithms: str
    rates: str  # the learning rates, with commas; "" if the rate is among the flags
    seeds: str
    figures: str  # the figures besides PASS, which are shown but not tested
    flags: str


ONE_UPDATE = "grpo,dr_grpo,dapo,cispo,luspo,maxrl,opo,gdpo,reinforce++,reinforce++-baseline"
EIGHT_UPDATES = "grpo,dr_grpo,dapo,gspo,cispo,sapo,gmpo,luspo,dppo,maxrl,opo,gdpo,reinforce++,reinforce++-baseline"
# grpo, and the presets that change the ratio or its bounds.
OWN_RATIOS = "grpo,dapo,gspo,cispo,sapo,gmpo,luspo,dppo"
FIVE, EIGHT = "1,2,3,4,5", "1,2,3,4,5,6,7,8"
COMMON = "--prompts_per_step 8 --max_grad_norm 1000 --warmup_steps 5 --eval_every 99 --save_every 0"
CHAIN_ON = f"--task chain --steps 40 {COMMON}"
CHAIN_OFF = f"--task chain --steps 30 --num_iterations 2 --minibatches 4 {COMMON}"
ADDITION_ON = f"--task addition --steps 24 {COMMON}"
ADDITION_OFF = f"--task addition --steps 15 --num_iterations 2 --minibatches 4 {COMMON}"
TWO_REWARDS = f"{CHAIN_ON} --reward exact_result tasks.chain:shortness --reward_weights 1 0.3 --learning_rate 1.2e-4"
FEW = "completion_length entropy"
MANY = "completion_length length_incorrect entropy eval/pass@4:last"
GRIDS = {
    "chain_on": Grid(ONE_UPDATE, "3e-5,6e-5,1.2e-4,2.4e-4", EIGHT, f"reward:1-40 {MANY}", CHAIN_ON),
    "chain_off": Grid(EIGHT_UPDATES, "1.5e-5,3e-5,6e-5,1.2e-4", EIGHT, f"reward:1-30 {MANY}", CHAIN_OFF),
    "addition_on": Grid(ONE_UPDATE, "1e-4,2e-4,4e-4", FIVE, f"reward:1-24 {MANY}", ADDITION_ON),
    "addition_off": Grid(EIGHT_UPDATES, "5e-5,1e-4,2e-4", FIVE, f"reward:1-15 {MANY}", ADDITION_OFF),
    "common_on": Grid(ONE_UPDATE, "1.2e-4", EIGHT, f"reward:1-40 {FEW}", CHAIN_ON),
    "common_off": Grid(EIGHT_UPDATES, "3e-5", EIGHT, f"reward:1-30 {FEW}", CHAIN_OFF),
    "too_high": Grid(OWN_RATIOS, "1.2e-4", FIVE, f"reward:1-30 {FEW}", CHAIN_OFF),
    "two_rewards": Grid("grpo,gdpo", "", EIGHT, f"reward/exact_result:1-40 {FEW}", TWO_REWARDS),
}
TUNED = [name for name, grid in GRIDS.items() if "," in grid.rates]


def ablation(name: str, out: Path, algorithms: str | None = None, jobs: int = 1) -> argparse.Namespace:
    """Return the arguments of tools.ablate for this grid: every objective with every learning rate, on the seeds that
    are reported."""
    grid = GRIDS[name]
    words = ["--vary", f"algorithm={algorithms or grid.algorithms}"]
    words += ["--vary", f"learning_rate={grid.rates}"] if grid.rates else []
    words += ["--seeds", grid.seeds, "--figures", PASS, *grid.figures.split(), "--out", str(out), "--jobs", str(jobs)]
    return ablate.parse([*words, "--", *grid.flags.split()])


def with_(args: argparse.Namespace, **other: object) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | other)


def read_all(args: argparse.Namespace, read: Callable) -> list[list[Lines]]:
    """Read the logs of all runs. Return for each variant its logs, in the order of the seeds."""
    logs = [read(run) for run in ablate.runs_of(args)]
    # runs_of goes through all variants for each seed, so every len(variants)-th run is of the same variant.
    return [logs[i :: len(args.variants)] for i in range(len(args.variants))]


def tuned(args: argparse.Namespace, read: Callable) -> argparse.Namespace:
    """Return the arguments with one variant for each objective. Its learning rate has the best mean of PASS over
    TUNE_SEEDS."""
    best: dict[str, tuple[float, dict]] = {}
    for variant, runs in zip(args.variants, read_all(with_(args, seeds=TUNE_SEEDS), read), strict=True):
        score = statistics.fmean(ablate.figure(lines, PASS) for lines in runs)
        name = variant["algorithm"]
        if name not in best or score > best[name][0]:
            best[name] = score, variant
    return with_(args, variants=[variant for _, variant in best.values()])


def run(name: str, args: argparse.Namespace) -> argparse.Namespace:
    """Make the runs of a grid, and return the arguments of those that are reported. If the grid is tuned, only the best
    learning rate of each objective is reported."""
    if name in TUNED:
        ablate.run_all(with_(args, seeds=TUNE_SEEDS))
        args = tuned(args, ablate.finished)
    ablate.run_all(args)
    return args


# ---- The logs: a line for each run ----


def rows_of(name: str) -> dict[tuple, dict]:
    rows = logs.read_gz(HERE / f"{name}.jsonl.gz")
    return {key_of(vars(Config()) | row["settings"]): row for row in rows}


def key_of(settings: dict) -> tuple:
    return settings["algorithm"], settings["learning_rate"], settings["seed"]


@functools.cache
def logged(name: str) -> tuple[argparse.Namespace, list[list[Lines]]]:
    """Read the log of a grid. Return the arguments of the runs that are reported, and for each variant its runs."""
    rows = rows_of(name)

    def read(run: ablate.Run) -> Lines:
        row = rows[key_of(vars(run.config))]
        ablate.check_settings(run, resolve(Config(**row["settings"]), {}, on_gpu=False))
        # The log has a list of values for each metric. Return a dictionary for each step.
        return [dict(zip(row["columns"], line)) for line in zip(*row["columns"].values())]

    args = ablation(name, HERE)  # the folder is not used: `read` takes the runs from the log
    args = tuned(args, read) if name in TUNED else args
    return args, read_all(args, read)


def keep(name: str, args: argparse.Namespace) -> None:
    """Add the finished runs in the folder `args.out` to the log of this grid. A run with the same objective, learning
    rate and seed is replaced. For each run, the log keeps the metrics of the grid's figures, rounded to five digits,
    and the settings that are not the default."""
    rows, default = rows_of(name), vars(Config())
    metrics = ["step", *dict.fromkeys(figure.partition(":")[0] for figure in args.figures)]
    for run in ablate.runs_of(with_(args, seeds=[*args.seeds, *TUNE_SEEDS])):
        lines = ablate.log_if_finished(run)
        if not lines:  # not made: on the reported seeds, only the best rate of each objective is run
            continue
        made = json.loads((run.folder / "config.json").read_text())
        settings = {key: value for key, value in made["settings"].items() if value != default[key] and key != "out"}
        about = {key: made[key] for key in ("commit", "versions", "hardware")}
        columns = {metric: [short(line.get(metric)) for line in lines] for metric in metrics}
        rows[key_of(vars(run.config))] = {"run": run.folder.name, "columns": columns, "settings": settings} | about
    written = sorted(rows.values(), key=lambda row: row["run"])
    logs.write_gz(HERE / f"{name}.jsonl.gz", logs.as_jsonl(written))


def short(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- What holds ----


def differences_of(runs: list[list[Lines]], name: str = PASS) -> list[list[float]]:
    """Return for each variant its differences from the first variant, one for each seed."""
    values = values_of(runs, name)
    return [[a - b for a, b in zip(by_seed, values[0], strict=True)] for by_seed in values]


def values_of(runs: list[list[Lines]], name: str = PASS) -> list[list[float]]:
    """Return for each variant the values of this figure, one for each seed."""
    return [[ablate.figure(lines, name) for lines in logs] for logs in runs]


def what_holds(runs: list[list[Lines]]) -> list[bool]:
    """Return for each variant whether its difference from the first variant holds. The first variant has none."""
    holds = ablate.clear(dict(enumerate(differences_of(runs)[1:])))
    return [False, *(i in holds for i in range(len(runs) - 1))]


# ---- Tables ----


def table(args: argparse.Namespace, runs: list[list[Lines]], describe: bool = False) -> str:
    """Return a table of PASS with a row for each variant. With `describe`, the other figures have a column each."""
    others, variants = (args.figures[1:] if describe else []), args.variants
    difference = f"difference from {' at '.join(variants[0].values())} (95 % interval)"
    names = [*variants[0], f"pass@1, mean ± std of {len(args.seeds)} seeds", difference]
    rows = [row[1:-1] for row in ablate.compared([PASS], variants, runs)]  # without the metric's name and the verdict
    for row, lines_of_seeds, holds in zip(rows, runs, what_holds(runs), strict=True):
        row[-1] += " **holds**" if holds else ""
        for other in others:
            mean = statistics.fmean(ablate.figure(lines, other) for lines in lines_of_seeds)
            row.append(f"{mean:.{ablate.decimals(mean)}f}")
    return ablate.markdown([*names, *others], *rows)


# paper, claim, one update ("on") or eight ("off"), figure, the objective that the claim says is higher, and the other
CLAIMS = [
    ("Dr. GRPO", "dividing by length makes wrong completions longer", "on", "length_incorrect", "grpo", "dr_grpo"),
    ("Dr. GRPO", "not dividing by the std is as good or better", "on", PASS, "dr_grpo", "grpo"),
    ("DAPO", "equal token weights, clip-higher and dynamic sampling are better", "off", PASS, "dapo", "grpo"),
    ("DAPO", "entropy stays higher", "off", "entropy", "dapo", "grpo"),
    ("GSPO", "one ratio for each completion is better off-policy", "off", PASS, "gspo", "grpo"),
    ("LUSPO", "without GSPO's length bias, completions are longer", "off", "completion_length", "luspo", "gspo"),
    ("CISPO", "keeping the gradient of clipped tokens is better", "off", PASS, "cispo", "dapo"),
    ("SAPO", "a soft gate is better off-policy than clipping", "off", PASS, "sapo", "grpo"),
    ("GMPO", "a geometric mean is better off-policy", "off", PASS, "gmpo", "grpo"),
    ("GMPO", "entropy stays higher", "off", "entropy", "gmpo", "grpo"),
    ("DPPO", "bounding the divergence, not the ratio, is better", "off", PASS, "dppo", "dapo"),
    ("MaxRL", "more hard prompts are solved in four tries", "on", "eval/pass@4:last", "maxrl", "grpo"),
    ("MaxRL", "entropy stays higher", "on", "entropy", "maxrl", "grpo"),
    ("OPO", "the baseline of least variance is better", "on", PASS, "opo", "dr_grpo"),
    ("REINFORCE++", "dividing by the std of the batch is better", "on", PASS, "reinforce++-baseline", "grpo"),
]


def claims() -> str:
    """Return a table with a row for each claim and a column for each task."""
    logs_of_grid = {}  # the name of a grid -> the name of an objective -> its logs
    for name in TUNED:
        args, runs = logged(name)
        logs_of_grid[name] = {variant["algorithm"]: logs for variant, logs in zip(args.variants, runs, strict=True)}
    rows = []
    for paper, claim, regime, figure, higher, lower in CLAIMS:
        cells = [paper, claim, f"{figure.partition(':')[0]}, {higher} minus {lower}"]
        for task in ("chain", "addition"):
            by_objective = logs_of_grid[f"{task}_{regime}"]
            _, differences = differences_of([by_objective[lower], by_objective[higher]], figure)
            mean, half = ablate.interval(differences)
            seen = "not seen"
            if abs(mean) > half:
                seen = "**seen**" if mean > 0 else "**opposite**"
            digits = ablate.decimals(statistics.fmean(ablate.figure(lines, figure) for lines in by_objective[lower]))
            cells.append(f"{ablate.with_interval(differences, digits)}: {seen}")
        rows.append(cells)
    return ablate.markdown(["paper", "claim", "measure", "chain", "addition"], *rows)


# ---- The picture ----


def panels() -> list[dict]:
    """Return what is drawn, in plain values, with a panel for each tuned grid."""
    drawn = []
    for name in TUNED:
        args, runs = logged(name)
        columns = {
            "variant": args.variants,
            "values": values_of(runs),
            "differences": differences_of(runs),
            "holds": what_holds(runs),
        }
        task, _, regime = name.partition("_")
        title = f"{task}, {'1 update' if regime == 'on' else '8 updates'} a rollout"
        rows = [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]
        drawn.append({"title": title, "metric": PASS, "rows": rows})
    return drawn


def draw(panels: list[dict]) -> Figure:
    n_columns = 2
    n_rows = math.ceil(len(panels) / n_columns)
    figure = Figure(figsize=(9, 0.6 + 3.1 * n_rows), layout="constrained")
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes, panel in zip(all_axes.flat, panels):
        draw_panel(axes, panel)
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
        # The other rows are compared with the first one, so the first has no interval and gets no error bar.
        axes.errorbar(
            centre + mean, y, xerr=half or None, fmt="o", color=colour, markersize=5, capsize=2.5, linewidth=1.4
        )
    labels = [" at ".join(row["variant"].values()) for row in panel["rows"]]
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_title(panel["title"], fontsize=9)
    axes.set_xlabel(panel["metric"].partition(":")[0].removeprefix("eval/") + " on held-out prompts", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


# ---- The page ----


def tables() -> dict[str, str]:
    return {name: table(*logged(name)) for name in GRIDS} | {"claims": claims()}


def picture() -> dict[Path, tuple[Figure, str]]:
    shown = panels()
    fingerprint = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
    return {PICTURE: (draw(shown), fingerprint)}


def stale() -> list[str]:
    return list(evidence.mismatches([PAGE], tables(), picture()))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", choices=GRIDS)
    parser.add_argument("--keep", choices=GRIDS)
    parser.add_argument("--out", type=Path, help="folder of the runs; default: runs/atlas_ and the grid's name")
    parser.add_argument("--algorithms", help="in the place of the grid's; the first is the one to compare with")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args(words)
    name = args.run or args.keep
    if name:
        ablation_args = ablation(name, args.out or Path("runs") / f"atlas_{name}", args.algorithms, args.jobs)
    if args.run:
        reported = run(name, ablation_args)
        print(table(reported, read_all(reported, ablate.finished), describe=True))
    elif args.keep:
        keep(name, ablation_args)
    elif args.check:
        found = stale()
        print("\n".join(found) or "the page says what the logs say")
        return 1 if found else 0
    else:
        evidence.write([PAGE], tables(), picture())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
