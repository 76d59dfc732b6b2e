"""What models make of `--task guess`, on ranges that were never trained on: how often they find the number, beside the
player who halves what is left and the one who guesses at random among it; where they guess; and games.

    python results/guess/guess.py play MODEL NAME      writes results/guess/NAME.jsonl, two games of each held-out row
    python results/guess/guess.py table                prints the tables of docs/findings.md
"""

import json
import statistics
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from config import Config  # noqa: E402
from rollout import Sampling, rollout, uniforms  # noqa: E402
from tasks import guess, turns_of  # noqa: E402
from tasks._turns import Replies  # noqa: E402

SAMPLES = 2


@cache
def random_player(size: int, guesses: int = guess.GUESSES) -> float:
    """The chance to find one of `size` numbers for who guesses at random among those that are left."""
    if size == 0 or guesses == 0:
        return 0.0
    chances = [below * random_player(below, guesses - 1) for below in range(size)]  # that it is below, and is found
    return (size + 2 * sum(chances)) / size**2


def bisection(size: int) -> float:
    return min(1.0, (2**guess.GUESSES - 1) / size)


def play(folder: str, name: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = [row for row in guess.load(Config()).eval for _ in range(SAMPLES)]
    replies = [Replies(guess.reply, row, tokenizer, [tokenizer.eos_token_id]) for row in rows]
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    sampling = Sampling(guess.DEFAULTS["max_completion_length"], [tokenizer.eos_token_id], tokens_at_once=32768)
    uniform = uniforms(12345, 0, [divmod(i, SAMPLES) for i in range(len(rows))], sampling.max_completion_length)
    completions = rollout(model, prompts, uniform, sampling, replies=replies)
    turns = [turns_of(made, tokenizer) for made in completions]
    (found,) = guess.load(Config()).rewards
    scores = found([], [], [made.ids for made in completions], turns, [row["number"] for row in rows])
    games = [row | {"turns": said, "found": score} for row, said, score in zip(rows, turns, scores, strict=True)]
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))


def size_of(game: dict) -> int:
    low, high = map(int, game["prompt"].rstrip(":").split("-"))
    return high - low + 1


def near_middle(game: dict) -> list[bool]:
    """For each guess whether it leaves at least a third of the other numbers that are left on either side."""
    low, high = map(int, game["prompt"].rstrip(":").split("-"))
    made = []
    for turn in game["turns"]:
        number = int(turn) if turn.isdecimal() else 0
        made.append(min(number - low, high - number) >= (high - low) // 3)
        if low <= number <= high and number != game["number"]:
            low, high = (number + 1, high) if number < game["number"] else (low, number - 1)
    return made


def line(name: str) -> list[str]:
    games = [json.loads(text) for text in (HERE / f"{name}.jsonl").read_text().splitlines()]
    rows = [games[i : i + SAMPLES] for i in range(0, len(games), SAMPLES)]
    found = [statistics.fmean(game["found"] for game in row) for row in rows]
    chance, best = (statistics.fmean(map(of, map(size_of, games))) for of in (random_player, bisection))
    half = 1.96 * statistics.stdev(found) / len(found) ** 0.5
    middle = [[made[k] for made in map(near_middle, games) if len(made) > k] for k in range(guess.GUESSES)]
    success = statistics.fmean(found)
    return [
        name,
        f"{success:.3f} ± {half:.3f}",
        f"{chance:.3f}",
        f"{best:.3f}",
        f"{success / best:.2f}",
        f"{statistics.fmean(len(game['turns']) for game in games):.2f}",
        *(f"{statistics.fmean(of_turn):.2f}" for of_turn in middle),
    ]


def games_of(name: str, count: int = 5) -> list[str]:
    """The first game of as many rows."""
    games = [json.loads(text) for text in (HERE / f"{name}.jsonl").read_text().splitlines()][
        : count * SAMPLES : SAMPLES
    ]
    return [f"{game['prompt']} {game['number']}: {' '.join(game['turns'])}" for game in games]


def table() -> str:
    names = ["before", *sorted(path.stem for path in HERE.glob("seed-*.jsonl"))]
    head = "| | found | at random | by halves | of halves' | turns | near the middle in turn 1 | 2 | 3 | 4 | 5 |"
    lines = [head, "|" + "---|" * 11, *("| " + " | ".join(line(name)) + " |" for name in names)]
    return "\n".join([*lines, "", *(f"{name}\n    " + "\n    ".join(games_of(name)) for name in names)])


if __name__ == "__main__":
    play(*sys.argv[2:]) if sys.argv[1] == "play" else print(table())
