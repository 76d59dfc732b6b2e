"""Keep the logs of a study, which is a folder of runs, in one compressed file.

    python -m bench.logs keep runs/blocks --columns reward     writes results/blocks/metrics.jsonl.gz
    python -m bench.logs unpack results/blocks                 writes runs/blocks/, for tools.plot and the other tools

`read` takes either folder, and zcat shows an archive. Its first line has what config.json says in all runs: settings,
commit, versions, hardware. Each run then has a line with the rest of its config.json, and its lines of metrics.jsonl.
Of these, --columns keeps what tables and pictures need. If a commit has the whole logs, give it as --whole.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import NamedTuple

from infra import run_folder

ROOT = Path(__file__).parent.parent


class Run(NamedTuple):
    config: dict  # of config.json
    lines: list[dict]  # of metrics.jsonl


def read(study: Path) -> dict[str, Run]:
    """Return the runs of a study by name."""
    if (study / "metrics.jsonl.gz").exists():
        return from_archive(study / "metrics.jsonl.gz")
    # train.py --overwrite renames the folder of an earlier run to NAME.replaced-1 and so on. Skip those.
    logs = [log for log in sorted(study.glob("*/metrics.jsonl")) if ".replaced-" not in log.parent.name]
    return {
        log.parent.name: Run(run_folder.read_json(log.parent / "config.json"), run_folder.read_lines(log))
        for log in logs
    }


def from_archive(file: Path) -> dict[str, Run]:
    about, *lines = read_gz(file)
    runs: dict[str, Run] = {}
    for line in lines:
        name = line.pop("run")
        if "config" in line:
            runs[name] = Run(merged(about["shared"], line["config"]), [])
        else:
            runs[name].lines.append(line)
    return runs


def keep(study: Path, columns: list[str] | None = None, whole: str | None = None) -> None:
    """Write the archive. In it, absolute paths become relative ones, such as those in the command on a page."""
    runs = read(study)
    if not runs:
        sys.exit(f"error: {study} has no folders of runs")
    shared = shared_by([run.config for run in runs.values()])
    about = {"whole": f"git show {whole}:results/{study.name}/RUN/metrics.jsonl"} if whole else {}
    lines = [about | {"shared": shared}]
    for name, run in runs.items():
        lines.append({"run": name, "config": without(run.config, shared)})
        for line in run.lines:
            kept = {key: x for key, x in line.items() if columns is None or key in ("step", *columns)}
            lines.append({"run": name} | kept)
    text = as_jsonl(lines).replace(f"{study.parent.resolve()}/", "runs/").replace(f"{ROOT}/", "")
    write_gz(ROOT / "results" / study.name / "metrics.jsonl.gz", text)


def unpack(study: Path, to: Path) -> None:
    """Write the runs of an archive to the folders that they came from."""
    for name, run in read(study).items():
        (to / name).mkdir(parents=True)
        (to / name / "config.json").write_text(json.dumps(run.config, indent=2) + "\n")
        (to / name / "metrics.jsonl").write_text(as_jsonl(run.lines))


def as_jsonl(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def read_gz(file: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def write_gz(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))  # without the time, the same logs make the same file


# ---- What all runs share, in nested dictionaries ----


def shared_by(all_of: list[dict]) -> dict:
    first, *others = all_of
    shared = {}
    for name, x in first.items():
        there = [other[name] for other in others if name in other]
        if len(there) == len(others):
            if isinstance(x, dict):
                shared[name] = shared_by([x, *there])
            elif all(y == x for y in there):
                shared[name] = x
    return shared


def without(config: dict, shared: dict) -> dict:
    own = {name: x for name, x in config.items() if name not in shared or x != shared[name]}
    return {name: without(x, shared.get(name, {})) if isinstance(x, dict) else x for name, x in own.items()}


def merged(shared: dict, own: dict) -> dict:
    nested = {name: merged(shared.get(name, {}), x) for name, x in own.items() if isinstance(x, dict)}
    return shared | own | nested


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["keep", "unpack"])
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY")
    parser.add_argument("--columns", nargs="+", help="default: all")
    parser.add_argument("--whole", metavar="COMMIT")
    args = parser.parse_args(words)
    for study in args.studies:
        if args.what == "keep":
            keep(study, args.columns, args.whole)
        else:
            unpack(study, ROOT / "runs" / study.name)


if __name__ == "__main__":
    main(sys.argv[1:])
