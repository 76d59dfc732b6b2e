"""GSM8K: word problems with grade-school arithmetic, from openai/gsm8k on the hub.

The reward is 1 if the final number of the completion equals the answer, and 0 otherwise. Columns: prompt, answer (72,
"72", or the data set's own text that ends in "#### 72").
"""

import re
from decimal import Decimal

from config import Config, UserError
from tasks import Task, text_of
from tasks._files import hub_splits


def to_row(row: dict) -> dict:
    question = row["question"] + "\nThink step by step, and put the final number in \\boxed{}."
    return {"prompt": [{"role": "user", "content": question}], "answer": row["answer"].rpartition("####")[2].strip()}


# The parts of this expression, in order:
# - What must not come before a number with its sign: a letter, a dot, a comma, a digit, a closing parenthesis, or "1e-"
#   or "1e+", so that the 5 of "1e-5" is not found. After a digit or a closing parenthesis, "-" is a minus and not a
#   sign: "10-5" has the numbers 10 and 5.
# - A sign.
# - Digits, with or without commas between groups of three, and a decimal part.
# - What must not come after a number: more digits, as in "1,2" or "1.2.3", or an exponent, as in "1e3".
NUMBER = re.compile(r"(?ai)(?<![a-z0-9.,)])(?<!\de[-+])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![.,]?\d|e[-+]?\d)")
BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def right_number(prompts, completions, completion_ids, answer: list, **columns) -> list[float]:
    """Return 1 if the final number of the completion equals the answer, otherwise 0."""
    numbers = [only_number(str(wanted).rpartition("####")[2]) for wanted in answer]
    for number, wanted, prompt in zip(numbers, answer, prompts, strict=True):
        if number is None:
            raise UserError(f"the answer {wanted!r} has no number, or several, for prompt {prompt!r:.200}")
    return [float(final_number(text_of(given)) == number) for given, number in zip(completions, numbers, strict=True)]


def final_number(text: str) -> Decimal | None:
    r"""Return the number in the last \boxed{}. If there is no box, return the number in the first line of the text that
    follows the last "####". If there is no "####" either, return the last number of the text."""
    if "\\boxed{" in text:
        box = BOX.match(text, text.rindex("\\boxed{"))
        return only_number(box[1]) if box else None
    if "####" in text:
        return only_number(text.rpartition("####")[2].strip().partition("\n")[0])
    return (numbers_in(text) or [None])[-1]


def only_number(text: str) -> Decimal | None:
    """Return the number in the text, or None if it has none or several."""
    found = numbers_in(text)
    return found[0] if len(found) == 1 else None


def numbers_in(text: str) -> list[Decimal]:
    """Return all numbers in the text. As Decimals they are exact, and 72.0 equals 72."""
    # Remove dollar signs and LaTeX's thin spaces. Replace LaTeX's comma {,} and the Unicode minus by plain ones.
    plain = re.sub(r"\\?\$|\\[,!]", "", text).replace("{,}", ",").replace("−", "-")
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(plain)]


def load(config: Config) -> Task:
    train, test = ([to_row(row) for row in rows] for rows in hub_splits(config, "openai/gsm8k", "main"))
    return Task(train, test, [right_number], [1.0], correct="right_number")
