"""TL;DR: TRL's quick start, to see a run work. Posts are answered in 20 characters.

The reward is minus the distance from 20 characters of decoded text (not tokens; special tokens are not in the text).
The rows are the hub's trl-lib/tldr. Columns: prompt.
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
