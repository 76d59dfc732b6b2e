"""TL;DR: the task of TRL's quick start, for a quick check that a run works. A completion should be 20 characters long.

The reward is minus the difference from 20 characters, counted in the text without special tokens. The rows are from
trl-lib/tldr on the hub. Columns: prompt.
"""

from config import Config
from tasks import Task, text_of
from tasks._files import hub_splits

DEFAULTS = dict(max_completion_length=128)


def near_20(prompts, completions, completion_ids, **columns) -> list[float]:
    return [float(-abs(20 - len(text_of(completion)))) for completion in completions]


def load(config: Config) -> Task:
    train, test = ([{"prompt": row["prompt"]} for row in rows] for rows in hub_splits(config, "trl-lib/tldr"))
    return Task(train, test, [near_20], [1.0], correct="near_20", correct_at=0.0, graded=True)
