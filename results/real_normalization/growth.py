"""Print how much answers grow during the runs in this folder, and ten answers of each normalization at the end of its
run on seed 11.

    PYTHONPATH=. python results/real_normalization/growth.py > results/real_normalization/growth.txt
"""

import json
from pathlib import Path

from bench import logs
from infra import run_folder
from tools import ablate

HERE = Path(__file__).parent
RUNS, SAMPLES = logs.read(HERE), logs.read_gz(HERE / "samples.jsonl.gz")
NORMALIZATIONS, SEEDS = ("sequence", "global", "constant"), (11, 12, 13, 14, 15)

print("Mean tokens in steps 31 to 40 minus those in steps 1 to 10, with 95 % intervals over the seeds:\n")
rows = []
for normalization in NORMALIZATIONS:
    of_seeds = [RUNS[f"{normalization}-{seed}"].lines for seed in SEEDS]
    cells = []
    for metric in ("length_incorrect", "length_correct"):
        growth = [ablate.figure(log, f"{metric}:31-40") - ablate.figure(log, f"{metric}:1-10") for log in of_seeds]
        cells.append(ablate.with_interval(growth, 1))
    rows.append([normalization, *cells])
print(ablate.markdown(["normalization", "wrong answers", "right answers"], *rows))

for normalization in NORMALIZATIONS:
    print(f"\n## {normalization}\n\n| prompt | answer | tokens | reward |\n|---|---|---|---|")
    for line in [line for line in SAMPLES if line["run"] == f"{normalization}-11"][-10:]:
        answer = " ".join(line["completion"].replace("<|im_end|>", "").split())
        print(f"| {line['prompt'][-1]['content']} | {answer} | {line['length']} | {line['reward']:g} |")
print(f"\n{json.dumps(run_folder.provenance())}")
