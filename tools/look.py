"""Make RUN/look.html, a page for reading the completions of a run. It is a single file and needs no network.

    python tools/look.py runs/addition-grpo-0           (with the path of this file, from any folder)

The page shows curves of the metrics, and the completions in samples.jsonl: four for each step, unless the run had
another --samples_per_step. If there is more than a browser can show, the page leaves some of it out and says how much:
it has at most 40 MB of completions, 10,000 points of each curve, and the first 10,000 tokens of a completion.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

if __name__ == "__main__":  # find this program from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra import run_folder

MOST_POINTS = 10_000  # of a curve


def content(run: Path, megabytes: float = 40.0) -> dict:
    """Return the data of the page. If the completions take more than that many megabytes, only every second step is
    kept, or every third, and so on. If these still take more, only the last completions that fit are kept, at least
    one."""
    most_bytes = megabytes * 1e6
    metrics, samples = (run_folder.read_lines(run / f"{name}.jsonl") for name in ("metrics", "samples"))
    if not metrics:
        sys.exit(f"error: {run} has no metrics.jsonl with the steps of a run")
    trained, held_out = ([line for line in samples if line["kind"] == kind] for kind in ("train", "eval"))
    steps = sorted({line["step"] for line in trained})
    step_stride = max(1, math.ceil(len(json.dumps(trained)) / most_bytes))
    kept = set(steps[::-step_stride])  # counted from the last one
    shown = [line for line in trained if line["step"] in kept]
    # The bytes of the last line, of the last two, and so on.
    sizes = itertools.accumulate(len(json.dumps(line)) for line in reversed(shown))
    fitting = list(itertools.takewhile(lambda size: size <= most_bytes, sizes))
    shown = shown[-max(1, len(fitting)) :]
    shown_eval_steps = [line["step"] for line in held_out[:1] + held_out[-1:]]  # the first and the last
    point_stride = max(1, math.ceil(len(metrics) / MOST_POINTS))
    points = metrics[::-point_stride][::-1]  # counted from the last one
    parts = (shown, trained, "completions"), (points, metrics, "points of the curves")
    cuts = [f"; {len(part):,} of {len(whole):,} {what}" for part, whole, what in parts if len(part) < len(whole)]
    return {
        "title": "".join([run.resolve().name, *cuts]),
        "metrics": points,
        "trained": shown,
        "held_out": [line for line in held_out if line["step"] in shown_eval_steps],
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args(words).run
    data = json.dumps(content(run)).replace("<", "\\u003c")  # no text can end the script element
    (run / "look.html").write_text(Path(__file__).with_suffix(".html").read_text().replace("DATA", data))
    print(run / "look.html")


if __name__ == "__main__":
    main(sys.argv[1:])
