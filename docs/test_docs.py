"""The pages agree with the repository: their commands run, and each test, flag, file and link that they name exists."""

import ast
import dataclasses
import inspect
import itertools
import json
import math
import re
import runpy
import shlex
import shutil
import signal
from collections.abc import Callable
from functools import partial
from graphlib import TopologicalSorter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

import conftest
import train
from advantage import combine_rewards, group_advantages
from config import ALGORITHMS, Config
from conftest import assert_same_files, metrics, run
from infra.command_line import parse, ready
from infra.run_folder import MAY_CHANGE
from loss import policy_loss, token_weights
from rollout import Sampling, rollout
from tasks._characters import small_config
from tools import ablate, evidence, plot

HERE = Path(__file__).parent.parent
PATHS = [HERE / "README.md", *HERE.glob("docs/*.md"), *HERE.glob("results/*/*.md")]
PAGES = {str(path.relative_to(HERE)): path.read_text() for path in PATHS}
README, EXTENDING, OBJECTIVES = (PAGES[name] for name in ("README.md", "docs/extending.md", "docs/objectives.md"))
ADDITIONS, _, EDITS = EXTENDING.partition("## Another optimizer\n")  # these are of train.py, in the place of a flag
EDITS, _, DISTILLATION = EDITS.partition("## On-policy distillation\n")
DISTILLATION, _, SAMPLER = DISTILLATION.partition("## A sampler of your own\n")
SAMPLER, _, BASELINE = SAMPLER.partition("## An optimal token baseline\n")
BASELINE, _, REMEMBERED = BASELINE.partition("## What a run remembers\n")
FILES = re.findall(r"[Ii]n\s`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", EXTENDING, re.DOTALL | re.MULTILINE)


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands(page: str, start: str) -> list[list[str]]:
    """For each command of the page that starts like this, the words after the start."""
    lines = "\n".join(blocks(page, "", "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[match.end() :], comments=True) for line in lines if (match := re.match(start, line))]


def settings_of(words: list[str]) -> Config:
    return ready(parse(words, on_gpu=False), on_gpu=False)


def missing(pattern: str, is_there: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """The names that match the pattern on a page and do not exist, each with its page."""
    named = [(page, name) for page, text in PAGES.items() for name in dict.fromkeys(re.findall(pattern, text))]
    assert len(named) > 20, "the pattern finds what the pages name"
    return [(page, name) for page, name in named if not is_there(page, name)]


def test_every_test_is_there():
    tests = "\n".join(path.read_text() for path in HERE.rglob("test_*.py"))
    assert missing(r"`(test_\w+)`", lambda page, name: f"def {name}(" in tests) == []


def test_every_flag_is_there():
    tools = "\n".join(path.read_text() for path in [*HERE.glob("tools/*.py"), *HERE.glob("results/*/*.py")])
    known = {field.name for field in dataclasses.fields(Config)} | {*re.findall(r"\w+", tools)}
    known |= {*re.findall(r"^\+    (\w+): .*setting\(", EXTENDING, re.MULTILINE)}
    known |= {"nproc_per_node", "nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "max"}  # torchrun's
    known |= {"logprobs", "nodes", "ntasks", "gpus", "requeue", "dist", "help"}  # of vLLM, Slurm, pytest, everyone
    assert missing(r"--([a-z]\w+)", lambda page, name: name in known) == []


def test_every_file_is_there():
    made = {"prompts.jsonl", "metrics.jsonl", "samples.jsonl", "config.json", *(name for name, _ in FILES)}

    def is_there(page: str, name: str) -> bool:
        return name in made or (HERE / name).exists() or (HERE / page).with_name(name).exists()

    assert missing(r"`([\w/.]+\.(?:py|txt|md|toml|jsonl?))`", is_there) == []
    tree = [line.split()[0] for line in README.partition("\ntrain.py  ")[2].partition("```")[0].splitlines()[1:]]
    assert [name for name in tree if not list(HERE.glob(name))] == []


def test_every_link_leads_somewhere():
    def is_there(page: str, link: str) -> bool:
        file, _, heading = link.partition("#")
        target = (HERE / page).parent / file if file else HERE / page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
        anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
        return target.exists() and (not heading or heading in anchors)

    assert missing(r"\]\((?!https?:)([^)\s]+)\)", is_there) == []


@pytest.mark.parametrize("page", sorted({*PAGES} - {"docs/extending.md"}))  # those of that page are run, below
def test_every_command_is_understood(page):
    for words in commands(PAGES[page], r"(pip|python|torchrun|srun) .*train\.py"):
        parse(words, on_gpu=True)
    for name in re.findall(r"python -m tools\.(\w+)", PAGES[page]):
        assert (HERE / "tools" / f"{name}.py").exists()


SOURCES = [path for path in HERE.rglob("*.py") if "test" not in path.name and ".venv" not in path.parts]
TREES = {path.relative_to(HERE): ast.parse(path.read_text()) for path in SOURCES}


def test_imports_run_one_way():
    """As docs/contributing.md says: tools -> train -> infra -> tasks -> the other files at the top; no circle."""
    order, imports = ["results", "tools", "minimal", "train", "infra", "tasks"], {}
    for path, tree in TREES.items():
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        nodes = [*ast.walk(tree)]
        imports[name] = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                imports[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    imports = {name: found & imports.keys() for name, found in imports.items()}
    room = {name: [*order, name.split(".")[0]].index(name.split(".")[0]) for name in imports}
    assert [(name, one) for name, found in imports.items() for one in found if room[one] < room[name]] == []
    plain = [name for name in imports if name in ("loss", "advantage") or name.startswith("fast.")]
    assert len(plain) >= 5 and all(imports[name] == set() for name in plain)
    TopologicalSorter(imports).prepare()  # raises where there is a circle


def test_every_table_is_that_of_the_logs_and_every_picture_is_there():
    evidence.main(["--check"])
    rows = README.partition("docs/benchmarks.md):\n")[2].partition("\n[")[0].strip().splitlines()
    assert len(rows) > 5 and [row for row in rows if row not in PAGES["docs/benchmarks.md"]] == []


def test_the_default_run_begins_as_its_log_says(tmp_path):
    """The first three steps, run again: the same completions, up to ties in floating point."""
    assert train.main([*"--seed 0 --steps 3 --eval_every 0 --out".split(), str(tmp_path)]) == 0
    logged, again = (plot.read_log(folder).lines for folder in (HERE / "results" / "default" / "seed-0", tmp_path))
    logged = [line for line in logged if "reward" in line][:3]
    for name in ("step", "reward", "completion_length", "entropy", "grad_norm", "loss"):
        expected = pytest.approx([line[name] for line in logged], rel=1e-3, abs=1e-6)
        assert [line[name] for line in again] == expected, name


def test_the_findings_come_from_runs_of_their_commands():
    """Those of a command have one commit, and the settings that the command has today."""
    for args in map(ablate.parse, commands(PAGES["docs/findings.md"], "python -m tools.ablate")):
        args.out, commits = HERE / "results" / args.out.name, set()
        for folder, words, _ in ablate.runs_of(args):
            made, meant = json.loads((folder / "config.json").read_text()), vars(settings_of(words))
            names = meant.keys() & made["settings"].keys() - MAY_CHANGE
            assert {name: made["settings"][name] for name in names} == {name: meant[name] for name in names}
            commits.add(made["commit"])
            if meant["max_grad_norm"] == 100:  # "never takes hold"
                assert max(step.get("grad_norm", 0) for step in plot.read_log(folder).lines) < 100
        assert len(commits) == 1 and re.fullmatch("[0-9a-f]{40}", commits.pop())


def test_the_page_of_objectives_has_every_preset_and_switch():
    rows = dict(re.findall(r"^\| `([\w+-]+)` .* \| `(--.*?)` \|", OBJECTIVES, re.MULTILINE))
    assert rows.keys() == ALGORITHMS.keys()
    for name, flags in rows.items():
        grpo = {} if name == "grpo" else ALGORITHMS["grpo"]
        switches = {switch: value for switch, value in ALGORITHMS[name].items() if value != grpo.get(switch)}
        given = vars(parse(shlex.split(flags), on_gpu=False))
        assert {switch: given[switch] for switch in re.findall(r"--(\w+)", flags)} == switches, name
    sections = re.split("^##+ ", OBJECTIVES, flags=re.MULTILINE)
    for field in dataclasses.fields(Config):
        if field.metadata["heading"] == "The objective" and field.name != "algorithm":
            (section,) = (text for text in sections if re.match(rf".*--{field.name}\b", text))  # in its title
            assert [name for name in field.metadata["names"] or () if f"`{name}`" not in section] == [], field.name


def test_every_setting_of_trl_has_its_row():
    names = (HERE / "docs" / "from_trl.txt").read_text().split("\n\n")[1:]
    rows = re.findall(r"^\| (.*?) \| ", PAGES["docs/from_trl.md"].partition("What other trainers")[0], re.MULTILINE)
    found = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert [len(part.split()) for part in names] == [79, 14] and {*" ".join(names).split()} - found == set()


def test_the_names_are_those_of_trl():
    trl = pytest.importorskip("trl")
    config, trainer = (part.split() for part in (HERE / "docs" / "from_trl.txt").read_text().split("\n\n")[1:])
    assert trl.__version__.startswith("1.16.") and config == [*trl.GRPOConfig.__annotations__]
    assert ["self", *trainer] == [*inspect.signature(trl.GRPOTrainer.__init__).parameters]


def test_objectives_that_are_the_same_with_one_update_a_rollout():
    """Their gradients with respect to the log-probs are the same up to a factor, which depends on the step in gdpo and
    luspo. That dapo also replaces groups is not compared."""
    unit = {}
    for name in ALGORITHMS:
        settings = settings_of(["--algorithm", name, "--prompts_per_step", "3", "--num_generations", "4"])
        torch.manual_seed(0)
        rewards, logp = torch.rand(3, 4, 1, dtype=torch.float64), torch.randn(12, 9, dtype=torch.float64)
        mask = torch.arange(9) < torch.randint(1, 10, (12, 1))
        how = dict(scale=settings.scale_rewards, baseline=settings.baseline, lengths=mask.sum(1).view(3, 4))
        advantages = group_advantages(combine_rewards(rewards, [1.0], settings.combine_rewards), **how).flatten()
        weights = token_weights(mask, settings.normalization, settings.max_completion_length, torch.arange(12) // 4)
        switches = {name: getattr(settings, name) for name in ("objective", "ratio", "epsilon_low", "epsilon_high")}
        loss, _ = policy_loss(logp.requires_grad_(), logp.detach(), advantages, weights, mask, **switches)
        (gradient,) = torch.autograd.grad(loss, logp)
        unit[name] = gradient / gradient.norm()
    same = [{"grpo", "gspo", "gmpo", "sapo", "gdpo"}, {"dapo", "cispo", "dppo", "vespo", "luspo"}, {"dr_grpo", "rloo"}]
    for a, b in itertools.combinations(ALGORITHMS, 2):
        is_same = torch.allclose(unit[a], unit[b], rtol=1e-9, atol=1e-12)
        assert is_same == any({a, b} <= each for each in same), (a, b)


def test_readme_opens_with_the_update_of_minimal():
    (update, *_) = blocks(README, "python")
    assert update in (HERE / "minimal.py").read_text()


def patched(diff: str, folder: Path) -> dict[str, str]:
    """The changed text of each file of the diff. The old lines of a hunk must occur exactly once in the file."""
    files = {}
    for file in re.split(r"^--- .*\n\+\+\+ b/", diff, flags=re.MULTILINE)[1:]:
        name, *hunks = file.split("\n@@\n")
        files[name] = (folder / name).read_text()
        for hunk in hunks:
            sides = [[line[1:] for line in hunk.splitlines() if line[:1] in marks] for marks in (" -", " +")]
            old, new = ("\n".join(["", *lines, ""]) for lines in sides)
            assert files[name].count(old) == 1, f"{name} has this {files[name].count(old)} times:{old}"
            files[name] = files[name].replace(old, new)
    return files


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    """A copy of the code with every file and every diff of the page. A diff of train.py makes another program of it."""
    assert {len(patched(diff, HERE)) for diff in blocks(README + EXTENDING, "diff")} == {1, 2}, "each applies by itself"
    copy = tmp_path_factory.mktemp("copy") / "fork"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("docs", "results", "runs", ".*", "__pycache__"))
    for name, text in [*FILES, ("prompts.jsonl", blocks(EXTENDING, "json")[0] * 3)]:
        (copy / name).write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "models" / "addition")
    config = small_config(tokenizer, 32, 32)
    config.num_labels = 1
    tokenizer.save_pretrained(copy / "reward_model")
    LlamaForSequenceClassification(config).save_pretrained(copy / "reward_model")
    for name in ("edited.py", "asking.py", "baselined.py", "recipes.py", *(f"recipe_{i}.py" for i in range(5))):
        shutil.copy(copy / "train.py", copy / name)
    edits = EDITS.replace("b/train.py", "b/edited.py") + SAMPLER.replace("b/train.py", "b/asking.py")
    edits += BASELINE.replace("b/train.py", "b/baselined.py")
    for diff in blocks(README + ADDITIONS + edits, "diff"):
        for name, text in patched(diff, copy).items():
            (copy / name).write_text(text)
    for i, diff in enumerate(blocks(REMEMBERED, "diff")):
        alone, with_others = (patched(diff.replace("b/train", f"b/{x}"), copy) for x in (f"recipe_{i}", "recipes"))
        for name, text in (alone | with_others).items():
            (copy / name).write_text(text)
    return copy


def make(copy: Path, module: str, words: list[str], out: str, *before: Callable, **expected) -> Path:
    """A run by this module of the copy. -> its folder"""
    (copy / "runs").mkdir(exist_ok=True)
    settings = {flag: values for flag, *values in (part.split() for part in " ".join(words).split("--")[1:])}
    run(settings, copy / "runs" / out, partial(conftest.in_a_copy, copy, module), *before, **expected)
    return copy / "runs" / out


@pytest.fixture(scope="module")
def runs(fork) -> dict[str, Path]:
    """The folder of the run of each command."""
    (ablation,) = map(ablate.parse, commands(README, "python -m tools.ablate"))
    variant = itertools.chain(*((f"--{name}", str(x)) for name, x in ablation.variants[-1].items()))
    lines = [("train", words) for words in [*commands(ADDITIONS, "python train.py"), [*ablation.flags, *variant]]]
    lines += [("edited", [*words, "--learning_rate", "0.1"]) for words in commands(EDITS, "python train.py")]  # SGD's
    folders = {}
    for module, words in lines:
        shorter = "--steps 20" if "largest" in words else "--steps 2 --prompts_per_step 4"
        words_of_run = [*words, *shorter.split(), "--eval_every", "0"]
        folders[" ".join([module, *words])] = make(fork, module, words_of_run, str(len(folders)))
    return folders


def test_every_command_of_an_addition(runs):
    assert any(line.endswith("vl") for line in runs) and len(runs) > 9
    for line, folder in runs.items():
        steps = plot.read_log(folder).lines
        for step in steps:
            if "brevity" in line:
                assert step["reward/brevity"] == pytest.approx(-step["completion_length"] / 100)
            if "overlong" in line:
                assert step["reward"] == pytest.approx(step["reward/exact_sum"] + step["reward/overlong"])
            if "judge" in line:
                assert step["reward"] == step["reward/judge"] != 0
        if "prompts.jsonl" in line:
            samples = [json.loads(text) for text in (folder / "samples.jsonl").read_text().splitlines()]
            assert {sample["prompt"] for sample in samples} == {"12+34="}
        if "largest" in line:
            assert steps[0]["reward"] < 0.1 and steps[-1]["reward"] > 0.3, "it learns"
        assert "chi2" not in line or steps[0]["kl"] == 0 < steps[1]["kl"]
        if "second_best" in line:
            samples = [json.loads(text) for text in (folder / "samples.jsonl").read_text().splitlines()]
            assert {sample["advantage"] for sample in samples} <= {0.0, 1.0}  # 1 where only one is right
        if "edited" in line:  # another optimizer, whose state is saved
            assert json.loads((folder / "checkpoint" / "000002" / "state.json").read_text())["optimizer"] == "SGD"


def test_what_a_run_remembers_outlives_a_kill_on_one_rank_and_on_two(fork):
    """With all recipes in one run: a run that is killed in its fourth step goes on after the second."""
    recipes = commands(REMEMBERED, "python train.py")
    few = "--prompts_per_step 2 --eval_every 0 --save_every 2 --steps".split()
    all_recipes = [*itertools.chain(*recipes), *few, "5"]
    whole = make(fork, "recipes", all_recipes, "recipes")
    killed = partial(conftest.at, "train.training_step", 4, conftest.die)
    cut = make(fork, "recipes", all_recipes, "cut", killed, code=-signal.SIGKILL)
    shutil.copytree(cut, fork / "runs" / "cut-two")
    assert_same_files(make(fork, "recipes", all_recipes, "cut"), whole)
    on_two = make(fork, "recipes", all_recipes, "cut-two", world=2)
    for ours, theirs in zip(metrics(on_two), metrics(whole), strict=True):
        assert ours == {name: x if x is None else pytest.approx(x, 1e-3, 1e-6) for name, x in theirs.items()}
    made = [make(fork, f"recipe_{i}", [*words, *few, "2"], f"recipe_{i}") for i, words in enumerate(recipes)]
    replayed, adapted, chosen, shortened, _ = map(metrics, made)
    assert abs(replayed[0]["loss"]) < 1e-6 < 1e-4 < abs(replayed[1]["loss"]), "off-policy"
    assert [line["logged/beta"] for line in adapted] == [0.05, pytest.approx(0.05 * 0.98)], "the first KL is 0"
    assert [line["reward"] for line in chosen] != [line["reward"] for line in shortened], "other prompts"
    first, second = shortened
    assert second["logged/mean"] == pytest.approx(0.9 * first["logged/mean"] + 0.1 * second["completion_length"])
    coef, applied = 0.01, 0.0
    explored = metrics(make(fork, "recipe_4", [*recipes[4], *few, "4"], "explored"))
    for line in explored:
        assert line["logged/entropy_coef"] == pytest.approx(applied)
        coef += 0.005 if line["entropy"] <= 0.25 else -0.005
        applied = coef if line["entropy"] <= 0.25 else 0.0
    assert {line["entropy"] <= 0.25 for line in explored} == {True, False}


def own(fork: Path, name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(fork / f"{name}.py")))


def test_the_reward_model_it_adds(fork, monkeypatch):
    """The score of a pair does not depend on the padding of its batch."""
    monkeypatch.chdir(fork)
    judge, texts = own(fork, "judge"), ["#1", "#22", *["#3"] * 20, "7+5=12#12"]
    scores = judge.judge(prompts=["1+1="] * 23, completions=texts)
    alone = [judge.model(**judge.tokenizer(f"1+1={text}", return_tensors="pt")).logits.item() for text in texts]
    assert scores == pytest.approx(alone, abs=1e-5) and len({*scores}) >= 4  # fp32, scores near 1


def test_the_functions_it_adds(fork):
    """Each function equals its equation. The mean of the chi2 estimator is (sum pi_ref^2 / pi - 1) / 2."""
    loss, lengths = own(fork, "loss"), [5, 0, 2, 7]
    total = sum(n**-0.75 for n in lengths if n)
    expected = [[n**-0.75 / (10 * total) if t < n else 0.0 for t in range(8)] for n in lengths]
    weights = loss.token_weights(torch.arange(8) < torch.tensor(lengths)[:, None], "vl", max_completion_length=10)
    assert weights.tolist() == [pytest.approx(row, rel=1e-14) for row in expected]
    policy, reference = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    mean = (policy * loss.kl_divergence(policy.log(), reference.log(), "chi2")).sum()
    assert float(mean) == pytest.approx(float((reference.square() / policy).sum() - 1) / 2, rel=1e-12)
    rewards, how = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 2.0]]), dict(scale="none", baseline="median")
    assert own(fork, "advantage").group_advantages(rewards, **how).tolist() == [[-1.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
    rewards = torch.tensor([[0.5, 2.0, 1.0, math.nan], [2.0, 2.0, 1.0, 0.0]])
    best = own(fork, "advantage").group_advantages(rewards, scale="none", baseline="second_best")
    assert best.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0] * 4]
    rollout = own(fork, "rollout")
    for cutoff, kept, least in [(0.25, [0, 1], 0.375), (0.9, [0], 1.0)]:  # of 0.5 and 0.3; of the likeliest
        sampling = rollout.Sampling(max_completion_length=1, eos_ids=[0], epsilon_cutoff=cutoff)
        logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(100, 3)
        tokens, logp, sets = rollout.sample(logits, torch.linspace(0, 0.999, 100), sampling)
        assert set(tokens.tolist()) == {*kept} and logp.exp().min() == pytest.approx(least)
        assert all(one.nonzero().squeeze(1).tolist() == kept for one in sets)


def test_the_token_baseline_it_adds(fork):
    """sum_i r_i W_it / sum_i W_it over the completions of a prompt that have a token t. The loss of a run is minus the
    mean advantage of its tokens, up to the two digits of their log-probs and sums of squares in samples.jsonl."""
    (words,) = commands(BASELINE, "python train.py")
    words += "--steps 1 --prompts_per_step 4 --eval_every 0 --samples_per_step -1".split()
    out = make(fork, "baselined", words, "baselined")
    rows, expected = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()], []
    W = [[*itertools.accumulate(1 - 2 * math.exp(logp) + p for _, logp, p in row["tokens"])] for row in rows]
    for i, row in enumerate(rows):
        for t in range(row["length"]):
            there = [j for j in range(i // 8 * 8, i // 8 * 8 + 8) if rows[j]["length"] > t]
            weighted = sum(rows[j]["reward"] * W[j][t] for j in there)
            expected.append(row["reward"] - weighted / sum(W[j][t] for j in there))
    assert metrics(out)[0]["loss"] == pytest.approx(-sum(expected) / len(expected), abs=2e-3)
    tokens = [torch.tensor([token[1:] for token in row["tokens"]], dtype=torch.float64) for row in rows]
    logp, squares = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).unbind(2)
    mask = torch.arange(logp.shape[1]) < torch.tensor([len(x) for x in tokens])[:, None]
    batch = SimpleNamespace(sampler_logp=logp, sampler_entropy=squares, mask=mask, prompts=torch.arange(32) // 8)
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    advantages = own(fork, "baselined").above_token_baseline(rewards, batch)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-6)  # the equation adds 1e-8 to a sum of weights


class Server(BaseHTTPRequestHandler):
    """The sampler of this repository, asked as the page asks."""

    def do_POST(self) -> None:
        asked, answer = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), {}
        if self.path == "/load":
            self.server.model = AutoModelForCausalLM.from_pretrained(asked["folder"])
        else:
            sampling = Sampling(asked["max_tokens"], asked["stop_token_ids"], asked["temperature"])
            made = rollout(self.server.model, asked["prompts"], np.array(asked["uniform"]), sampling)
            answer = [dict(ids=each.ids, logp=each.logp, truncated=each.truncated) for each in made]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def test_a_sampler_behind_a_server_leaves_the_same_files(fork):
    (words,) = commands(SAMPLER, "python train.py")
    words += "--steps 3 --prompts_per_step 4 --eval_prompts 4".split()
    server = HTTPServer(("localhost", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    here = partial(conftest.replace, "served.SERVER", lambda _: f"http://localhost:{server.server_port}")
    asked, whole = make(fork, "asking", words, "asked", here), make(fork, "train", words, "not asked")
    server.shutdown()
    assert_same_files(asked, whole)
    assert all(line["gate_dropped"] == line["tis_bounded"] == 0 for line in metrics(whole) if line["step"])


def test_distillation_has_the_gradient_of_the_kl(fork):
    """The printed diff learns what a run learns from k2 alone, with rewards of weight 0 and the same teacher."""
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_pretrained(fork / "models" / "addition")
    for weights in teacher.parameters():
        weights.data += 0.02 * torch.randn_like(weights)
    teacher.save_pretrained(fork / "teacher")
    distilled = patched(*blocks(DISTILLATION, "diff"), HERE)["train.py"]
    (fork / "distilled.py").write_text(distilled)
    (fork / "taught.py").write_text(distilled.replace("part.ref_logp - logp.detach(),", "part.advantages,"))
    (words,) = commands(DISTILLATION, "python train.py")
    words += "--steps 2 --prompts_per_step 4 --eval_every 0".split()
    k2 = "--reward exact_sum --reward_weights 0 --beta 1 --kl_estimator k2".split()
    made = [make(fork, name, words + more, name) for name, more in (("distilled", []), ("taught", k2))]
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in made)
    student = load_file(fork / "models" / "addition" / "model.safetensors")
    ours, theirs = (torch.cat([(w[name] - x).flatten() for name, x in student.items()]) for w in (ours, theirs))
    assert conftest.distance(ours, theirs) < 1e-3 and theirs.norm() > 1e-3  # fp32; Adam enlarges its rounding
    for line, other in zip(*map(metrics, made), strict=True):
        assert line["kl"] > 0 and line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
