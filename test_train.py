"""Whole runs with tiny models: what a step computes, however it is computed, and what a run leaves behind."""

import copy
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

import train
from advantage import combine_rewards, group_advantages
from batch import minibatches
from config import ALGORITHMS, Config
from conftest import ROOT, assert_same_run, flags, lines, metrics, near, run, samples
from infra import faults
from tasks import Task
from tasks._characters import EOS, EOS_ID, char_tokenizer, small_config
from tasks.sorting import model as sorting_model

G = 4

REWARDS = '''
import json
from pathlib import Path


def note(**call):
    with Path(__file__).with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps(call) + "\\n")


def sometimes(completions, completion_ids, **kwargs):
    """No reward for every third length."""
    return [len(set(text)) if len(ids) % 3 else None for text, ids in zip(completions, completion_ids)]


def never(prompts, **kwargs):
    return [None] * len(prompts)


def letters(prompts, completions, **kwargs):
    """The same for a whole group, where the prompt begins with a or b."""
    return [0.5 if prompt[0] in "ab" else len(text) for prompt, text in zip(prompts, completions)]


def lucky(prompts, completions, **kwargs):
    values = [float(text[:1] in "abc") for text in completions]
    note(prompts=prompts, values=values)
    return values


def chatty(prompts, completions, completion_ids, answer, **kwargs):
    note(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
    return [float(len(ids)) for ids in completion_ids]


def first(completions, **kwargs):
    """None where the completion is of one token."""
    return [float(ord(c[0]["content"][0]) % 7) if c[0]["content"] else None for c in completions]
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def go(sorting, rewards, tmp_path, monkeypatch):
    """-> a function that runs train.py in this process, where what it does can be watched"""
    monkeypatch.setattr(faults, "stop_requests", list)

    def run_here(name: str = "out", **settings) -> Path:
        settings = with_rewards(sorting | settings, rewards)
        assert train.main(flags(settings, tmp_path / name)) == 0
        return tmp_path / name

    return run_here


def with_rewards(settings: dict, file: Path) -> dict:
    if "reward" in settings:
        settings = settings | {"reward": [f"{file}:{name}" for name in settings["reward"].split()]}
    return settings


@pytest.fixture
def gradients():
    """The gradient of every optimizer update, as the optimizer sees it."""
    seen: list[Tensor] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(gradient_of(optimizer)))
    yield seen
    hook.remove()


def gradient_of(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]).double()


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def trained(out: Path) -> Tensor:
    return flat(AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32))


def untrained() -> Tensor:
    return flat(sorting_model(Config())[0])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """In float32 a gradient is right to about 1e-5. After some updates it is so to less: Adam divides by the size of
    each entry, so that the smallest ones, which are mostly rounding, move a weight as much as all others."""
    assert expected.norm() > 0
    assert (actual - expected).norm() <= tolerance * expected.norm()


# ---- The same step however it is computed ----

OFF_POLICY = dict(
    num_iterations=2, minibatches=3, beta=0.1, normalization="global", learning_rate=0.02, max_grad_norm=0.5
)
BY_RANKS = {  # ranks and settings
    "seven ranks, groups of eight, micro-batches of three, some without a reward": (
        7, dict(num_generations=8, micro_batch_size=3, reward="sometimes", entropy_coef=0.1),
    ),
    "off-policy, a group over three": (3, OFF_POLICY | dict(prompts_per_step=1, num_generations=8)),
    "more ranks than completions": (
        5, dict(prompts_per_step=1, num_generations=2, eval_every=1, eval_prompts=9, eval_k=1),
    ),
    "dynamic sampling": (2, dict(reward="letters", dynamic_sampling=2, steps=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_RANKS)
def test_ranks_do_not_change_what_is_computed(go, sorting, rewards, tmp_path, name):
    world, settings = BY_RANKS[name]
    one = go("one", **settings)
    many = with_rewards(sorting | settings, rewards)
    run(many, tmp_path / "many", world=world)
    assert_same_run(tmp_path / "many", one)
    assert all(line["grad_norm"] > 0.01 for line in metrics(one) if line["step"])


def test_torchrun_from_another_directory(go, sorting, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    shown = subprocess.check_output([*command, *flags(sorting, tmp_path / "two")], cwd=tmp_path, text=True)
    assert "2 rank(s)" in shown and "prompts_per_step 3" in shown and "step 2/2  reward" in shown
    assert_same_run(tmp_path / "two", go())


SPLITS = [dict(micro_batch_size=1), dict(micro_batch_tokens=40), dict(micro_batch_size=3, micro_batch_tokens=30)]
VARIANTS = {
    "off-policy": OFF_POLICY,
    "gspo, a group of eight": dict(
        algorithm="gspo", num_iterations=2, learning_rate=0.02, prompts_per_step=1, num_generations=8
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_do_not_change_the_step(go, gradients, variant):
    settings = VARIANTS[variant] | dict(steps=1)
    whole = go("whole", micro_batch_tokens=10**6, **settings)
    expected = [*gradients]
    assert len(expected) == settings.get("num_iterations", 1) * settings.get("minibatches", 1)
    for i, split in enumerate(SPLITS):
        gradients.clear()
        part = go(f"{i}", **split, **settings)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert_close(ours, theirs, 1e-4)
        assert_same_run(part, whole)


def test_micro_batches_are_as_large_as_asked_for(go, monkeypatch):
    lengths: list[list[int]] = []
    logprobs = train.logprobs

    def noting(run, part, *rest, **options):
        lengths.append(part.attention.sum(1).tolist())
        return logprobs(run, part, *rest, **options)

    monkeypatch.setattr(train, "logprobs", noting)
    go("rows", steps=1, micro_batch_size=5)
    assert [len(piece) for piece in lengths] == [5, 5, 2]
    lengths.clear()
    out = go("tokens", steps=1, micro_batch_tokens=40)
    padded = [len(piece) * max(piece) for piece in lengths]
    assert max(padded) <= 40 and len(padded) < 12
    whole = sorted(len(line["prompt"]) + line["length"] for line in samples(out))
    assert sorted(itertools.chain(*lengths)) == whole, "every completion once"
    lengths.clear()
    go("both", steps=1, micro_batch_size=5, micro_batch_tokens=40)
    assert [len(piece) for piece in lengths] == [min(5, n) for n in map(len, lengths)] != [5, 5, 2]


# ---- The step against the equation, completion by completion, in float64 ----


def advantages(rewards: list[float | None]) -> list[float]:
    given = [r for r in rewards if r is not None]
    mean, std = statistics.mean(given), statistics.stdev(given)
    return [0.0 if r is None or std == 0.0 else (r - mean) / (std + 1e-4) for r in rewards]


def to_rows(lines: list[dict], n: int) -> list[dict]:
    """Prompt ids, completion ids, and the advantage by the group's rewards, of each sampled completion."""
    _, tokenizer = sorting_model(Config())
    rows = []
    for start in range(0, len(lines), n):
        group = lines[start : start + n]
        assert len({line["prompt"] for line in group}) == 1
        for line, advantage in zip(group, advantages([line["reward"] for line in group])):
            ids = tokenizer(line["completion"]).input_ids
            assert len(ids) == line["length"] and (ids[-1] == EOS_ID) != line["truncated"]
            assert line["advantage"] == pytest.approx(advantage, abs=1e-5)
            rows.append(line | dict(prompt_ids=tokenizer(line["prompt"]).input_ids, ids=ids, A=advantage))
    return rows


def log_probs(model, row: dict, temperature: float) -> tuple[Tensor, Tensor]:
    logits = model(torch.tensor([row["prompt_ids"] + row["ids"]])).logits[0, len(row["prompt_ids"]) - 1 : -1]
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, torch.tensor(row["ids"])[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def by_hand(
    model, rows: list[dict], updates: list[list[int]], *, normalization="sequence", temperature=1.0, beta=0.0, L=12,
    learning_rate=1e-3, entropy_coef=0.0, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.0,
):  # fmt: skip
    """The updates of a step: each a loop over these of the rows. -> losses, gradients, the sums of entropy, KL, tokens
    clipped low and high, and tokens; the weights afterwards"""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(adam_beta1, adam_beta2), weight_decay=weight_decay
    )
    with torch.no_grad():
        start = [log_probs(model, row, temperature)[0] for row in rows]
    losses, grads, sums = [], [], np.zeros(5)
    for update in updates:
        N, tokens = len(update), sum(len(rows[i]["ids"]) for i in update)
        loss = 0.0
        for i in update:
            logp, entropy = log_probs(model, rows[i], temperature)
            A, length = rows[i]["A"], len(rows[i]["ids"])
            weights = {"sequence": 1 / (N * length), "global": 1 / tokens, "constant": 1 / (N * L), "sum": 1 / N}
            ratio = (logp - start[i]).exp()
            surrogate = torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A)
            kl = (start[i] - logp).exp() - (start[i] - logp) - 1  # the reference is the policy at the start
            loss = loss - weights[normalization] * (surrogate - beta * kl + entropy_coef * entropy).sum()
            low, high = (ratio < 0.8).sum() if A < 0 else 0, (ratio > 1.2).sum() if A > 0 else 0
            sums += np.array([float(x) for x in (entropy.detach().sum(), kl.detach().sum(), low, high, length)])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append(gradient_of(optimizer))
        optimizer.step()
    return losses, grads, sums, flat(model)


STEPS = {
    **{name: dict(normalization=name) for name in ("sequence", "global", "constant", "sum")},
    "temperature 1.5": dict(temperature=1.5, normalization="global"),
    "entropy": dict(entropy_coef=0.3, temperature=0.7),
    "mask_truncated": dict(mask_truncated=True),
    "some without a reward": dict(reward="sometimes", normalization="constant"),
    "three passes": dict(num_iterations=3, learning_rate=0.02),
    "one pass in minibatches": dict(minibatches=3, learning_rate=0.04, normalization="global"),
    "KL": dict(num_iterations=3, learning_rate=0.02, beta=0.5, temperature=0.7, normalization="global"),
    "minibatches": dict(num_iterations=2, minibatches=2, learning_rate=0.01, beta=0.1),
    "another Adam": dict(
        num_iterations=3, learning_rate=0.01, adam_beta1=0.5, adam_beta2=0.3, weight_decay=2.0, normalization="sum"
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_papers_equation(go, gradients, name):
    settings = STEPS[name]
    out = go(steps=1, num_generations=6, micro_batch_size=5, **settings)
    actual, rows, (figures,) = [*gradients], to_rows(samples(out), 6), metrics(out)
    masked = {i for i, row in enumerate(rows) if row["reward"] is None}
    if "mask_truncated" in settings:
        masked = {i for i, row in enumerate(rows) if row["truncated"]}
    assert bool(masked) == (name in ("mask_truncated", "some without a reward")) and len(masked) < 12
    updates = [
        [i for i in rows_of_update if i not in masked]
        for iteration in range(settings.get("num_iterations", 1))
        for rows_of_update in minibatches(18, settings.get("minibatches", 1), seed=(0, 1, iteration))
    ]
    known = by_hand.__kwdefaults__.keys() & settings.keys()
    losses, grads, sums, weights = by_hand(sorting_model(Config())[0], rows, updates, **{x: settings[x] for x in known})
    for ours, expected in zip(actual, grads, strict=True):  # in float32, in float64
        assert_close(ours, expected, 1e-4 if len(grads) == 1 else 5e-3)
    assert figures["loss"] == pytest.approx(statistics.mean(losses), abs=1e-5, rel=1e-3)
    assert figures["grad_norm"] == pytest.approx(statistics.mean(float(g.norm()) for g in grads), rel=1e-3)
    assert figures["entropy"] == pytest.approx(sums[0] / sums[4], rel=1e-3)
    one_token = 1.5 / sums[4]  # whose ratio is a bound, but for rounding
    assert figures["clip_low"] == pytest.approx(sums[2] / sums[4], abs=one_token)
    assert figures["clip_high"] == pytest.approx(sums[3] / sums[4], abs=one_token)
    assert (figures["clip_low"] > 0.01 and figures["clip_high"] > 0.01) == (len(grads) > 1)
    assert figures["kl"] == (pytest.approx(sums[1] / sums[4], rel=2e-3) if "beta" in settings else None)
    assert_close(trained(out) - untrained(), weights - untrained(), 0.02)


def test_gradients_are_clipped_to_a_norm(go, gradients):
    out = go(steps=1, max_grad_norm=0.01)
    assert metrics(out)[0]["grad_norm"] > 0.1 and float(gradients[0].norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_step_without_any_reward_changes_nothing(go):
    out = go(steps=1, reward="never")
    (figures,) = metrics(out)
    assert figures["reward"] is None and figures["reward/never"] is None and figures["grad_norm"] == 0.0
    assert {row["reward"] for row in samples(out)} == {None}
    assert torch.equal(trained(out), untrained())


def test_what_is_not_trained_on_is_counted(go):
    (figures,) = metrics(go(steps=1, reward="never", dynamic_sampling=2))
    assert (figures["without_reward"], figures["groups_replaced"]) == (figures["groups_replaced"] * G + 12, 6)


def test_a_run_from_a_program_is_that_of_the_command_line(go, sorting, tmp_path, monkeypatch):
    expected = go(steps=1)
    settings = sorting | dict(data=str(sorting["data"]), steps=1, out=str(tmp_path / "program"))
    assert train.train(Config(**settings)) == 0
    assert_same_run(tmp_path / "program", expected)
    assert torch.equal(trained(tmp_path / "program"), trained(expected))


def test_samples_have_each_reward_and_the_columns_of_their_row(go):
    for line in samples(go(steps=1, reward="letters never")):
        assert line["rewards"] == {"letters": line["reward"], "never": None}
        assert line["columns"] == {"answer": "".join(sorted(line["prompt"][:-1]))}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_switch_of_an_algorithm_reaches_the_step(go, monkeypatch, algorithm):
    given, policy_loss = {}, train.policy_loss
    monkeypatch.setattr(train, "policy_loss", lambda *args, **kw: given.update(kw) or policy_loss(*args, **kw))
    others = dict(beta=0.1, kl_estimator="k2", kl_importance=True, tis_cap=3.0, tis_floor=0.5, tis_mode="token_mask")
    others |= dict(off_policy_mask=2.5, sapo_tau_pos=1.5, sapo_tau_neg=2.0)
    if ALGORITHMS[algorithm]["objective"] == "clip":
        others["delta"] = 7.0
    out = go(steps=1, algorithm=algorithm, **others)
    settings = json.loads((out / "config.json").read_text())["settings"]
    in_the_loss = {"objective", "ratio", "epsilon_low", "epsilon_high", *others}
    assert {name: given[name] for name in in_the_loss} == {name: settings[name] for name in in_the_loss}
    assert settings | others | ALGORITHMS[algorithm] == settings and metrics(out)[0]["grad_norm"] > 0.01
    rewards, advantages = (torch.tensor([line[x] for line in samples(out)]) for x in ("reward", "advantage"))
    lengths = torch.tensor([line["length"] for line in samples(out)]).reshape(-1, G)
    combined = combine_rewards(rewards.reshape(-1, G, 1), [1.0], settings["combine_rewards"])
    expected = group_advantages(combined, settings["scale_rewards"], settings["baseline"], lengths=lengths)
    torch.testing.assert_close(advantages.reshape(-1, G), expected)


def test_metrics_are_of_the_whole_step(go):
    out = go(steps=1, prompts_per_step=8)
    (figures,), rows = metrics(out), samples(out)
    groups = [[row["reward"] for row in rows[i : i + G]] for i in range(0, len(rows), G)]
    lengths = [row["length"] for row in rows]

    def mean(values) -> float | None:
        values = list(values)
        return statistics.mean(values) if values else None

    expected = {
        "reward": mean(row["reward"] for row in rows),
        "reward/sorted_share": mean(row["reward"] for row in rows),
        "reward_std": mean(statistics.stdev(group) for group in groups),
        "completion_length": mean(lengths),
        "length_correct": mean(row["length"] for row in rows if row["reward"] == 1.0),
        "length_incorrect": mean(row["length"] for row in rows if row["reward"] < 1.0),
        "truncated": mean(row["truncated"] for row in rows),
        "dead_groups": mean(min(group) == max(group) for group in groups),
        "tokens": sum(lengths),
    }
    assert {name: figures[name] for name in expected} == {name: near(value) for name, value in expected.items()}
    assert figures["sampler_gap"] < 1e-5


# ---- Several steps ----


def test_kl_starts_at_zero_and_a_refreshed_reference_brings_it_back(go):
    settings = dict(steps=4, beta=0.1, learning_rate=0.01)
    a, b = ([line["kl"] for line in metrics(go(f"{n}", ref_sync_every=n, **settings))] for n in (0, 2))
    assert a[0] == pytest.approx(0.0, abs=1e-9) and min(a[1:]) > 1e-3
    assert b[:2] == a[:2] and b[2] == pytest.approx(0.0, abs=1e-9) and b[3] > 1e-3


def test_each_pass_and_each_step_has_minibatches_of_its_own(go, monkeypatch):
    passes, draw = [], train.minibatches
    monkeypatch.setattr(train, "minibatches", lambda *args, **kw: passes.append(draw(*args, **kw)) or passes[-1])
    go(num_iterations=2, minibatches=3)
    assert len(passes) == 2 * 2 and len({str(parts) for parts in passes}) == 4
    assert all(sorted(itertools.chain(*parts)) == list(range(12)) for parts in passes)


@pytest.fixture
def draws(monkeypatch) -> tuple[list[int], list[tuple]]:
    """Which prompts are drawn, and which streams (step, prompt, sample) are sampled from."""
    indices, streams = [], []
    draw, uniforms = Task.draw, train.uniforms
    monkeypatch.setattr(
        Task, "draw", lambda self, first, n, seed: indices.extend(range(first, first + n)) or draw(self, first, n, seed)
    )

    def noting(seed: int, step: int, of: list, length: int):
        streams.extend((step, *stream) for stream in of)
        return uniforms(seed, step, of, length)

    monkeypatch.setattr(train, "uniforms", noting)
    return indices, streams


def test_prompts_and_streams(go, draws):
    go(steps=2, eval_every=1, eval_prompts=5, eval_k=2)
    assert draws[0] == list(range(6))
    greedy, sampled = ([(0, prompt, i) for prompt in range(5) for i in range(k)] for k in (1, 2))
    step_1, step_2 = ([(step, prompt, i) for prompt in range(3) for i in range(G)] for step in (1, 2))
    evaluation = sampled + greedy  # the same each time, and no step of the training's
    assert draws[1] == evaluation + step_1 + evaluation + step_2 + evaluation


def test_dynamic_sampling_replaces_dead_groups(go, draws):
    out = go(reward="letters", dynamic_sampling=3, steps=4, prompts_per_step=4)
    indices, streams = draws
    assert indices == list(range(len(indices))) and len(indices) > 16, "prompts are drawn on and on"
    assert len(streams) == len(set(streams)) == len(indices) * G, "no stream is used twice"
    assert all(line["prompt"][0] not in "ab" for line in samples(out))
    assert len(samples(out)) == 4 * 4 * G
    assert any(line["dead_groups"] > 0 for line in metrics(out)), "the metrics are of all that was drawn"


def test_after_the_rounds_of_dynamic_sampling_the_groups_that_are_alive_make_the_step(go):
    out = go(reward="letters", dynamic_sampling=1, steps=4, prompts_per_step=6)
    steps = [[line for line in samples(out) if line["step"] == step] for step in range(1, 5)]
    assert all(line["prompt"][0] not in "ab" for step in steps for line in step)
    assert min(map(len, steps)) < 6 * G, "some step has fewer"
    assert all(line["grad_norm"] > 0.01 for line in metrics(out))


def test_where_no_group_is_alive_after_the_rounds_nothing_is_learned(go, draws):
    out = go(reward="never", dynamic_sampling=3)
    assert draws[0] == list(range(2 * (1 + 3) * 3))
    assert [(line["grad_norm"], line["dead_groups"]) for line in metrics(out)] == [(0.0, 1.0), (0.0, 1.0)]
    assert len(samples(out)) == 2 * 3 * G


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 3, 3, 3, 3]),
        ("linear", [1, 2, 3, 3, 2, 1]),
        ("cosine", [1, 2, 3] + [3 * (1 + math.cos(math.pi * x / 3)) / 2 for x in range(3)]),
    ],
)
def test_learning_rate(schedule, expected):
    settings = Config(steps=6, warmup_steps=3, lr_schedule=schedule, learning_rate=3e-4)
    rates = [train.learning_rate(settings, step, highest=3e-4) for step in range(1, 7)]
    assert rates == pytest.approx([x * 1e-4 for x in expected])


def test_each_group_of_parameters_keeps_its_own_learning_rate(go, monkeypatch):
    def two_groups(parameters, lr: float, **settings):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1 * lr}, {"params": others}], lr=lr)

    seen = []
    monkeypatch.setattr(torch.optim, "AdamW", two_groups)
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append([g["lr"] for g in optimizer.param_groups])
    )
    go(steps=3, warmup_steps=2, learning_rate=4e-4)
    hook.remove()
    assert seen == [pytest.approx([0.1 * x, x]) for x in (2e-4, 4e-4, 4e-4)]


def test_every_update_of_a_step_has_the_learning_rate_of_its_metrics(go):
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    out = go(steps=3, warmup_steps=2, learning_rate=4e-4, num_iterations=2)
    hook.remove()
    assert seen[::2] == seen[1::2] == [line["learning_rate"] for line in metrics(out)] == [2e-4, 4e-4, 4e-4]


# ---- In a script of one's own ----

IMPORTS = """
import ast, importlib, json, logging, pathlib, random, sys, warnings
import numpy, torch, transformers

def state():
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    of_loggers = {x.name: [x.level, len(x.handlers), len(x.filters), x.propagate, x.disabled] for x in loggers}
    of_loggers = {name: x for name, x in of_loggers.items() if x != [logging.NOTSET, 0, 0, True, False]}
    rest = [warnings.filters, warnings.showwarning, logging.root.manager.disable, logging.getLoggerClass()]
    rest += [transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()]
    rest += [torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), sys.excepthook]
    rest += [random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()]
    return {"loggers": of_loggers, "rest": [str(x) for x in rest]}

own = [*pathlib.Path().glob("*.py"), *pathlib.Path().glob("infra/*.py"), *pathlib.Path().glob("tasks/*.py")]
own = {str(x.with_suffix("")).replace("/", "."): x for x in own if "test" not in x.name}
for path in own.values():  # what libraries do is theirs
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.col_offset == 0:
            if node.module not in own and node.module not in ("infra", "tasks"):
                importlib.import_module(node.module)
                [getattr(sys.modules[node.module], x.name) for x in node.names]
before = state()
for name in own:
    importlib.import_module(name)
    print(json.dumps([name, before == state()]))
"""


def test_an_import_changes_nothing():
    """No logging, no filter of warnings, no threads, no random state."""
    shown = subprocess.check_output([sys.executable, "-c", IMPORTS], cwd=ROOT, text=True)
    unchanged = dict(json.loads(line) for line in shown.splitlines())
    assert len(unchanged) > 20 and unchanged["train"] and all(unchanged.values()), unchanged


# ---- What a run leaves behind ----


def test_what_a_run_leaves(go):
    out = go(samples_per_step=2)
    about = json.loads((out / "config.json").read_text())
    assert about["settings"] | dict(steps=2, normalization="sequence", num_generations=4) == about["settings"]
    assert {"commit", "versions", "hardware"} <= about.keys()
    assert about["versions"]["torch"] == torch.__version__
    assert [line["step"] for line in metrics(out)] == [1, 2]
    timings = {"seconds_rollout", "seconds_update", "tokens_per_second", "peak_memory_gb"}
    assert all(line[name] > 0 for line in lines(out / "metrics.jsonl") for name in timings)
    assert [line["step"] for line in samples(out)] == [1, 1, 2, 2]
    assert {"prompt", "completion", "reward", "advantage"} <= samples(out)[0].keys()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer("cab>").input_ids == sorting_model(Config())[1]("cab>").input_ids
    assert tokenizer.eos_token_id == EOS_ID


# ---- Evaluation ----


def test_evaluation_against_counting(go, rewards):
    rewards.with_suffix(".jsonl").unlink(missing_ok=True)
    settings = dict(eval_every=2, eval_prompts=7, eval_k=3, steps=3, reward="lucky", correct="lucky")
    out = go(**settings)
    calls = lines(rewards.with_suffix(".jsonl"))
    evaluated = [line for line in metrics(out) if "eval/accuracy" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 3]
    at = [0, 4, 7]  # sampled, greedy; two steps; sampled, greedy; a step; sampled, greedy
    assert len(calls) == 9 and len(samples(out, "eval")) == 6
    trained_on = {prompt for i in (2, 3, 6) for prompt in calls[i]["prompts"]}
    for figures, i in zip(evaluated, at):
        sampled, greedy = calls[i], calls[i + 1]
        assert len(set(greedy["prompts"])) == 7 and not trained_on & set(greedy["prompts"])
        groups = [sampled["values"][j : j + 3] for j in range(0, 21, 3)]
        assert sampled["prompts"] == [prompt for prompt in greedy["prompts"] for _ in range(3)]
        assert figures["eval/accuracy"] == pytest.approx(statistics.mean(greedy["values"]))
        assert figures["eval/pass@1"] == pytest.approx(statistics.mean(map(statistics.mean, groups)))
        assert figures["eval/pass@3"] == pytest.approx(statistics.mean(map(max, groups)))


def test_an_evaluation_without_training_is_that_of_a_run(go, sorting, tmp_path, capsys):
    """Of the model it starts from, of the trained one, and of a checkpoint; on two ranks as on one."""
    held_out = dict(eval_every=2, eval_prompts=7, eval_k=2)
    made = go("made", **held_out)
    before, after = ({name: x for name, x in line.items() if "eval/" in name} for line in metrics(made)[::2])
    assert before != after
    trained = [dict(model=made / "model"), dict(model=made / "checkpoint" / "000002")]
    for i, (model, figures) in enumerate([({}, before), *((model, after) for model in trained)]):
        settings = held_out | dict(steps=0) | model
        capsys.readouterr()
        out = go(f"{i}", **settings)
        shown = capsys.readouterr().out
        assert re.search(r"\naccuracy +\d\.\d+ ± \d\.\d+\n", shown) and "tools.plot" not in shown
        assert metrics(out) == [{"step": 0} | figures] and len(samples(out, "eval")) == 2
        assert sorted(path.name for path in out.iterdir()) == [".lock", "config.json", "metrics.jsonl", "samples.jsonl"]
    run(sorting | settings, tmp_path / "two", world=2)
    assert metrics(tmp_path / "two") == metrics(out)
    assert (tmp_path / "two" / "samples.jsonl").read_text() == (out / "samples.jsonl").read_text()


def test_an_evaluation_by_rewards_of_ones_own_shows_their_means(go, capsys):
    out = go(steps=0, eval_every=1, eval_prompts=7, reward="letters lucky", reward_weights=[1.0, 0.5])
    (figures,) = metrics(out)
    shown = capsys.readouterr().out.partition("held out (")[2]
    for name in ("reward", "reward/letters", "reward/lucky"):
        half = figures[f"eval/{name}_ci"]
        assert half > 0 and re.search(rf"\n{name} +{figures[f'eval/{name}']:.3f} ± {half:.3f}\n", shown)
    assert figures["eval/accuracy"] is figures["eval/accuracy_ci"] is None and "accuracy" not in shown


# ---- A chat model, rewards in TRL's signature ----

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDS = [EOS_ID, 5, 9, 12]


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> dict:
    """Settings for a model with end tokens and generation settings of its own."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = char_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789<>;+ ?")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(tokenizer, hidden_size=32, intermediate_size=48))
    own = dict(eos_token_id=ENDS, pad_token_id=0, do_sample=True, temperature=0.6, top_k=3)
    model.generation_config = GenerationConfig(**own)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1?"}]
    rows = [{"prompt": messages, "answer": "2"}, {"prompt": [{"role": "user", "content": "2+3?"}], "answer": "5"}]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "strings.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return dict(
        task="data", model=folder, data=folder / "chat.jsonl", prompts_per_step=2, max_completion_length=20, steps=1,
        reward="chatty first", reward_weights=[0.5, 2.0],
    )  # fmt: skip


def test_chat_prompts_and_rewards_of_ones_own(go, chat, rewards, capsys, monkeypatch):
    prompts, rollout = [], train.rollout
    monkeypatch.setattr(
        train, "rollout", lambda model, given, *args, **kw: prompts.extend(given) or rollout(model, given, *args, **kw)
    )
    rewards.with_suffix(".jsonl").unlink(missing_ok=True)
    out = go(**chat)
    assert "chat template" not in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(chat["model"])
    expected = {"<system>add;<user>1+1?;<assistant>", "<user>2+3?;<assistant>"}
    assert {tokenizer.decode(ids).replace(EOS, "") for ids in prompts} == expected

    (call,) = lines(rewards.with_suffix(".jsonl"))
    given = lines(chat["data"])
    assert sorted(call["answer"]) == ["2"] * G + ["5"] * G
    for i, line in enumerate(samples(out)):
        assert line["prompt"] == call["prompts"][i] == given[call["answer"][i] == "5"]["prompt"]
        assert [m["role"] for m in call["completions"][i]] == ["assistant"]
        text, ids = call["completions"][i][0]["content"], call["ids"][i]
        assert line["completion"].replace(EOS, "").replace("<pad>", "") == text
        assert not set(ids[:-1]) & {*ENDS} and line["truncated"] == (ids[-1] not in ENDS)
        assert line["reward"] == pytest.approx(0.5 * len(ids) + (2.0 * (ord(text[0]) % 7) if text else 0.0))
    assert {call["ids"][i][-1] for i in range(2 * G)} & {*ENDS[1:]}, "every end token ends"

    before, after = (GenerationConfig.from_pretrained(x).to_diff_dict() for x in (chat["model"], out / "model"))
    assert before["eos_token_id"] == ENDS
    assert before | {"transformers_version": 0} == after | {"transformers_version": 0}
    assert AutoTokenizer.from_pretrained(out / "model").chat_template == TEMPLATE


def test_string_prompts_to_a_chat_model_are_noted(go, chat, capsys):
    go(**chat | dict(data=chat["model"] / "strings.jsonl", reward="letters", reward_weights=[1.0]))
    assert len(re.findall("chat template is not applied", capsys.readouterr().out)) == 1
