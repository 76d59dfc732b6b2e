"""The pages against the repository: what they show runs, and every test, flag, file and link they name is there."""

import ast
import dataclasses
import importlib
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

import train
from advantage import combine_rewards, group_advantages
from config import ALGORITHMS, Config
from conftest import assert_same_files, metrics
from infra.command_line import parse, ready
from infra.run_folder import MAY_CHANGE
from logprob import token_logprobs
from loss import policy_loss, token_weights
from tasks._characters import small_config
from tools import ablate, evidence, plot

HERE = Path(__file__).parent.parent
PATHS = [HERE / "README.md", *HERE.glob("docs/*.md"), *HERE.glob("results/*/*.md")]
PAGES = {str(path.relative_to(HERE)): path.read_text() for path in PATHS}
README, EXTENDING, OBJECTIVES = (PAGES[name] for name in ("README.md", "docs/extending.md", "docs/objectives.md"))
ADDITIONS, _, EDITS = EXTENDING.partition("## Another optimizer\n")  # these are of train.py, in the place of a flag
EDITS, _, DISTILLATION = EDITS.partition("## On-policy distillation\n")
DISTILLATION, _, REMEMBERED = DISTILLATION.partition("## What a run remembers\n")
FILES = re.findall(r"[Ii]n\s`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", EXTENDING, re.DOTALL | re.MULTILINE)


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands(page: str, start: str) -> list[list[str]]:
    """The words that follow this start, for each command of the page that has it."""
    lines = "\n".join(blocks(page, "", "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[match.end() :], comments=True) for line in lines if (match := re.match(start, line))]


def settings_of(words: list[str]) -> Config:
    return ready(parse(words, on_gpu=False), on_gpu=False)


def missing(pattern: str, is_there: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """What the pages name in this way and is not there, with the page."""
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
    known |= {"nodes", "ntasks", "gpus", "requeue", "dist", "help"}  # Slurm's, pytest's, and everyone's
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
PLAIN = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PLAIN += (ast.Assign, ast.AnnAssign, ast.AugAssign)


def test_an_import_changes_nothing():
    """No logging, no filter of warnings, no threads, no random state: modules import, define, name, and no more."""
    for path, tree in TREES.items():
        for node in tree.body if path.parts[0] not in ("tools", "results") else []:
            only_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            as_script = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            assert isinstance(node, PLAIN) or only_text or as_script, (path, node.lineno)
            targets = [part for target in getattr(node, "targets", []) for part in ast.walk(target)]
            assert not any(isinstance(part, ast.Attribute | ast.Subscript) for part in targets), (path, node.lineno)


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
    assert len(plain) == 5 and all(imports[name] == set() for name in plain)
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


def test_objectives_that_are_the_same_with_one_update_a_rollout():
    """Gradients by the log-probs, up to a scale, of each step in gdpo and luspo. dapo also replaces groups."""
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
    same = [{"grpo", "gspo", "gmpo", "sapo", "gdpo"}, {"dapo", "cispo", "dppo", "luspo"}, {"dr_grpo", "rloo"}]
    for a, b in itertools.combinations(ALGORITHMS, 2):
        is_same = torch.allclose(unit[a], unit[b], rtol=1e-9, atol=1e-12)
        assert is_same == any({a, b} <= each for each in same), (a, b)


def test_readme_opens_with_the_update_of_minimal():
    (update, *_) = blocks(README, "python")
    assert update in (HERE / "minimal.py").read_text()


def patched(diff: str, folder: Path) -> dict[str, str]:
    """Its files as it makes them. Each hunk's context and removed lines stand in their file exactly once."""
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
    """A copy of the code with every file and every diff; what edits train.py itself makes files beside it."""
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
    for name in ("edited.py", "recipes.py", *(f"recipe_{i}.py" for i in range(4))):
        shutil.copy(copy / "train.py", copy / name)
    edits = EDITS.replace("b/train.py", "b/edited.py")
    for diff in blocks(README + ADDITIONS + edits, "diff"):
        for name, text in patched(diff, copy).items():
            (copy / name).write_text(text)
    for i, diff in enumerate(blocks(REMEMBERED, "diff")):
        alone, with_others = (patched(diff.replace("b/train", f"b/{x}"), copy) for x in (f"recipe_{i}", "recipes"))
        for name, text in (alone | with_others).items():
            (copy / name).write_text(text)
    return copy


def make(fork: Path, asked: list[tuple]) -> None:
    """Runs of these modules, to fail after a step or not, by words. To import PyTorch takes longer than the steps."""
    code = """import importlib, json, sys
for name, last, *words in json.load(sys.stdin):
    module = importlib.import_module(name)
    step = module.training_step
    module.training_step = lambda run, n: step(run, n) if last is None or n <= last else 1 / 0
    assert module.main(words) == (last is not None), (name, words)
    module.training_step = step"""
    ran = subprocess.run([sys.executable, "-c", code], input=json.dumps(asked).encode(), cwd=fork, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()


@pytest.fixture(scope="module")
def runs(fork) -> dict[str, Path]:
    """For each command its folder."""
    (ablation,) = map(ablate.parse, commands(README, "python -m tools.ablate"))
    lines = [["train", *words] for words in commands(ADDITIONS, "python train.py")]
    lines += [["train", *ablation.flags, *(f"--{name}={x}" for name, x in ablation.variants[-1].items())]]
    lines += [["edited", *words] for words in commands(EDITS, "python train.py")]
    asked = []
    for i, line in enumerate(lines):
        shorter = ["--steps", "20"] if "largest" in line else ["--steps", "2", "--prompts_per_step", "4"]
        rate = ["--learning_rate", "0.1"] if line[0] == "edited" else []  # SGD's, in that addition
        asked.append([line[0], None, *line[1:], *shorter, *rate, "--eval_every", "0", "--out", f"runs/{i}"])
    make(fork, asked)
    return {" ".join(words): fork / "runs" / str(i) for i, words in enumerate(lines)}


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
        if "edited" in line:  # another optimizer, whose state is saved
            assert json.loads((folder / "checkpoint" / "000002" / "state.json").read_text())["optimizer"] == "SGD"


def test_what_a_run_remembers_outlives_a_kill_on_one_rank_and_on_two(fork):
    """Five steps against a run that fails in the fourth and goes on after the second; all at once on two ranks."""
    recipes = {f"recipe_{i}": words for i, words in enumerate(commands(REMEMBERED, "python train.py"))}
    recipes["recipes"], asked = [*itertools.chain(*recipes.values())], []
    for name, words in recipes.items():
        words += "--steps 5 --save_every 2 --prompts_per_step 2 --eval_every 0 --out".split()
        asked += [(name, last, *words, f"runs/{name}{end}") for last, end in ((None, ""), (3, "-cut"), (None, "-cut"))]
    make(fork, asked[:-1])
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "recipes.py"]
    subprocess.run([*two, *asked[-1][2:]], cwd=fork, check=True, capture_output=True)
    on_two, on_one = (metrics(fork / "runs" / name) for name in ("recipes-cut", "recipes"))
    for ours, theirs in zip(on_two, on_one, strict=True):
        assert ours == {name: x if x is None else pytest.approx(x, 1e-3, 1e-6) for name, x in theirs.items()}
    for i in range(4):
        assert_same_files(fork / "runs" / f"recipe_{i}-cut", fork / "runs" / f"recipe_{i}")
    replayed, adapted, chosen, shortened = (metrics(fork / "runs" / f"recipe_{i}") for i in range(4))
    assert abs(replayed[0]["loss"]) < 1e-6 < 1e-4 < abs(replayed[1]["loss"]), "off-policy"
    assert [line["logged/beta"] for line in adapted[:2]] == [0.05, pytest.approx(0.05 * 0.98)], "the first KL is 0"
    assert [line["reward"] for line in chosen] != [line["reward"] for line in shortened], "other prompts"
    for a, b in itertools.pairwise(shortened):
        assert b["logged/mean"] == pytest.approx(0.9 * a["logged/mean"] + 0.1 * b["completion_length"])


def own(fork: Path, name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(fork / f"{name}.py")))


def test_the_reward_model_it_adds(fork, monkeypatch):
    """Each pair of a batch by itself, whatever the padding."""
    monkeypatch.chdir(fork)
    judge, texts = own(fork, "judge"), ["#1", "#22", *["#3"] * 20, "7+5=12#12"]
    scores = judge.judge(prompts=["1+1="] * 23, completions=texts)
    alone = [judge.model(**judge.tokenizer(f"1+1={text}", return_tensors="pt")).logits.item() for text in texts]
    assert scores == pytest.approx(alone, abs=1e-5) and len({*scores}) >= 4  # fp32, scores near 1


def test_the_functions_it_adds(fork):
    """Each against its equation; the mean of the chi2 estimator is half of sum pi_ref^2 / pi - 1."""
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
    rollout = own(fork, "rollout")
    for cutoff, kept, least in [(0.25, [0, 1], 0.375), (0.9, [0], 1.0)]:  # of 0.5 and 0.3; of the likeliest
        sampling = rollout.Sampling(max_completion_length=1, eos_ids=[0], epsilon_cutoff=cutoff)
        logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(100, 3)
        tokens, logp, sets = rollout.sample(logits, torch.linspace(0, 0.999, 100), sampling)
        assert set(tokens.tolist()) == {*kept} and logp.exp().min() == pytest.approx(least)
        assert all(one.nonzero().squeeze(1).tolist() == kept for one in sets)


def test_distillation_has_the_gradient_of_the_kl(tmp_path, monkeypatch):
    """Two steps as printed; the teacher is the student with noise. Their gradients are those of k2 alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_pretrained(HERE / "models" / "addition")
    for weights in teacher.parameters():
        weights.data += 0.02 * torch.randn_like(weights)
    teacher.save_pretrained("teacher")
    Path("distilled.py").write_text(patched(*blocks(DISTILLATION, "diff"), HERE)["train.py"])
    distilled, pairs = importlib.import_module("distilled"), []
    accumulate = distilled.accumulate

    def compared(run, batch):
        figures = accumulate(run, batch)
        logp, _ = token_logprobs(run.model, batch.ids, batch.attention, batch.mask)
        fixed = logp.detach(), torch.zeros(len(batch)), batch.weights, batch.mask
        loss, _ = policy_loss(logp, *fixed, ref_logp=batch.ref_logp, beta=1.0, kl_estimator="k2")
        parameters = list(run.model.parameters())
        pairs.extend(zip([p.grad.clone() for p in parameters], torch.autograd.grad(loss, parameters), strict=True))
        return figures

    monkeypatch.setattr(distilled, "accumulate", compared)
    (words,) = commands(DISTILLATION, "python train.py")
    assert distilled.main([*words, "--steps", "2", "--eval_every", "0", "--out", "run"]) == 0
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)  # fp32, in other micro-batches
