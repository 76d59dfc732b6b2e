"""Every table and picture of README.md and FINDINGS.md, made again from the logs in results/.

    python results.py                  writes them
    python results.py --check          changes nothing; names what differs from the logs or is missing; exits with 1
    python results.py --keep runs/NAME copies the logs of these runs to results/NAME/

A table stands between `<!-- made by results.py: NAME -->` and `<!-- end -->`. The table of a finding is that of the
`python ablate.py ... --out runs/NAME` in FINDINGS.md, from the logs in results/NAME/. The pictures are those of every
`python plot.py ... --out results/...` on the pages, and that of `python bench.py scaling`. Nothing is run or measured.

Left out: whether a picture shows its log. It is drawn again when this is run without --check.
"""

import glob
import json
import os
import re
import shlex
import shutil
import statistics
import sys
from pathlib import Path

from tools import ablate, bench, plot

HERE = Path(__file__).parent.parent
PAGES = ("README.md", "FINDINGS.md")
BLOCK = re.compile(r"(<!-- made by results\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> dict[str, str]:
    return {page: (HERE / page).read_text() for page in PAGES}


def commands(text: str, tool: str, out: str) -> list[list[str]]:
    """The words after `python TOOL.py` of each command, in a block or in the text, that writes to this folder."""
    found = re.findall(rf"python {tool}\.py ([^`]+?)(?=`|\n\n|(?<!\\)\npython )", text)
    return [shlex.split(words.replace("\\\n", " ")) for words in found if f"--out {out}/" in words]


# ---- Tables ----


def measured() -> list[dict]:
    return [json.loads(line) for line in (HERE / "results" / "bench.jsonl").read_text().splitlines()]


def tables() -> dict[str, str]:
    entries = measured()
    made = {"default": default_table(), "logprobs": logprobs_table(entries), "bench": bench.markdown(entries).strip()}
    for words in commands(pages()["FINDINGS.md"], "ablate", "runs"):
        args = ablate.parse(words)
        runs = ablate.read(HERE / "results" / args.out.name, args.variants, args.seeds)
        made[args.out.name] = ablate.table(args.variants, runs, args.figures)
    return made


def default_table() -> str:
    names = ["", "greedy, before", "after", "sampled, before", "after", "length, before", "after", "seconds"]
    rows = [f"| {' | '.join(names)} |".replace("|  |", "| |"), "|---" * len(names) + "|"]
    for folder in sorted((HERE / "results" / "default").glob("seed-*")):
        lines = plot.read(folder)[1]
        evaluations = [line for line in lines if "eval/accuracy" in line]
        ends = evaluations[0], evaluations[-1]
        cells = [f"{end[name]:.3f}" for name in ("eval/accuracy", "eval/pass@1") for end in ends]
        cells += [f"{end['eval/completion_length']:.1f}" for end in ends]
        seconds = sum(line["seconds_rollout"] + line["seconds_update"] for line in lines if "reward" in line)
        rows.append(f"| {folder.name.replace('-', ' ')} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(rows)


def logprobs_table(entries: list[dict]) -> str:
    """Medians of the newest entry."""
    names = {"seconds": ".1f", "cpu_seconds": ".1f", "memory_gb": ".2f"}
    newest = [entry for entry in entries if bench.kind(entry) == "logprobs"][-1]
    of = {way: {n: statistics.median(its[n]) for n in names} for way, its in newest["results"].items()}
    rows = ["| | seconds | CPU-seconds | peak memory above the model, GB |", "|---|---|---|---|"]
    rows += [f"| {way} | " + " | ".join(f"{its[n]:{f}}" for n, f in names.items()) + " |" for way, its in of.items()]
    return "\n".join([*rows, "| ratio | " + " | ".join(f"{newest['ratios'][n]:.2f}" for n in names) + " |"])


def filled(text: str, made: dict[str, str]) -> str:
    """With its tables made anew; one that nothing makes is left empty."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{made.get(match[2], '')}\n\n{match[3]}", text)


def stale() -> list[str]:
    """What differs from the logs, or is missing."""
    made, found, placed = tables(), [], set()
    for page, text in pages().items():
        there, anew = BLOCK.finditer(text), BLOCK.finditer(filled(text, made))
        for old, new in zip(there, anew, strict=True):
            placed.add(old[2])
            found += [f"{page}: the table {old[2]} is not that of the logs"] * (old[0] != new[0])
        shown = re.findall(r"\]\((results/[^)]+)\)", text)
        found += [f"{page}: {file} is not there" for file in shown if not (HERE / file).exists()]
    return found + [f"the table {name} is on no page" for name in made if name not in placed]


def keep(folder: Path) -> None:
    for config in sorted(folder.glob("*/config.json")):
        to = HERE / "results" / folder.name / config.parent.name
        to.mkdir(parents=True, exist_ok=True)
        for log in (config, config.with_name("metrics.jsonl")):
            shutil.copy(log, to)


def main(words: list[str]) -> int:
    if words == ["--check"]:
        print("\n".join(found := stale()) or "the pages say what the logs say")
        return int(bool(found))
    if words[:1] == ["--keep"] and len(words) > 1:
        for folder in words[1:]:
            keep(Path(folder))
        return 0
    if words:
        print(__doc__)
        return 2
    os.chdir(HERE)  # the commands on the pages are relative to it
    made = tables()
    for page, text in pages().items():
        (HERE / page).write_text(filled(text, made))
    for words in commands("\n\n".join(pages().values()), "plot", "results"):
        plot.main([name for word in words for name in sorted(glob.glob(word)) or [word]])
    points = [entry["points"] for entry in measured() if bench.kind(entry) == "scaling"][-1]
    bench.plot_scaling(points, HERE / "results" / "scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
