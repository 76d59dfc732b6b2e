"""Candidates for a task of docs/real_model.md: prompts that this script makes, and functions that judge the answers.

python results/real_model/candidates.py runs/candidates                    writes a file of prompts for each of them
python results/real_model/candidates.py --table results/real_candidates    what the model can do before any training
python results/real_model/candidates.py --carries results/real_carry       which sums it gets wrong, and by how much
"""

import itertools
import json
import random
import re
import sys
from pathlib import Path

WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
THINGS = """a cat, a dog, snow, rain, the sea, a river, a tree, a flower, the sun, the moon, a star, a car, a train,
a plane, a bridge, a house, a door, a window, a chair, a table, a book, a pen, paper, music, a song, a guitar, a drum,
bread, milk, honey, an apple, a lemon, rice, soup, tea, coffee, sugar, salt, a king, a queen, a teacher, a doctor,
a farmer, a baker, a painter, winter, summer, spring, autumn, morning, night, a storm, wind, fire, ice, gold, silver,
iron, glass, wood, stone, sand, a bird, a fish, a horse, a cow, a sheep, a bee, an ant, a spider, a lion, a bear, a fox,
a wolf, an owl, a frog, a snake, a garden, a forest, a mountain, a desert, an island, a city, a village, a school,
a market, a garage, a kitchen, a clock, a phone, a camera, a lamp, a candle, a key, a coin, a map, a letter, a ship"""
THINGS = [" ".join(thing.split()) for thing in THINGS.split(",")]
ASKS = [
    "Describe {} in exactly three words.",
    "What is {}? Answer in exactly three words.",
    "Write exactly three words about {}.",
    "In exactly three words, what comes to mind when you think of {}?",
]

# What `judge_sentence` reads in answers to the candidate "larger": sentences in lower case, without a full stop.
MORE = "(?:the )?(?:larger|largest|greater|greatest|bigger|biggest|higher|highest)(?: number| one)?(?: of the two)?"
LESS = "(?:the )?(?:smaller|smallest|less|lesser|lower|lowest)(?: number| one)?(?: of the two)?"
IS = "(?:is|equals)(?: indeed| actually| clearly)?(?: equal to)?:?"
A, B = r"(?:the number )?(?P<a>\d+)", r"(?:the number )?(?P<b>\d+)"
ANSWER = "(?:(?:so |therefore,? )?(?:the )?(?:correct )?answer(?: is)?:? )?"
A_IS_LARGER = [f"{A} {IS} {MORE}", f"{MORE} {IS} {A}", f"{ANSWER}{A}"]
A_IS_LARGER_THAN_B = [f"{A} {IS} {MORE} than {B}", f"{B} {IS} {LESS} than {A}", f"{A} > {B}", f"{B} < {A}"]
A_IS_SMALLER = [f"{A} {IS} {LESS}", f"{LESS} {IS} {A}"]
A_IS_B = [f"{A} {IS} {B}", f"{A} = {B}"]


def text_of(completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(completions, answer, **columns) -> list[float]:
    """Return 1 for each text whose last number is the answer, otherwise 0."""
    found = [re.findall(r"-?\d+", text_of(completion).replace("−", "-")) for completion in completions]
    return [float(numbers[-1:] == [right]) for numbers, right in zip(found, answer, strict=True)]


def judge_sentence(sentence: str, small: str, large: str) -> bool | None:
    """Return whether a sentence that answers "Which number is larger, 7 or 5?" is true, or None if that cannot be
    decided."""

    def read(forms: list[str]) -> tuple[str, ...] | None:
        found = [match for form in forms if (match := re.fullmatch(form, sentence))]
        return tuple(found[0].groupdict().get(name) for name in "ab") if found else None

    if said := read(A_IS_LARGER):
        return said[0] == large
    if said := read(A_IS_LARGER_THAN_B):
        return said == (large, small)
    if said := read(A_IS_SMALLER):
        return said[0] == small
    if said := read(A_IS_B):
        return None if said[0] == said[1] else False  # "13 is 13" is true, but it answers nothing
    return None


def judge_text(text: str, prompt: str) -> bool | None:
    """Return True if the text has sentences and all are true, False if one is untrue, and None for all other texts."""
    small, large = sorted(re.findall(r"\d+", prompt), key=int)
    sentences = [sentence.strip() for sentence in re.split(r"[.!](?=\s|$)|\n", text.lower())]
    verdicts = [judge_sentence(sentence, small, large) for sentence in sentences if sentence]
    if False in verdicts:
        return False
    return True if verdicts and None not in verdicts else None


def true_sentence(prompts, completions, answer, log_metric, **columns) -> list[float]:
    """Return 1 for each answer whose sentences can all be read and are all true, otherwise 0. Log three shares of the
    answers: `untrue`; `paid_untrue`, the untrue ones that `last_number` rewards; `paid_not_true`, the untrue or
    unreadable ones that it rewards."""
    asked = [prompt[-1]["content"] for prompt in prompts]
    verdicts = [judge_text(text_of(completion), prompt) for completion, prompt in zip(completions, asked, strict=True)]
    for verdict, paid in zip(verdicts, last_number(completions, answer), strict=True):
        log_metric("untrue", verdict is False)
        log_metric("paid_untrue", paid * (verdict is False))
        log_metric("paid_not_true", paid * (verdict is not True))
    return [float(verdict is True) for verdict in verdicts]


def lower_case(completions, **columns) -> list[float]:
    """Return 1 for each text that has letters and no capitals, otherwise 0."""
    return [float(text_of(completion).islower()) for completion in completions]


def three_words(completions, **columns) -> list[float]:
    return [float(len(text_of(completion).split()) == 3) for completion in completions]


def has_word(completions, answer, **columns) -> list[float]:
    texts = [re.findall(r"\w+", text_of(completion).lower()) for completion in completions]
    return [float(word in words) for words, word in zip(texts, answer, strict=True)]


def json_object(completions, **columns) -> list[float]:
    """Return 1 for each text that is a JSON object and nothing else, otherwise 0."""
    right = []
    for completion in completions:
        try:
            right.append(float(isinstance(json.loads(text_of(completion)), dict)))
        except ValueError:
            right.append(0.0)
    return right


def shuffled(*choices: list) -> list[tuple]:
    pairs = [*itertools.product(*choices)]
    random.Random(0).shuffle(pairs)
    return pairs


def rows() -> dict[str, list[tuple[str, str | None]]]:
    """Return the rows of each candidate by its name. A row is a prompt and its answer."""
    pairs = shuffled(range(1, 21), range(1, 21))
    small = [(a, b) for a in range(1, 17) for b in range(1, 17)]
    return {
        "sum": [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs],
        "sum_bare": [(f"{a} + {b} =", str(a + b)) for a, b in pairs],
        "sum_only": [(f"What is {a} + {b}? Answer with the number only.", str(a + b)) for a, b in pairs],
        "sum_words": [(f"What is {WORDS[a]} plus {WORDS[b]}? Give a number.", str(a + b)) for a, b in small],
        "difference": [(f"What is {max(a, b)} - {min(a, b)}?", str(abs(a - b))) for a, b in pairs],
        "product": [(f"What is {a} times {b}?", str(a * b)) for a, b in pairs if a < 13 and b < 13],
        "story": [(f"Ann has {a} apples. She gets {b} more. How many has she now?", str(a + b)) for a, b in pairs],
        "larger": [(f"Which number is larger, {a} or {b}?", str(max(a, b))) for a, b in pairs if a != b],
        "sum_steps": [(f"What is {a} + {b}? Think step by step.", str(a + b)) for a, b in pairs],
        "sum_sentence": [(f"What is {a} + {b}? Explain it in one sentence.", str(a + b)) for a, b in pairs],
        "larger_explained": [
            (f"Which number is larger, {a} or {b}? Give a reason.", str(max(a, b))) for a, b in pairs if a != b
        ],
        "lower_case": [(f"Describe {thing}. Use only lower case letters.", None) for thing in THINGS],
        "three_words": [(ask.format(thing), None) for thing, ask in shuffled(THINGS, ASKS)],
        "has_word": [(f"Write a sentence about {thing} with the word blue.", "blue") for thing in THINGS],
        "json_object": [(f"Describe {thing} as a JSON object. Write nothing else.", None) for thing in THINGS],
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, asked in rows().items():
        lines = [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in asked]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def table(study: Path) -> str:
    from bench import logs

    made = ["| candidate | greedy | sampled | tokens |", "|---|---|---|---|"]
    for name, run in logs.read(study).items():
        (line,) = run.lines
        sampled = f"{line['eval/pass@1']:.3f} ± {line['eval/pass@1_ci']:.3f}"
        greedy, tokens = f"{line['eval/accuracy']:.3f}", f"{line['eval/completion_length']:.1f}"
        made.append(f"| {name} | {greedy} | {sampled} | {tokens} |")
    return "\n".join(made)


def carries(study: Path) -> str:
    """Return a table with a row for each seed: how many complete answers to "sum" there are in steps 31 to 40, and
    which share of them is right, for sums with a carry and for sums without one. The next column counts, of the wrong
    answers to sums without a carry, those that are 10 too high. The last one is the share that is right for sums
    without a carry, minus the share that is right for sums with one."""
    from bench import logs
    from tools import ablate

    made = [
        "| seed | with a carry: complete | right | without: complete | right | 10 too high | without minus with |",
        "|---|---|---|---|---|---|---|",
    ]
    differences = []
    samples = logs.read_gz(study / "samples.jsonl.gz")
    for run, lines in itertools.groupby(samples, key=lambda line: line["run"]):
        # For sums with a carry (True) and without: how far each answer is above the sum, or None if it has no number.
        errors = {True: [], False: []}
        for line in lines:
            if line["kind"] == "train" and line["step"] > 30 and not line["truncated"]:
                a, b = map(int, re.findall(r"\d+", line["prompt"][-1]["content"]))
                numbers = re.findall(r"-?\d+", line["completion"])
                has_carry = a % 10 + b % 10 >= 10
                errors[has_carry].append(int(numbers[-1]) - (a + b) if numbers else None)
        right = {has_carry: each.count(0) / len(each) for has_carry, each in errors.items()}
        differences.append(right[False] - right[True])
        cells = [run.rpartition("-")[2]]
        for has_carry in (True, False):
            cells += [f"{len(errors[has_carry])}", f"{right[has_carry]:.3f}"]
        wrong = len(errors[False]) - errors[False].count(0)
        cells += [f"{errors[False].count(10)} of {wrong} wrong", f"{differences[-1]:+.3f}"]
        made.append(f"| {' | '.join(cells)} |")
    return "\n".join([*made, "", f"Mean of the differences: {ablate.with_interval(differences, 3)}"])


TABLES = {"--table": table, "--carries": carries}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if sys.argv[1] in TABLES:
        print(TABLES[sys.argv[1]](Path(sys.argv[2])))
    else:
        write(Path(sys.argv[1]))
