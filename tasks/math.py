r"""Math: problems whose answers are put in \boxed{} and judged by math-verify, as MATH and DAPO-17k are trained on.

    --task math                                                    the hub's DigitalLearningGmbH/MATH-lighteval
    --task math --data agentica-org/DeepScaleR-Preview-Dataset     or a file: a problem and its answer in each row

Needs `pip install math-verify==0.9.*`. The reward is 1 where it finds the answer in the last box equal, else 0. It is
lenient: 2+1 equals 3, 10% equals 0.1. What takes it more than five seconds is wrong. Columns: prompt, answer.
"""

import re

from config import Config, UserError
from tasks import Task, text_of
from tasks._files import excerpt, hub_splits

DEFAULTS = {}  # all as for a real model


def to_row(row: dict) -> dict:
    """Of a data set's problem, and its answer or else its solution with a box. Other rows stay what they are."""
    if "problem" not in row:
        return row
    problem = row["problem"] + "\nThink step by step, and put your final answer in \\boxed{}."
    return {"prompt": [{"role": "user", "content": problem}], "answer": row.get("answer") or row.get("solution")}


def equal_answer(prompts, completions, completion_ids, answer: list, **columns) -> list[float]:
    """1 if the completion's last box holds the answer."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise UserError("--task math: pip install math-verify==0.9.*") from None
    rewards = []
    for prompt, completion, wanted in zip(prompts, completions, answer, strict=True):
        gold = parse(str(wanted) if re.search(r"\$|\\boxed", str(wanted)) else f"${wanted}$")  # bare LaTeX is not found
        if not gold:
            raise UserError(f"the answer {wanted!r} is no mathematics, for prompt {excerpt(prompt)}")
        _, box, boxed = text_of(completion).rpartition("\\boxed{")
        rewards.append(float(verify(gold, parse(box + boxed, [LatexExtractionConfig(boxed_match_priority=0)]))))
    return rewards


def load(config: Config) -> Task:
    train, test = (list(map(to_row, rows)) for rows in hub_splits(config, "DigitalLearningGmbH/MATH-lighteval"))
    return Task(train, test, [equal_answer], [1.0], correct="equal_answer", to_row=to_row)
