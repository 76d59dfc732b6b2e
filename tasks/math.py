r"""Math: problems whose final answers are in \boxed{} and are judged by math-verify.

    --task math                                                    DigitalLearningGmbH/MATH-lighteval on the hub
    --task math --data agentica-org/DeepScaleR-Preview-Dataset     other rows, each with a problem and its answer

Install the packages of requirements-gpu.txt first. The reward is 1 if math-verify finds the last box equal to the
answer, and 0 otherwise. Math-verify is lenient: 2+1 equals 3, and 10% equals 0.1. An answer that takes it more than
five seconds counts as wrong. Columns: prompt, answer.
"""

from config import Config, UserError, needs
from tasks import Task, text_of
from tasks._files import hub_splits

ASK = "\nThink step by step, and put your final answer in \\boxed{}."


def to_row(row: dict) -> dict:
    """Make a row of this task. The problem is in the column `problem` or `prompt`, and the answer in `answer` or
    `solution`. A prompt that is a list of messages is used as it is, without ASK."""
    prompt, answer = row.get("prompt"), row.get("answer", row.get("solution"))
    if not isinstance(prompt, list):
        prompt = row.get("problem", prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt + ASK}]
    return {"prompt": prompt, "answer": answer}


def equal_answer(prompts, completions, completion_ids, answer: list, **columns) -> list[float]:
    """Return 1 if the last box of the completion equals the answer, otherwise 0."""
    needs("math_verify")
    from math_verify import LatexExtractionConfig, parse, verify

    def last_box(text: str) -> list:
        _, box, inside = text.rpartition("\\boxed{")
        return parse(box + inside, [LatexExtractionConfig(boxed_match_priority=0)]) if box else []

    # Every answer is put into a box, so that it is parsed in the same way as completions.
    golds = [text if "\\boxed{" in text else f"\\boxed{{{text.strip(' $')}}}" for text in map(str, answer)]
    for prompt, wanted, gold in zip(prompts, answer, golds, strict=True):
        if wanted is None or not last_box(gold):  # without this error, every completion would silently count as wrong
            raise UserError(f"the answer {wanted!r} is not mathematics, for prompt {prompt!r:.200}")
    return [float(verify(last_box(gold), last_box(text_of(x)))) for gold, x in zip(golds, completions, strict=True)]


def load(config: Config) -> Task:
    splits = (list(map(to_row, rows)) for rows in hub_splits(config, "DigitalLearningGmbH/MATH-lighteval"))
    return Task(*splits, [equal_answer], [1.0], correct="equal_answer", to_row=to_row)
