import sys
from types import SimpleNamespace

from config import Config
from tasks.tldr import load, near_20


def test_the_reward_is_highest_at_20_characters():
    for text, value in [("x" * 20, 0), ("x" * 19, -1), ("x" * 22, -2), ("é" * 20, 0), ("", -20)]:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert near_20([""], [completion], [[1]]) == [value]


def test_rows_come_from_the_hub(monkeypatch):
    def load_dataset(name, subset=None, split=None):
        assert (name, subset) == ("trl-lib/tldr", None)
        return [{"prompt": f"SUBREDDIT: {split} TL;DR:", "completion": " a summary"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = load(Config())
    assert task.train == [{"prompt": "SUBREDDIT: train TL;DR:"}]
    assert task.eval == [{"prompt": "SUBREDDIT: test TL;DR:"}]
    assert task.rewards[0]([""], ["x" * 20], [[1]]) == [task.correct_at]
