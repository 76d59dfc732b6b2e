"""Make the tables and pictures of README.md and docs/ from the logs in results/.

    python -m bench.evidence                    writes every table and picture
    python -m bench.evidence --check            reports every table and picture that does not match the logs
    python -m bench.evidence --keep runs/NAME   copies the logs of these runs to results/NAME/

On a page, a table stands between `<!-- made by bench.evidence: NAME -->` and `<!-- end -->`. It is made from the logs
in results/NAME/. The command that made the runs, `python -m tools.ablate ... --out runs/NAME`, must be on one of the
pages. It is not run again, but its flags decide what the table shows. The table `default` needs no command. Each
command `python -m tools.plot ... --out results/...` on a page makes a picture, which contains a fingerprint of its logs
and flags. Those of `tools.compare` have none. Not supported: commands with --tune; --check does not notice if the code
that draws the pictures has changed.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from tools import ablate, plot

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- made by [\w.]+: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(tool: str) -> list[list[str]]:
    """Return the words that follow `python -m tools.TOOL` in each such command on the pages."""
    text = "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")
    found = re.findall(rf"^python -m tools\.{tool} (.+)$", text, re.MULTILINE)
    return [shlex.split(words, comments=True) for words in found]


def tables() -> dict[str, str]:
    made = {"default": default_table()}
    for args in map(ablate.parse, commands("ablate")):
        args.out = ROOT / "results" / args.out.name
        if args.out.is_dir():
            made[args.out.name] = ablate.table(args)  # an error if the runs do not have the settings of the command
    return made


def default_table() -> str:
    rows = [["", "greedy, before", "after", "sampled, before", "after", "length, before", "after", "seconds"]]
    names = [("eval/accuracy", ".3f"), ("eval/pass@1", ".3f"), ("eval/completion_length", ".1f")]
    for folder in sorted((ROOT / "results" / "default").glob("seed-*")):
        first, *trained = plot.read_log(folder).lines
        cells = [f"{line[name]:{digits}}" for name, digits in names for line in (first, trained[-1])]
        seconds = sum(line["seconds_rollout"] + line["seconds_update"] for line in trained)
        rows.append([folder.name.replace("-", " "), *cells, f"{seconds:.0f}"])
    return ablate.markdown(*rows)


def pictures() -> dict[Path, tuple[plot.Figure, str]]:
    made = {}
    for args in map(plot.parse, commands("plot")):
        if args.out.parts[0] == "results":
            args.runs = [folder for pattern in args.runs for folder in sorted(ROOT.glob(str(pattern)))]
            made[ROOT / args.out] = plot.picture_of(args)
    return made


def mismatches(pages: list[Path], made: dict[str, str], drawn: dict[Path, tuple[plot.Figure, str]]) -> Iterator[str]:
    """Yield a message for every table and picture that does not match the logs."""
    compared = {ROOT / words[words.index("--picture") + 1] for words in commands("compare") if "--picture" in words}
    for page in pages:
        page_name, text = page.relative_to(ROOT), page.read_text()
        wrong = [name for _, name, table, _ in BLOCK.findall(text) if table.strip() != made.get(name, "")]
        yield from (f"{page_name}: the table {name} does not match the logs" for name in wrong)
        wrong = [link for link in PICTURE.findall(text) if (page.parent / link).resolve() not in {*drawn, *compared}]
        yield from (f"{page_name}: no command on a page draws {link}" for link in wrong)
    for file, (_, fingerprint) in drawn.items():
        if not file.exists() or fingerprint.encode() not in file.read_bytes():
            yield f"{file.relative_to(ROOT)} does not match the logs"


def write(pages: list[Path], made: dict[str, str], drawn: dict[Path, tuple[plot.Figure, str]]) -> None:
    for page in pages:
        page.write_text(BLOCK.sub(lambda m: f"{m[1]}\n{made.get(m[2], '')}\n\n{m[4]}", page.read_text()))
    for file, picture in drawn.items():
        plot.save(*picture, file)


def keep(folders: list[Path]) -> None:
    """Copy the logs of these runs to results/. In the copies, absolute paths are shortened to runs/NAME, which is the
    path in the command on the page."""
    for folder in folders:
        # train.py --overwrite renames the folder of an earlier run to NAME.replaced-1 and so on. Skip those.
        runs = [file.parent for file in folder.glob("*/metrics.jsonl") if ".replaced-" not in file.parent.name]
        if not runs:
            sys.exit(f"error: {folder} has no folders of runs")
        for log in [run / name for run in runs for name in ("config.json", "metrics.jsonl")]:
            to = ROOT / "results" / log.relative_to(folder.parent)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(log.read_text().replace(f"{folder.parent.resolve()}/", "runs/"))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", nargs="+", type=Path, metavar="runs/NAME", default=[])
    args = parser.parse_args(words)
    keep(args.keep)
    if args.check and (found := list(mismatches(pages(), tables(), pictures()))):
        sys.exit("\n".join(found))
    if not args.check and not args.keep:
        write(pages(), tables(), pictures())


if __name__ == "__main__":
    main(sys.argv[1:])
