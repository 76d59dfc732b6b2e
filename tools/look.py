"""Make RUN/look.html, a page for reading the completions of a run. It is a single file and needs no network.

    python -m tools.look runs/addition-grpo-0

The page shows the completions in samples.jsonl: four for each step, unless the run had another --samples_per_step.
"""

import argparse
import json
import math
import sys
from pathlib import Path


def content(run: Path, megabytes: float) -> dict:
    """The data of the page. If the completions take more than that many megabytes, some steps are left out."""
    files = run / "metrics.jsonl", *run.glob("samples.jsonl")  # without samples, the page still shows the curves
    metrics, *samples = ([json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in files)
    trained, held_out = ([x for lines in samples for x in lines if x["kind"] == kind] for kind in ("train", "eval"))
    steps = sorted({line["step"] for line in trained})
    every = math.ceil(sum(len(json.dumps(line)) for line in trained) / (megabytes * 1e6))
    kept = {*steps[:: -max(1, every)]}  # the last step is always among them
    ends = [line["step"] for line in held_out[:1] + held_out[-1:]]
    left_out = f": {len(kept)} of {len(steps)} steps, the others are left out (--megabytes {megabytes:g})"
    return {
        "title": run.resolve().name + (left_out if len(kept) < len(steps) else ""),
        "metrics": metrics,
        "trained": [line for line in trained if line["step"] in kept],
        "held_out": [line for line in held_out if line["step"] in ends],
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--megabytes", type=float, default=40.0, help="the most that the completions may take")
    args = parser.parse_args(words)
    data = json.dumps(content(args.run, args.megabytes)).replace("<", "\\u003c")  # no text can end the script element
    (args.run / "look.html").write_text(Path(__file__).with_suffix(".html").read_text().replace("DATA", data))
    print(args.run / "look.html")


if __name__ == "__main__":
    main(sys.argv[1:])
