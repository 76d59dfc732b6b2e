"""Make the tables and pictures of README.md and docs/ from the logs in results/.

    python -m bench.evidence            writes every table and picture
    python -m bench.evidence --check    reports every table and picture that does not match the logs

Where a command on a page names runs/NAME, the logs in results/NAME/ (bench/logs.py) are taken. A table stands between
`<!-- made by bench.evidence: NAME -->` and `<!-- end -->`. The command that made its runs, `python -m tools.ablate ...
--out runs/NAME`, must be on one of the pages. It is not run again, but its flags decide what the table shows. The table
`default` needs no command. Each command `python -m tools.plot ... --out results/...` makes a picture, which contains a
fingerprint of its logs and flags. Those of `tools.compare` have none. Not supported: commands with --tune; --check does
not notice if the code that draws the pictures has changed.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import logs
from tools import ablate, plot

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- made by [\w.]+: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def text_of_pages() -> str:
    return "\n".join(page.read_text() for page in pages()).replace("\\\n", " ")


def commands(tool: str) -> list[list[str]]:
    """Return the words that follow `python -m tools.TOOL` in each such command on the pages."""
    found = re.findall(rf"^python -m tools\.{tool} (.+)$", text_of_pages(), re.MULTILINE)
    return [shlex.split(words, comments=True) for words in found]


def unpack(folder: Path) -> None:
    """Write the runs that the pages name to FOLDER/runs/, as far as their logs are kept."""
    for name in {"default", *re.findall(r"\bruns/(\w+)", text_of_pages())}:
        logs.unpack(ROOT / "results" / name, folder / "runs" / name)


def tables(folder: Path) -> dict[str, str]:
    made = {"default": default_table(folder / "runs" / "default")}
    for args in map(ablate.parse, commands("ablate")):
        args.out = folder / args.out
        if args.out.is_dir():
            made[args.out.name] = ablate.table(args)  # an error if the runs do not have the settings of the command
    return made


def default_table(runs: Path) -> str:
    rows = [["", "greedy, before", "after", "sampled, before", "after", "length, before", "after", "seconds"]]
    names = [("eval/accuracy", ".3f"), ("eval/pass@1", ".3f"), ("eval/completion_length", ".1f")]
    for run in sorted(runs.glob("seed-*")):
        first, *trained = plot.read_log(run).lines
        cells = [f"{line[name]:{digits}}" for name, digits in names for line in (first, trained[-1])]
        seconds = sum(line["seconds_rollout"] + line["seconds_update"] for line in trained)
        rows.append([run.name.replace("-", " "), *cells, f"{seconds:.0f}"])
    return ablate.markdown(*rows)


def pictures(folder: Path) -> dict[Path, tuple[plot.Figure, str]]:
    made = {}
    for args in map(plot.parse, commands("plot")):
        if args.out.parts[0] == "results":
            args.runs = [run for pattern in args.runs for run in sorted(folder.glob(str(pattern)))]
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


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args(words).check
    with TemporaryDirectory() as folder:
        unpack(Path(folder))
        made, drawn = tables(Path(folder)), pictures(Path(folder))
        if not is_check:
            write(pages(), made, drawn)
        elif found := list(mismatches(pages(), made, drawn)):
            sys.exit("\n".join(found))


if __name__ == "__main__":
    main(sys.argv[1:])
