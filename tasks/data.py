"""Rows and rewards of your own, from files: --data and --reward. They also take the place of any other task's."""

from config import Config
from tasks import Task


def load(config: Config) -> Task:
    return Task(train=[], eval=[], rewards=[], weights=[])  # load_task puts in what the files hold
