"""The tables and pictures of README.md and docs/, made from the logs in results/.

    python -m tools.evidence                    writes every table and draws every picture
    python -m tools.evidence --check            changes nothing; names what is not that of the logs; exits with 1
    python -m tools.evidence --keep runs/NAME   copies the logs of these runs to results/NAME/

A table stands on any page between `<!-- made by tools.evidence: NAME -->` and `<!-- end -->`. NAME is `default`, `step`
(the benchmark), or that of a `python -m tools.ablate ... --out runs/NAME` in a code block, whose logs are in results/.
The pictures are those of each `python -m tools.plot ... --out results/...` in a code block; a picture has the
fingerprint of what it shows in its file. Left out: whether the code that drew it is still the same.
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

from tools import ablate, plot

ROOT = Path(__file__).parent.parent
BENCH_LOG = "results/bench.jsonl"
BLOCK = re.compile(r"(<!-- made by [\w.]+: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(tool: str) -> list[list[str]]:
    """The words behind `python -m tools.TOOL` of each line of a page that begins with it."""
    text = "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")
    return [shlex.split(words) for words in re.findall(rf"^python -m tools\.{tool} (.+)$", text, re.MULTILINE)]


# ---- What is made ----


def tables() -> dict[str, str]:
    made = {"default": default_table(), "step": "\n\n".join(map(step_table, measurements()))}
    for args in map(ablate.parse, commands("ablate")):
        args.out = ROOT / "results" / args.out.name
        if args.out.is_dir():
            made[args.out.name] = ablate.table(args)
    return made


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


def measurements() -> list[dict]:
    """Of the benchmark: the newest of those that differ in what was measured, with which transformers, on a CPU or on
    which GPU."""
    newest = {}
    for measurement in map(json.loads, (ROOT / BENCH_LOG).read_text().splitlines()):
        if re.search(r"\bbench(\.py)? step", measurement["command"]):
            differ = [str(measurement[name]) for name in ("size", "lengths", "prompts", "limit", "transformers")]
            on = "CPU" if "CPU" in measurement["hardware"] else measurement["hardware"]
            newest[*differ, on, *measurement["results"]] = measurement
    return [newest[key] for key in sorted(newest)]


def step_table(measurement: dict) -> str:
    """Medians. On a CPU CPU-seconds are compared: other work on the machine hardly changes them."""
    unit = "_cpu" if "CPU" in measurement["hardware"] else ""
    phases = ("rollout", "forward", "backward", "update", "step")
    names = [phase + unit for phase in phases] + ["memory_gb"]
    of = {way: [statistics.median(its[name]) for name in names] for way, its in measurement["results"].items()}
    (first, ours), *others = of.items()
    rows = []
    for way, its in of.items():
        *seconds, memory = (f"{value:.2f}" for value in its)
        rows.append([way, *seconds, f"{measurement['tokens'] / its[-2]:,.0f}", memory])
    for way, its in others:
        *seconds, memory = (f"{a / b:.2f}" for a, b in zip(ours, its, strict=True))
        rows.append([f"{first} / {way}", *seconds, f"{its[-2] / ours[-2]:.1f}", memory])
    shape = "**{size}, {prompts} prompts × {group}, {lengths} lengths to {limit}: {tokens} tokens a step**"
    about = "({hardware}; threads: {threads}; transformers {transformers}; commit `{commit:.7}`)"
    table = ablate.markdown(["", *phases, "tokens a second", "peak GB"], rows)
    return f"{shape.format(**measurement)}\n\n{table}\n\n{about.format(**measurement)}"


def pictures() -> dict[Path, tuple[Figure, str]]:
    """-> for each file what is drawn, and its fingerprint"""
    made = {}
    for args in map(plot.parse, commands("plot")):
        if args.out.parts[0] == "results":
            args.runs = [folder for pattern in args.runs for folder in sorted(ROOT.glob(str(pattern)))]
            made[ROOT / args.out] = plot.picture_of(args)
    return made


# ---- What the pages say, against it ----


def filled(text: str, made: dict[str, str]) -> str:
    """With its tables made anew; one that nothing makes is left empty."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{made.get(block[2], '')}\n\n{block[3]}", text)


def not_of_the_logs(pages: list[Path], made: dict[str, str], drawn: dict[Path, tuple[Figure, str]]) -> list[str]:
    found, placed = [], set()
    for page in pages:
        text, name = page.read_text(), page.relative_to(ROOT)
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(filled(text, made)), strict=True):
            placed.add(old[2])
            if old[0] != new[0]:
                found.append(f"{name}: the table {old[2]} is not that of the logs")
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", text):
            if (page.parent / link).resolve() not in drawn:
                found.append(f"{name}: no command on a page draws {link}")
    found += [f"the table {name} is on no page" for name in made if name not in placed]
    for file, (_, fingerprint) in drawn.items():
        if not file.exists() or fingerprint.encode() not in file.read_bytes():
            found.append(f"{file.relative_to(ROOT)} is not the picture of the logs")
    return found


def stale() -> list[str]:
    return not_of_the_logs(pages(), tables(), pictures())


def write(pages: list[Path], made: dict[str, str], drawn: dict[Path, tuple[Figure, str]]) -> None:
    for page in pages:
        page.write_text(filled(page.read_text(), made))
    for file, picture in drawn.items():
        plot.save(*picture, file)


def keep(folder: Path) -> None:
    for run in plot.without_replaced(sorted(folder.iterdir())):
        to = ROOT / "results" / folder.name / run.name
        if (run / "config.json").exists():
            to.mkdir(parents=True, exist_ok=True)
            for log in ("config.json", "metrics.jsonl"):
                shutil.copy(run / log, to)


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
        write(pages(), tables(), pictures())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
