"""The pages agree with the repository: their commands run, and each test, flag, file and link that they name exists."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import json
import math
import re
import runpy
import shlex
import shutil
import signal
import string
import sys
from collections.abc import Callable
from functools import partial
from graphlib import TopologicalSorter
from http.server import BaseHTTPRequestHandler, HTTPServer
from operator import methodcaller
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

import conftest
import tasks
import train
from advantage import combine_rewards, group_advantages
from batch import Group
from config import ALGORITHMS, Config
from conftest import assert_same_files, metrics, run
from infra import command_line
from infra.command_line import parse, ready
from infra.run_folder import MAY_CHANGE
from loss import policy_loss, token_weights
from rollout import Completion, Sampling, rollout
from tasks._characters import EOS_ID, char_tokenizer, small_config
from tasks._prompts import encode_prompts
from tasks._turns import Replies
from test_config import DIFFERS
from tools import ablate, evidence, plot

HERE = Path(__file__).parent.parent
PATHS = [HERE / "README.md", *HERE.glob("docs/*.md"), *HERE.glob("results/*/*.md")]
PAGES = {str(path.relative_to(HERE)): path.read_text() for path in PATHS}
README, EXTENDING, OBJECTIVES = (PAGES[name] for name in ("README.md", "docs/extending.md", "docs/objectives.md"))
ADDITIONS, _, EDITS = EXTENDING.partition("## Another optimizer\n")  # these are of train.py, in the place of a flag
EDITS, _, DISTILLATION = EDITS.partition("## On-policy distillation\n")
DISTILLATION, _, SAMPLER = DISTILLATION.partition("## A sampler of your own\n")
SAMPLER, _, BASELINE = SAMPLER.partition("## An optimal token baseline\n")
BASELINE, _, TURNS = BASELINE.partition("## Several turns\n")
TURNS, _, REMEMBERED = TURNS.partition("## What a run remembers\n")
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


class Parsed(Exception):
    """The words of a command were understood, and it would begin."""


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_tool_knows_the_flags_that_a_page_gives_it(page, monkeypatch):
    """Each parser reads the words of its tool, and that of train.py those after "--"."""
    parse_args = argparse.ArgumentParser.parse_args

    def parses(parser: argparse.ArgumentParser, words: list[str] | None = None) -> None:
        parse_args(parser, words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parses)
    named = re.findall(r"python -m ((?:tools|results)\.[\w.]+)([^`\n]*)", PAGES[page].replace("\\\n", " "))
    for module, words in [(module, shlex.split(words, comments=True)) for module, words in named]:
        monkeypatch.setattr(sys, "argv", [module, *words])
        monkeypatch.delitem(sys.modules, module, raising=False)
        if "parse_args" in (HERE / f"{module.replace('.', '/')}.py").read_text():
            with pytest.raises(Parsed):
                runpy.run_module(module, run_name="__main__")
            words = [*itertools.dropwhile(lambda word: word != "--", words)][1:]
        parse_args(command_line.flags(), words)  # a tool without a parser passes on all words


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
        if field.metadata["heading"] == "The objective" and field.name in DIFFERS.keys() - {"algorithm"}:
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
    (copy / "my_environment.py").write_text(ENVIRONMENT)
    chat_model(copy / "chat")
    for name in ("edited", "asking", "baselined", "turned", "recipes", *(f"recipe_{i}" for i in range(5))):
        shutil.copy(copy / "train.py", copy / f"{name}.py")
    edits = EDITS.replace("b/train.py", "b/edited.py") + SAMPLER.replace("b/train.py", "b/asking.py")
    edits += BASELINE.replace("b/train.py", "b/baselined.py") + TURNS.replace("b/train.py", "b/turned.py")
    for diff in blocks(README + ADDITIONS + edits, "diff"):
        for name, text in patched(diff, copy).items():
            (copy / name).write_text(text)
    for i, diff in enumerate(blocks(REMEMBERED, "diff")):
        alone, with_others = (patched(diff.replace("b/train", f"b/{x}"), copy) for x in (f"recipe_{i}", "recipes"))
        for name, text in (alone | with_others).items():
            (copy / name).write_text(text)
    return copy


ENVIRONMENT = '''
class Environment:
    """With all that the contract of TRL 1.16 allows: a text of its own, several tools, state, errors, a reward."""

    def reset(self, start: int = 0, **columns):
        self.total, self.asked = start, columns["prompt"][-1]["content"]
        return f" It is {start} now."

    def add(self, n: int) -> int:
        """
        Add to the counter.

        Args:
            n: How much to add.
        """
        if n < 0:
            raise ValueError("only up")
        self.total += n
        return self.total

    def get_reward(self) -> float:
        return float(self.total == 9)
'''


def chat_model(folder: Path) -> None:
    tokenizer = char_tokenizer(string.printable)
    of_messages = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    asked = "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer.chat_template = "{{ tools | tojson }}" + of_messages + asked
    config = small_config(tokenizer, 32, 32)
    config.max_position_embeddings = 1024
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)


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


# ---- Several turns ----

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


@pytest.fixture
def tools(fork, monkeypatch, capsys) -> Callable:
    """-> a function: the tools of a file as the model's tokenizer shows them, and what is replied to these turns"""
    monkeypatch.chdir(fork)
    monkeypatch.syspath_prepend(fork)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(fork / "tasks")])

    def told(name: str, row: dict, turns: list[str]) -> tuple[SimpleNamespace, str, list]:
        tokenizer = AutoTokenizer.from_pretrained("chat")
        capsys.readouterr()
        file = SimpleNamespace(**runpy.run_path(name, run_name="__main__"))
        given = json.loads(capsys.readouterr().out)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **given)
        replies = Replies(file.reply, row, tokenizer, [EOS_ID])
        said = [replies(tokenizer(turn + "<eos>").input_ids) for turn in turns]
        encode_prompts(tokenizer, [row])
        return file, tokenizer.decode(row["prompt_ids"]), [ids and tokenizer.decode(ids) for ids in said]

    return told


def test_the_tool_it_adds(tools):
    row = {"prompt": [{"role": "user", "content": "2*(3+4)?"}]}
    turns = [CALL % ("calculator", f'{{"expression": "{x}"}}') for x in ("2*(3+4)", "2*x", "1/0")]
    _, prompt, said = tools("calculator.py", row, [*turns, "<tool_call>{</tool_call>", "It is 14."])
    assert "Work out an arithmetic expression." in prompt and prompt.endswith("[user]2*(3+4)?<eos>[assistant]")
    results = "14", "ValueError: malformed", "ZeroDivisionError: division by zero", "JSONDecodeError: Expecting"
    assert said.pop() is None
    for text, result in zip(said, results, strict=True):
        assert text.startswith(f"[tool]{result}") and text.endswith("<eos>[assistant]")


def test_the_environment_it_adds(tools):
    row = {"prompt": [{"role": "user", "content": "Up to 9."}], "start": 4}
    up, twice, down = (CALL % ("add", f'{{"n": {n}}}') * count for n, count in ((1, 1), (2, 2), (-1, 1)))
    turns = [twice, down, CALL % ("reset", "{}"), up]
    file, prompt, said = tools("tasks/environment.py", row, [*turns, "Done."])
    assert "Add to the counter." in prompt and file.TOOLS == ["add"]
    results = ["6", "8"], ["ValueError: only up"], ["KeyError: 'reset'"], ["9"]
    assert said == ["".join(f"[tool]{x}<eos>" for x in each) + "[assistant]" for each in results] + [None]
    task = file.load(Config())
    prompted = task.to_row(row)["prompt"]
    assert prompted == [{"role": "user", "content": "Up to 9. It is 4 now."}]
    given = dict(prompts=[prompted] * 2, completions=["", ""], completion_ids=[[], []], log_extra=print)
    assert task.rewards[0](**given, turns=[turns, turns[:1]], start=[4, 4]) == [1.0, 0.0]


def test_the_game_the_environment_and_the_rewards_of_turns_run(fork):
    game, each = commands(TURNS, "python train.py")
    chat = {"prompt": [{"role": "user", "content": "Up."}], "start": 8}
    (fork / "chat.jsonl").write_text("".join(json.dumps(chat | {"start": n}) + "\n" for n in range(4)))
    environment = "--task environment --model chat --data chat.jsonl --max_completion_length 8".split()
    environment += ["--chat_template_kwargs", '{"tools":[]}']
    short = "--steps 2 --prompts_per_step 16 --samples_per_step -1 --eval_every 0".split()
    for name, words in {"nim": game, "each": each, "environment": environment}.items():
        make(fork, "turned" if name == "each" else "train", [*words, *short], name)
    assert all(max(line["turns"] for line in metrics(fork / "runs" / name)) > 1 for name in ("nim", "each"))
    assert all(line["reward"] == 0.0 for line in metrics(fork / "runs/environment"))
    lines = (fork / "runs/each/samples.jsonl").read_text().splitlines()
    several = [line for line in map(json.loads, lines) if None in [logp for _, logp in line["tokens"]]]
    assert several and all(len(line["advantage"]) == len(line["tokens"]) for line in several)


TWO_TURNS = {(0,): [0.3], (1, 0): [-0.2, 1.0], (1, 1): [-0.2, -0.5]}  # what is done in each turn -> its rewards


def by_index(returns: list[list[float]]) -> list[list[float]]:
    """Normalized among those that got so far, as in verl's issue 7244."""
    made = [[0.0] * len(each) for each in returns]
    for k in range(2):
        there = [i for i, each in enumerate(returns) if len(each) > k]
        values = torch.tensor([returns[i][k] for i in there], dtype=torch.float64)
        for i, x in zip(there, values - values.mean() if len(there) > 1 else []):
            made[i][k] = float(x / (values.std() + 1e-4))
    return made


def test_the_rewards_of_turns_have_the_gradient_of_the_expected_return(fork):
    """By all groups of three that a bandit of two turns can give, in float64. A return normalized by turn has not."""
    by_turn = own(fork, "by_turn").by_turn
    theta = torch.tensor([0.4, -0.7], dtype=torch.float64, requires_grad=True)
    chance = torch.stack([theta.sigmoid(), 1 - theta.sigmoid()])  # of doing 0 or 1 in each turn
    of = {done: [chance[did, k] for k, did in enumerate(done)] for done in TWO_TURNS}
    p = {done: math.prod(chances) for done, chances in of.items()}
    (expected,) = torch.autograd.grad(sum(p[done] * sum(TWO_TURNS[done]) for done in p), theta, retain_graph=True)
    ours, theirs = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for group in itertools.product(TWO_TURNS, repeat=3):
        written = [[True, False, True][: 2 * len(done) - 1] for done in group]
        made = [Completion([1] * len(mask), [0.0] * len(mask), False, written=mask) for mask in written]
        advantages = by_turn(Group([], {}, made, extras=[{"of_turns": TWO_TURNS[done]} for done in group]))
        returns = [[sum(TWO_TURNS[done][k:]) for k in range(len(done))] for done in group]
        together = math.prod(p[done] for done in group).detach()
        for done, A, mask, other in zip(group, advantages, written, by_index(returns), strict=True):
            assert A.shape == (len(mask),) and (len(mask) == 1 or A[1] == 0), "a reply"
            for values, total in ((A[mask].tolist(), ours), (other, theirs)):
                score = sum(x * chances.log() for x, chances in zip(values, of[done], strict=True))
                total += together * torch.autograd.grad(score, theta, retain_graph=True)[0] / 3
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert torch.cosine_similarity(theirs, expected, dim=0) < 0.99


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
    here = partial(conftest.replace, "served.SERVER", methodcaller("replace", "8000", str(server.server_port)))
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
