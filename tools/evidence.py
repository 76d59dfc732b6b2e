"""The tables and pictures of README.md and docs/, made from the logs in results/.

    python -m tools.evidence                    writes every table and draws every picture
    python -m tools.evidence --check            changes nothing; names what is not that of the logs; exits with 1
    python -m tools.evidence --keep runs/NAME   copies the logs of these runs to results/NAME/

A table stands on any page between `<!-- made by tools.evidence: NAME -->` and `<!-- end -->`. NAME is one that
`tables` makes: `default`, `claims`, a measurement's, or that of a `python -m tools.ablate ... --out runs/NAME` in a
code block, whose logs are in results/. The pictures are those of each `python -m tools.plot ... --out results/...` in a
code block, and results/atlas.png. A picture has the fingerprint of what it shows in its file. Nothing is run here.

Left out: whether the code that drew a picture is still the same.
"""

import argparse
import json
import re
import shlex
import shutil
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

from tools import ablate, atlas, plot

ROOT = Path(__file__).parent.parent
BENCH_LOG = "results/bench.jsonl"
BLOCK = re.compile(r"(<!-- made by tools\.evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(tool: str) -> list[list[str]]:
    """The words behind `python -m tools.TOOL` of each line of a page that begins with it."""
    text = "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")
    return [shlex.split(words) for words in re.findall(rf"^python -m tools\.{tool} (.+)$", text, re.MULTILINE)]


def grids() -> list[argparse.Namespace]:
    """The words of each `python -m tools.ablate` whose logs are in results/."""
    parsed = [ablate.parse(words) for words in commands("ablate")]
    for args in parsed:
        args.out = ROOT / "results" / args.out.name
    return [args for args in parsed if args.out.is_dir() or ablate.kept(args.out.name)]


# ---- Tables ----


def tables() -> dict[str, str]:
    made = {"default": default_table()} | {kind: tables_of(kind) for kind in MEASURED}
    if tuned := [args for args in grids() if args.tune]:
        made["claims"] = atlas.claims(tuned)
    return made | {args.out.name: ablate.table_of(args) for args in grids()}


def default_table() -> str:
    rows = []
    for folder in sorted((ROOT / "results" / "default").glob("seed-*")):
        lines = plot.read_log(folder).lines
        first, *_, last = (line for line in lines if "eval/accuracy" in line)
        cells = [f"{end[name]:.3f}" for name in ("eval/accuracy", "eval/pass@1") for end in (first, last)]
        cells += [f"{end['eval/completion_length']:.1f}" for end in (first, last)]
        seconds = sum(line["seconds_rollout"] + line["seconds_update"] for line in lines if "reward" in line)
        rows.append([folder.name.replace("-", " "), *cells, f"{seconds:.0f}"])
    names = ["", "greedy, before", "after", "sampled, before", "after", "length, before", "after", "seconds"]
    return ablate.markdown(names, rows)


# ---- Tables of measurements ----


def kind_of(measurement: dict) -> str:
    """step or logprobs"""
    return re.search(r"\bbench(\.py)? (\w+)", measurement["command"])[2]


def measurements(kind: str) -> list[dict]:
    """The newest of those that differ in what was measured, with which transformers, on a CPU or on which GPU."""
    newest = {}
    for measurement in map(json.loads, (ROOT / BENCH_LOG).read_text().splitlines()):
        differ = [str(measurement.get(name)) for name in ("size", "lengths", "prompts", "limit", "transformers")]
        on = "CPU" if unit(measurement) else measurement["hardware"]
        if kind_of(measurement) == kind:
            newest[*differ, on, *measurement.get("results", [])] = measurement
    return [newest[key] for key in sorted(newest)]


def tables_of(kind: str) -> str:
    return "\n\n".join(map(measurement_table, measurements(kind)))


def measurement_table(measurement: dict) -> str:
    about = "{hardware}; threads: {threads}; transformers {transformers}; commit `{commit:.7}`".format(**measurement)
    return f"{MEASURED[kind_of(measurement)](measurement)}\n\n({about})"


def medians(its: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in its.items()}


def unit(measurement: dict) -> str:
    """On a CPU CPU-seconds are compared: other work on the machine hardly changes them."""
    return "_cpu" if "CPU" in measurement["hardware"] else ""


def step_table(measurement: dict) -> str:
    phases = ("rollout", "forward", "backward", "update", "step")
    names = [phase + unit(measurement) for phase in phases] + ["memory_gb"]
    of = {way: medians(its) for way, its in measurement["results"].items()}
    first, *others = of
    rows = []
    for way, its in of.items():
        *seconds, memory = (f"{its[name]:.2f}" for name in names)
        rows.append([way, *seconds, f"{measurement['tokens'] / its[names[-2]]:,.0f}", memory])
    for way in others:
        *seconds, memory = (f"{of[first][name] / of[way][name]:.2f}" for name in names)
        rows.append([f"{first} / {way}", *seconds, f"{of[way][names[-2]] / of[first][names[-2]]:.1f}", memory])
    shape = "{size}, {prompts} prompts × {group}, {lengths} lengths to {limit}: {tokens} tokens a step"
    table = ablate.markdown(["", *phases, "tokens a second", "peak GB"], rows)
    return f"**{shape.format(**measurement)}**\n\n{table}"


def logprobs_table(measurement: dict) -> str:
    digits = {"seconds": 1, "cpu_seconds": 1, "memory_gb": 2}
    of = {way: medians(its) for way, its in measurement["results"].items()}
    rows = [[way, *(f"{its[name]:.{n}f}" for name, n in digits.items())] for way, its in of.items()]
    ours, full = of.values()
    rows.append(["ratio", *(f"{ours[name] / full[name]:.2f}" for name in digits)])
    return ablate.markdown(["", "seconds", "CPU-seconds", "peak GB above the model"], rows)


MEASURED = {"step": step_table, "logprobs": logprobs_table}


# ---- Pictures ----


def pictures() -> dict[Path, tuple[Figure, str]]:
    """-> for each file what is drawn, and its fingerprint"""
    made = {}
    for words in commands("plot"):
        args = plot.parse(words)
        if args.out.parts[0] == "results":
            args.runs = [folder for pattern in args.runs for folder in sorted(ROOT.glob(str(pattern)))]
            made[ROOT / args.out] = plot.picture_of(args)
    if tuned := [args for args in grids() if args.tune]:
        panels = atlas.panels(tuned)
        made[ROOT / "results" / "atlas.png"] = atlas.draw(panels), plot.fingerprint(panels)
    return made


# ---- What the pages say, against it ----


def filled(text: str, made: dict[str, str]) -> str:
    """With its tables made anew; one that nothing makes is left empty."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{made.get(block[2], '')}\n\n{block[3]}", text)


def stale() -> list[str]:
    made, drawn, found, placed = tables(), pictures(), [], set()
    for page in pages():
        text, name = page.read_text(), page.relative_to(ROOT)
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(filled(text, made)), strict=True):
            placed.add(old[2])
            if old[0] != new[0]:
                found.append(f"{name}: the table {old[2]} is not that of the logs")
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", text):
            if (page.parent / link).resolve() not in drawn:
                found.append(f"{name}: no command on a page draws {link}")
    found += [f"the table {name} is on no page" for name in made if name not in placed]
    for out, (_, fingerprint) in drawn.items():
        if not out.exists() or fingerprint.encode() not in out.read_bytes():
            found.append(f"{out.relative_to(ROOT)} is not the picture of the logs")
    return found


def write() -> None:
    made = tables()
    for page in pages():
        page.write_text(filled(page.read_text(), made))
    for out, picture in pictures().items():
        plot.save(*picture, out)


def keep(folder: Path) -> None:
    for config in sorted(folder.glob("*/config.json")):
        to = ROOT / "results" / folder.name / config.parent.name
        to.mkdir(parents=True, exist_ok=True)
        for log in (config, config.with_name("metrics.jsonl")):
            shutil.copy(log, to)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", nargs="+", type=Path, metavar="runs/NAME", default=[])
    args = parser.parse_args(words)
    for folder in args.keep:
        keep(folder)
    if args.check:
        found = stale()
        print("\n".join(found) or "the pages say what the logs say")
        return 1 if found else 0
    if not args.keep:
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
