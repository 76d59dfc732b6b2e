"""Reasoning Gym: `--task gym:NAME` trains on the data set NAME, which makes its questions and scores the answers.

    --task gym:chain_sum
    --task 'gym:chain_sum:{"max_terms": 2, "max_digits": 1, "size": 500}'    with settings of the data set, as JSON

Install it first: `pip install reasoning-gym`. The answer is the text between the last <answer> and </answer>. A right
answer is worth 1, and some data sets give partial credit for a wrong one. Each question occurs only once, and a fifth
of the questions are held out. Some data sets take seconds for each row; give them a smaller "size". Columns: prompt,
number (of the question in the data set).
"""

import json
import re

from config import Config, UserError, needs
from tasks import Task, text_of

VARIANTS = True  # `load` reads what follows "gym:"
ASK = "\nPut your final answer inside <answer> and </answer>."
# The scorers of these data sets execute the answer as Python code, so they are refused.
RUNS_ANSWERS = """binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24
    simple_integration spiral_matrix string_insertion""".split()


def load(config: Config) -> Task:
    name, _, settings = config.task.partition(":")[2].partition(":")
    if found := set(RUNS_ANSWERS) & set(re.findall(r"\w+", config.task)):  # the JSON may name data sets, too
        raise UserError(f"--task {config.task}: the scorer of {found.pop()} runs a model's answers as Python code")
    if not name:
        raise UserError(f"--task {config.task}: needs the name of a data set, for instance gym:chain_sum")
    needs("reasoning_gym")
    from reasoning_gym import create_dataset, utils

    try:
        data_set = create_dataset(name, **(dict(size=2048, seed=0) | json.loads(settings or "{}")))
    except (AssertionError, TypeError, ValueError) as error:  # an unknown name or setting, or broken JSON
        raise UserError(f"--task {config.task}: {error}") from error
    entries = list({entry["question"]: entry for entry in data_set}.values())

    def gym_score(prompts, completions, completion_ids, number: list[int], **columns) -> list[float]:
        return [score(utils.extract_answer(text_of(x)), entries[n]) for x, n in zip(completions, number, strict=True)]

    def score(answer: str | None, entry: dict) -> float:
        try:
            return 0.0 if answer is None else data_set.score_answer(answer, entry)
        except Exception:  # several scorers raise an error if they cannot read the answer
            return 0.0

    asked = [[{"role": "user", "content": entry["question"] + ASK}] for entry in entries]
    rows = [{"prompt": prompt, "number": n} for n, prompt in enumerate(asked)]
    # Hold out rows of the same data set. One with another seed could contain the same questions, because row i is made
    # with seed + i.
    held_out = len(rows) // 5
    return Task(rows[held_out:], rows[:held_out], [gym_score], [1.0], correct="gym_score")
