"""Make the tables and pictures of README.md and docs/ from the logs in results/.

    python -m tools.evidence                    writes every table and picture
    python -m tools.evidence --check            reports every table and picture that does not match the logs
    python -m tools.evidence --keep runs/NAME   copies the logs of these runs to results/NAME/

A page has a table between `<!-- made by tools.evidence: NAME -->` and `<!-- end -->`. NAME is `default`, `step` for
the benchmark, or the NAME of a command in a code block, `python -m tools.ablate ... --out runs/NAME` or
`python -m tools.bench learn ... --out runs/NAME`, whose logs are in results/NAME/. Each `python -m tools.plot ... --out
results/...` in a code block makes a picture, which contains a fingerprint of its logs and flags. Left out: whether the
code that draws the pictures has changed.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np

from tools import ablate, bench, plot

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- made by [\w.]+: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(tool: str) -> list[list[str]]:
    text = "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")
    found = re.findall(rf"^python -m tools\.{tool} (.+)$", text, re.MULTILINE)
    return [shlex.split(words, comments=True) for words in found]


def tables() -> dict[str, str]:
    made = {
        "default": default_table(),
        "step": step_tables(),
        "long": bench.long_table(ROOT / "results" / "bench.jsonl"),
    }
    grids = [(ablate.table, ablate.parse(words)) for words in commands("ablate")]
    grids += [(bench.learn_table, bench.parse(words)) for words in commands("bench") if words[0] == "learn"]
    for table, args in grids:
        args.out = ROOT / "results" / args.out.name
        if args.out.is_dir():
            made[args.out.name] = table(args)
    return made


def default_table() -> str:
    rows = [["", "greedy, before", "after", "sampled, before", "after", "length, before", "after", "seconds"]]
    for folder in sorted((ROOT / "results" / "default").glob("seed-*")):
        lines = plot.read_log(folder).lines
        first, *_, last = (line for line in lines if "eval/accuracy" in line)
        cells = [f"{end[name]:.3f}" for name in ("eval/accuracy", "eval/pass@1") for end in (first, last)]
        cells += [f"{end['eval/completion_length']:.1f}" for end in (first, last)]
        seconds = sum(line["seconds_rollout"] + line["seconds_update"] for line in lines if "reward" in line)
        rows.append([folder.name.replace("-", " "), *cells, f"{seconds:.0f}"])
    return ablate.markdown(*rows)


def step_tables() -> str:
    """The newest table for each shape, version of transformers, hardware (all CPUs count as one) and ways to train."""
    newest = {}
    for entry in map(json.loads, (ROOT / "results" / "bench.jsonl").read_text().splitlines()):
        if re.search(r"\bbench(\.py)? step", entry["command"]):
            table, hardware = step_table(entry), "CPU" if "CPU" in entry["hardware"] else entry["hardware"]
            newest[table.partition(":")[0], entry["transformers"], hardware, *entry["results"]] = table
    return "\n\n".join(newest[key] for key in sorted(newest))


def step_table(entry: dict) -> str:
    """Medians of the steps. A step is the rollout and the rest: scoring and the update."""
    unit, rows, medians = "_cpu" if "CPU" in entry["hardware"] else "", [], {}
    for way, figures in entry["results"].items():
        rollout, step, memory = (np.median(figures[name]) for name in ("rollout" + unit, "step" + unit, "memory_gb"))
        medians[way] = np.array([rollout, step - rollout, step, memory])
        rows.append([way, *(f"{x:.2f}" for x in medians[way]), f"{entry['tokens'] / step:,.0f}"])
    first, *others = medians
    for way in others:
        ratios = medians[first] / medians[way]
        rows.append([f"{first} / {way}", *(f"{x:.2f}" for x in ratios), f"{1 / ratios[2]:.1f}"])
    prompt_length = f" of {entry['prompt_tokens']} tokens" if entry.get("prompt_tokens") else ""
    title = "**{size}, {prompts} prompts{of} × {group}, {lengths} lengths to {limit}: {tokens} tokens a step**"
    about = "({hardware}; threads: {threads}; transformers {transformers}; commit `{short}`)"
    short = entry["commit"][:7] + entry["commit"][40:]  # keeps "-dirty"
    table = ablate.markdown(["", "rollout", "rest", "step", "peak GB", "tokens a second"], *rows)
    return f"{title.format(of=prompt_length, **entry)}\n\n{table}\n\n{about.format(short=short, **entry)}"


def pictures() -> dict[Path, tuple[plot.Figure, str]]:
    made = {}
    for args in map(plot.parse, commands("plot")):
        if args.out.parts[0] == "results":
            args.runs = [folder for pattern in args.runs for folder in sorted(ROOT.glob(str(pattern)))]
            made[ROOT / args.out] = plot.picture_of(args)
    return made


def not_of_the_logs(pages: list[Path], made: dict[str, str], drawn: dict[Path, tuple[plot.Figure, str]]) -> list[str]:
    """-> a message for every table and picture that does not match the logs"""
    found = []
    for page in pages:
        name, text = page.relative_to(ROOT), page.read_text()
        wrong = [table for _, table, shown, _ in BLOCK.findall(text) if shown.strip() != made.get(table, "")]
        found += [f"{name}: the table {table} does not match the logs" for table in wrong]
        wrong = [link for link in PICTURE.findall(text) if (page.parent / link).resolve() not in drawn]
        found += [f"{name}: no command on a page draws {link}" for link in wrong]
    for file, (_, fingerprint) in drawn.items():
        if not file.exists() or fingerprint.encode() not in file.read_bytes():
            found.append(f"{file.relative_to(ROOT)} does not match the logs")
    return found


def write(pages: list[Path], made: dict[str, str], drawn: dict[Path, tuple[plot.Figure, str]]) -> None:
    for page in pages:
        page.write_text(BLOCK.sub(lambda m: f"{m[1]}\n{made.get(m[2], '')}\n\n{m[4]}", page.read_text()))
    for file, picture in drawn.items():
        plot.save(*picture, file)


def keep(folders: list[Path]) -> None:
    for log in [log for folder in folders for log in folder.glob("*/*")]:
        if log.name in ("config.json", "metrics.jsonl") and ".replaced-" not in log.parent.name:
            to = ROOT / "results" / log.relative_to(log.parents[2])
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(log.read_text().replace(f"{log.parents[2].resolve()}/", "runs/"))  # the --out of the page


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", nargs="+", type=Path, metavar="runs/NAME", default=[])
    args = parser.parse_args(words)
    keep(args.keep)
    if args.check and (found := not_of_the_logs(pages(), tables(), pictures())):
        sys.exit("\n".join(found))
    if not args.check and not args.keep:
        write(pages(), tables(), pictures())


if __name__ == "__main__":
    main(sys.argv[1:])
