r"""Tasks for real models, and how to add your own.

A task is a function of the settings that returns a Task: rows of prompts, rewards, and what a right answer is worth.
This is a complete one. Both functions go into this file, and `"shout": _REAL,` into TASKS in config.py:

    def in_capitals(prompts, completions, completion_ids, word: list[str], **columns) -> list[float]:
        return [float(text_of(c).strip() == w.upper()) for c, w in zip(completions, word, strict=True)]


    def shout(config: Config) -> Task:
        words = ["red", "green", "blue", "white", "black", "brown"]
        rows = [{"prompt": [{"role": "user", "content": f"Shout: {word}"}], "word": word} for word in words]
        return Task(train=rows[2:], eval=rows[:2], rewards=[in_capitals], weights=[1.0], full_reward=1.0)

    python train.py --model Qwen/Qwen2.5-0.5B-Instruct --task shout

With --data the rows are replaced by the file's, so each task says below which columns its rewards need, and then
neither draws nor loads rows of its own.
"""

import random
import re
from decimal import Decimal
from fractions import Fraction

from config import Config
from tasks import Task
from tasks._files import load_hub


def text_of(completion: str | list[dict]) -> str:
    """A completion is a string, or to a chat prompt a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def hub_splits(config: Config, name: str, subset: str | None = None) -> tuple[list[dict], list[dict]]:
    if config.data:
        return [], []
    return load_hub(name, split="train", subset=subset), load_hub(name, split="test", subset=subset)


# ---- countdown: reach a target with given numbers. Columns: prompt, numbers (a list of integers), target ----

TRAIN_ROWS = 8192
COUNTDOWN_PROMPT = """\
Write an expression that equals {target}. Use each of the numbers {numbers} exactly once, with + - * / and parentheses.
Think inside <think> </think>, then give the expression alone inside <answer> </answer>, like this: \
<answer>(1 + 2) / 3</answer>"""
ANSWER = re.compile(r"<answer>([^<>]*)</answer>")
FORMAT = re.compile(r"(<think>)?((?!</?(think|answer)>).)*</think>\s*" + ANSWER.pattern, re.DOTALL)
MAX_CHARACTERS, MAX_DEPTH = 200, 20  # of an expression


def countdown(config: Config) -> Task:
    """The same rows whatever the seed; no two are one problem with its numbers in another order."""
    rng, problems = random.Random(0), {}
    while not config.data and len(problems) < TRAIN_ROWS + config.eval_prompts:
        row = draw_problem(rng)
        if 10 <= row["target"] <= 999:
            problems.setdefault((*sorted(row["numbers"]), row["target"]), row)
    rows = list(problems.values())
    return Task(rows[:TRAIN_ROWS], rows[TRAIN_ROWS:], [equation, format], [1.0, 0.1], full_reward=1.1)


def draw_problem(rng: random.Random) -> dict:
    """Three or four numbers from 1 to 99, joined two at a time until one value is left: the target. In this solution
    every intermediate value is a positive integer; an answer may also pass through fractions, zero and negatives."""
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        rng.shuffle(terms)
        terms.append(join(rng, *terms.pop(), *terms.pop()))
    target, solution = terms[0]
    prompt = COUNTDOWN_PROMPT.format(target=target, numbers=", ".join(map(str, numbers)))
    return {"prompt": user(prompt), "numbers": numbers, "target": target, "solution": solution}


def join(rng: random.Random, a: int, left: str, b: int, right: str) -> tuple[int, str]:
    choices = [(a + b, "+"), (a * b, "*")]
    if a > b:
        choices.append((a - b, "-"))
    if a % b == 0:
        choices.append((a // b, "/"))
    value, sign = rng.choice(choices)
    return value, f"({left} {sign} {right})"


def equation(prompts, completions, completion_ids, numbers: list, target: list, **columns) -> list[float]:
    """1 if the last <answer> is an expression of exactly the given numbers that equals the target."""
    answers = [(ANSWER.findall(text_of(completion)) or [""])[-1] for completion in completions]
    return [float(evaluate(*pair) == Fraction(t)) for *pair, t in zip(answers, numbers, target, strict=True)]


def format(prompts, completions, completion_ids, **columns) -> list[float]:
    """1 if the completion is a thought and an answer, and nothing else. The opening <think> may be missing: the chat
    templates of some reasoning models put it into the prompt."""
    return [float(FORMAT.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def evaluate(text: str, numbers: list[int]) -> Fraction | None:
    """The exact value of an expression of + - * / and parentheses that uses every number once, or None."""
    tokens = re.findall(r"[0-9]+|\S", text) if len(text) <= MAX_CHARACTERS else []
    unused = [str(number) for number in numbers]
    try:
        value = _sum(tokens, unused, depth=0)
    except (IndexError, ValueError, ZeroDivisionError):  # tokens ran out, a token that may not stand there, x / 0
        return None
    return None if tokens or unused else value


def _sum(tokens: list[str], unused: list[str], depth: int) -> Fraction:
    value = _product(tokens, unused, depth)
    while tokens and tokens[0] in ("+", "-"):
        sign, right = tokens.pop(0), _product(tokens, unused, depth)
        value = value + right if sign == "+" else value - right
    return value


def _product(tokens: list[str], unused: list[str], depth: int) -> Fraction:
    value = _factor(tokens, unused, depth)
    while tokens and tokens[0] in ("*", "/"):
        sign, right = tokens.pop(0), _factor(tokens, unused, depth)
        value = value * right if sign == "*" else value / right
    return value


def _factor(tokens: list[str], unused: list[str], depth: int) -> Fraction:
    token = tokens.pop(0)
    if token != "(":
        unused.remove(token)  # ValueError for anything but a given number that is still unused
        return Fraction(token)
    if depth == MAX_DEPTH:
        raise ValueError("nested too deep")
    value = _sum(tokens, unused, depth + 1)
    if tokens.pop(0) != ")":
        raise ValueError("not closed")
    return value


# ---- gsm8k: word problems. Columns: prompt, answer (72, "72", or the data set's own text that ends in "#### 72") ----

# A minus after an operand is no sign ("10-5"), and what is glued to other digits is no number ("1,2", "1.2.3", "1e3").
NUMBER = re.compile(r"(?ai)(?<![a-z0-9.,)])(?<!\de[-+])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![.,]?\d|e[-+]?\d)")
BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def gsm8k(config: Config) -> Task:
    train, test = ([gsm8k_row(row) for row in rows] for rows in hub_splits(config, "openai/gsm8k", "main"))
    return Task(train, test, [right_number], [1.0], full_reward=1.0)


def gsm8k_row(row: dict) -> dict:
    question = row["question"] + "\nThink step by step, and put the final number in \\boxed{}."
    return {"prompt": user(question), "answer": row["answer"].rpartition("####")[2].strip()}


def right_number(prompts, completions, completion_ids, answer: list, **columns) -> list[float]:
    """1 if the completion's final number is the answer's."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        number = only_number(str(wanted).rpartition("####")[2])
        if number is None:
            raise ValueError(f'the answer {wanted!r} is neither a number nor a text that ends in "#### 72"')
        rewards.append(float(final_number(text_of(completion)) == number))
    return rewards


def final_number(text: str) -> Decimal | None:
    r"""In the last \boxed{}; without one, on the line after the last "####"; without either, the last of the text."""
    if "\\boxed{" in text:
        box = BOX.match(text, text.rindex("\\boxed{"))
        return only_number(box[1]) if box else None
    if "####" in text:
        return only_number(text.rpartition("####")[2].strip().partition("\n")[0])
    return (numbers_in(text) or [None])[-1]


def only_number(text: str) -> Decimal | None:
    found = numbers_in(text)
    return found[0] if len(found) == 1 else None


def numbers_in(text: str) -> list[Decimal]:
    """Decimal reads any number of digits exactly; 72.0 equals 72."""
    plain = re.sub(r"\\?\$|\\[,!]", "", text).replace("{,}", ",").replace("−", "-")  # dollars, LaTeX's thin spaces
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(plain)]


# ---- tldr: TRL's quick start, to see a run work: completions of 20 characters. Columns: prompt ----


def tldr(config: Config) -> Task:
    train, test = ([{"prompt": row["prompt"]} for row in rows] for rows in hub_splits(config, "trl-lib/tldr"))
    return Task(train, test, [near_20], [1.0], full_reward=0.0)


def near_20(prompts, completions, completion_ids, **columns) -> list[float]:
    """Minus the distance from 20 characters of decoded text (not tokens; special tokens are not in the text)."""
    return [float(-abs(20 - len(text_of(completion)))) for completion in completions]
