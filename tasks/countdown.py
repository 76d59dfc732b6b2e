"""Countdown: write an expression that equals a target and uses each of the given numbers exactly once.

The model is asked to think inside <think> and to give the expression inside <answer>. The reward is 1 if the expression
is right, plus 0.1 if the completion is a thought and an answer and nothing else. Columns: prompt, numbers (a list of
integers), target, and solution, which no reward uses.
"""

import ast
import operator
import random
import re
from fractions import Fraction

from config import Config
from tasks import Task, text_of

TRAIN_ROWS = 8192
PROMPT = """\
Write an expression that equals {target}. Use each of the numbers {numbers} exactly once, with + - * / and parentheses.
Think inside <think> </think>, then give the expression alone inside <answer> </answer>, like this: \
<answer>(1 + 2) / 3</answer>"""
ANSWER = re.compile(r"<answer>([^<>]*)</answer>")
# A thought, which has no tags inside and may lack its <think>, and then one answer.
SHAPE = re.compile(r"(<think>)?((?!</?(think|answer)>).)*</think>\s*" + ANSWER.pattern, re.DOTALL)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def draw_problem(rng: random.Random) -> dict:
    """Draw three or four numbers and join them from left to right by signs that keep every intermediate result whole.
    The prompt shows the numbers sorted. An answer may use any brackets, and its intermediate results may be
    fractions."""
    drawn = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
    target, solution, numbers = drawn[0], str(drawn[0]), sorted(drawn)
    for number in drawn[1:]:
        sign = rng.choice("+-*/" if target % number == 0 else "+-*")
        target = {"+": target + number, "-": target - number, "*": target * number, "/": target // number}[sign]
        solution = f"({solution} {sign} {number})"
    prompt = [{"role": "user", "content": PROMPT.format(target=target, numbers=", ".join(map(str, numbers)))}]
    return {"prompt": prompt, "numbers": numbers, "target": target, "solution": solution}


def equation(prompts, completions, completion_ids, numbers: list, target: list, **columns) -> list[float]:
    """Return 1 if the last <answer> is an expression of exactly these numbers that equals the target, otherwise 0."""
    answers = [(ANSWER.findall(text_of(completion)) or [""])[-1] for completion in completions]
    cases = zip(answers, numbers, target, strict=True)
    return [float(value_of(answer, given) == Fraction(wanted)) for answer, given, wanted in cases]


def well_formed(prompts, completions, completion_ids, **columns) -> list[float]:
    """Return 1 if the completion is a thought and an answer and nothing else, otherwise 0. The opening <think> may be
    missing, because the chat templates of some reasoning models put it into the prompt."""
    return [float(SHAPE.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def value_of(text: str, numbers: list[int]) -> Fraction | None:
    """Return the exact value of an expression of + - * / and parentheses that uses every number exactly once. Return
    None if the text is anything else."""
    given = sorted(map(str, numbers))
    if len(text) > 200 or sorted(re.findall("[0-9]+", text)) != given or re.search(r"[^0-9+*/()\s-]", text):
        return None
    try:
        return _value(ast.parse(" ".join(text.split()), mode="eval").body)  # a line break would be a syntax error
    except (SyntaxError, KeyError, AttributeError, ZeroDivisionError):  # the last for x / 0
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    return OPERATORS[type(node.op)](_value(node.left), _value(node.right))


def load(config: Config) -> Task:
    """Draw distinct problems, the same in every run. None are drawn if --data replaces them."""
    rng, problems = random.Random(0), {}
    while not config.data and len(problems) < TRAIN_ROWS + config.eval_prompts:
        row = draw_problem(rng)
        if 10 <= row["target"] <= 999:
            problems.setdefault((*row["numbers"], row["target"]), row)
    rows = list(problems.values())
    return Task(rows[:TRAIN_ROWS], rows[TRAIN_ROWS:], [equation, well_formed], [1.0, 0.1], correct="equation")
