"""What it costs two ranks to exchange the completions of a step: CPU-microseconds and bytes for each token.

    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc_per_node 2 results/lengths/gather.py > results/lengths/gather.md

The 128 completions are made up, 64 on each rank. Their lengths are drawn as in the runs of this folder. Each token has
an id, a log-prob and a kept set: 20 ids, out of 152,000, that top-k or top-p would leave. The time is that of both
ranks together, the best of five.
"""

import json
import pickle
import time

import numpy as np

from advantage import Group
from infra import ranks, run_folder
from rollout import Completion
from tools import ablate

VOCABULARY, KEPT, ROWS = 152_000, 20, 64


def group_of(length: int, rng: np.random.Generator) -> Group:
    kept = np.split(rng.integers(0, VOCABULARY, length * KEPT).astype(np.int32), length)
    ids, logp = rng.integers(0, VOCABULARY, length), -rng.random(length)
    completion = Completion(ids.astype(np.int32), logp.astype(np.float32), truncated=False, kept=kept)
    return Group([1, 2, 3], {"prompt": "p"}, [completion])


def main() -> None:
    ranks.start()
    rows = []
    for limit in (256, 1024, 4096, 16384):
        rng = np.random.default_rng(ranks.rank())
        lengths = rng.lognormal(np.log(limit / 4), 0.8, ROWS).astype(int).clip(1, limit)
        own = [group_of(int(length), rng) for length in lengths]
        seconds = []
        for _ in range(5):
            start = time.process_time()
            groups = ranks.gather(own)
            own_seconds = time.process_time() - start
            seconds.append(sum(ranks.gather([own_seconds])))
        tokens = sum(len(group.completions[0].ids) for group in groups)
        rows.append([f"{limit}", f"{1e6 * min(seconds) / tokens:.2f}", f"{len(pickle.dumps(groups)) / tokens:.0f}"])
    if ranks.rank() == 0:
        print(ablate.markdown(["limit", "CPU-microseconds", "bytes"], *rows))
        print(f"\n{json.dumps(run_folder.provenance())}")


main()
