"""A run -> a page to read its completions on, RUN/look.html: one file, which opens from disk without a network.

    python -m tools.look runs/addition-grpo-0

It shows the completions that the run has written, four of a step unless --samples_per_step says otherwise.
"""

import argparse
import json
import math
import sys
from pathlib import Path


def content(run: Path, megabytes: float) -> dict:
    """What the page shows. Where that would be more, only every n-th step."""
    files = run / "metrics.jsonl", *run.glob("samples.jsonl")  # the curves of a run that kept no samples can be seen
    metrics, *samples = ([json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in files)
    trained, held_out = ([x for lines in samples for x in lines if x["kind"] == kind] for kind in ("train", "eval"))
    steps = sorted({line["step"] for line in trained})
    every = math.ceil(sum(len(json.dumps(line)) for line in trained) / (megabytes * 1e6))
    kept = {*steps[:: -max(1, every)]}  # the last one is always among them
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
    parser.add_argument("--megabytes", type=float, default=40.0, help="of completions, which a browser has to open")
    args = parser.parse_args(words)
    data = json.dumps(content(args.run, args.megabytes)).replace("<", "\\u003c")  # no text ends the script it stands in
    (args.run / "look.html").write_text(Path(__file__).with_suffix(".html").read_text().replace("DATA", data))
    print(args.run / "look.html")


if __name__ == "__main__":
    main(sys.argv[1:])
