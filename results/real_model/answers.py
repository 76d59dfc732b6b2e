"""Copy the part of each run's samples.jsonl that results/ keeps: the training answers of the last ten steps, without
their tokens.

    python results/real_model/answers.py runs/real_cheat      writes results/real_cheat/*/samples.jsonl
    python results/real_model/answers.py runs/real_cheat 8    copies only every eighth answer
"""

import json
import sys
from pathlib import Path

KEPT = ("step", "kind", "prompt", "completion", "reward", "rewards", "length", "truncated")

if __name__ == "__main__":
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for file in Path(sys.argv[1]).glob("*/samples.jsonl"):
        lines = [json.loads(line) for line in file.open()]
        last = [line for line in lines if line["kind"] == "train" and line["step"] > lines[-1]["step"] - 10][::every]
        to = Path("results").joinpath(*file.parts[-3:])
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text("".join(json.dumps({name: line[name] for name in KEPT}) + "\n" for line in last))
