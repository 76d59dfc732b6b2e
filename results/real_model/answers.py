"""Keep the part of each run's samples.jsonl that a table needs: the training answers of the last ten steps, without
their tokens.

    PYTHONPATH=. python results/real_model/answers.py runs/real_carry      writes results/real_carry/samples.jsonl.gz
    PYTHONPATH=. python results/real_model/answers.py runs/real_carry 8    keeps only every eighth answer
"""

import json
import sys
from pathlib import Path

from bench import logs

KEPT = ("step", "kind", "prompt", "completion", "reward", "rewards", "length", "truncated")

if __name__ == "__main__":
    study, every = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    kept = []
    for file in sorted(study.glob("*/samples.jsonl")):
        lines = [json.loads(line) for line in file.open()]
        last = [line for line in lines if line["kind"] == "train" and line["step"] > lines[-1]["step"] - 10][::every]
        kept += [{"run": file.parent.name} | {name: line[name] for name in KEPT} for line in last]
    logs.write_gz(Path("results") / study.name / "samples.jsonl.gz", logs.as_jsonl(kept))
