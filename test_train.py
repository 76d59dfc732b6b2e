"""Whole runs with tiny models: what a step computes, however it is computed, and what a run leaves behind."""

import copy
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

import config
import tasks as task
import train
from infra import checkpoint, report
from tasks._characters import EOS, EOS_ID, char_tokenizer, small_config, sorting_model

CAUGHT = (signal.SIGINT, signal.SIGTERM)
HERE = Path(__file__).parent
G = 4
METRICS = (
    "step reward reward_std reward/sorted_share loss grad_norm kl entropy completion_length length_correct "
    "length_incorrect truncated dead_groups clip_low clip_high learning_rate tokens seconds_rollout seconds_update "
    "tokens_per_second peak_memory_gb"
).split()
OWN = ("seconds_rollout", "seconds_update", "tokens_per_second", "peak_memory_gb", "sampler_gap")  # of how it was run

REWARDS = '''
import json
from pathlib import Path

CALLS = []


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


def flat(prompts, **kwargs):
    return [1.0] * len(prompts)


def overflows(completions, **kwargs):
    CALLS.append(1)
    return [len(text) * (1.0 if len(CALLS) == 1 else 1e300) for text in completions]


def raises(prompts, **kwargs):
    if any("d" in prompt for prompt in prompts):
        raise KeyError("no d")
    return [0.0] * len(prompts)


def lucky(prompts, completions, **kwargs):
    values = [float(text[:1] in "abc") for text in completions]
    note(prompts=prompts, values=values)
    return values


def chatty(prompts, completions, completion_ids, answer, **kwargs):
    note(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, others=sorted(kwargs))
    return [float(len(ids)) for ids in completion_ids]


def first(completions, **kwargs):
    return [float(ord(c[0]["content"][:1] or "0") % 7) for c in completions]
'''


# ---- Runs ----


@pytest.fixture(autouse=True)
def one_thread_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads, handlers = torch.get_num_threads(), {number: signal.getsignal(number) for number in CAUGHT}
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Prompts to sort and rewards of the user's own."""
    folder, r = tmp_path_factory.mktemp("files"), random.Random(0)
    words = dict.fromkeys("".join(r.choices("abcdef", k=r.randint(1, 6))) for _ in range(40))
    rows = [{"prompt": word + ">", "answer": "".join(sorted(word))} for word in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def flags(files: Path, out: Path, **settings) -> list[str]:
    settings = dict(
        task="sorting", data=files / "rows.jsonl", prompts_per_step=3, num_generations=G, steps=2, warmup_steps=0,
        eval_every=0, samples_per_step=-1, max_grad_norm=1e6, out=out,
    ) | settings  # fmt: skip
    if "reward" in settings:
        settings["reward"] = [f"{files / 'rewards.py'}:{name}" for name in settings["reward"].split()]
    words = []
    for name, value in settings.items():
        given = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, given)]
    return words


def go(files: Path, out: Path, code: int = 0, **settings) -> Path:
    """A run in this process, which then lets go of the folder as a process does when it ends."""
    try:
        assert train.main(flags(files, out, **settings)) == code
    finally:
        while checkpoint._locks:
            checkpoint._locks.pop().close()
    return out


@pytest.fixture
def gradients():
    """The gradient of every optimizer update, as the optimizer sees it."""
    seen: list[Tensor] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(flat_gradient(optimizer)))
    yield seen
    hook.remove()


def flat_gradient(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]).double()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out: Path) -> list[dict]:
    return lines(out / "metrics.jsonl")


def samples(out: Path, kind: str = "train") -> list[dict]:
    return [line for line in lines(out / "samples.jsonl") if line["kind"] == kind]


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def trained(out: Path) -> Tensor:
    return flat(AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32))


def untrained() -> Tensor:
    return flat(sorting_model(0)[0])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.norm() > 0
    assert (actual - expected).norm() <= tolerance * expected.norm()


def near(value: float | None, **tolerance):
    return None if value is None else pytest.approx(value, **tolerance)


def assert_same_metrics(a: Path, b: Path) -> None:
    for ours, theirs in zip(metrics(a), metrics(b), strict=True):
        for name in ours.keys() - set(OWN):
            assert ours[name] == near(theirs[name], rel=1e-4, abs=1e-6), name


def assert_same_run(a: Path, b: Path) -> None:
    exact = ("step", "kind", "prompt", "completion", "reward", "length", "truncated")
    ours, theirs = ([[line[name] for name in exact] for line in lines(x / "samples.jsonl")] for x in (a, b))
    assert ours == theirs
    assert_same_metrics(a, b)


# ---- The same numbers for any number of ranks ----

OFF_POLICY = dict(num_iterations=2, minibatches=3, beta=0.1, normalization="global", learning_rate=0.02)
BY_RANKS = {  # name: ranks and settings, for a run to be compared with that of one process
    "two": (2, {}),
    "three": (3, {}),
    "seven ranks, groups of eight, micro-batches of three": (7, dict(num_generations=8, micro_batch_size=3)),
    "a group over three": (3, dict(prompts_per_step=1, micro_batch_size=1)),
    "more ranks than completions": (7, dict(prompts_per_step=2, num_generations=2)),
    "off-policy": (3, OFF_POLICY),
    "dynamic sampling": (2, dict(reward="letters", dynamic_sampling=2, steps=3)),
    "some without a reward": (2, dict(reward="sometimes", entropy_coef=0.1)),
    "evaluation": (2, dict(eval_every=1, eval_prompts=9, eval_k=3)),
}
FAILING = {
    "a reward raises": (3, dict(reward="raises")),
    "overflow": (2, dict(reward="overflows", scale_rewards="none")),
}


def work(rank: int, jobs: dict[str, tuple[int, int, list[str]]], root: str) -> None:
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    for name, (world, port, args) in jobs.items():
        if rank >= world:
            continue
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
        with open(f"{root}/{name}.{rank}", "w") as screen, redirect_stdout(screen), redirect_stderr(screen):
            print("exit", train.main(args))


@pytest.fixture(scope="module")
def by_ranks(files, tmp_path_factory) -> Path:
    """The folder of all runs with several ranks; what a rank showed is in <name>.<rank>."""
    root, jobs, sockets = tmp_path_factory.mktemp("ranks"), {}, []
    for name, (world, settings) in (BY_RANKS | FAILING).items():
        sockets.append(socket.create_server(("127.0.0.1", 0)))
        jobs[name] = world, sockets[-1].getsockname()[1], flags(files, root / name, **settings)
    for s in sockets:
        s.close()
    most = max(world for world, *_ in jobs.values())
    torch.multiprocessing.set_forkserver_preload([__name__])  # imported once, by the server that forks the processes
    torch.multiprocessing.start_processes(work, args=(jobs, str(root)), nprocs=most, start_method="forkserver")
    return root


@pytest.mark.parametrize("name", BY_RANKS)
def test_ranks_do_not_change_what_is_computed(by_ranks, files, tmp_path, name):
    one = go(files, tmp_path / "one", **BY_RANKS[name][1])
    assert_same_run(by_ranks / name, one)
    assert_close(trained(by_ranks / name) - untrained(), trained(one) - untrained(), 1e-3)
    assert all(line["grad_norm"] > 0.01 for line in metrics(one) if line["step"])


def test_a_reward_that_raises_on_one_rank_ends_all(by_ranks):
    screens = [(by_ranks / f"a reward raises.{rank}").read_text() for rank in range(3)]
    assert all("exit 2" in screen for screen in screens)
    told = [line for screen in screens for line in screen.splitlines() if "error" in line]
    assert told and all(
        re.search("raises raised KeyError.* for prompt '.*d.*' and completion '", line) for line in told
    )


def test_an_overflow_on_all_ranks_is_told_once(by_ranks):
    screens = [(by_ranks / f"overflow.{rank}").read_text() for rank in range(2)]
    assert all("exit 2" in screen for screen in screens)
    assert sum(screen.count("error: step 2") for screen in screens) == 1


def test_torchrun_and_python(files, tmp_path):
    starts = {"torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], "python": []}
    running = [
        subprocess.Popen(
            [sys.executable, *start, "train.py", *flags(files, tmp_path / name)],
            cwd=HERE,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, start in starts.items()
    ]
    one = go(files, tmp_path / "one")
    for name, process in zip(starts, running):
        shown, _ = process.communicate()
        assert process.returncode == 0 and f"computed by {2 if name == 'torchrun' else 1} rank" in shown
        assert "a step: 3 prompts x 4 = 12 completions" in shown and "step 2/2  reward" in shown
        assert_same_run(tmp_path / name, one)


# ---- The same step for any micro-batching ----

VARIANTS = {
    "sequence": {},
    "global": dict(normalization="global"),
    "constant": dict(normalization="constant"),
    "sum": dict(normalization="sum"),
    "off-policy": OFF_POLICY,
    "gspo": dict(algorithm="gspo", num_iterations=2, learning_rate=0.02),
    "one group": dict(prompts_per_step=1),
    "a group of eight": dict(prompts_per_step=1, num_generations=8),
}
SPLITS = [dict(micro_batch_size=1), dict(micro_batch_size=2), dict(micro_batch_size=3), dict(micro_batch_tokens=40)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_do_not_change_the_step(files, tmp_path, gradients, variant):
    settings = VARIANTS[variant] | dict(steps=1)
    whole = go(files, tmp_path / "whole", micro_batch_tokens=10**6, **settings)
    expected = [*gradients]
    assert len(expected) == settings.get("num_iterations", 1) * settings.get("minibatches", 1)
    for i, split in enumerate(SPLITS):
        gradients.clear()
        part = go(files, tmp_path / str(i), **split, **settings)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert_close(ours, theirs, 1e-4)
        assert_same_run(part, whole)


def test_micro_batches_are_as_large_as_asked_for(files, tmp_path, monkeypatch):
    shapes: list[tuple[int, int]] = []
    scored = train.token_logprobs
    monkeypatch.setattr(
        train,
        "token_logprobs",
        lambda *args, **kwargs: shapes.append(args[2].sum(1).tolist()) or scored(*args, **kwargs),
    )
    go(files, tmp_path / "rows", steps=1, micro_batch_size=5)
    assert [len(lengths) for lengths in shapes] == [5, 5, 2]
    shapes.clear()
    out = go(files, tmp_path / "tokens", steps=1, micro_batch_tokens=40)
    padded = [len(lengths) * max(lengths) for lengths in shapes]
    assert max(padded) <= 40 and len(padded) < 12
    lengths = sorted(len(line["prompt"]) + line["length"] for line in samples(out))
    assert sorted(itertools.chain(*shapes)) == lengths, "every completion once"


def test_the_loss_is_zero_per_sequence_but_not_per_token(files, tmp_path, gradients):
    sequence, token = (go(files, tmp_path / x, steps=1, normalization=x) for x in ("sequence", "global"))
    a, b = metrics(sequence)[0], metrics(token)[0]
    assert abs(a["loss"]) < 1e-6 < 1e-3 < abs(b["loss"])
    assert a["grad_norm"] > 0.1 and b["grad_norm"] > 0.1
    assert [line["completion"] for line in samples(sequence)] == [line["completion"] for line in samples(token)]
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()


# ---- The step against the equation, completion by completion, in float64 ----


def advantages(rewards: list[float | None]) -> list[float]:
    given = [r for r in rewards if r is not None]
    mean, std = statistics.mean(given), statistics.stdev(given)
    return [0.0 if r is None or std == 0.0 else (r - mean) / (std + 1e-4) for r in rewards]


def to_rows(lines: list[dict], n: int = G) -> list[dict]:
    """Prompt ids, completion ids, and the advantage by the group's rewards, of each sampled completion."""
    _, tokenizer = sorting_model(0)
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
    learning_rate=1e-3, entropy_coef=0.0,
):  # fmt: skip
    """The updates of a step: each a loop over these of the rows. -> losses, gradients, the sums of entropy, KL, tokens
    clipped low and high, and tokens; the weights afterwards"""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    with torch.no_grad():
        start = [log_probs(model, row, temperature)[0] for row in rows]
    losses, grads, sums = [], [], np.zeros(5)
    for update in updates:
        N, tokens = len(update), sum(len(rows[i]["ids"]) for i in update)
        loss = 0.0
        for i in update:
            logp, entropy = log_probs(model, rows[i], temperature)
            A, length = rows[i]["A"], len(rows[i]["ids"])
            w = {"sequence": 1 / (N * length), "global": 1 / tokens, "constant": 1 / (N * L), "sum": 1 / N}[
                normalization
            ]
            ratio = (logp - start[i]).exp()
            surrogate = torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A)
            kl = (start[i] - logp).exp() - (start[i] - logp) - 1  # the reference is the policy at the start
            loss = loss - w * (surrogate - beta * kl + entropy_coef * entropy).sum()
            low, high = (ratio < 0.8).sum() if A < 0 else 0, (ratio > 1.2).sum() if A > 0 else 0
            sums += np.array([float(x) for x in (entropy.detach().sum(), kl.detach().sum(), low, high, length)])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append(flat_gradient(optimizer))
        optimizer.step()
    return losses, grads, sums, flat(model)


STEPS = {
    **{name: dict(normalization=name) for name in ("sequence", "global", "constant", "sum")},
    "temperature 0.7": dict(temperature=0.7, normalization="global"),
    "temperature 1.5": dict(temperature=1.5),
    "entropy": dict(entropy_coef=0.3, temperature=0.7),
    "mask_truncated": dict(mask_truncated=True),
    "some without a reward": dict(reward="sometimes", normalization="constant"),
    "three passes": dict(num_iterations=3, learning_rate=0.02),
    "KL": dict(num_iterations=3, learning_rate=0.02, beta=0.5, normalization="global"),
    "minibatches": dict(num_iterations=2, minibatches=2, learning_rate=0.01, beta=0.1),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_papers_equation(files, tmp_path, gradients, name):
    settings = STEPS[name]
    out = go(files, tmp_path / "out", steps=1, num_generations=6, micro_batch_size=5, **settings)
    actual, rows, (figures,) = [*gradients], to_rows(samples(out), 6), metrics(out)
    masked = {i for i, row in enumerate(rows) if row["reward"] is None}
    if "mask_truncated" in settings:
        masked = {i for i, row in enumerate(rows) if row["truncated"]}
    assert bool(masked) == (name in ("mask_truncated", "some without a reward")) and len(masked) < 12
    updates = [
        [i for i in minibatch.tolist() if i not in masked]
        for iteration in range(settings.get("num_iterations", 1))
        for minibatch in train.minibatches(18, config.Config(minibatches=settings.get("minibatches", 1)), 1, iteration)
    ]
    known = ("normalization", "temperature", "entropy_coef", "learning_rate", "beta")
    losses, grads, sums, weights = by_hand(
        sorting_model(0)[0], rows, updates, **{k: v for k, v in settings.items() if k in known}
    )
    for ours, expected in zip(actual, grads, strict=True):
        assert_close(ours, expected, 1e-4 if len(grads) == 1 else 5e-3)
    assert figures["loss"] == pytest.approx(statistics.mean(losses), abs=1e-5, rel=1e-3)
    assert figures["grad_norm"] == pytest.approx(statistics.mean(float(g.norm()) for g in grads), rel=1e-3)
    assert figures["entropy"] == pytest.approx(sums[0] / sums[4], rel=1e-3)
    assert figures["clip_low"] == pytest.approx(sums[2] / sums[4], abs=2e-3)
    assert figures["clip_high"] == pytest.approx(sums[3] / sums[4], abs=2e-3)
    assert (figures["clip_low"] > 0.01 and figures["clip_high"] > 0.01) == (len(grads) > 1)
    assert figures["kl"] == (pytest.approx(sums[1] / sums[4], rel=2e-3) if "beta" in settings else None)
    assert_close(trained(out) - untrained(), weights - untrained(), 0.02)


def test_gradients_are_clipped_to_a_norm(files, tmp_path, gradients):
    out = go(files, tmp_path / "out", steps=1, max_grad_norm=0.01)
    assert metrics(out)[0]["grad_norm"] > 0.1 and float(gradients[0].norm()) == pytest.approx(0.01, rel=1e-3)


def test_metrics_are_of_the_whole_step(files, tmp_path):
    out = go(files, tmp_path / "out", steps=1, prompts_per_step=8)
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
    assert set(METRICS) <= figures.keys()
    assert figures["sampler_gap"] < 1e-5


def test_a_reward_of_several_is_their_weighted_sum_without_those_that_are_none(files, tmp_path):
    out = go(files, tmp_path / "out", steps=1, reward="sometimes letters", reward_weights=[2.0, -0.5])
    kinds = set()
    for row in samples(out):
        text = re.sub("<[a-z]+>", "", row["completion"])
        expected = -0.5 * (0.5 if row["prompt"][0] in "ab" else len(text))
        kinds.add(row["length"] % 3 > 0)
        assert row["reward"] == pytest.approx(expected + (2.0 * len(set(text)) if row["length"] % 3 else 0.0))
    assert kinds == {True, False}


def test_a_step_without_any_reward_changes_nothing(files, tmp_path):
    out = go(files, tmp_path / "out", steps=1, reward="never")
    (figures,) = metrics(out)
    assert figures["reward"] is None and figures["reward/never"] is None and figures["grad_norm"] == 0.0
    assert {row["reward"] for row in samples(out)} == {None}
    assert torch.equal(trained(out), untrained())


# ---- Switches over several steps ----


@pytest.mark.parametrize("algorithm", config.ALGORITHMS)
def test_every_algorithm_takes_a_step(files, tmp_path, algorithm):
    out = go(files, tmp_path / "out", steps=1, algorithm=algorithm)
    assert metrics(out)[0]["grad_norm"] > 0.01
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert tuple(settings[name] for name in config.SWITCHES) == config.ALGORITHMS[algorithm]


def test_kl_starts_at_zero_and_a_refreshed_reference_brings_it_back(files, tmp_path):
    fixed = go(files, tmp_path / "fixed", steps=4, beta=0.1, learning_rate=0.01)
    moved = go(files, tmp_path / "moved", steps=4, beta=0.1, learning_rate=0.01, ref_sync_every=2)
    a, b = ([line["kl"] for line in metrics(out)] for out in (fixed, moved))
    assert a[0] == pytest.approx(0.0, abs=1e-9) and min(a[1:]) > 1e-3
    assert b[:2] == a[:2] and b[2] == pytest.approx(0.0, abs=1e-9) and b[3] > 1e-3


def test_an_entropy_bonus_raises_the_entropy(files, tmp_path):
    entropy = [
        metrics(go(files, tmp_path / str(c), steps=6, entropy_coef=c, learning_rate=0.01))[-1]["entropy"]
        for c in (0.0, 1.0, -1.0)
    ]
    assert entropy[1] > entropy[0] + 0.05 and entropy[2] < entropy[0] - 0.05


@pytest.fixture
def draws(monkeypatch) -> tuple[list[int], list[tuple]]:
    """Which prompts are drawn, and which streams are sampled from."""
    indices, streams = [], []
    draw, uniforms = task.Task.draw, train.uniforms
    monkeypatch.setattr(task.Task, "draw", lambda self, i, seed: indices.append(i) or draw(self, i, seed))

    def noting(seed: int, step: int, of: list, length: int):
        streams.extend((step, *stream) for stream in of)
        return uniforms(seed, step, of, length)

    monkeypatch.setattr(train, "uniforms", noting)
    return indices, streams


def test_dynamic_sampling_replaces_dead_groups(files, tmp_path, draws):
    out = go(files, tmp_path / "out", reward="letters", dynamic_sampling=3, steps=4, prompts_per_step=4)
    indices, streams = draws
    assert indices == list(range(len(indices))) and len(indices) > 16, "prompts are drawn on and on"
    assert len(streams) == len(set(streams)) == len(indices) * G, "no stream is used twice"
    assert all(line["prompt"][0] not in "ab" for line in samples(out))
    assert len(samples(out)) == 4 * 4 * G
    drawn_dead = sum(line["dead_groups"] > 0 for line in metrics(out))
    assert drawn_dead, "the metrics are of all that was drawn"


def test_dynamic_sampling_ends_after_its_rounds(files, tmp_path, draws):
    out = go(files, tmp_path / "out", reward="flat", dynamic_sampling=3, steps=2)
    assert draws[0] == list(range(2 * (1 + 3) * 3))
    assert [line["grad_norm"] for line in metrics(out)] == [0.0, 0.0]
    assert [line["dead_groups"] for line in metrics(out)] == [1.0, 1.0]


def test_prompts_and_streams_without_dynamic_sampling(files, tmp_path, draws):
    go(files, tmp_path / "out", steps=3)
    assert draws[0] == list(range(9))
    assert draws[1] == [(step, prompt, i) for step in (1, 2, 3) for prompt in range(3) for i in range(G)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 3, 3, 3, 3]),
        ("linear", [1, 2, 3, 3, 2, 1]),
        ("cosine", [1, 2, 3] + [3 * (1 + math.cos(math.pi * x / 3)) / 2 for x in range(3)]),
    ],
)
def test_learning_rate(files, tmp_path, schedule, expected):
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    out = go(
        files, tmp_path / "out", steps=6, warmup_steps=3, lr_schedule=schedule, learning_rate=3e-4, num_iterations=2
    )
    hook.remove()
    assert seen[::2] == seen[1::2] == pytest.approx([x * 1e-4 for x in expected])
    assert [line["learning_rate"] for line in metrics(out)] == seen[::2]


def test_gradient_checkpointing_changes_nothing(files, tmp_path):
    plain, saving = (go(files, tmp_path / f"{i}", **({"gradient_checkpointing": True} if i else {})) for i in range(2))
    assert_same_run(plain, saving)
    torch.testing.assert_close(trained(saving), trained(plain), rtol=0, atol=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(files, tmp_path, gradients, capfd):
    out = go(files, tmp_path / "out", code=2, steps=3, save_every=1, reward="overflows", scale_rewards="none")
    error = capfd.readouterr().err
    assert len(error.strip().splitlines()) == 1 and error.startswith("error: step 2: ")
    assert len(gradients) == 1, "the optimizer took the first step alone"
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["000001"]
    assert [line["step"] for line in metrics(out)] == [1]
    assert not (out / "model").exists()


# ---- What a run leaves behind ----


def snapshot(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_what_a_run_leaves(files, tmp_path):
    out = go(files, tmp_path / "out", samples_per_step=2)
    about = json.loads((out / "config.json").read_text())
    assert about["settings"] | dict(steps=2, normalization="sequence", num_generations=4) == about["settings"]
    assert {"commit", "versions", "hardware"} <= about.keys()
    assert about["versions"]["torch"] == torch.__version__
    assert [line["step"] for line in metrics(out)] == [1, 2]
    assert [line["step"] for line in samples(out)] == [1, 1, 2, 2]
    assert {"prompt", "completion", "reward", "advantage"} <= samples(out)[0].keys()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer("cab>").input_ids == sorting_model(0)[1]("cab>").input_ids
    assert tokenizer.eos_token_id == EOS_ID


def test_the_saved_model_is_the_trained_one(files, tmp_path, monkeypatch):
    kept = []
    save = checkpoint.save_model
    monkeypatch.setattr(checkpoint, "save_model", lambda *args, **kwargs: kept.append(args[1]) or save(*args, **kwargs))
    out = go(files, tmp_path / "out")
    ids = torch.tensor([[3, 4, 5, 8]])
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    assert torch.equal(loaded(ids).logits, kept[0].eval()(ids).logits)
    assert not torch.equal(loaded(ids).logits, sorting_model(0)[0](ids).logits)


def test_a_finished_run_shows_its_result_again(files, tmp_path, capsys):
    out = go(files, tmp_path / "out", eval_every=1, eval_prompts=4, eval_k=2)
    shown = capsys.readouterr().out
    table = shown[shown.index(" before ") :]
    assert re.search(r"accuracy +\d\.\d+ +\d\.\d+\n", table) and re.search(r"pass@2 +\d\.\d+ +\d\.\d+\n", table)
    assert table.count("step 0, reward") == table.count("step 2, reward") == 2
    before = snapshot(out)
    go(files, out, eval_every=1, eval_prompts=4, eval_k=2, micro_batch_size=2)
    again = capsys.readouterr().out
    assert table in again and "step 1/2" not in again
    changed = {path for path, content in snapshot(out).items() if before.get(path) != content}
    assert changed <= {str(out / "config.json")}


def test_another_run_is_never_overwritten_unasked(files, tmp_path, capfd):
    out = go(files, tmp_path / "out")
    before = snapshot(out)
    capfd.readouterr()
    go(files, out, code=2, learning_rate=0.5, seed=7)
    error = capfd.readouterr().err
    assert "--learning_rate: 0.001 there, 0.5 here" in error and "--seed: 0 there, 7 here" in error
    assert "--overwrite" in error and "--steps" not in error and "Traceback" not in error
    assert snapshot(out) == before
    go(files, out, learning_rate=0.5, overwrite=True, steps=1)
    assert [line["learning_rate"] for line in metrics(out)] == [0.5]


def test_a_folder_of_something_else_is_left_alone(files, tmp_path, capfd):
    (tmp_path / "thesis.tex").write_text("years of work")
    for settings in ({}, {"overwrite": True}):
        go(files, tmp_path, code=2, **settings)
        assert "not a run" in capfd.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


# ---- Evaluation ----


def test_evaluation_against_counting(files, tmp_path, gradients):
    (files / "rewards.jsonl").unlink(missing_ok=True)
    settings = dict(eval_every=2, eval_prompts=7, eval_k=3, steps=3, reward="lucky")
    out = go(files, tmp_path / "out", **settings)
    calls = lines(files / "rewards.jsonl")
    evaluated = [line for line in metrics(out) if "eval/accuracy" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 3]
    at = [0, 4, 7]  # greedy, sampled; two steps; greedy, sampled; a step; greedy, sampled
    assert len(calls) == 9
    trained_on = {prompt for i in (2, 3, 6) for prompt in calls[i]["prompts"]}
    for figures, i in zip(evaluated, at):
        greedy, sampled = calls[i], calls[i + 1]
        assert len(set(greedy["prompts"])) == 7 and not trained_on & set(greedy["prompts"])
        groups = [sampled["values"][j : j + 3] for j in range(0, 21, 3)]
        assert sampled["prompts"] == [prompt for prompt in greedy["prompts"] for _ in range(3)]
        assert figures["eval/accuracy"] == pytest.approx(statistics.mean(greedy["values"]))
        assert figures["eval/pass@1"] == pytest.approx(statistics.mean(map(statistics.mean, groups)))
        assert figures["eval/pass@3"] == pytest.approx(statistics.mean(map(max, groups)))
    expected = [*gradients]
    gradients.clear()
    go(files, tmp_path / "without", **settings | dict(eval_every=0, data=files / "rows.jsonl"))
    assert len(samples(out, "eval")) == 6
    assert not any("eval/" in name for line in metrics(tmp_path / "without") for name in line)
    assert len(expected) == len(gradients)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_against_enumeration(n):
    for correct in range(n + 1):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
            assert report.pass_at_k(n, correct, k) == pytest.approx(sum(map(max, draws)) / len(draws))


# ---- A chat model, rewards in TRL's signature ----

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = char_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789<>;+ ?")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(tokenizer, hidden_size=32, intermediate_size=48))
    own = dict(eos_token_id=[EOS_ID, 5, 9, 12], pad_token_id=0, do_sample=True, temperature=0.6, top_k=3)
    model.generation_config = GenerationConfig(**own)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1?"}]
    rows = [{"prompt": messages, "answer": "2"}, {"prompt": [{"role": "user", "content": "2+3?"}], "answer": "5"}]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "strings.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return folder


def chat_settings(chat: Path) -> dict:
    return dict(
        task="data", model=chat, data=chat / "chat.jsonl", prompts_per_step=2, max_completion_length=20, steps=1,
        reward="chatty first", reward_weights=[0.5, 2.0],
    )  # fmt: skip


def test_chat_prompts_and_rewards_of_ones_own(files, chat, tmp_path, capsys):
    (files / "rewards.jsonl").unlink(missing_ok=True)
    out = go(files, tmp_path / "out", **chat_settings(chat))
    assert "chat template" not in capsys.readouterr().out
    (call,) = lines(files / "rewards.jsonl")
    given = lines(chat / "chat.jsonl")
    assert sorted(call["answer"]) == ["2"] * G + ["5"] * G
    for i, line in enumerate(samples(out)):
        assert line["prompt"] == call["prompts"][i] == given[call["answer"][i] == "5"]["prompt"]
        assert [m["role"] for m in call["completions"][i]] == ["assistant"]
        text, ids = call["completions"][i][0]["content"], call["ids"][i]
        assert line["completion"].replace(EOS, "").replace("<pad>", "") == text
        assert not set(ids[:-1]) & {EOS_ID, 5, 9, 12} and line["truncated"] == (ids[-1] not in {EOS_ID, 5, 9, 12})
        assert line["reward"] == pytest.approx(0.5 * len(ids) + 2.0 * (ord(text[:1] or "0") % 7))
    assert {call["ids"][i][-1] for i in range(2 * G)} & {5, 9, 12}, "every end token ends"
    figures = metrics(out)[0]
    assert figures["reward"] == pytest.approx(0.5 * figures["reward/chatty"] + 2.0 * figures["reward/first"])


def test_chat_prompts_go_through_the_template(files, chat, tmp_path, monkeypatch):
    seen, rollout = [], train.rollout
    monkeypatch.setattr(
        train, "rollout", lambda model, prompts, *rest: seen.extend(prompts) or rollout(model, prompts, *rest)
    )
    go(files, tmp_path / "out", **chat_settings(chat))
    tokenizer = AutoTokenizer.from_pretrained(chat)
    expected = {"<system>add;<user>1+1?;<assistant>", "<user>2+3?;<assistant>"}
    assert {tokenizer.decode(ids).replace(EOS, "") for ids in seen} == expected


def test_the_models_own_generation_settings_survive(files, chat, tmp_path):
    out = go(files, tmp_path / "out", **chat_settings(chat))
    before, after = (GenerationConfig.from_pretrained(x).to_diff_dict() for x in (chat, out / "model"))
    assert before["eos_token_id"] == [EOS_ID, 5, 9, 12] and before | {"transformers_version": 0} == after | {
        "transformers_version": 0
    }
    assert AutoTokenizer.from_pretrained(out / "model").chat_template == TEMPLATE


def test_string_prompts_to_a_chat_model_are_noted(files, chat, tmp_path, capsys):
    settings = chat_settings(chat) | dict(data=chat / "strings.jsonl", reward="flat", reward_weights=[1.0])
    go(files, tmp_path / "out", **settings)
    shown = capsys.readouterr().out
    assert len([line for line in shown.splitlines() if "chat template is not applied" in line]) == 1
