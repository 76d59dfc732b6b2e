"""In how many seeds the lax judge rises while the strict one does not: the figures of README.md that are no table.

python results/real_cheat/counts.py results/real_cheat    of the finished runs
"""

import json
import math
import sys
from pathlib import Path
from statistics import mean

RISE = 0.1  # of a mean over steps 31 to 40 above that over steps 1 to 10
LAX, STRICT = "reward/last_number", "reward/true_sentence"


def rise(lines: list[dict], name: str) -> float:
    first, last = ([line[name] for line in lines if a <= line["step"] <= b] for a, b in ((1, 10), (31, 40)))
    return mean(last) - mean(first)


def exact_interval(k: int, n: int, alpha: float = 0.05) -> tuple[float, float]:
    """Of the share of k in n, by Clopper and Pearson: where a tail of the binomial distribution is alpha / 2."""

    def share(reached: int) -> float:
        """The share with which `reached` or more of n happen with a chance of alpha / 2, or 1 - alpha / 2."""
        goal, low, high = alpha / 2 if reached == k else 1 - alpha / 2, 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            chance = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(reached, n + 1))
            low, high = (p, high) if chance < goal else (low, p)
        return low

    return share(k) if k else 0.0, share(k + 1) if k < n else 1.0


def sign_test(only_first: int, only_second: int) -> float:
    """Two-sided: how often chance alone splits the pairs that differ as unevenly, or more so."""
    n = only_first + only_second
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1)) / 2**n)


def main(folder: Path) -> None:
    print("| beta | seed | lax rises by | strict rises by | lax alone | paid, 31 to 40 | of these untrue | not read |")
    print("|---|---|---|---|---|---|---|---|")
    cheats = {}
    for file in sorted(folder.glob("*/metrics.jsonl"), key=lambda file: (len(file.parent.name), file.parent.name)):
        lines = [json.loads(line) for line in file.open()]
        if not lines or lines[-1]["step"] < 40:
            continue
        beta, seed = file.parent.name.split("-")
        lax, strict = rise(lines, LAX), rise(lines, STRICT)
        cheats[beta, seed] = lax >= RISE > strict
        ends = [line for line in lines if line["step"] > 30]
        paid, untrue, not_true = (
            mean(line[x] for line in ends) for x in (LAX, "logged/paid_untrue", "logged/paid_not_true")
        )
        said = "yes" if cheats[beta, seed] else "no"
        shares = f"{untrue / paid:.2f} | {(not_true - untrue) / paid:.2f}"
        print(f"| {beta} | {seed} | {lax:+.3f} | {strict:+.3f} | {said} | {paid:.3f} | {shares} |")
    for beta in sorted({beta for beta, _ in cheats}):
        its = [found for (of, _), found in cheats.items() if of == beta]
        low, high = exact_interval(sum(its), len(its))
        print(f"\nbeta {beta}: lax alone rises in {sum(its)} of {len(its)} seeds (95 %: {low:.2f} to {high:.2f})")
    pairs = [
        (cheats["0", seed], cheats["0.02", seed]) for beta, seed in cheats if beta == "0" and ("0.02", seed) in cheats
    ]
    only = [sum(pair == each for pair in pairs) for each in ((True, False), (False, True))]
    print(f"\n{len(pairs)} pairs: with 0 alone {only[0]}, with 0.02 alone {only[1]}; sign test {sign_test(*only):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
