"""Whole runs with tiny models: what a step computes, on any number of ranks, and what a run writes."""

import copy
import functools
import json
import math
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import advantage
import conftest
import train
from advantage import keep_high_entropy
from batch import minibatches
from config import Config
from conftest import ROOT, assert_same_run, distance, flags, flat_gradient, metrics, run, samples
from infra import faults, report
from tasks import Task, load_task
from tasks._characters import EOS, EOS_ID, char_tokenizer
from tasks.sorting import model as sorting_model

G = 4  # the num_generations of the fixture `sorting`


def sometimes(completions, completion_ids, **columns):
    """Give no reward to a completion whose length is a multiple of three."""
    return [len(set(text)) if len(ids) % 3 else None for text, ids in zip(completions, completion_ids)]


def wrong(prompts, **columns):
    return [0.0] * len(prompts)


def at_first(completions, trainer_state, **columns):
    """Give rewards in the first step only."""
    return [None if trainer_state.global_step else float(len(text)) for text in completions]


def letters(prompts, completions, **columns):
    """Give all completions the same reward if the prompt begins with a or b."""
    return [0.5 if prompt[0] in "ab" else len(text) for prompt, text in zip(prompts, completions)]


def noted(completions, log_metric, **columns):
    log_metric("completions", len(completions))
    return letters(completions=completions, **columns)


def judged(completions, completion_ids, log_metric, **columns):
    """Log the lengths. Judge a completion by its first letter, but give no reward if the number of its characters is at
    most three or divisible by three."""
    for ids in completion_ids:
        log_metric("tokens", len(ids))
    return [float(text[:1] < "f") if len(text) % 3 and len(text) > 3 else None for text in completions]


def lucky(completions, log_metric, **columns):
    log_metric("completions", len(completions))
    return [float(text[:1] in "abc") for text in completions]


def drawn(prompts, **columns):
    return [random.random() for _ in prompts]


def answered(row: dict, turns: list[str]) -> str | None:
    """Reply up to three times, each time with a shorter text, but not to a turn of one character.

    Also check that each completion has its own copy of the row, which is kept from one turn to the next: this function
    counts its calls there, and must have been called once for each turn."""
    row["calls"] = row.get("calls", 0) + 1
    assert row["calls"] == len(turns) and row.keys() == {"prompt", "answer", "calls"}
    return None if len(turns[-1]) == 1 or len(turns) > 3 else (row["answer"] + row["prompt"])[: 4 - len(turns)]


def paths(*names: str) -> list[str]:
    """Return the names that --reward takes for these functions of this file."""
    return [f"{__name__}:{name}" for name in names]


@pytest.fixture
def go(sorting, tmp_path, monkeypatch):
    """Return a function that runs train.py in this process, where the `watch` fixture can record calls."""
    # Install no signal handlers, so that Ctrl-C stops the tests at once.
    monkeypatch.setattr(faults, "stop_requests", lambda: [])

    def run_here(name: str = "out", **settings) -> Path:
        assert train.main(flags(sorting | settings, tmp_path / name)) == 0
        return tmp_path / name

    return run_here


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def trained(out: Path) -> Tensor:
    return flat(AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32))


def untrained() -> Tensor:
    return flat(sorting_model(Config())[0])


# A gradient in float32 is accurate to about 1e-5. After several updates it is less accurate: Adam divides each entry of
# the gradient by its size, so an entry that is little more than rounding changes its weight as much as any other entry.
ONE_UPDATE, SOME_UPDATES = 1e-4, 5e-3


# ---- The same step however it is computed ----

OFF_POLICY = dict(
    num_iterations=2, minibatches=3, beta=0.1, normalization="global", learning_rate=0.02, max_grad_norm=0.5
)
TURNS = dict(reply=f"{__name__}:answered", max_completion_length=24)
BY_RANKS = {  # ranks, settings, settings of the run on several ranks only
    "off-policy, groups and micro-batches split between ranks, some completions without a reward": (
        3, OFF_POLICY | dict(num_generations=8, micro_batch_size=3, reward=paths("sometimes"), entropy_coef=0.1,
        top_entropy=0.5), {},
    ),
    "more ranks than completions, dynamic sampling, evaluation": (
        3, dict(prompts_per_step=1, num_generations=2, reward=paths("letters", "judged"), dynamic_sampling=2,
        eval_every=1, eval_prompts=4, eval_k=1), {},
    ),
    "completions of an earlier step, with centered scores": (
        3, dict(steps=3, delay=1, score_centering=4, tis_cap=1.1, top_p=0.95, learning_rate=0.02),
        dict(micro_batch_size=2),
    ),
    "several turns": (
        2, TURNS | dict(delay=1, num_iterations=2, beta=0.1, top_p=0.9, top_entropy=0.5, eval_every=1, eval_prompts=5),
        dict(shard=True, rollout_tokens=70, micro_batch_size=2),
    ),
    "one completion of each prompt, of which the gate drops some": (
        2, dict(algorithm="flash_reinforce", num_generations=1, prompts_per_step=6, num_iterations=2, minibatches=2,
        learning_rate=0.02, gate_kl=1e-3), dict(micro_batch_size=2),
    ),
}  # fmt: skip


def with_own_replies(add_rewards):
    """Make sure that each completion has its replies, of which the last one may have had no room."""

    def checked(run, groups, **how):
        for one in (one for group in groups for one in group.completions):
            assert len(one.replies or []) - len(one.turns) in (-1, 0), (one.replies, one.turns)
        add_rewards(run, groups, **how)

    return checked


@pytest.mark.parametrize("name", BY_RANKS)
def test_ranks_do_not_change_what_is_computed(go, sorting, tmp_path, name):
    world, settings, of_many = BY_RANKS[name]
    one = go("one", **settings)
    # Only the first rank may open files and trackers. Gradients are summed in several parts, as those of a large model.
    one_log = functools.partial(conftest.at, "infra.report.RunLog.open", 1, conftest.die, rank=1)
    small_buckets = functools.partial(conftest.replace, "infra.ranks.BUCKET_BYTES", functools.partial(min, 50_000))
    replies = functools.partial(conftest.replace, "train.add_rewards", with_own_replies)
    run(sorting | settings | of_many, tmp_path / "many", one_log, small_buckets, replies, world=world)
    assert_same_run(tmp_path / "many", one)
    steps = [line for line in metrics(one) if line["step"]]  # step 0 is the evaluation before the first step
    assert all(line["grad_norm"] > 0.01 for line in steps)
    assert "gate_kl" not in settings or any(0.0 < line["gate_dropped"] < 1.0 for line in steps)
    assert all(line["turns"] > 1.2 and line["reply_length"] > 0.5 for line in steps if "reply" in settings)


def test_a_run_by_torchrun_from_another_directory_is_that_of_main(go, sorting, tmp_path):
    settings = dict(steps=1, samples_per_step=7)
    one = go("one", **settings)
    assert len({line["prompt"] for line in samples(one)}) == 3 and len(samples(one)) == 7, "of each prompt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", ROOT / "train.py"]
    subprocess.check_call([*command, *flags(sorting | settings, tmp_path / "two")], cwd=tmp_path)
    assert_same_run(tmp_path / "two", one)


# ---- A step compared with its equation, one completion after another, in float64 ----


def to_rows(lines: list[dict], n: int) -> list[dict]:
    """Return each line of samples.jsonl with the ids of prompt and completion and with an advantage that is computed
    here from the rewards of its group."""
    _, tokenizer = sorting_model(Config())
    rows = []
    for group in (lines[start : start + n] for start in range(0, len(lines), n)):
        given = [line["reward"] for line in group if line["reward"] is not None]
        mean, std = statistics.mean(given), statistics.stdev(given)
        for line in group:
            ids = tokenizer(line["completion"]).input_ids
            written = [logp is not None for _, logp, *_ in line["tokens"]]  # by the model, not in a reply
            assert len(ids) == len(written) and sum(written) == line["length"] and written[-1]
            advantage = 0.0 if line["reward"] is None or std == 0.0 else (line["reward"] - mean) / (std + 1e-4)
            assert line["advantage"] == pytest.approx(advantage, abs=1e-5)
            prompt_ids = tokenizer(line["prompt"]).input_ids
            rows.append(line | dict(prompt_ids=prompt_ids, ids=ids, A=advantage, written=written))
    return rows


def log_probs(model, row: dict, temperature: float) -> tuple[Tensor, Tensor]:
    logits = model(torch.tensor([row["prompt_ids"] + row["ids"]])).logits[0, len(row["prompt_ids"]) - 1 : -1]
    log_p = (logits / temperature).log_softmax(-1)[row["written"]]  # tokens of replies do not count
    ids = torch.tensor(row["ids"])[row["written"]]
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def by_hand(model, rows: list[dict], updates: list[list[int]], cfg: Config) -> tuple:
    """Compute the updates of a step, each in a loop over its rows. Return for each update its loss, gradient norm and
    clipped gradient, and the final weights."""
    model = copy.deepcopy(model).double()
    adam = dict(lr=cfg.learning_rate, betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    with torch.no_grad():
        start = [log_probs(model, row, cfg.temperature)[0] for row in rows]
    losses, norms, grads = [], [], []
    for update in updates:
        N, tokens = len(update), sum(rows[i]["length"] for i in update)
        loss = 0.0
        for i in update:
            logp, entropy = log_probs(model, rows[i], cfg.temperature)
            A, length = rows[i]["A"], rows[i]["length"]
            # 12 is max_completion_length. Each block of 6 consecutive rows has the completions of one prompt.
            weights = {"sequence": 1 / (N * length), "global": 1 / tokens, "constant": 1 / (N * 12), "sum": 1 / N}
            prompt_tokens = sum(rows[j]["length"] for j in update if j // 6 == i // 6)
            weights["prompt"] = 1 / (len({j // 6 for j in update}) * prompt_tokens)
            ratio = (logp - start[i]).exp()
            surrogate = torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A)
            kl = (start[i] - logp).exp() - (start[i] - logp) - 1  # the reference is the policy at the start
            terms = surrogate - cfg.beta * kl + cfg.entropy_coef * entropy
            loss = loss - weights[cfg.normalization] * terms.sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(conftest.gradient_of(optimizer).norm()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        grads.append(conftest.gradient_of(optimizer))
        optimizer.step()
    return losses, norms, grads, flat(model)


STEPS = {
    "temperature 1.5": dict(temperature=1.5, normalization="global", rollout_dtype="bfloat16"),
    "entropy below 0, all advantages 0": dict(entropy_coef=-3.0, temperature=0.7, reward=paths("wrong")),
    "mask_truncated": dict(mask_truncated=True, normalization="prompt"),
    "several turns": TURNS | dict(normalization="global", entropy_coef=0.3, beta=0.5, micro_batch_size=1),
    "some without a reward": dict(reward=paths("sometimes"), normalization="constant"),
    "KL, three passes, clipped gradients": dict(
        num_iterations=3, learning_rate=0.02, beta=0.5, temperature=0.7, max_grad_norm=0.2
    ),
    "minibatches": dict(num_iterations=2, minibatches=2, learning_rate=0.01, beta=0.1, seed=1),
    "one pass of minibatches": dict(minibatches=3, learning_rate=0.02),
    "another Adam": dict(num_iterations=3, normalization="sum", adam_beta1=0.5, adam_beta2=0.3, weight_decay=2.0),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_papers_equation(go, updates, name):
    settings = STEPS[name]
    out = go(**dict(steps=1, num_generations=6, micro_batch_size=5) | settings)
    # `updates` records the gradient and the learning rates of each update. Copy it, because by_hand will add its own.
    actual = [*updates]
    rows, (figures,) = to_rows(samples(out), 6), metrics(out)
    # The run above has these three settings as well, unless STEPS changes them.
    cfg = Config(**dict(normalization="sequence", learning_rate=1e-3, max_grad_norm=1e6) | settings)
    masked = {i for i, row in enumerate(rows) if row["reward"] is None or (cfg.mask_truncated and row["truncated"])}
    assert bool(masked) == (name in ("mask_truncated", "some without a reward")) and len(masked) < 12  # of 18
    # 18 completions: 3 prompts with 6 each
    passes = [minibatches(18, cfg.minibatches, seed=(cfg.seed, 1, n)) for n in range(cfg.num_iterations)]
    rows_by_update = [[i for i in rows_of_update if i not in masked] for each in passes for rows_of_update in each]
    model, _ = sorting_model(cfg)
    losses, norms, grads, weights = by_hand(model, rows, rows_by_update, cfg)
    for (ours, _), expected in zip(actual, grads, strict=True):
        # `ours` was computed in float32, `expected` in float64.
        assert distance(ours, expected) <= (ONE_UPDATE if len(grads) == 1 else SOME_UPDATES)
    assert figures["loss"] == pytest.approx(statistics.mean(losses), abs=1e-5, rel=1e-3)
    assert figures["grad_norm"] == pytest.approx(statistics.mean(norms), rel=1e-3) and max(norms) > 0.2
    assert (figures["clip_low"] > 0.01 and figures["clip_high"] > 0.01) == (len(grads) > 1)
    assert (figures["kl"] is None) == ("beta" not in settings)
    assert distance(trained(out) - flat(model), weights - flat(model)) <= 0.02


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_every_figure_of_a_step_is_worked_out_again(go, watch, updates, monkeypatch, mask_truncated):
    """Compute every metric again, from samples.jsonl and from what the loss returns for each micro-batch. The metrics
    of replies are in infra/test_report.py."""
    names = "start_sampling", "minibatches", "update", "logprobs_of", "policy_loss", "finish_sampling"
    starts, minibatch_calls, update_calls, logprob_calls, loss_calls, waits = (watch(train, name) for name in names)
    advantage_calls = watch(advantage, "group_advantages")
    # On this clock, sampling takes 3 s to start and 3 s to finish, an update 5 s, and all else no time.
    clock = SimpleNamespace(perf_counter=lambda: 3.0 * len(starts + waits) + 5.0 * len(update_calls))
    monkeypatch.setattr(train, "time", clock)
    # As if the file of the task had these weights.
    monkeypatch.setattr("infra.model.load_task", lambda cfg: replace(load_task(cfg), weights=[0.5, 2.0]))
    of_loss = dict(beta=0.1, kl_importance=True, off_policy_mask=0.05, tis_cap=9.0)
    out = go(
        steps=1, seed=1, prompts_per_step=16, num_generations=3, max_completion_length=16, micro_batch_size=4,
        reward=paths("sometimes", "judged"), correct="judged", mask_truncated=mask_truncated,
        num_iterations=2, minibatches=2, learning_rate=0.04, warmup_steps=2, top_entropy=0.5, entropy_coef=0.2,
        **of_loss,
    )  # fmt: skip
    (figures,), rows = conftest.lines(out / "metrics.jsonl"), samples(out)
    names = "length", "reward", "advantage", "truncated", "rewards"
    lengths, rewards, advantages, truncated, rewards_by_name = ([row[name] for row in rows] for name in names)
    weighted = [[w * x for w, x in zip((0.5, 2.0), named.values()) if x is not None] for named in rewards_by_name]
    assert rewards == [sum(values) if values else None for values in weighted]
    np.testing.assert_array_equal(advantage_calls[0].args[0].flatten(), np.float64(rewards))  # None becomes NaN
    trained_on = [r is not None and not (mask_truncated and cut) for r, cut in zip(rewards, truncated)]
    trained_lengths = [n if is_trained_on else 0 for n, is_trained_on in zip(lengths, trained_on)]
    assert [call.kwargs["lengths"].flatten().tolist() for call in advantage_calls] == [trained_lengths]
    rows_by_update = [rows_of_update for call in minibatch_calls for rows_of_update in call.result]
    for call, rows_of_update in zip(update_calls, rows_by_update, strict=True):
        batch = call.args[1]
        assert batch.mask.sum(1).tolist() == [trained_lengths[i] for i in rows_of_update]
        assert (batch.entropy[batch.mask.bool()] > 0).all(), "the policy before the step was scored"
        A = torch.tensor([advantages[i] for i in rows_of_update])
        expected = keep_high_entropy(A, batch.entropy, batch.mask, 0.5)
        assert torch.equal(batch.advantages * batch.mask, expected)
        # The KL and the entropy bonus have all tokens, also those that top_entropy leaves out.
        assert torch.equal(batch.weights, train.token_weights(batch.mask, "sequence"))

    names = *train.STATS, "tis_ratio"
    loss, totals = 0.0, np.zeros((len(names), 2))
    # Keep the calls in which `accumulate` scores the policy. Only they may ask for a head.
    # The other calls score the old policy and the reference.
    entropies = [call.result[1].detach() for call in logprob_calls if "head_ids" in call.kwargs]
    for call, entropy in zip(loss_calls, entropies, strict=True):
        assert of_loss.items() <= call.kwargs.items()
        part_loss, stats = call.result
        loss += part_loss.item() / 4  # the step has 4 updates
        assert torch.equal(call.kwargs["entropy"], entropy)
        totals += np.array([[float(x) for x in stats[name]] for name in names])

    def mean(values) -> float:
        return statistics.fmean(x for x in values if x is not None)

    given = [[r for r in rewards[i : i + 3] if r is not None] for i in range(0, len(rows), 3)]
    right = [named["judged"] for named in rewards_by_name]  # 1.0, 0.0 or None
    # A group is rejected if its completions that `judged` judges are all right or all wrong, or if fewer than two are
    # trained on. If `judged` judges none of them, the rewards take the place of its verdicts.
    verdicts = [{*right[i : i + 3]} - {None} or {*rewards[i : i + 3]} - {None} for i in range(0, len(rows), 3)]
    assert any({*right[i : i + 3]} == {None} for i in range(0, len(rows), 3)), "there are such groups"
    expected = dict(zip(names, totals[:, 0] / totals[:, 1])) | {
        "reward": mean(rewards),
        "reward/sometimes": mean(named["sometimes"] for named in rewards_by_name),
        "reward/judged": mean(named["judged"] for named in rewards_by_name),
        "reward_std": mean(statistics.stdev(values) for values in given if len(values) > 1),
        "without_reward": rewards.count(None),
        "completion_length": mean(lengths),
        "length_correct": mean(n for n, ok in zip(lengths, right) if ok),
        "length_incorrect": mean(n for n, ok in zip(lengths, right) if ok == 0.0),
        "truncated": mean(truncated),
        "equal_rewards": mean(len({*values}) < 2 for values in given),
        "without_signal": mean(len(verdicts[i]) < 2 or sum(trained_on[3 * i : 3 * i + 3]) < 2 for i in range(16)),
        "groups": 16,
        "tokens": sum(lengths),
        "logged/tokens": mean(lengths),
        "loss": loss,
        "grad_norm": mean(float(gradient.norm()) for gradient, _ in updates),
        "learning_rate": 0.02,  # half of 0.04 in the first of two warm-up steps
        "seconds_rollout": 6.0,
        "seconds_update": 20.0,
        "tokens_per_second": sum(lengths) / 26.0,
    }
    assert all(expected.values()), "a figure of 0 would show nothing"
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=0.0)  # float32


# ---- Log-probs of the sampler, the old policy and the reference ----


def test_where_the_vocabulary_is_cut_all_log_probs_are_over_what_is_left(go):
    """The sampler and the trainer have the same log-probs, also in several updates. The reference is the first policy,
    so the first KL is 0."""
    cut = dict(top_p=0.9, top_k=9, min_p=0.05)
    assert all(line["sampler_gap"] < 1e-5 for line in metrics(go("off-policy", **OFF_POLICY, **cut)))
    # With one update per step, the KL of the first step is that of the first policy with itself.
    first, second = metrics(go("once a step", beta=0.1, **cut))
    assert abs(first["kl"]) < 1e-9 < second["kl"] and first["grad_norm"] > 0.01


# ---- Completions of earlier steps ----


def test_with_a_delay_a_step_trains_on_what_an_earlier_policy_sampled(go, watch):
    """Step t trains on completions of the policy at the start of step t - 2, or of step 1, with the prompts and random
    numbers of step t. A run whose weights hardly change shows what these are. W is the ratio of the probabilities of a
    completion under the policy before the step and under the sampler, and ess is mean(W)^2 / mean(W^2)."""
    prompts = [line["prompt"] for line in samples(go("now", steps=4))]
    without, calls = go("still", steps=4, learning_rate=1e-30), watch(train, "policy_loss")
    off_policy = dict(delay=2, learning_rate=0.02, tis_cap=99.0, micro_batch_size=5, mask_truncated=True)
    out = go("out", steps=3, **off_policy)
    earlier = len(calls)
    go("out", steps=4, **off_policy)
    assert [line["delay"] for line in metrics(out)] == [0, 1, 2, 2]
    assert [line["prompt"] for line in samples(out)] == prompts
    texts, texts_without = ([line["completion"] for line in samples(folder)] for folder in (out, without))
    assert texts[:36] == texts_without[:36] and texts[36:] != texts_without[36:]  # 12 in each step

    last, w = metrics(out)[-1], []
    for call in calls[earlier:]:  # those of step 4
        _, old_logp, _, _, mask = call.args
        w += ((old_logp - call.kwargs["sampler_logp"]).double() * mask)[mask.any(1)].sum(1).exp().tolist()
    ess = statistics.fmean(w) ** 2 / statistics.fmean(x**2 for x in w)
    assert last["ess"] == pytest.approx(ess, rel=1e-5) and ess < 0.9 and 2 < len(w) < 12, "some are not trained on"
    highest = [float(call.result[1]["tis_ratio_max"].max) for call in calls[earlier:]]
    assert last["tis_ratio_max"] == pytest.approx(max(highest)) and max(highest) > min(highest) + 0.01
    # On-policy, the two differ by rounding only, also in the updates after the first one.
    (line,) = metrics(go("on-policy", steps=1, old_policy="sampler", num_iterations=2, learning_rate=0.02))
    assert line["ess"] == pytest.approx(1.0, abs=1e-6)
    assert report.metrics_of_weights(torch.full((3,), 800.0).double())["ess"] == 1.0, (
        "long completions have large ratios"
    )
    # What rewards draw depends on the step that trains.
    now, before = (samples(go(f"drawn {k}", delay=k, reward=paths("drawn"))) for k in (0, 2))
    assert [line["reward"] for line in before] == [line["reward"] for line in now]


@pytest.mark.parametrize(("K", "ids", "more"), [(3, 3, dict(top_k=9)), (99, 9, dict(top_k=99))])
def test_on_policy_the_head_of_each_token_has_the_log_probs_of_the_sampler(go, watch, K, ids, more):
    """Also after a reply, which has none. A token that was not written has no head. Of 99 ids, the vocabulary has 9."""
    calls = watch(train, "policy_loss")
    go(**TURNS, **more, score_centering=K, steps=1)
    for call in calls:
        *_, mask = call.args
        policy, sampler = (call.kwargs[name][mask.bool()] for name in ("head_logp", "sampler_head_logp"))
        assert policy.shape[1] == ids + 1 and len(policy) > 5
        torch.testing.assert_close(policy, sampler, rtol=1e-4, atol=1e-4)  # float32


def test_a_run_with_a_delay_goes_on_with_what_it_has_sampled(go, monkeypatch):
    """A checkpoint has the completions of the next steps. It does not have the rows of the task, but those that a fork
    has changed: here, those of steps 3 and 5, and those of step 1, which are new."""
    pick_rows = train.pick_rows

    def pick_and_change(run, n, step):
        rows = pick_rows(run, n, step)
        new = {"hint": "letters"} | ({"_index": None} if step == 1 else {})
        return [row | new for row in rows] if step % 2 else rows

    monkeypatch.setattr(train, "pick_rows", pick_and_change)
    settings = dict(delay=2, dynamic_sampling=1, reward=paths("letters", "judged"), save_every=1, learning_rate=0.02)
    whole = go("whole", steps=4, **settings)
    out = go("out", steps=2, **settings)
    queue = torch.load(out / "checkpoint/000002/state.pt", weights_only=False)["queue"]
    assert [{bool(group.row) for group in drawn} for _, drawn in queue] == [{True}, {False}], "of steps 3 and 4"
    conftest.assert_same_files(go("out", steps=4, **settings), whole)
    assert {line["step"] for line in samples(whole) if "hint" in line["columns"]} == {1, 3}


def test_old_policy_and_reference_are_scored_as_the_policy_is(go, watch):
    """Before the first update all three are the same policy. Even in bf16 they differ only by rounding in fp32."""
    losses = watch(train, "policy_loss")
    go(steps=1, beta=0.1, num_iterations=2, dtype="bfloat16")
    logp, old_logp, *_ = losses[0].args
    assert max((logp - other).abs().max() for other in (old_logp, losses[0].kwargs["ref_logp"])) < 1e-5


def test_a_teacher_is_the_reference_and_the_reward_has_no_weight(go, sorting, tmp_path, updates):
    """With beta = 1, k1+ and a reward weight of 0, the gradient is Σ w (log π − log π_ref) ∇ log π. The teacher has the
    vocabulary of the student, but cannot read several completions as one row, because of its sliding window."""
    student, tokenizer = sorting_model(Config())
    torch.manual_seed(1)
    settings = student.config.to_dict() | dict(model_type="mistral", sliding_window=3, num_hidden_layers=1)
    teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    for part in (teacher, tokenizer):
        part.save_pretrained(tmp_path / "teacher")
    distillation = dict(reference=tmp_path / "teacher", beta=1, kl_estimator="k1+", reward_weights=[0], steps=1)
    loss, rows = 0.0, to_rows(samples(go(**distillation, micro_batch_size=5)), G)
    for row in rows:
        logp, ref = (log_probs(model.double(), row, 1.0)[0] for model in (student, teacher))
        loss = loss + ((logp - ref).detach() * logp).mean() / len(rows)
    loss.backward()
    assert distance(updates[0][0], flat_gradient(student)) < ONE_UPDATE
    char_tokenizer("fedcba>").save_pretrained(tmp_path / "teacher")  # another vocabulary
    assert train.main(flags(sorting | distillation, tmp_path / "refused")) == 2


def test_rewards_are_reported_for_each_value_of_a_column(go, sorting, tmp_path):
    rows = [json.loads(line) for line in sorting["data"].read_text().splitlines()]
    # In a mixture of data sets, some rows lack the column.
    rows = [x if x["prompt"][1] < "c" else x | {"source": 5 if len(x["prompt"]) < 5 else "long"} for x in rows]
    (data := tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (others := tmp_path / "others.jsonl").write_text("\n".join(map(json.dumps, rows[:9])))
    own = dict(data=data, eval_data=[data, others], prompts_per_step=8, steps=1, metrics_by="source", eval_every=1)
    (line,) = metrics(out := go(**own, reward=paths("sometimes", "judged"), correct="judged"))[1:]
    for source in (5, "long", None):
        own_rewards = [one["reward"] for one in samples(out) if one["columns"]["source"] == source]
        given = [reward for reward in own_rewards if reward is not None]
        assert line[f"reward/source={source}"] == pytest.approx(statistics.fmean(given)) and given != own_rewards
    n = {source: line[f"eval/groups/source={source}"] for source in (5, "long", None)}
    right = sum(n[source] * line[f"eval/accuracy/source={source}"] for source in n)
    assert right == pytest.approx(sum(n.values()) * line["eval/accuracy"])
    # Each of the two files of held-out rows has figures of its own, of greedy answers and of samples.
    n = {file: line[f"eval/groups/eval_data={file}"] for file in ("mixed", "others")}
    right = sum(n[file] * line[f"eval/accuracy/eval_data={file}"] for file in n)
    assert right == pytest.approx(sum(n.values()) * line["eval/accuracy"]) and n["mixed"] > n["others"] > 0
    assert {f"eval/avg@4/eval_data={file}" for file in n} <= line.keys() and "eval/avg@4/source=5" in line
    assert "eval_data" not in samples(out)[0]["columns"]


@pytest.mark.parametrize("settings", [{}, dict(gradient_checkpointing=True, num_iterations=2)])
def test_log_probs_are_computed_as_in_eval_mode(go, monkeypatch, settings):
    """Dropout, or a router that draws random numbers, must not act when completions are scored."""
    model, tokenizer = sorting_model(Config())
    model.model.norm.register_forward_hook(lambda norm, _, out: torch.dropout(out, 0.5, norm.training))
    monkeypatch.setattr("tasks.sorting.model", lambda config: (model, tokenizer))
    assert all(line["sampler_gap"] < 1e-5 for line in metrics(go(**settings))), "only rounding in float32"


# ---- Nothing to learn from ----


def test_nothing_changes_in_a_step_without_a_reward_however_many_rounds(go):
    """Not even by momentum or weight decay."""
    settings = dict(reward=paths("at_first"), dynamic_sampling=3, weight_decay=0.1, metrics_by="answer")
    one, three = (go(f"{n}", steps=n, **settings) for n in (1, 3))
    drawn = (1 + 3) * 3  # the first draw and three more rounds, of 3 prompts each
    expected = {"grad_norm": 0.0, "reward": None, "reward/at_first": None}
    expected |= {"equal_rewards": 1.0, "without_reward": drawn * G, "groups_replaced": 9}
    for line in metrics(three)[1:]:
        assert expected.items() <= line.items() and drawn == sum(n for x, n in line.items() if x.startswith("groups/"))
    assert {row["reward"] for row in samples(three)[-2 * 3 * G :]} == {None}
    assert torch.equal(trained(three), trained(one)) and not torch.equal(trained(one), untrained())


def test_nothing_is_learned_if_every_group_was_rejected(go):
    graded_apart = dict(reward=paths("letters", "wrong"), correct="wrong")
    out = go(**graded_apart, dynamic_sampling=1, learning_rate=1.0, weight_decay=0.1)
    assert len({line["reward"] for line in samples(out)}) > 3 and {line["advantage"] for line in samples(out)} == {0.0}
    assert all(line["without_signal"] == 1.0 and line["equal_rewards"] < 1.0 for line in metrics(out))
    # There are tokens, so weight decay acts, in two steps: 0.9 * 0.9 = 0.81.
    torch.testing.assert_close(trained(out), 0.81 * untrained(), rtol=1e-6, atol=0)
    (line,) = metrics(go("all", **graded_apart, steps=1))
    assert line["without_signal"] == 1.0 and line["grad_norm"] > 0.01, "without dynamic sampling, no group is rejected"


def test_a_loss_of_exactly_0_is_learned_from(go):
    """All advantages are A, 0 or -A, and all completions have one token, so the loss is a sum of zeros."""
    out = go(steps=1, num_generations=2, max_completion_length=1, prompts_per_step=8, reward=paths("lucky"))
    assert metrics(out)[0]["loss"] == 0.0 and not torch.equal(trained(out), untrained())


# ---- Several steps ----


def test_kl_starts_at_zero_and_a_refreshed_reference_brings_it_back(go):
    kl = [line["kl"] for line in metrics(go(steps=4, beta=0.1, learning_rate=0.01, ref_sync_every=2))]
    assert max(kl[0], kl[2]) == pytest.approx(0.0, abs=1e-9) and min(kl[1], kl[3]) > 1e-3


def test_each_update_has_its_minibatch_and_the_learning_rate_of_its_step(go, watch, updates, monkeypatch):
    def two_groups(parameters, lr: float, **settings):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1 * lr}, {"params": others}], lr=lr)

    calls = watch(train, "minibatches")
    monkeypatch.setattr(torch.optim, "AdamW", two_groups)
    out = go(steps=3, delay=1, warmup_steps=2, learning_rate=4e-4, num_iterations=2, minibatches=3)
    assert len({str(call.result) for call in calls}) == len(calls) == 3 * 2
    # learning_rate/1 is the rate of the second group of parameters, and learning_rate that of the first.
    assert [line["learning_rate/1"] for line in metrics(out)] == [2e-4, 4e-4, 4e-4]
    assert [line["learning_rate"] for line in metrics(out)] == pytest.approx([2e-5, 4e-5, 4e-5])
    assert [lr for _, lr in updates] == [pytest.approx([0.1 * x, x]) for x in (2e-4, 4e-4, 4e-4) for _ in range(6)]


def test_learning_rate():
    cosine = [(1 + math.cos(math.pi * x / 3)) / 2 for x in range(3)]
    for schedule, factors in {"constant": [1, 1, 1], "linear": [1, 2 / 3, 1 / 3], "cosine": cosine}.items():
        settings = Config(steps=6, warmup_steps=3, lr_schedule=schedule)
        rates = [train.learning_rate(settings, step, highest=3e-4) for step in range(1, 7)]
        assert rates == pytest.approx([1e-4, 2e-4, 3e-4, *(3e-4 * factor for factor in factors)])


@pytest.fixture
def draws(watch):
    """Return a function that lists the prompts drawn so far, and the streams (step, prompt, sample) used so far."""
    drawn, sampled = watch(Task, "rows_from"), watch(train, "uniforms")

    def so_far() -> tuple[list[int], list[tuple]]:
        # Task.rows_from(self, first, n, seed)
        indices = [i for _, first, n, _ in (call.args for call in drawn) for i in range(first, first + n)]
        return indices, [(step, p, i) for _, step, pairs, _ in (call.args for call in sampled) for p, i in pairs]

    return so_far


def test_prompts_and_streams(go, draws, watch, sorting):
    rollouts = watch(train, "rollout_and_limit")
    held_out = dict(eval_every=1, eval_data=sorting["data"], eval_prompts=5, eval_k=2)
    go(steps=2, **held_out, temperature=0.8, top_p=0.9, top_k=5, min_p=0.1)
    given = [(one.temperature, one.top_p, one.top_k, one.min_p) for one in (call.args[3] for call in rollouts)]
    assert {*given} == {(0.8, 0.9, 5, 0.1), (0.0, 0.9, 5, 0.1)}
    greedy, sampled = ([(0, prompt, i) for prompt in range(5) for i in range(k)] for k in (1, 2))
    step_1, step_2 = ([(step, prompt, i) for prompt in range(3) for i in range(G)] for step in (1, 2))
    evaluation = sampled + greedy  # step 0 each time, so no evaluation changes what training samples
    assert draws() == (list(range(6)), evaluation + step_1 + evaluation + step_2 + evaluation)


def test_dynamic_sampling_replaces_dead_groups_while_there_are_rounds(go, draws):
    out = go(reward=paths("noted"), dynamic_sampling=1, steps=4, prompts_per_step=6)
    indices, streams = draws()
    assert indices == list(range(len(indices))) and len(indices) > 24, "no prompt is drawn twice or left out"
    assert len(streams) == len(set(streams)) == len(indices) * G, "no stream is used twice"
    assert all(line["prompt"][0] not in "ab" for line in samples(out))
    sizes = [sum(line["step"] == step for line in samples(out)) for step in range(1, 5)]
    assert min(sizes) < max(sizes) == 6 * G, "after the last round, a step trains on the groups that it has"
    assert [G * line["groups"] for line in metrics(out)] == sizes
    for line in metrics(out):
        drawn = G * (line["groups"] + line["groups_replaced"])
        assert line["logged/completions"] == drawn / (2 if line["groups_replaced"] else 1), "the mean over the rounds"
    assert len(indices) * G == sum(sizes) + G * sum(line["groups_replaced"] for line in metrics(out))


def test_dapo_rejects_only_the_groups_of_a_graded_task_whose_rewards_are_all_equal(go):
    assert all(line["without_signal"] == line["equal_rewards"] < 0.5 for line in metrics(go(algorithm="dapo")))


def test_user_code_draws_other_random_numbers_on_each_rank(monkeypatch):
    monkeypatch.setattr(train, "pick_rows", lambda *args: np.random.rand())
    monkeypatch.setattr(train, "start_groups", lambda run, rows, *args: rows)
    drawn = []
    for number in (0, 1, 0):
        monkeypatch.setattr(train.ranks, "rank", lambda number=number: number)
        drawn.append(train.start_sampling(SimpleNamespace(config=Config()), 1))
    assert drawn[0] == drawn[2] != drawn[1]


# ---- Evaluation ----


def test_an_evaluation_reports_the_mean_rewards_of_held_out_prompts(go, watch):
    rewarded, rollouts = watch(sys.modules[__name__], "lucky"), watch(train, "rollout_and_limit")
    own = dict(temperature=0.8, eval_temperature=0.5, eval_top_p=0.9)
    out = go(eval_every=2, eval_prompts=7, eval_k=3, steps=3, reward=paths("lucky"), correct="lucky", **own)
    calls = [call.kwargs | {"values": call.result} for call in rewarded]
    evaluated = [line for line in metrics(out) if "eval/accuracy" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 3] and len(samples(out, "eval")) == 6
    # The temperature and top_p of each rollout, and of its call of the reward.
    sampled, greedy, step = (0.5, 0.9), (0.0, 1.0), (0.8, 1.0)
    kinds = [sampled, greedy, step, step, sampled, greedy, step, sampled, greedy]
    assert [(call.args[3].temperature, call.args[3].top_p) for call in rollouts] == kinds
    assert all(one.kept is None for call in rollouts for one in call.result[0]), "an evaluation needs no kept sets"
    trained_on = {prompt for call, kind in zip(calls, kinds, strict=True) if kind == step for prompt in call["prompts"]}
    for figures, i in zip(evaluated, (0, 4, 7)):  # the first call of each evaluation
        of_sampled, of_greedy = calls[i], calls[i + 1]
        shown = [row["completion"] for row in samples(out, "eval") if row["step"] == figures["step"]]
        shown = [text.replace("<pad>", "").replace(EOS, "") for text in shown]
        assert shown == of_sampled["completions"][:4:3], "the first samples of two prompts"
        assert len(set(of_greedy["prompts"])) == 7 and not trained_on & set(of_greedy["prompts"])
        assert {x["trainer_state"].global_step for x in (of_sampled, of_greedy)} == {figures["step"]}
        assert of_sampled["prompts"] == [prompt for prompt in of_greedy["prompts"] for _ in range(3)]
        of_both = {"accuracy": of_greedy["values"], "pass@1": of_sampled["values"], "logged/completions": [7 * 3, 7]}
        for name, values in of_both.items():
            assert figures[f"eval/{name}"] == pytest.approx(statistics.fmean(values))


def test_a_run_of_no_steps_evaluates_as_a_training_run_does(go, watch, sorting):
    """This holds for the initial model, the trained one, and a checkpoint. Evaluations change no training."""
    held_out = dict(eval_every=2, eval_prompts=7, eval_k=2, reward=paths("judged", "drawn"), max_completion_length=12)
    made = go("made", **held_out)
    assert torch.equal(trained(go("often", **held_out | dict(eval_every=1))), trained(made))
    # The evaluations before the first step and after the second one.
    before, after = ({name: x for name, x in line.items() if "eval/" in name} for line in metrics(made)[::2])
    assert before != after
    evaluated = [None, made / "model", made / "checkpoint/000002/model"]
    for i, (model, figures) in enumerate(zip(evaluated, (before, after, after))):
        out = go(f"{i}", **held_out, steps=0, **({"model": model, "task": "data"} if model else {}))
        assert metrics(out) == [{"step": 0} | figures] and len(samples(out, "eval")) == 2
        assert sorted(path.name for path in out.iterdir()) == [".lock", "config.json", "metrics.jsonl", "samples.jsonl"]
    made = watch(train, "set_up")
    go("same prompts", steps=0, eval_every=1, eval_data=sorting["data"])
    assert not [note for note in made[0].result[2] if "trained on" in note], "nothing is trained on"


# ---- A chat model ----

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"


def test_the_chat_template_and_the_generation_settings_are_saved_again(go, watch, tmp_path):
    """These settings, which have several end tokens, must change nothing else in a run."""
    generation = dict(eos_token_id=[EOS_ID, 5, 9, 12], pad_token_id=0, do_sample=True, temperature=0.6, top_k=3)
    conftest.save_chat_model(tmp_path / "model", "abcdefghijklmnopqrstuvwxyz<>;", TEMPLATE, **generation)
    prompt = [{"role": "system", "content": "add"}, {"role": "user", "content": "one"}]
    (data := tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": prompt}))
    asked = watch(train, "rollout_and_limit")
    out = go(task="data", model=tmp_path / "model", data=data, reward=paths("drawn"), max_completion_length=20, steps=1)
    assert sorted(asked[0].args[3].eos_ids) == sorted(generation["eos_token_id"])
    assert all((row["prompt"], row["columns"]) == (prompt, {}) for row in samples(out))
    last = {row["tokens"][-1][0] for row in samples(out) if not row["truncated"]}
    assert last - {EOS}, "end tokens other than the first must occur"
    before, after = (GenerationConfig.from_pretrained(x).to_diff_dict() for x in (tmp_path / "model", out / "model"))
    assert before == after and after["eos_token_id"] == generation["eos_token_id"]
    assert AutoTokenizer.from_pretrained(out / "model").chat_template == TEMPLATE
