"""The figures of a step and of an evaluation, and what is told of them."""

import io
import json
import math
import random
import sys
from datetime import date

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from batch import Group
from config import Config
from infra import ranks, report, run_folder
from infra.report import RunLog
from rollout import Completion

NAMES = ["right", "penalty"]


def group(parts: list[list[float]], right: list[bool] | None, lengths: list[int], advantages: bool = True) -> Group:
    """A prompt with a completion for each row of `parts`, which holds a value for each reward."""
    completions = [Completion([7] * n, [0.0] * n, truncated=n > 3) for n in lengths]
    made = Group([1], {"prompt": "a"}, completions)
    made.reward_parts = torch.tensor(parts, dtype=torch.float64)  # (G, K)
    made.rewards = made.reward_parts.nansum(1).where(made.reward_parts.isfinite().any(1), math.nan)
    made.right = None if right is None else torch.tensor(right)
    made.advantages, made.has_signal = torch.zeros(len(parts)) if advantages else None, advantages
    return made


def test_the_figures_of_a_step():
    """Over all that was drawn: a group of several rewards, a dead one that was replaced, one with a missing reward."""
    alive = group([[1.0, -0.5], [0.0, 0.0], [1.0, -1.0]], [True, False, True], [1, 2, 4])
    dead = group([[0.0, 0.0]] * 2, [False] * 2, [3, 3], advantages=False)
    missing = group([[math.nan, math.nan], [1.0, 0.0]], [False, True], [3, 2])
    rewards = {"reward": (0.5 + 1) / 6, "reward/right": 3 / 6, "reward/penalty": -1.5 / 6, "without_reward": 1}
    rewards |= {"reward_std": np.std([0.5, 0, 0], ddof=1) / 2, "dead_groups": 2 / 3}  # of one there is no spread
    lengths = {"length_correct": 7 / 3, "length_incorrect": 11 / 4, "truncated": 1 / 7, "tokens": 18}
    drawn = {"completion_length": 18 / 7, "rejected_groups": 1 / 3, "groups_replaced": 1}
    assert report.of_groups([alive, dead, missing], NAMES) == pytest.approx(rewards | lengths | drawn)
    nothing_says = report.of_groups([group([[1.0, 0.0]], None, [2])], NAMES)
    assert (nothing_says["length_correct"], nothing_says["length_incorrect"]) == (None, None)


def test_the_figures_of_updates_are_means_over_updates_or_tokens_and_what_is_logged_one_for_each_name():
    totals = [[[6.0, 3.0], [0.0, 0.0]], [[2.0, 1.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]]]  # sum and count
    totals = [dict(zip(("entropy", "kl"), torch.tensor(of))) for of in totals]
    updates = [(torch.tensor(x), torch.tensor(2 * x), of) for x, of in zip((1.0, 2.0, 6.0), totals)]
    assert report.of_updates(updates) == {"loss": 3.0, "grad_norm": 6.0, "entropy": 1.5, "kl": None}
    logged = [("logged/b", 1.0), ("logged/a", 3.0), ("logged/b", 2.0), ("logged/b", math.nan), ("logged/c", math.nan)]
    assert report.of_logged(logged) == {"logged/a": 3.0, "logged/b": 1.5, "logged/c": None}


def test_the_figures_of_an_evaluation_are_means_over_prompts_with_their_intervals():
    """Three prompts of which 0, 1 and 5 of 5 samples are right; the interval is 1.96 standard errors to each side.
    Accuracy, rewards and lengths are those of the greedy completion, which is another one than the samples."""

    def of(right: list[int], length: int) -> Group:
        return group([[r, -1.0] for r in right], [r == 1 for r in right], [length] * len(right))

    greedy, sampled = [of([1], 1), of([0], 2), of([1], 5)], [of([0] * 5, 9), of([0, 0, 0, 0, 1], 9), of([1] * 5, 9)]
    of_prompts = {"accuracy": [1, 0, 1], "pass@1": [0, 0.2, 1], "pass@2": [0, 0.4, 1], "pass@4": [0, 0.8, 1]}
    of_prompts |= {"pass@5": [0, 1, 1], "completion_length": [1, 2, 5], "reward": [0, -1, 0]}
    of_prompts |= {"reward/right": [1, 0, 1], "reward/penalty": [-1, -1, -1]}
    expected = {f"eval/{name}": np.mean(x) for name, x in of_prompts.items()}
    expected |= {f"eval/{name}_ci": 1.96 * np.std(x, ddof=1) / 3**0.5 for name, x in of_prompts.items()}
    assert report.of_evaluation(greedy, sampled, NAMES) == pytest.approx(expected)
    one = group([[1.0, 0.0]], None, [1])
    alone = report.of_evaluation([group([[math.nan] * 2], None, [1]), one], [one] * 2, NAMES)
    assert (alone["eval/reward"], alone["eval/reward_ci"]) == (1.0, None)
    assert alone["eval/accuracy"] is alone["eval/pass@1"] is alone["eval/accuracy_ci"] is None


def test_memory_on_a_gpu_and_on_a_cpu(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "gather", lambda made: [*made, 5e12])  # of a second rank
        assert report.of_machine(30, 1.0, 2.0)["peak_memory_gb"] == 5e3
    on_cpu = report.of_machine(30, 1.0, 2.0)
    assert on_cpu["peak_memory_gb"] > 0 and on_cpu["peak_memory_reserved_gb"] is None
    assert (on_cpu["seconds_rollout"], on_cpu["seconds_update"], on_cpu["tokens_per_second"]) == (1.0, 2.0, 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3e9)
    assert list(report.of_machine(30, 1.0, 2.0).values())[-2:] == [2.0, 3.0]


def test_every_line_that_is_written_is_json():
    columns = {"x": [math.inf, {"y": math.nan}], "day": date(2026, 1, 2), 3: (4,)}
    (line,) = report.as_json([{"step": 1, "loss": math.nan, "kl": 0.5, "columns": columns}]).splitlines()
    written = {"x": [None, {"y": None}], "day": "2026-01-02", "3": [4]}
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "kl": 0.5, "columns": written}


def test_the_texts_of_tokens_add_up_to_the_completion_and_a_character_of_several_is_the_last_ones():
    """Id i is byte i, above them are words. The first space of a text is dropped, as by many tokenizers, and bytes are
    decoded as a run: a broken one breaks its neighbours."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"_a": 256, "b_": 257, "_": 258}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    log = RunLog(Config(out="run"), PreTrainedTokenizerFast(tokenizer_object=tokenizer).decode, NAMES)
    ids = [256, 256, *"中é😀中".encode(), 257, *"é".encode(), 258, 256, 0xE4, 256]
    texts = ["a", " a", *["", "", "中"], *["", "é"], *["", "", "", "😀"], *["", "", "中"], "b ", "", "é", " ", " a"]
    texts += ["", "\ufffd a"]
    assert log.tokens(ids, [-0.126] * len(ids), None) == [[text, -0.13] for text in texts]
    assert log.tokens([256, 0xE4], [-1.0, -2.0], [0.123, 0.456]) == [["a", -1.0, 0.12], ["\ufffd", -2.0, 0.46]]
    rng = random.Random(0)
    for length in range(100):
        ids = rng.choices([*range(220, 259), *"中".encode()], k=length)
        assert "".join(text for text, _ in log.tokens(ids, [0.0] * length, None)) == log.decode(ids)


@pytest.mark.parametrize(
    "text, steps, noted",
    [
        ('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n', [0, 1, 2], 0),  # step 3 will be run again
        ('{"step": 1}\n{"step": 2}', [1, 2], 0),  # a whole line, without its end
        ('{"step": 1}\n{"step": 2}\n{"step": ', [1, 2], 0),
        ('{"step": 1}\n{"step": 2}\n{"step": 2}\n', [1, 2, 2], 1),
        ("", [], 1),
    ],
)
def test_lines_of_a_run_that_goes_on_after_step_2(tmp_path, capsys, text, steps, noted):
    (tmp_path / "metrics.jsonl").write_text(text)
    RunLog(Config(out=str(tmp_path), steps=2), str, NAMES).open(2)
    assert [line["step"] for line in run_folder.read_lines(tmp_path / "metrics.jsonl")] == steps
    assert capsys.readouterr().out.count("steps are missing or stand twice") == noted


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    screen.isatty = lambda: is_terminal
    log = RunLog(Config(out=str(tmp_path), steps=2), str, NAMES)
    log.open(0)
    log.bar.mininterval = 0  # each change is drawn
    log.show_step(dict(reward=0.5, completion_length=7.0, entropy=None, tokens_per_second=1234.4, step=1))
    log.generating(17, 3)
    figures = "reward 0.500  completion_length 7.000  entropy -  tokens_per_second 1,234.400"
    *_, stepped, sampling = f"\r{screen.getvalue()}".split("\r")
    if is_terminal:
        assert "1/2 [" in stepped and figures in stepped and "token 17, 3 going on" in sampling
    else:
        assert sampling == f"step 1/2  {figures}\n"
