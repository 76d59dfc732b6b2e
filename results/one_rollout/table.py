"""Print the tables of the study, for the variants whose runs are all kept.

PYTHONPATH=. python results/one_rollout/table.py addition    from results/one_rollout/
PYTHONPATH=. python results/one_rollout/table.py sum         from results/one_rollout_sum/
"""

import statistics
import sys
from pathlib import Path

from bench import logs
from results.one_rollout.study import STUDIES, Study, best_rate, reward_of
from tools.ablate import clear, markdown, with_interval

Variant = tuple[str, int]  # an arm, and its delay


def rewards_of(study: Study, runs: dict[str, logs.Run]) -> dict[Variant, tuple[str, list[float]]]:
    """Return for each variant the rate that the study chose, and the reward of each seed with it."""

    found = {}
    for arm, delay in ((arm, delay) for arm in study.arms for delay in sorted(study.delays)):
        rate = best_rate(study, runs, arm, delay)
        rewards = [reward_of(study, runs, arm, delay, rate, seed) for seed in study.seeds]
        if None not in rewards:
            found[arm, delay] = rate, rewards
    return found


def main(study: Study) -> None:
    runs = logs.read(Path(__file__).parents[1] / study.folder)
    found = rewards_of(study, runs)
    delays = sorted(study.delays)
    one_minus = {
        (arm, delay): [a - b for a, b in zip(found["one", delay][1], rewards, strict=True)]
        for (arm, delay), (_, rewards) in found.items()
        if arm != "one" and ("one", delay) in found
    }
    # The control was added when the others were known, so it is none of the comparisons that were decided on.
    differ = clear({(arm, delay): x for (arm, delay), x in one_minus.items() if arm != "grouped"})

    def cell(variant: Variant) -> str:
        if variant not in found:
            return ""
        rate, rewards = found[variant]
        return f"{statistics.mean(rewards):.3f} ± {statistics.stdev(rewards):.3f} at {rate}"

    def difference(variant: Variant) -> str:
        if variant not in one_minus:
            return ""
        text = with_interval(one_minus[variant], 3)
        return f"**{text}**" if variant in differ else text

    heads = [f"delay {delay}" for delay in delays]
    print(markdown(["arm", *heads], *([arm, *(cell((arm, delay)) for delay in delays)] for arm in study.arms)))
    print("\none minus, bold after Holm's correction")
    groups = [arm for arm in study.arms if arm != "one"]
    print(markdown(["arm", *heads], *([arm, *(difference((arm, delay)) for delay in delays)] for arm in groups)))
    print("\nhow much better one does with the delay than without, beside an arm")
    for (arm, delay), differences in one_minus.items():
        if delay > 0 and arm != "grouped" and ("grpo", 0) in one_minus:
            without = one_minus.get((arm, 0), one_minus["grpo", 0])  # without a delay, centering is grpo
            changes = [a - b for a, b in zip(differences, without, strict=True)]
            print(f"{arm}, {delay}: {with_interval(changes, 3)}")
    for arm in study.arms:
        lines = [line for name, run in runs.items() if name.startswith(f"{arm}-") for line in run.lines]
        if lines and "seconds_update" in lines[0]:
            print(f"seconds of an update, {arm}: {statistics.mean(line['seconds_update'] for line in lines):.1f}")


if __name__ == "__main__":
    main(STUDIES[sys.argv[1]])
