"""The pages against the repository: what they show runs, and every test, flag, file and link they name is there."""

import ast
import dataclasses
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

import train
from advantage import combine_rewards, group_advantages
from config import ALGORITHMS, Config, settings_that_may_change
from infra.command_line import parse
from loss import policy_loss, token_weights
from tasks import Task
from tasks._characters import small_config
from tools import ablate, evidence, plot

HERE = Path(__file__).parent.parent
PAGES = {str(path.relative_to(HERE)): path.read_text() for path in [HERE / "README.md", *HERE.glob("docs/*.md")]}
README, EXTENDING, FINDINGS = (PAGES[name] for name in ("README.md", "docs/extending.md", "docs/findings.md"))
EDITS = EXTENDING.partition("## Another optimizer\n")[2]  # of train.py, in the place of a flag
ADDITIONS = README + EXTENDING.removesuffix(EDITS)
FILES = re.findall(r"[Ii]n\s`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", EXTENDING, re.DOTALL | re.MULTILINE)


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands(page: str, start: str) -> list[list[str]]:
    """The words that follow this start, for each command of the page that has it."""
    lines = "\n".join(blocks(page, "", "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[match.end() :], comments=True) for line in lines if (match := re.match(start, line))]


# ---- What the pages name ----


def missing(pattern: str, is_there: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """What the pages name in this way and is not there, with the page."""
    named = [(page, name) for page, text in PAGES.items() for name in dict.fromkeys(re.findall(pattern, text))]
    assert len(named) > 20, "the pattern finds what the pages name"
    return [(page, name) for page, name in named if not is_there(page, name)]


def test_every_test_is_there():
    tests = "\n".join(path.read_text() for path in HERE.rglob("test_*.py"))
    assert missing(r"`(test_\w+)`", lambda page, name: f"def {name}(" in tests) == []


def test_every_flag_is_there():
    added = re.findall(r"^\+    (\w+): .*setting\(", EXTENDING, re.MULTILINE)
    settings = {field.name for field in dataclasses.fields(Config)} | {*added}
    tools = "\n".join(path.read_text() for path in HERE.glob("tools/*.py"))
    others = {"nproc_per_node", "nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "max"}  # torchrun's
    others |= {"nodes", "ntasks", "gpus", "requeue", "help"}  # Slurm's, and everyone's

    def is_there(page: str, name: str) -> bool:
        return name in settings | others or re.search(rf"\b{name}\b", tools) is not None

    assert missing(r"--([a-z]\w+)", is_there) == []


def test_every_file_is_there():
    made = {"prompts.jsonl", "metrics.jsonl", "samples.jsonl", "config.json", *(name for name, _ in FILES)}

    def is_there(page: str, name: str) -> bool:
        return name in made or (HERE / name).exists()

    assert missing(r"`([\w/.]+\.(?:py|txt|md|toml|jsonl?))`", is_there) == []
    tree = [line.split()[0] for line in README.partition("\ntrain.py  ")[2].partition("```")[0].splitlines()[1:]]
    assert [name for name in tree if not list(HERE.glob(name))] == []
    code = {path.name for path in HERE.glob("*.py") if not path.name.startswith(("test_", "conftest"))}
    assert code - {"train.py", *tree} == set()


def test_every_link_leads_somewhere():
    def is_there(page: str, link: str) -> bool:
        file, _, heading = link.partition("#")
        target = (HERE / page).parent / file if file else HERE / page
        if not target.exists() or not heading:
            return target.exists()
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        return heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}

    assert missing(r"\]\((?!https?:)([^)\s]+)\)", is_there) == []


@pytest.mark.parametrize("page", sorted({*PAGES} - {"docs/extending.md"}))
def test_every_command_is_understood(page):
    """Those of extending.md are run, below."""
    for words in commands(PAGES[page], r"(pip|python|torchrun|srun) .*train\.py"):
        parse(words, on_gpu=True)
    for name in re.findall(r"python -m tools\.(\w+)", PAGES[page]):
        assert (HERE / "tools" / f"{name}.py").exists()


def test_imports_run_one_way():
    """As docs/contributing.md says: tools -> train -> infra -> tasks -> the other files at the top; no circle."""
    order = ["tools", "train", "infra", "tasks", "concepts"]
    imports = {}
    for path in [file for file in HERE.rglob("*.py") if "test" not in file.name and ".venv" not in file.parts]:
        name = ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        imports[name] = found

    def room(name: str) -> int:
        top = name.split(".")[0]
        return order.index(top if top in order else "concepts")

    own = {name: {other for other in found if other in imports} for name, found in imports.items()}
    assert own["loss"] == own["advantage"] == set()
    for name, others in own.items():
        assert all(room(name) <= room(other) for other in others), (name, others)
    left = own
    while left:
        free = {name for name, others in left.items() if not others & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in free}


# ---- What the logs say ----


def test_every_table_is_that_of_the_logs_and_every_picture_is_there():
    assert evidence.stale() == []
    rows = README.partition("docs/benchmarks.md):\n")[2].partition("\n[")[0].strip().splitlines()
    assert len(rows) > 5 and [row for row in rows if row not in PAGES["docs/benchmarks.md"]] == []


def test_the_default_run_begins_as_its_log_says(tmp_path):
    """The first three steps, run again: the same completions, up to ties in floating point."""
    assert train.main([*"--seed 0 --steps 3 --eval_every 0 --out".split(), str(tmp_path)]) == 0
    logged, again = (plot.read_log(folder).lines for folder in (HERE / "results" / "default" / "seed-0", tmp_path))
    logged = [line for line in logged if "reward" in line][:3]
    assert [line["step"] for line in again] == [1, 2, 3]
    for name in ("reward", "completion_length", "entropy", "grad_norm", "advantage_easy", "loss"):
        expected = pytest.approx([line[name] for line in logged], rel=1e-3, abs=1e-6)
        assert [line[name] for line in again] == expected, name


def test_the_findings_come_from_runs_of_their_commands():
    """With the settings that the command has today, and from one commit."""
    commits = set()
    for args in map(ablate.parse, commands(FINDINGS, "python -m tools.ablate")):
        for variant, seed in itertools.product(args.variants, args.seeds):
            out = ablate.folder_of(args.out, variant, seed)
            meant = vars(parse([*args.flags, *ablate.flags_of(variant), "--seed", seed, "--out", str(out)], False))
            made = json.loads((HERE / "results" / out.relative_to("runs") / "config.json").read_text())
            names = meant.keys() & made["settings"].keys() - {*settings_that_may_change()} | {"out"}
            assert {name: made["settings"][name] for name in names} == {name: meant[name] for name in names}
            commits.add(made["commit"])
            if meant["max_grad_norm"] == 100:  # "never takes hold"
                steps = plot.read_log(HERE / "results" / out.relative_to("runs")).lines
                assert max(step.get("grad_norm", 0) for step in steps) < 100
    assert len(commits) == 1 and re.fullmatch("[0-9a-f]{40}", commits.pop())


def test_the_atlas_comes_from_runs_of_its_commands():
    for args in map(ablate.parse, commands(PAGES["docs/atlas.md"], "python -m tools.ablate")):
        kept = HERE / "results" / f"{args.out.name}.jsonl"
        for row in map(json.loads, kept.read_text().splitlines() if kept.exists() else []):
            made = vars(Config()) | row["settings"]
            variant = {name: str(made[name]) for name in ("algorithm", "learning_rate", "seed")}
            meant = vars(parse([*args.flags, *ablate.flags_of(variant)], on_gpu=False))
            names = meant.keys() - {*settings_that_may_change()} | {"steps"}
            assert {name: made[name] for name in names} == {name: meant[name] for name in names}, row["run"]


def gradient_of(algorithm: str) -> torch.Tensor:
    """Of the preset's loss by the log-probs, in the first update of a rollout."""
    settings = parse(["--algorithm", algorithm, "--prompts_per_step", "3", "--num_generations", "4"], on_gpu=False)
    torch.manual_seed(0)
    rewards, logp = torch.rand(3, 4, dtype=torch.float64), torch.randn(12, 9, dtype=torch.float64).requires_grad_()
    mask = torch.arange(9) < torch.randint(1, 10, (12, 1))
    parts = combine_rewards(rewards[..., None], [1.0], settings.combine_rewards)
    lengths = mask.sum(1).view(3, 4)
    advantages = group_advantages(parts, settings.scale_rewards, settings.baseline, lengths=lengths).flatten()
    weights = token_weights(mask, settings.normalization, settings.max_completion_length, torch.arange(12) // 4)
    switches = {name: getattr(settings, name) for name in train.LOSS_SWITCHES}
    loss, _ = policy_loss(logp, logp.detach(), advantages, weights, mask, **switches)
    return torch.autograd.grad(loss, logp)[0]


def test_objectives_that_are_the_same_with_one_update_a_rollout():
    """Up to a scale, of each step in gdpo and luspo; the others differ. dapo also replaces groups."""
    unit = {name: gradient_of(name) / gradient_of(name).norm() for name in ALGORITHMS}
    same = [{"grpo", "gspo", "gmpo", "sapo", "gdpo"}, {"dapo", "cispo", "dppo", "luspo"}, {"dr_grpo", "rloo"}]
    for a, b in itertools.combinations(ALGORITHMS, 2):
        is_same = torch.allclose(unit[a], unit[b], rtol=1e-9, atol=1e-12)
        assert is_same == any({a, b} <= each for each in same), (a, b)


# ---- What can be added ----


def test_a_step_of_ones_own_is_that_of_train(tmp_path, monkeypatch):
    """The script at the top of extending.md, and a step of train.py on its prompts: the same gradient."""
    script = tmp_path / "my_step.py"
    script.write_text(blocks(EXTENDING, "python")[0])
    monkeypatch.chdir(HERE)
    own = runpy.run_path(str(script))
    answers = {"1047+85=": "1132", "723+1409=": "2132"}
    config = parse(["--prompts_per_step", "2", "--eval_every", "0", "--out", str(tmp_path / "run")], on_gpu=False)
    run, *_ = train.set_up(config, torch.device("cpu"))
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
    run.task.train = sorted(rows, key=lambda row: Task(rows, [], [], [], 1.0).draw(0, 0) != row)
    gradients = []
    monkeypatch.setattr(run.optimizer, "step", lambda: gradients.extend(p.grad.clone() for p in run.model.parameters()))
    monkeypatch.setattr(train.ranks, "clip_gradients", lambda model, norm: torch.zeros(()))
    _, groups = train.training_step(run, 1)
    sampled = [completion.ids for group in groups for completion in group.completions]
    assert sampled == [completion.ids for group in own["groups"] for completion in group.completions]
    for ours, theirs in zip(gradients, own["model"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """A copy of the code, in a git repository of its own."""
    copy = tmp_path_factory.mktemp("clean") / "copy"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("docs", "results", "runs", ".*", "__pycache__"))
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    return copy


def apply(diff: str, copy: Path, *flags: str) -> None:
    applied = subprocess.run(["git", "apply", *flags], input=diff, cwd=copy, text=True, capture_output=True)
    assert applied.returncode == 0, applied.stderr + diff


@pytest.fixture(scope="module")
def fork(clean) -> Path:
    """With every file and every diff, one after the other. What edits train.py itself makes edited.py of it."""
    copy = shutil.copytree(clean, clean.with_name("fork"))
    for name, text in [*FILES, ("prompts.jsonl", blocks(EXTENDING, "json")[0] * 3)]:
        (copy / name).write_text(text)
    judge = AutoTokenizer.from_pretrained(HERE / "models" / "addition")
    judging = small_config(judge, 32, 32)
    judging.num_labels = 1
    judges = LlamaForSequenceClassification(judging)
    for part in (judge, judges):
        part.save_pretrained(copy / "reward_model")
    for diff in blocks(ADDITIONS, "diff"):
        apply(diff, copy)
    shutil.copy(copy / "train.py", copy / "edited.py")
    for diff in blocks(EDITS, "diff"):
        apply(diff.replace("/train.py", "/edited.py"), copy)
    return copy


def test_every_diff_applies_by_itself_and_is_small(clean):
    for diff in blocks(README + EXTENDING, "diff"):
        apply(diff, clean, "--check")
        assert diff.count("\n+++ ") <= 2


RUN_ALL = """
import importlib, json, sys
for i, (module, *words) in enumerate(json.load(sys.stdin)):
    if "largest" in words:
        words += ["--steps", "20"]
    else:
        words += ["--steps", "2", "--prompts_per_step", "4"]
    if module == "edited":  # with SGD, the learning rate of that addition
        words += ["--learning_rate", "0.1"]
    code = importlib.import_module(module).main([*words, "--eval_every", "0", "--out", f"runs/{i}"])
    assert code == 0, (module, words, code)
"""


@pytest.fixture(scope="module")
def runs(fork) -> dict[str, tuple[Path, list[dict]]]:
    """For each command its folder and its metrics. In one process: to import PyTorch takes longer than the steps."""
    (ablation,) = map(ablate.parse, commands(README, "python -m tools.ablate"))
    lines = [["train", *words] for words in commands(ADDITIONS, "python train.py")]
    lines += [["train", *ablation.flags, *ablate.flags_of(ablation.variants[-1])]]
    lines += [["edited", *words] for words in commands(EDITS, "python train.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", RUN_ALL]
    ended = subprocess.run(command, input=json.dumps(lines), cwd=fork, env=environment, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    folders = [fork / "runs" / str(i) for i in range(len(lines))]
    return {" ".join(words): (out, plot.read_log(out).lines) for words, out in zip(lines, folders, strict=True)}


def test_every_command_of_an_addition(runs):
    assert "train --normalization vl" in runs and len(runs) > 9
    for line, (folder, steps) in runs.items():
        for step in steps:
            if "brevity" in line:
                assert step["reward/brevity"] == pytest.approx(-step["completion_length"] / 100)
            if "overlong" in line:
                assert step["reward"] == pytest.approx(step["reward/exact_sum"] + step["reward/overlong"])
        if "prompts.jsonl" in line:
            samples = [json.loads(text) for text in (folder / "samples.jsonl").read_text().splitlines()]
            assert {sample["prompt"] for sample in samples} == {"12+34="}
        if "largest" in line:
            assert steps[0]["reward"] < 0.1 and steps[-1]["reward"] > 0.3, "it learns"
        if "chi2" in line:
            assert steps[0]["kl"] == 0 < steps[1]["kl"]


def test_another_optimizer_and_a_buffer(runs):
    """The optimizer's state is saved. The completions of the step before are trained on once more, off-policy."""
    folder, _ = runs["edited --learning_rate 0.1"]
    assert json.loads((folder / "checkpoint" / "000002" / "state.json").read_text())["optimizer"] == "SGD"
    _, steps = runs["edited --old_policy sampler"]
    assert abs(steps[0]["loss"]) < 1e-6 < 1e-4 < abs(steps[1]["loss"])


def own(fork: Path, name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(fork / f"{name}.py")))


def test_the_reward_model_it_adds(fork, runs, monkeypatch):
    """Each pair of a batch by itself, whatever the padding; and in a run."""
    monkeypatch.chdir(fork)
    judge = own(fork, "judge")
    texts = ["#1", "#22", *["#3"] * 20, "7+5=12#12"]
    scores = judge.judge(prompts=["1+1="] * 23, completions=texts)
    alone = [judge.model(**judge.tokenizer(f"1+1={text}", return_tensors="pt")).logits.item() for text in texts]
    assert scores == pytest.approx(alone, abs=1e-5) and len({*scores}) >= 4
    _, steps = runs["train --reward judge.py:judge"]
    assert all(step["reward"] == step["reward/judge"] != 0 for step in steps)


def test_the_normalization_it_adds(fork):
    """w = |o_i|^-0.75 / (L sum_j |o_j|^-0.75); completions of 5, 0, 2 and 7 tokens, L = 10"""
    lengths = [5, 0, 2, 7]
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    total = sum(n**-0.75 for n in lengths if n)
    expected = [[n**-0.75 / (10 * total) if t < n else 0.0 for t in range(8)] for n in lengths]
    weights = own(fork, "loss").token_weights(mask, "vl", max_completion_length=10)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_the_kl_estimator_it_adds(fork):
    """Its mean over the policy's tokens is half of sum pi_ref^2 / pi - 1."""
    policy, reference = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    per_token = own(fork, "loss").kl_divergence(policy.log(), reference.log(), "chi2")
    exact = ((reference.square() / policy).sum() - 1) / 2
    torch.testing.assert_close((policy * per_token).sum(), exact, rtol=0, atol=1e-12)


def test_the_advantage_and_the_knob_it_adds(fork):
    rewards = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 2.0]])
    advantages = own(fork, "advantage").group_advantages(rewards, scale="none", baseline="median")
    assert advantages.tolist() == [[-1.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
    rollout = own(fork, "rollout")
    sampling = rollout.Sampling(max_completion_length=1, eos_ids=[0], min_p=0.5)
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(100, 3)
    tokens, logp = rollout.sample(logits, torch.linspace(0, 0.999, 100), sampling)
    assert set(tokens.tolist()) == {0, 1} and logp.exp().min() == pytest.approx(0.3)
