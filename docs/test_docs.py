"""What README and FINDINGS say, against the repository: its tests, flags, files and figures are there."""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from config import Config
from infra.checkpoint import FREE
from infra.command_line import parse
from tools import ablate, plot, results

HERE = Path(__file__).parent.parent
README, FINDINGS = ((HERE / page).read_text() for page in results.PAGES)
CONTRIBUTING = (HERE / "CONTRIBUTING.md").read_text()
ADDING = README.partition("## Adding your own\n")[2].partition("\n## ")[0]
NUMBER = r"\d+\.\d+"


def test_every_test_it_names_is_there():
    tests = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 20 and [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_every_flag_and_file_it_names_is_there():
    tools = "".join((HERE / name).read_text() for name in ("ablate.py", "plot.py", "results.py"))
    of_torchrun = {"nproc_per_node", "max", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}
    of_slurm = {"nodes", "ntasks", "gpus", "requeue"}
    of_bench = re.findall(r"\b(\w+)=\(", (HERE / "bench.py").read_text())
    of_tools = {*of_torchrun, *of_slurm, *of_bench, *re.findall(r'"--(\w+)"', tools)}
    flags = set(re.findall(r"--([a-z]\w+)", README)) - of_tools
    assert len(flags) > 15 and flags - {field.name for field in dataclasses.fields(Config)} == set()
    files = set(re.findall(r"`(\w+\.(?:py|txt))`", README + CONTRIBUTING)) - {"my_rewards.py"}
    files |= set(re.findall(r"\]\(([\w/]+\.\w+)\)", README + CONTRIBUTING))
    assert len(files) > 25 and [name for name in sorted(files) if not (HERE / name).exists()] == []
    code = {path.name for path in HERE.glob("*.py") if not path.name.startswith(("test_", "conftest", "_"))}
    assert sorted(code - set(re.findall(r"`(\w+\.py)`", README))) == []


def test_the_two_commands():
    for command in ("requirements.txt && torchrun train.py", "requirements-dev.txt && pytest"):
        assert f"\n```\npip install -r {command}\n```\n" in README


def test_the_length_of_what_is_to_be_read_and_of_its_own_lines():
    path = re.findall(r"^\| `(\w+\.py)` \|", README.partition("*off the path")[0], re.MULTILINE)
    lines = sum(len((HERE / name).read_text().splitlines()) for name in path)
    assert path[:2] == ["train.py", "loss.py"] and len(path) == 8 and "about 1,500 lines" in README
    assert 1400 < lines < 1600, lines
    prose = [line for page in (README, CONTRIBUTING) for line in page.split("\n") if line[:1] not in ("|", "!")]
    assert [line for line in prose if len(line) > 120] == []


def test_every_table_is_that_of_the_logs_and_every_picture_is_there(capsys):
    assert results.main(["--check"]) == 0, capsys.readouterr().out
    tables = results.tables()
    assert tables["default"].count("| seed ") == 3 and len(tables) > 5 and "| ours / TRL |" in tables["bench"]


def test_the_check_finds_what_is_not_that_of_the_logs(tmp_path, monkeypatch, capsys):
    """A digit of a table, the end of a log, a picture; and writing the pages anew mends the tables."""
    for name in ("README.md", "FINDINGS.md"):
        shutil.copy(HERE / name, tmp_path)
    shutil.copytree(HERE / "results", tmp_path / "results")
    monkeypatch.setattr(results, "HERE", tmp_path)
    assert results.stale() == []
    page, log = tmp_path / "README.md", tmp_path / "results" / "default" / "seed-1" / "metrics.jsonl"
    page.write_text(README.replace("| ours / TRL | 0.", "| ours / TRL | 1.", 1))
    (tmp_path / "results" / "normalization.png").unlink()
    found = [
        "README.md: the table bench is not that of the logs",
        "FINDINGS.md: results/normalization.png is not there",
    ]
    assert results.stale() == found
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert results.stale() == ["README.md: the table default is not that of the logs", *found]
    monkeypatch.setattr(plot, "main", lambda words: None)
    monkeypatch.chdir(tmp_path)
    assert results.main([]) == 0 and results.stale() == found[1:]
    page.write_text(page.read_text().replace("made by results.py: default", "made by hand"))
    assert results.main(["--check"]) == 1 and "the table default is on no page" in capsys.readouterr().out


def test_kept_logs_are_those_of_the_runs(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "beta" / "0.1-1"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"settings": {"beta": 0.1}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.23456789e-07, "kl": null, "tokens": 1234567}\n')
    (run / "samples.jsonl").touch()
    monkeypatch.setattr(results, "HERE", tmp_path)
    assert results.main(["--keep", str(tmp_path / "runs" / "beta")]) == 0
    kept = tmp_path / "results" / "beta" / "0.1-1"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "metrics.jsonl"]
    assert plot.read(kept) == ({"beta": 0.1}, [{"step": 1, "loss": 1.23456789e-07, "kl": None, "tokens": 1234567}])


def test_no_number_of_the_findings_is_written_by_hand():
    """With a decimal point: it stands in a table made from the logs, or in a command."""
    text = re.sub(r"\b\d{4}\.\d{5}\b", "", FINDINGS)  # arXiv
    sources = [*results.tables().values(), *re.findall(r"```.*?```", text, re.DOTALL)]
    allowed = set(re.findall(NUMBER, "\n".join(sources)))
    assert len(allowed) > 50 and set(re.findall(NUMBER, text)) - allowed == set()


def test_the_findings_come_from_runs_of_their_commands():
    """With the settings that the command has today, and from one clean commit."""
    commands, commits = results.commands(FINDINGS, "ablate", "runs"), set()
    assert len(commands) >= 3
    for args in map(ablate.parse, commands):
        assert len(args.seeds) == 5 and len(args.variants) > 1
        for variant, seed in itertools.product(args.variants, args.seeds):
            out = ablate.folder_of(args.out, variant, seed)
            meant = vars(parse([*args.flags, *ablate.flags_of(variant), "--seed", seed, "--out", str(out)], False))
            made = json.loads((HERE / "results" / out.relative_to("runs") / "config.json").read_text())
            names = meant.keys() & made["settings"].keys() - {*FREE} | {"out"}
            assert {name: made["settings"][name] for name in names} == {name: meant[name] for name in names}
            commits.add(made["commit"])
            if meant["max_grad_norm"] == 100:  # "never takes hold"
                lines = plot.read(HERE / "results" / out.relative_to("runs"))[1]
                assert max(line.get("grad_norm", 0) for line in lines) < 100
    assert len(commits) == 1 and re.fullmatch("[0-9a-f]{40}", commits.pop())


def test_the_default_run_begins_as_its_log_says(tmp_path):
    """The first three steps, run again. The same completions, up to ties in floating point."""
    command = [sys.executable, HERE / "train.py", *"--seed 0 --steps 3 --eval_every 0 --out".split(), tmp_path / "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    logged, again = plot.read(HERE / "results" / "default" / "seed-0")[1], plot.read(tmp_path / "run")[1]
    logged = [line for line in logged if "reward" in line][:3]
    assert [line["step"] for line in again] == [1, 2, 3]
    for name in ("reward", "completion_length", "entropy", "grad_norm", "advantage_easy", "loss"):
        near = {"rel": 1e-3, "abs": 1e-6}
        assert [line[name] for line in again] == pytest.approx([line[name] for line in logged], **near), name


# ---- What the README adds ----


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", ADDING, re.DOTALL | re.MULTILINE)
    return [text for its_language, text in found if its_language == language]


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """A copy of the code, in a git repository of its own."""
    copy = tmp_path_factory.mktemp("clean") / "copy"
    shutil.copytree(HERE / "models", copy / "models")
    for path in HERE.glob("*.py"):
        shutil.copy(path, copy)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    return copy


def apply(diff: str, copy: Path, *flags: str) -> None:
    applied = subprocess.run(["git", "apply", *flags], input=diff, cwd=copy, text=True, capture_output=True)
    assert applied.returncode == 0, applied.stderr + diff


@pytest.fixture(scope="module")
def fork(clean) -> Path:
    """With every diff applied, one after the other."""
    copy = shutil.copytree(clean, clean.with_name("fork"))
    for diff in blocks("diff"):
        apply(diff, copy)
    (copy / "my_rewards.py").write_text(blocks("python")[0])
    (copy / "prompts.jsonl").write_text(blocks("json")[0] * 3)
    return copy


@pytest.fixture(scope="module")
def own_loss(fork) -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loss", fork / "loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_diff_applies_by_itself(clean):
    assert len(blocks("diff")) == 3
    for diff in blocks("diff"):
        apply(diff, clean, "--check")


RUN_ALL = """
import json, sys, train
for i, words in enumerate(json.load(sys.stdin)):
    code = train.main([*words, "--eval_every", "0", "--samples_per_step", "-1", "--out", f"runs/{i}"])
    assert code == 0, (words, code)
"""


def test_what_the_readme_adds(fork):
    """Its commands, all in one process: to import PyTorch takes longer than the steps."""
    lines = [line for block in blocks("") for line in block.splitlines()]
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("python train.py ")]
    assert len(commands) == 5
    work = json.dumps([[*words, "--steps", "30" if "largest" in words else "2"] for words in commands])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", RUN_ALL]
    ended = subprocess.run(command, input=work, cwd=fork, env=environment, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    settings, metrics = zip(*(plot.read(fork / "runs" / str(i)) for i in range(5)))

    for lines in metrics[:2]:
        assert [m["reward/brevity"] for m in lines] == pytest.approx([-m["completion_length"] / 100 for m in lines])
    samples = [json.loads(line) for line in (fork / "runs" / "1" / "samples.jsonl").read_text().splitlines()]
    assert {sample["prompt"] for sample in samples} == {"12+34="}
    assert metrics[2][0]["reward"] < 0.1 and metrics[2][-1]["reward"] > 0.4, "it learns"
    assert settings[3]["normalization"] == "vl" and metrics[3][1]["reward"] is not None
    assert settings[4]["kl_estimator"] == "abs" and metrics[4][0]["kl"] == 0 < metrics[4][1]["kl"]


def test_the_normalization_it_adds(own_loss):
    """w = |o_i|^-0.75 / (L sum_j |o_j|^-0.75); completions of 5, 0, 2 and 7 tokens, L = 10"""
    lengths = [5, 0, 2, 7]
    weights = own_loss.token_weights(torch.arange(8) < torch.tensor(lengths)[:, None], "vl", max_completion_length=10)
    total = sum(n**-0.75 for n in lengths if n)
    expected = [[n**-0.75 / (10 * total) if t < n else 0.0 for t in range(8)] for n in lengths]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_the_kl_estimator_it_adds(own_loss):
    """The mean of its gradients over the policy's tokens is the gradient of sum |pi - pi_ref|."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), other.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() - ref.exp()).abs().sum(), logits, retain_graph=True)
    per_token = own_loss.kl_divergence(logp, ref, "abs")
    (estimated,) = torch.autograd.grad((logp.exp().detach() * per_token).sum(), logits)
    assert per_token.tolist() == (ref - logp).abs().tolist()
    torch.testing.assert_close(estimated, exact, rtol=0, atol=1e-12)
