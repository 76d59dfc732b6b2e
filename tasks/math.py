r"""Math: problems whose answers are put in \boxed{} and judged by math-verify, as MATH and DAPO-17k are trained on.

    --task math                                                    the hub's DigitalLearningGmbH/MATH-lighteval
    --task math --data agentica-org/DeepScaleR-Preview-Dataset     or a file: a problem and its answer in each row

Needs `pip install math-verify==0.9.*`. The reward is 1 where it finds the last box equal to the answer, else 0. It is
lenient: 2+1 equals 3, 10% equals 0.1. What takes it more than five seconds is wrong.
"""

from config import Config, UserError
from tasks import Task, text_of
from tasks._files import hub_splits

ASK = "\nThink step by step, and put your final answer in \\boxed{}."


def to_row(row: dict) -> dict:
    """A row may call its problem the prompt, and have a solution for the answer. Chat messages stay what they are."""
    problem, answer = row.get("problem", row.get("prompt")), row.get("answer", row.get("solution"))
    prompt = [{"role": "user", "content": problem + ASK}] if isinstance(problem, str) else problem
    return {"prompt": prompt, "answer": answer}


def equal_answer(prompts, completions, completion_ids, answer: list, **columns) -> list[float]:
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise UserError("--task math: pip install math-verify==0.9.*") from None

    def last_box(text: str) -> list:
        _, box, inside = text.rpartition("\\boxed{")
        return parse(box + inside, [LatexExtractionConfig(boxed_match_priority=0)]) if box else []

    golds = [text if "\\boxed{" in text else f"\\boxed{{{text.strip(' $')}}}" for text in map(str, answer)]
    for prompt, wanted, gold in zip(prompts, answer, golds, strict=True):
        if wanted is None or not last_box(gold):  # every answer would be wrong
            raise UserError(f"no mathematics is found in the answer {wanted!r}, for prompt {prompt!r:.200}")
    return [float(verify(last_box(a), last_box(text_of(b)))) for a, b in zip(golds, completions, strict=True)]


def load(config: Config) -> Task:
    splits = (list(map(to_row, rows)) for rows in hub_splits(config, "DigitalLearningGmbH/MATH-lighteval"))
    return Task(*splits, [equal_answer], [1.0], correct="equal_answer", to_row=to_row)
