"""Show how well models play `--task guess` on ranges that they were not trained on: how often they find the number,
compared with a player who guesses at random and with one who halves the range, and whether they guess near its middle.

    python results/guess/guess.py play MODEL NAME      two games of each held-out row, in results/guess/NAME.jsonl.gz
    python results/guess/guess.py table                prints the table of docs/findings.md and what halving would find
"""

import statistics
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from bench import logs  # noqa: E402
from config import Config  # noqa: E402
from rollout import Sampling, rollout, uniforms  # noqa: E402
from tasks import guess, turns_of  # noqa: E402
from tasks._turns import Conversation  # noqa: E402

SAMPLES = 2


@cache
def random_player(size: int, guesses: int = guess.GUESSES) -> float:
    """Return the probability of finding one of `size` numbers by guessing at random among those that are left."""
    if size == 0 or guesses == 0:
        return 0.0
    # There are size² equally likely pairs of a first guess and a secret number. In `size` of them, the guess is right.
    # Take the first guess with n numbers below it. In n pairs the secret number is one of these, and later guesses are
    # expected to find n * random_player(n, guesses - 1) of the n. Summed over all first guesses, these expected numbers
    # are sum(found_below). By symmetry, secret numbers above the first guess add as much.
    found_below = [n * random_player(n, guesses - 1) for n in range(size)]
    return (size + 2 * sum(found_below)) / size**2


def bisection(size: int) -> float:
    """Return the probability of finding one of `size` numbers by always halving those that are left."""
    return min(1.0, (2**guess.GUESSES - 1) / size)


def play(folder: str, name: str) -> None:
    """Let the model in a folder play, and write its games."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = [row for row in guess.load(Config()).eval for _ in range(SAMPLES)]
    replies = [Conversation(guess.reply, row, tokenizer, [tokenizer.eos_token_id]) for row in rows]
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    sampling = Sampling(guess.DEFAULTS["max_completion_length"], [tokenizer.eos_token_id], tokens_at_once=32768)
    uniform = uniforms(12345, 0, [divmod(i, SAMPLES) for i in range(len(rows))], sampling.max_completion_length)
    completions = rollout(model, prompts, uniform, sampling, replies=replies)
    turns = [turns_of(made, tokenizer) for made in completions]
    ids, numbers = [made.ids for made in completions], [row["number"] for row in rows]
    scores = guess.found([], [], ids, turns=turns, number=numbers)
    games = [row | {"turns": said, "found": score} for row, said, score in zip(rows, turns, scores, strict=True)]
    logs.write_gz(HERE / f"{name}.jsonl.gz", logs.as_jsonl(games))


def size_of(game: dict) -> int:
    low, high = map(int, game["prompt"].rstrip(":").split("-"))
    return high - low + 1


def near_middle(game: dict) -> bool:
    """Return whether the first guess is near the middle: if n other numbers are possible, at least n // 3 of them are
    below it, and at least n // 3 are above it."""
    low, high = map(int, game["prompt"].rstrip(":").split("-"))
    number = int(game["turns"][0]) if game["turns"][0].isdecimal() else 0
    return min(number - low, high - number) >= (high - low) // 3


def read_games(name: str) -> list[dict]:
    return logs.read_gz(HERE / f"{name}.jsonl.gz")


def line(name: str) -> str:
    """Return a model's line of the table. The two games of a held-out row are not independent, so the interval is
    computed from one value for each row, the mean of its two games."""
    games = read_games(name)
    found = [statistics.fmean(game["found"] for game in games[i : i + SAMPLES]) for i in range(0, len(games), SAMPLES)]
    half = 1.96 * statistics.stdev(found) / len(found) ** 0.5
    cells = [
        f"{statistics.fmean(found):.3f} ± {half:.3f}",
        f"{statistics.fmean(len(game['turns']) for game in games):.2f}",
        f"{statistics.fmean(map(near_middle, games)):.2f}",
    ]
    label = "before training" if name == "before" else name.replace("-", " ")
    return f"| {label} | {' | '.join(cells)} |"


def table() -> str:
    names = ["before", *sorted(path.name.removesuffix(".jsonl.gz") for path in HERE.glob("seed-*.jsonl.gz"))]
    sizes = [size_of(game) for game in read_games("before")]
    chance = statistics.fmean(map(random_player, sizes))
    best = statistics.fmean(map(bisection, sizes))
    head = [
        "| | found (95 % interval) | mean turns | first guess near the middle |",
        "|---|---|---|---|",
    ]
    rows = [f"| random player | {chance:.3f} | | |", *map(line, names)]
    return "\n".join([*head, *rows, "", f"Halving the range would find {best:.3f}."])


if __name__ == "__main__":
    play(*sys.argv[2:]) if sys.argv[1] == "play" else print(table())
