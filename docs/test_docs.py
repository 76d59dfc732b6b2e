"""The pages agree with the repository: their commands run, and every flag and link on them exists."""

import argparse
import ast
import dataclasses
import importlib
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
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import conftest
import rollout
import train
from batch import Batch, Group
from bench import evidence, logs
from config import ALGORITHMS, Config
from conftest import assert_same_files, metrics, run
from infra.command_line import flags, for_argparse, parse, ready
from loss import token_weights
from tasks import as_completion, guess, turns_of
from tasks._turns import Conversation
from tools import ablate

HERE = Path(__file__).parent.parent
PATHS = [HERE / "README.md", *HERE.glob("docs/*.md"), *HERE.glob("results/*/*.md")]
PAGES = {str(path.relative_to(HERE)): path.read_text() for path in PATHS}
README, EXTENDING = PAGES["README.md"], PAGES["docs/extending.md"]
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", EXTENDING, re.DOTALL | re.MULTILINE))
# The diffs of these sections may change the same lines of train.py. So each section gets its own copy of train.py,
# under the name given here. The fixture `fork`, below, makes these copies and applies the diffs.
PROGRAMS = {
    "kl_reward": SECTIONS.pop("The KL in the reward"),
    "follows": SECTIONS.pop("On-policy distillation") + SECTIONS.pop("A control, and a statistic"),
    "gold": SECTIONS.pop("Gold answers"),
    "turns": SECTIONS.pop("Several turns"),
    "recipes": SECTIONS.pop("What a run remembers"),
}
PROGRAMS["replay"] = PROGRAMS["recipes"].partition("**A curriculum.**")[0]  # the first recipe only
ADDITIONS = "".join(SECTIONS.values())  # the other sections; all of their diffs can be applied together
# The name and text of each new file on the page: "In `name.py`:", followed by a block of Python.
FILES = re.findall(r"[Ii]n\s`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", EXTENDING, re.DOTALL | re.MULTILINE)


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands(page: str, start: str) -> list[list[str]]:
    """Return the words of each command on the page that begins with `start`, without this beginning."""
    lines = "\n".join(blocks(page, "", "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[match.end() :], comments=True) for line in lines if (match := re.match(start, line))]


def missing(pattern: str, is_there: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """Return the names on the pages that match the pattern but do not exist, each with its page."""
    named = [(page, name) for page, text in PAGES.items() for name in dict.fromkeys(re.findall(pattern, text))]
    assert len(named) > 20, "the pattern must find what the pages name"
    return [(page, name) for page, name in named if not is_there(page, name)]


def test_the_table_of_presets_has_their_switches():
    table = re.findall(r"^\| `(\S+)`.*?\| `(--.*?)` \|", PAGES["docs/objectives.md"], re.MULTILINE)
    assert dict(table).keys() == ALGORITHMS.keys()
    for name, switches in table:
        shown, preset = (ready(parse(x.split(), False), False) for x in (switches, f"--algorithm {name}"))
        assert shown == dataclasses.replace(preset, algorithm="grpo", out=shown.out), name


def test_every_flag_is_there():
    places = ("bench/*.py", "tools/*.py", "results/*/*.py")
    tools = "\n".join(path.read_text() for place in places for path in HERE.glob(place))
    known = {field.name for field in dataclasses.fields(Config)} | {*re.findall(r"\w+", tools)}
    # Settings that the diffs of extending.md add to Config.
    known |= {*re.findall(r"^\+    (\w+): .*setting\(", EXTENDING, re.MULTILINE)}
    # Flags of torchrun; "max" is what the pattern below finds in --max-restarts. Then those of vLLM, Slurm and pytest.
    known |= {"nproc_per_node", "nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "max"}
    known |= {"logprobs", "host", "nodes", "ntasks", "gpus", "requeue", "dist", "help"}
    assert missing(r"--([a-z]\w+)", lambda page, name: name in known) == []


def test_every_link_leads_somewhere():
    def is_there(page: str, link: str) -> bool:
        file, _, heading = link.partition("#")
        target = (HERE / page).parent / file if file else HERE / page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
        anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
        return target.exists() and (not heading or heading in anchors)

    assert missing(r"\]\((?!https?:)([^)\s]+)\)", is_there) == []


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_command_is_understood(page, monkeypatch):
    """If it is a tool's, the tool's parser must accept it, and the parser of train.py the words after "--"."""
    if page != "docs/extending.md":  # its commands are run below
        for words in commands(PAGES[page], r"(pip|python|torchrun|srun) .*train\.py"):
            parse(words, on_gpu=True)
    parse_args = argparse.ArgumentParser.parse_args

    def parses(parser: argparse.ArgumentParser, words: list[str] | None = None) -> None:
        parse_args(parser, words)
        raise StopIteration  # so that the tool itself does not run

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parses)
    command = r"python -m ((?:bench|tools|results)\.[\w.]+)([^`\n]*)"
    for module, text in re.findall(command, PAGES[page].replace("\\\n", " ")):
        words = shlex.split(text, comments=True)
        monkeypatch.setattr(sys, "argv", [module, *words])
        monkeypatch.delitem(sys.modules, module, raising=False)
        if "parse_args" in (HERE / f"{module.replace('.', '/')}.py").read_text():
            with pytest.raises(StopIteration):
                runpy.run_module(module, run_name="__main__")
            # The tool passes on to train.py only the words after "--". A tool without a parser passes on all words.
            words = words[words.index("--") + 1 :] if "--" in words else []
        if "parse_known_args" in (HERE / f"{module.replace('.', '/')}.py").read_text():
            _, words = importlib.import_module(module).split(words)
        parse_args(flags(), [*for_argparse(words)])  # flags() is the parser of train.py


def test_imports_run_one_way():
    """Imports follow the order that docs/contributing.md gives."""
    order, imports = {"results": 0, "bench": 1, "tools": 2, "minimal": 3, "train": 4, "infra": 5, "tasks": 6}, {}
    for path in HERE.rglob("*.py"):
        if "test" not in path.name and ".venv" not in path.parts:
            name = ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            # `from a import b` may import the module a.b, so collect a and a.b. What is no module is left out below.
            pairs = [(node.module, alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
            imports[name] = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            imports[name] |= {found for module, alias in pairs for found in (module, f"{module}.{alias.name}")}
    imports = {name: found & imports.keys() for name, found in imports.items()}
    # The place of a module is that of its folder. All modules that are not in `order` come last.
    place = {name: order.get(name.split(".")[0], 7) for name in imports}
    against = [(name, other) for name, found in imports.items() for other in found if place[other] < place[name]]
    assert against == [], "train may not import tools, for example"
    # loss, advantage and the modules of fast/ import no module of this repository.
    assert [name for name in imports if re.match(r"loss$|advantage$|fast\.", name) and imports[name]] == []


def test_every_table_is_that_of_the_logs_and_every_picture_is_there(monkeypatch):
    monkeypatch.setattr(evidence.plot, "draw_picture", lambda *_: None)  # only fingerprints are compared
    evidence.main(["--check"])


def test_the_default_run_begins_as_its_log_says(tmp_path):
    """Run the first three steps again, and compare their metrics with the log. They may differ by rounding errors. In
    the rare case that rounding decides which token is sampled, they differ by far more, and the test fails."""
    assert train.main([*"--seed 0 --steps 3 --warmup_steps 5 --eval_every 0 --out".split(), str(tmp_path)]) == 0
    names = "reward completion_length entropy grad_norm loss".split()
    logged = [line for line in logs.read(HERE / "results/default")["seed-0"].lines if line["step"] in (1, 2, 3)]
    for ours, theirs in zip(metrics(tmp_path), logged, strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-3, abs=1e-6)


def test_defaults_are_those_of_the_logged_runs():
    """Every default must be the value in one of them. A setting that is newer than all of them is left out."""
    runs = [run for file in HERE.glob("results/*/metrics.jsonl.gz") for run in logs.from_archive(file).values()]
    logged = [run.config["settings"] for run in runs]
    for name, default in vars(ready(Config(out="anywhere"), on_gpu=False)).items():
        values = [settings[name] for settings in logged if name in settings]
        none = None if default == [] else default  # what is a list may have been a single value, or None
        assert name == "out" or not values or default in values or none in values, name
    assert guess.DEFAULTS.items() <= logs.read(HERE / "results/guess")["seed-4"].config["settings"].items()


def test_readme_opens_with_the_update_of_minimal():
    assert blocks(README, "python")[0] in (HERE / "minimal.py").read_text()


def patched(diff: str, folder: Path) -> dict[str, str]:
    """Return the changed text of each file in the diff. The old lines of a hunk must occur exactly once in the file."""
    files = {}
    for file in re.split(r"^--- .*\n\+\+\+ b/", diff, flags=re.MULTILINE)[1:]:
        name, *hunks = file.split("\n@@\n")
        files[name] = (folder / name).read_text()
        for hunk in hunks:
            # An empty line counts as context: its line[:1] is "", which is in every string. Each list begins and ends
            # with "", so that `old` begins and ends with a line break and matches only whole lines.
            old = "\n".join(["", *(line[1:] for line in hunk.splitlines() if line[:1] in " -"), ""])
            new = "\n".join(["", *(line[1:] for line in hunk.splitlines() if line[:1] in " +"), ""])
            assert files[name].count(old) == 1, f"not once in {name} (a fork may leave out docs/test_docs.py):{old}"
            files[name] = files[name].replace(old, new)
    return files


TEMPLATE = "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    """Copy the code, and add the files and diffs of docs/extending.md. The diffs of each section in PROGRAMS are
    applied to a copy of train.py that bears the section's name."""
    # Each diff applies to the code as it is, without the others. It changes one to three files.
    assert {len(patched(diff, HERE)) for diff in blocks(README + EXTENDING, "diff")} == {1, 2, 3}
    folder = tmp_path_factory.mktemp("copy") / "fork"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("docs", "results", "runs", "smollm2", ".*", "__py*"))
    for name, text in [*FILES, ("prompts.jsonl", blocks(EXTENDING, "json")[0] * 3), ("increment.py", INCREMENT)]:
        (folder / name).write_text(text)
    characters = folder / "tasks/_characters.py"  # in small tasks with fewer prompts, each run starts sooner
    characters.write_text(characters.read_text().replace("8192", "512"))
    conftest.save_chat_model(folder / "chat", string.printable, TEMPLATE)
    edits = ""
    for name, text in PROGRAMS.items():
        edits += text.replace("b/train.py", f"b/{name}.py")
        shutil.copy(folder / "train.py", folder / f"{name}.py")
    for diff in blocks(README + ADDITIONS + edits, "diff"):
        for name, text in patched(diff, folder).items():
            (folder / name).write_text(text)
    return folder


# Shaped as the example in TRL's documentation of GRPOTrainer.
INCREMENT = '''
import random
class IncrementEnv:
    def reset(self, **kwargs):
        self.counter, self.target = 0, random.randint(1, 6)
        return f"Increment the counter by {self.target}."
    def get_reward(self):
        return float(self.counter == self.target)
    def increment(self, step: int):
        """Increment the counter.

        Args:
            step: How far.
        """
        self.counter += step
        return self.counter
'''


def make(copy: Path, module: str, words: list[str], out: str, *before: Callable, **options) -> Path:
    """Make a run with this module of the copy in the place of train.py, and return its folder. `before` and `options`
    are passed to conftest.run: functions that the process calls first, the expected exit code and the number of ranks.
    conftest.run takes settings, so the words are split into flags with their values."""
    (copy / "runs").mkdir(exist_ok=True)
    settings = {flag: values for flag, *values in (part.split() for part in " ".join(words).split("--")[1:])}
    run(settings, copy / "runs" / out, partial(conftest.in_a_copy, copy, module), *before, **options)
    return copy / "runs" / out


def test_every_command_of_an_addition(fork):
    """One run of README's ablation is made, with the flags that all its runs share and those of its last variant."""
    ablation, _ = map(ablate.parse, commands(README, "python -m tools.ablate"))
    variant = itertools.chain(*((f"--{name}", str(x)) for name, x in ablation.variants[-1].items()))
    lines = [("train", words) for words in [*commands(ADDITIONS, "python train.py"), [*ablation.flags, *variant]]]
    distillation, *_ = commands(PROGRAMS["follows"], "python train.py")  # other tests run the others
    for i, (module, words) in enumerate([*lines, ("follows", distillation)]):
        words += "--steps 1 --prompts_per_step 4 --max_completion_length 16 --eval_every 0".split()
        prompts = {sample["prompt"] for sample in conftest.samples(make(fork, module, words, str(i)))}
        assert (prompts == {"12+34="}) == ("prompts.jsonl" in words), "prompts.jsonl has only this prompt"
    assert len(lines) == 8


def its_own_tests() -> None:
    sys.exit(pytest.main(["-q", "-k", "importance and not kl_importance", "test_loss.py"]))


def test_an_objective_of_a_fork_is_held_to_plain_numbers(fork):
    shown = conftest.screen_of(make(fork, "train", [], "tests", its_own_tests)).read_text()
    assert int(re.search(r"(\d+) passed", shown)[1]) > 50


def test_what_a_run_remembers_outlives_a_kill_on_one_rank_and_on_two(fork):
    """One run uses all recipes, and two optimizers. It is killed in its fourth step, and continues after its second."""
    recipes = commands(PROGRAMS["recipes"], "python train.py")
    few = "--prompts_per_step 2 --eval_every 0 --save_every 2".split()
    all_recipes = [*itertools.chain(*recipes), *few, "--steps", "4", "--optimizer", "muon"]
    whole = make(fork, "recipes", all_recipes, "recipes")
    dies = partial(conftest.at, "train.training_step", 4, conftest.die)
    killed = make(fork, "recipes", all_recipes, "killed", dies, code=-signal.SIGKILL)
    shutil.copytree(killed, fork / "runs" / "killed-two")
    # A run in the same folder resumes.
    assert_same_files(make(fork, "recipes", all_recipes, "killed"), whole)
    on_two = make(fork, "recipes", all_recipes, "killed-two", world=2)
    for ours, theirs in zip(metrics(on_two), metrics(whole), strict=True):
        assert ours == {name: x if x is None else pytest.approx(x, 1e-3, 1e-6) for name, x in theirs.items()}
    replayed = make(fork, "replay", [*recipes[0], *few, "--steps", "2"], "replay")
    first, second = metrics(replayed)
    # The first step is on-policy, so its loss is 0, up to rounding. The second step also trains on replayed
    # completions, which are off-policy, so its loss is not 0.
    assert abs(first["loss"]) < 1e-6 and abs(second["loss"]) > 1e-4
    assert (first["delay"], second["delay"]) == (0.0, 0.5)  # half of the second are of the first step
    assert (first["groups"], second["groups"]) == (2, 4), "what the updates used, and not what was drawn"
    # The replay run takes the first prompts of the data, in order. The curriculum of the other run draws a few of 512
    # prompts. With this seed, it draws none of the first ones.
    in_order, chosen = ({line["prompt"] for line in conftest.samples(folder)} for folder in (replayed, whole))
    assert not in_order & chosen
    # The recipe for the entropy bonus: after a step whose entropy is at most 0.17, the coefficient grows by 0.005 and
    # is applied in the next step. After any other step, it shrinks by 0.005, and the next step has no bonus.
    coef, applied = 0.01, 0.0
    for line in metrics(whole):
        assert line["logged/entropy_coef"] == pytest.approx(applied)
        coef += 0.005 if line["entropy"] <= 0.17 else -0.005
        applied = coef if line["entropy"] <= 0.17 else 0.0
    assert {line["entropy"] <= 0.17 for line in metrics(whole)} == {True, False}


def names_in(fork: Path, name: str, run_name: str | None = None) -> SimpleNamespace:
    """Run a file of the fork and return the names that it defines."""
    return SimpleNamespace(**runpy.run_path(str(fork / f"{name}.py"), run_name=run_name))


# ---- Several turns ----

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


@pytest.fixture
def program(fork, monkeypatch, capsys) -> Callable:
    """Return a function that runs a file as a program, and returns the names it defines and the tools it prints."""
    monkeypatch.syspath_prepend(fork)
    return lambda name: (names_in(fork, name, "__main__"), json.loads(capsys.readouterr().out)["tools"])


def test_the_tool_of_the_page(program):
    file, (tool,) = program("calculator")
    assert tool["function"]["name"] == "calculator"
    refused = "ValueError: only numbers, + - * / and parentheses"
    for expression, result in {"2*(3+4)": "14", "2*x": refused, "9**9": refused}.items():
        turn = CALL % ("calculator", json.dumps({"expression": expression}))
        assert file.reply({}, ["2*x", turn]) == [{"role": "tool", "name": "calculator", "content": result}]
    assert file.reply({}, [CALL % ("calculator", "{}"), "It is 14."]) is None, "the last turn has no call"


def test_the_environment_of_the_page(program):
    file, (tool,) = program("tasks/environment")
    assert tool["function"]["name"] == "increment"
    asked, once = {"prompt": [{"role": "user", "content": "Please. "}]}, CALL % ("increment", '{"step": 1}')
    row, again = file.to_row(asked), file.to_row(asked)
    target = row["environment"].target
    assert row["prompt"] == again["prompt"], "every rank gets the same prompt"
    assert row["prompt"][0]["content"] == f"Please. Increment the counter by {target}."
    # Only the last turn is executed. The counter of `again` keeps its value from turn to turn.
    for turn, results in [(once + once, ["1", "2"]), (CALL % ("reset", "{}"), ["KeyError: 'reset'"]), (once, ["3"])]:
        assert file.reply(again, [once, turn]) == [{"role": "tool", "content": result} for result in results]
    assert file.reply(again, [once, "Done."]) is None
    # Rewards see what the calls have left: one completion reaches the target, and the other has counted to 3.
    assert file.reply(row, [once * target])
    assert file.score([row["environment"], again["environment"]]) == [1.0, target == 3]
    assert {each["environment"].target for each in file.load(Config()).train} == {1, 2, 3, 4, 5, 6}


def test_the_tool_in_the_middle_of_a_turn(fork, monkeypatch):
    """The model is made to write this answer. Its first call gets a result, and its second parenthesis ends no call."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(fork / "chat"), AutoTokenizer.from_pretrained(fork / "chat")
    end, ids = tokenizer.eos_token_id, tokenizer("calc(12*3)=36 (eggs).<eos>").input_ids
    numbers = np.array([ids]) / 1000  # the sampler below reads the ids from its random numbers

    def sample(logits, u, sampling):
        return (1000 * u).round().long(), u.float(), None, None

    monkeypatch.setattr(rollout, "sample", sample)
    row = {"prompt": [{"role": "user", "content": "12*3?"}]}
    conversation = Conversation(names_in(fork, "calc").reply, row, tokenizer, [end])
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
    sampling = rollout.Sampling(len(ids), [end], stop=[")"], to_text=tokenizer.decode)
    (made,) = rollout.rollout(model, [prompt["input_ids"]], numbers, sampling, replies=[conversation])
    assert made.ids.tolist() == ids and not made.truncated
    assert tokenizer.decode(made.ids[~made.written]) == "=36" and (made.logp[~made.written] == 0).all()
    assert conversation.turns == turns_of(made, tokenizer) == ["calc(12*3)", " (eggs)", "."]
    made.replies = conversation.replies
    message = {"role": "assistant", "content": "calc(12*3)=36 (eggs)."}
    assert as_completion(row["prompt"], made, tokenizer) == [message]


def test_runs_with_the_game_with_the_environment_and_with_a_reward_for_each_turn(fork):
    game, turn_rewards = commands(PROGRAMS["turns"], "python train.py")
    environment = '--task environment --model chat --max_completion_length 8 --chat_template_kwargs {"tools":[]}'
    short = "--steps 1 --prompts_per_step 16 --samples_per_step -1 --eval_every 0".split()
    programs = {"nim": ("train", game), "turns": ("turns", turn_rewards), "environment": ("train", environment.split())}
    nim, by_turn, _ = (make(fork, module, [*words, *short], name) for name, (module, words) in programs.items())
    assert all(max(line["turns"] for line in metrics(folder)) > 1 for folder in (nim, by_turn))
    # The tokens of a reply have no log-prob, because the model did not sample them.
    replied = [line for line in conftest.samples(by_turn) if None in [logp for _, logp in line["tokens"]]]
    assert replied and all(len(line["advantage"]) == len(line["tokens"]) for line in replied)


# All completions of a game of two turns with the actions 0 and 1, in which action 0 ends the game. A key has the action
# of each turn, and its value the reward of each turn.
TWO_TURNS = {(0,): [0.3], (1, 0): [-0.2, 1.0], (1, 1): [-0.2, -0.5]}


def test_the_rewards_of_turns_have_the_gradient_of_the_expected_return(fork):
    """The gradient of a step is summed over every group of three completions that a bandit with two turns can give,
    each with its probability. The sum, in float64, is the gradient of the expected return."""
    by_turn = names_in(fork, "by_turn").by_turn
    theta = torch.tensor([0.4, -0.7], dtype=torch.float64, requires_grad=True)
    chance = torch.stack([theta.sigmoid(), 1 - theta.sigmoid()])  # of doing 0 or 1 in each turn
    chances = {actions: [chance[action, turn] for turn, action in enumerate(actions)] for actions in TWO_TURNS}
    p = {actions: math.prod(chances[actions]) for actions in TWO_TURNS}
    (expected,) = torch.autograd.grad(sum(p[taken] * sum(TWO_TURNS[taken]) for taken in p), theta, retain_graph=True)
    surrogate = 0.0
    for group in itertools.product(TWO_TURNS, repeat=3):
        # Each turn is one token. The reply between two turns is one token, too.
        written = [[True, False, True][: 2 * len(actions) - 1] for actions in group]
        made = [rollout.Completion([1] * len(mask), [0.0] * len(mask), False, written=mask) for mask in written]
        advantages = by_turn(Group([], {}, made, extras=[{"of_turns": TWO_TURNS[actions]} for actions in group]))
        for actions, A, mask in zip(group, advantages, written, strict=True):
            assert A.shape == (len(mask),) and (len(mask) == 1 or A[1] == 0), "a reply has advantage 0"
            score = sum(x * factor.log() for x, factor in zip(A[mask].tolist(), chances[actions], strict=True))
            surrogate += math.prod(p[taken] for taken in group).detach() * score / 3
    (ours,) = torch.autograd.grad(surrogate, theta)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)  # float64, sums of 27 groups


def test_the_functions_of_the_page(fork):
    """Each function on the page computes its equation."""
    coin, state = names_in(fork, "control").coin, SimpleNamespace(global_step=3)
    prompts = [str(i // 8) for i in range(800)]  # the flips do not depend on which prompts share a call
    flips = coin(prompts, state)
    assert flips == [*coin(prompts[:80], state), *coin(prompts[80:], state)] and 300 < sum(flips) < 500
    assert flips != coin(prompts, SimpleNamespace(global_step=4)) and 0 < sum(flips[:8]) < 8
    mask = torch.arange(8) < torch.tensor([5, 0, 2, 7])[:, None]
    # VL norm: the weight of a token is |o_i|^-0.75 / (L Σ_j |o_j|^-0.75), where L = max_completion_length = 10. The
    # empty completion has no part in the sum.
    powers = torch.tensor([5**-0.75, 0, 2**-0.75, 7**-0.75], dtype=torch.float64)
    weights = names_in(fork, "loss").token_weights(mask, "vl", max_completion_length=10)
    torch.testing.assert_close(weights, mask * powers[:, None] / (10 * powers.sum()), rtol=1e-14, atol=0.0)
    of_block = names_in(fork, "loss").token_weights
    for n, same in (1, "sequence"), (2, "prompt"), (4, "global"):
        of_block.__globals__["BLOCK"] = n
        expected = token_weights(mask, same, prompts=torch.tensor([7, 7, 3, 3]))
        torch.testing.assert_close(of_block(mask, "block"), expected, rtol=1e-14, atol=0.0)
    rewards = torch.tensor([[0.5, 2.0, 1.0, math.nan], [2.0, 2.0, 1.0, 0.0], [1.0, *[math.nan] * 3]])
    # The advantage of the best completion is its lead over the second best one. All others have the advantage 0. If two
    # completions are equally good and best, the lead is 0, and so it is if there is no other reward.
    best = names_in(fork, "advantage").group_advantages(rewards, scale="none", baseline="second_best")
    assert best.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]
    with pytest.raises(ValueError, match="at least 2 completions"):
        names_in(fork, "advantage").group_advantages(rewards[:, :1], scale="none", baseline="second_best")
    fork_rollout = names_in(fork, "rollout")
    for cutoff, kept, least in [(0.25, [0, 1], 0.375), (0.9, [0], 1.0)]:  # 0.375 is 0.3 / (0.5 + 0.3)
        sampling = fork_rollout.Sampling(max_completion_length=1, eos_ids=[0], epsilon_cutoff=cutoff)
        logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(100, 3)
        # `masks` has a row for each of the 100 draws, which is True for the tokens that are kept.
        tokens, logp, masks, _ = fork_rollout.sample(logits, torch.linspace(0, 0.999, 100), sampling)
        assert set(tokens.tolist()) == {*kept} and logp.exp().min() == pytest.approx(least)
        assert all(row.nonzero().squeeze(1).tolist() == kept for row in masks)


def saving_batches(update: Callable) -> Callable:
    def saving(run: train.Run, batch: Batch, step: int) -> tuple:
        saved = batch.advantages, batch.old_logp, batch.ref_logp, batch.mask, batch.ids, batch.prompt_lengths
        torch.save(saved, f"{run.config.out}/batch")
        return update(run, batch, step)

    return saving


@pytest.mark.parametrize("of_tokens", [False, True])
def test_the_kl_in_the_reward_is_there_before_the_baseline(fork, of_tokens):
    """RLOO: r_i - beta Σ_t (log π_old - log π_ref) takes the place of r_i. REINFORCE++: the advantage of token t has
    the sum from t on, and is then whitened over all tokens. The loss has no KL of its own."""
    name, settings = "kl_reward", "--algorithm rloo"
    if of_tokens:
        name, settings = "kl_returns", "--algorithm reinforce++ --normalization sequence"
        (replacement,) = blocks(PROGRAMS["kl_reward"], "python")
        program = (fork / "kl_reward.py").read_text()
        # The lines of the first variant, up to the one that sets the advantages, give way to those of the second.
        lines = r"    rewards = torch\.cat\(.*?batch\.advantages = batch\.mask \* A.*?\n"
        (fork / "kl_returns.py").write_text(re.sub(lines, lambda _: replacement, program, count=1, flags=re.DOTALL))
    words = f"{settings} --beta 0.5 --learning_rate 1e-3 --prompts_per_step 4 --eval_every 0 --samples_per_step -1"
    saving = partial(conftest.replace, "train.update", saving_batches)
    out = make(fork, name, [*words.split(), "--steps", "2"], name, saving)
    A, old, ref, mask, *_ = torch.load(out / "batch")  # of the second step
    kl = (old - ref) * mask
    assert kl.sum(1).abs().max() > 0.05
    r = torch.tensor([line["reward"] for line in conftest.samples(out) if line["step"] == 2])[:, None]
    if of_tokens:
        values = r - 0.5 * torch.stack([kl[:, t:].sum(1) for t in range(kl.shape[1])], dim=1)
        mean, std = values[mask == 1].mean(), values[mask == 1].std()
        expected = mask * (values - mean) / (std + 1e-4)
        loss = -(expected.sum(1) / mask.sum(1)).mean()
    else:
        r = (r[:, 0] - 0.5 * kl.sum(1)).view(4, 8)  # 8 is the default of --num_generations
        expected = mask * (r - (r.sum(1, keepdim=True) - r) / 7).view(-1, 1)
        loss = -(expected * old).sum(1).mean()
    torch.testing.assert_close(A * mask, expected, rtol=1e-4, atol=1e-5)  # float32
    assert metrics(out)[1]["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)


def test_the_teacher_is_the_policy_with_a_hint(fork):
    """In the first step, the teacher has the weights of models/addition."""
    _, words, *_ = commands(PROGRAMS["follows"], "python train.py")
    words += "--steps 1 --prompts_per_step 3 --eval_every 0".split()
    out = make(fork, "follows", words, "hinted", partial(conftest.replace, "train.update", saving_batches))
    _, _, ref, mask, ids, prompt_lengths = torch.load(out / "batch")
    model, tokenizer = (
        kind.from_pretrained(HERE / "models/addition") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    for i, start in enumerate(prompt_lengths.tolist()):
        prompt, end = tokenizer.decode(ids[i, :start]), start + int(mask[i].sum())
        a, b = prompt.rstrip("=").split("+")
        hinted = tokenizer(f"{int(a) + int(b)}={prompt}").input_ids
        logits = model(torch.tensor([hinted + ids[i, start:end].tolist()])).logits[0, len(hinted) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, ids[i, start:end, None])[:, 0]
        torch.testing.assert_close(ref[i, start:end], logp, rtol=1e-4, atol=1e-4)  # float32
    assert metrics(out)[0]["kl"] > 0.1, "the hint matters"


def test_gold_answers_are_trained_on_beside_samples_in_any_split(fork):
    """The advantages of a group add up to 0, so the loss is that of one gold answer for every eight samples."""
    words = "--steps 1 --prompts_per_step 3 --eval_every 0".split()
    (whole,), (one_by_one,) = (
        metrics(make(fork, "gold", [*words, *more], name))
        for name, more in (("gold", []), ("gold one by one", ["--micro_batch_size", "1"]))
    )
    assert whole["loss"] == pytest.approx(-0.1 / 9, rel=1e-4) and whole["grad_norm"] > 0.01
    assert one_by_one == {name: x if x is None else pytest.approx(x, 1e-4, 1e-6) for name, x in whole.items()}


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["content-length"])))["text"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(text) / 100}).encode())

    def log_message(self, *args) -> None:
        pass


def test_a_reward_model_and_a_server_that_judges(fork):
    tokenizer = AutoTokenizer.from_pretrained(HERE / "models/addition")
    config = AutoConfig.from_pretrained(HERE / "models/addition", num_labels=1)
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    for part in (classifier, tokenizer):
        part.save_pretrained(fork / "classifier")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    judge = fork / "judge.py"
    judge.write_text(judge.read_text().replace("8000", str(server.server_port)))
    words = "--steps 1 --prompts_per_step 2 --eval_every 0 --samples_per_step -1 --reward reward_model.py:preference"
    out = make(fork, "train", [*words.split(), "judge.py:judged"], "judged")
    server.shutdown()
    for line in conftest.samples(out):
        text = line["prompt"] + line["completion"].removesuffix(tokenizer.eos_token)
        score = classifier(**tokenizer(text, return_tensors="pt")).logits.item()
        assert line["rewards"] == pytest.approx({"preference": score, "judged": len(text) / 100}, abs=1e-5)


def test_a_reference_that_follows_the_policy(fork):
    """After step 1, the reference is 0.1 of the policy and 0.9 of the policy at its start."""
    *_, control = commands(PROGRAMS["follows"], "python train.py")
    words = "--beta 0.1 --ref_sync_every 1 --steps 1 --prompts_per_step 4 --eval_every 0 --learning_rate 1e-2".split()
    out = make(fork, "follows", [*control, *words], "follows")
    (line,) = metrics(out)
    assert 0.0 < line["probability"] < 1.0
    start, end = (load_file(folder / "model.safetensors") for folder in (fork / "models/addition", out / "model"))
    (file,) = (out / "checkpoint/000001/reference").glob("*.safetensors")
    for name, x in load_file(file).items():
        torch.testing.assert_close(x, start[name].lerp(end[name], 0.1))
