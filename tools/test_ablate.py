"""Grids of runs, and their tables."""

import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import Config
from conftest import ROOT
from infra import run_folder
from infra.command_line import parse, ready
from tools import ablate

T = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 15: 2.131, 30: 2.042}  # Student's, at 97.5 %, by degrees of freedom
GRID = "--vary beta=0.0,0.1 --seeds 1 --figures reward"
WRONG = [  # flags, and a part of the message; the fixture `out` has the runs of GRID, made with --learning_rate 1e-3
    ("--vary algorithm=grpo,rloo -- --num_iterations 2", "error: --objective reinforce: has no ratio"),
    (GRID, "0.0-1 was made with --learning_rate 0.001, not "),
    (f"{GRID} -- --learning-rate 1e-3 --steps 1", "made with --steps 2, not 1"),
    (f"{GRID} -- --learning-rate 1e-3 --eval_k 3 --steps 2", "made with --eval_k 4, not 3"),
    ("--vary beta=0 --seeds 1,1,1", "a run twice"),
    ("--vary beta=0 --launch torchrun", "must be torchrun, with --nproc_per_node and a number"),
    (
        "--vary beta=0 --launch=torchrums\xa0--nproc_per_node\xa04",
        "must be torchrun, with --nproc_per_node and a number",
    ),
    ("--vary seed=1,2", "give --seeds"),
    ("--vary beta=0,0.1 --vary beta=0.2", "--vary names a setting twice"),
    ("--vary beta=0 --figures b:lastt", "--figures b:lastt: "),
    ("--vary beta=0,0.1 --tune learning_rate=1e-3,1e-4 --seeds 101", "--tune_seeds others than --seeds"),
    ("--vary beta=0 --tune learning_rate=1e-3,1e-4 --figures reward:reaches-0.9", "whose highest value is best"),
]


@pytest.mark.parametrize("lr_schedule", ["cosine", "linear"])
def test_a_run_whose_learning_rates_would_be_others_is_not_continued(lr_schedule):
    made = Config(lr_schedule=lr_schedule, steps=2)
    with pytest.raises(SystemExit, match="made with --steps 2, not 3"):
        ablate.check_settings(ablate.Run("out", [], replace(made, steps=3)), made)


def test_intervals_and_p_values_agree_with_printed_tables():
    for df, t in T.items():
        # df + 1 numbers with a mean of 0: pairs of -1 and 1, and one 0 if df + 1 is odd.
        differences = [-1.0, 1.0] * ((df + 1) // 2) + [0.0] * ((df + 1) % 2)
        half = t * statistics.stdev(differences) / math.sqrt(df + 1)
        assert ablate.interval([2.0 + x for x in differences]) == (2.0, pytest.approx(half, rel=3e-4))
        if df > 1:
            assert ablate.p_value([half + x for x in differences]) == pytest.approx(0.05, rel=2e-3)


@pytest.mark.parametrize("df, t", {2: (4.303, 9.925), 7: (2.365, 3.499)}.items())  # Student's t at 5 % and at 1 %
def test_the_clearest_difference_is_tested_first_and_none_is_clear_after_one_that_is_not(df, t):
    """Of five comparisons, the clearest one is tested at the level 5 % / 5 = 1 %."""

    def clear(*comparisons: list[float]) -> set[int]:
        return ablate.clear(dict(enumerate(comparisons)))

    none = [-1.0, 1.0] * ((df + 1) // 2) + [0.0] * ((df + 1) % 2)  # its mean is 0
    limit_5, limit_1 = (each * statistics.stdev(none) / math.sqrt(df + 1) for each in t)
    # All lists have the same spread. With it, a mean of limit_5 is just significant at 5 %, and one of limit_1 at 1 %.
    beyond_5 = [1.01 * limit_5 + each for each in none]
    beyond_1 = [1.01 * limit_1 + each for each in none]
    far_below = [-99 * limit_1 + each for each in none]
    unknown = [math.nan] * (df + 1)
    assert clear(beyond_5) == {0} and clear(beyond_5, none) == set()
    assert clear(none, beyond_1, unknown, none, none) == {1}
    # Of six, the clearest is tested at 5 % / 6, which is below 1 %.
    assert clear(beyond_5, beyond_1, none, none, none, none) == set()
    assert clear(beyond_5, far_below) == {0, 1} and clear([0.1, 0.1]) == set()


def test_the_steps_of_a_figure():
    lines = [{"step": 0, "eval/accuracy": 0.1}]
    lines += [{"step": s, "entropy": s * 1.0, "length_incorrect": None if s == 5 else 7.0} for s in range(1, 8)]
    assert ablate.figure(lines, "entropy") == 5.5  # the mean over the second half of the steps: 4, 5, 6, 7
    assert ablate.figure(lines, "entropy:2-3") == 2.5 and ablate.figure(lines, "entropy:last") == 7.0
    assert ablate.figure(lines, "length_incorrect") == 7.0 and ablate.figure(lines, "eval/accuracy:last") == 0.1
    assert math.isnan(ablate.figure(lines, "length_incorrect:5-5"))
    with pytest.raises(SystemExit, match="entropie: no such metric; the log has step, entropy"):
        ablate.figure(lines, "entropie")


def rows(name: str, *values: list[float], times: int = 1) -> list[list[str]]:
    """Return the table of one-step runs with these values: a list for each variant, with a value for each seed.
    The table has the same figure several times."""
    logs = [[[{"step": 1, name: value}] for value in variant] for variant in values]
    return ablate.compared([name] * times, [{"beta": str(i)} for i in range(len(values))], logs)


def test_the_table_tells_differences_from_noise():
    better = rows("reward", [-0.70, -0.60, -0.50], [-0.59, -0.50, -0.40])
    assert better[0] == ["reward", "0", "-0.600 ± 0.100", "", ""]
    assert better[1] == ["", "1", "-0.497 ± 0.095", "+0.103 (+0.089 to +0.118)", "**differs**"]
    assert rows("length", [10, 11, 12], [10, 12, 11])[1][3:] == ["+0.00 (-2.48 to +2.48)", "no clear difference"]
    assert rows("reward", [0.5, 0.6], [0.61, 0.70])[1][4] == "too few seeds"
    # A missing value makes the interval NaN, and then nothing differs.
    assert rows("reward", [0.5, 0.6, math.nan], [0.61, 0.71, 0.81])[1][4] == "no clear difference"
    assert rows("kl", [1.0, 1.0, 1.0], [1.001, 1.0012, 1.0011])[1][3] == "+0.00110 (+0.00085 to +0.00135)"


def test_verdicts_are_corrected_for_their_number():
    # With four degrees of freedom, p is 0.03 for each of three variants: below 0.05, but not below 0.05 / 3.
    spread, shift = [-1.0, -0.5, 0.0, 0.5, 1.0], 3.298 * statistics.stdev([-1.0, -0.5, 0.0, 0.5, 1.0]) / 5**0.5
    one, zero = [0.1 * (shift + x) for x in spread], [0.0] * 5
    three = rows("reward", zero, one, one, one)[1:], rows("reward", zero, one, times=3)[1::2]
    assert [[row[4] for row in each] for each in three] == [["no clear difference"] * 3] * 2
    clear = [1.0, 1.01, 0.99, 1.0, 1.0]  # p is 1e-9; the others are then compared with 0.05 / 2 and 0.05
    assert [row[4] for row in rows("reward", zero, clear, one)[1:]] == ["**differs**", "**differs**"]


def test_what_it_takes_to_reach_a_value():
    lines = [{"step": 0, "eval/accuracy": 0.9}]
    rewards = {1: None, 2: 0.2, 3: 0.3}  # also what came before the first reward was spent
    spent = dict(tokens=100, seconds_rollout=1.0, seconds_update=0.5)
    lines += [{"step": s, "reward": reward} | spent for s, reward in rewards.items()]
    for name, value in (("", 2), ("-tokens", 200), ("-seconds", 3.0)):
        assert ablate.figure(lines, f"reward:reaches-0.2{name}") == value
        assert ablate.figure(lines[1:], f"reward:reaches-0.2{name}") == value, "also without an evaluation at step 0"
    assert math.isnan(ablate.figure(lines, "reward:reaches-0.4"))


def test_every_variant_gets_the_value_that_is_best_for_it_on_seeds_of_their_own(tmp_path, monkeypatch, capsys):
    """Instead of training, a run writes a reward. Only at a learning rate of 1e-3 with beta 0, else at 1e-4, every seed
    has one."""

    def run_one(run, launch, gpus) -> int:
        config = replace(run.config, out=str(run.folder))
        run_folder.begin(config, config, run_folder.claim(config), {})
        is_best = config.learning_rate == (1e-3 if config.beta == 0.0 else 1e-4)
        reward = 1.0 + config.beta + config.seed / 1000 if is_best else {8: 9.0}.get(config.seed)
        (run.folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": reward}) + "\n")
        return 0

    monkeypatch.setattr(ablate, "run_one", run_one)
    words = "--vary beta=0.0,0.1 --tune learning_rate=1e-3,1e-4 --tune_seeds 8,9 --seeds 1,2,3 --figures reward step"
    ablate.main(f"{words} --out {tmp_path}/o -- --steps 1".split())
    table = capsys.readouterr().out
    assert "| 0.0 | 1e-3 | 1.00" in table and "| 0.1 | 1e-4 | 1.10" in table
    made = sorted(path.name for path in (tmp_path / "o").iterdir() if path.is_dir())
    tried = [f"{beta},{rate}-{seed}" for beta in ("0.0", "0.1") for rate in ("1e-3", "1e-4") for seed in (8, 9)]
    assert made == sorted([*tried, *(f"0.0,1e-3-{s}" for s in (1, 2, 3)), *(f"0.1,1e-4-{s}" for s in (1, 2, 3))])


def test_a_grid_has_every_combination_and_each_run_has_its_own_folder():
    words = "--vary algorithm=grpo,dapo --vary beta=0,0.1 --out o --figures entropy reward:1-2 -- --beta 9 --seed 9"
    args = ablate.parse(words.split())
    assert args.flags == "--beta 9 --seed 9".split() and args.figures == ["entropy", "reward:1-2"]
    runs = [(str(run.folder), run.config.beta, run.config.seed) for run in ablate.runs_of(args)]
    assert len(runs) == 2 * 2 * 3  # there are three seeds by default
    # --vary and --seeds win over --beta 9 and --seed 9.
    assert runs[1:4] == [("o/grpo,0.1-1", 0.1, 1), ("o/dapo,0-1", 0, 1), ("o/dapo,0.1-1", 0.1, 1)], "the grid wins"
    words = "--vary model=/models/a,../b,org/c,org_c,org%2Fc --vary data=x,x-y --seeds 1,2 --out o -- --reward r.py:f"
    folders = {run.folder for run in ablate.runs_of(ablate.parse(words.split()))}
    assert len(folders) == 5 * 2 * 2 and all(folder.parent == args.out for folder in folders)


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Make a folder with two finished runs. Starting a run would raise a TypeError."""
    monkeypatch.setattr(ablate, "run_one", None)
    for beta in ("0.0", "0.1"):
        flags = f"--steps 2 --out {tmp_path}/{beta}-1 --beta {beta} --seed 1 --learning_rate 1e-3"
        given = parse(flags.split(), on_gpu=False)
        # The run has the dtype of a GPU. The grid leaves the dtype at "auto", so `ablate` must accept any.
        config = ready(given, on_gpu=False)
        run_folder.begin(replace(config, dtype="bfloat16"), given, run_folder.claim(config), {})
        (tmp_path / f"{beta}-1/metrics.jsonl").write_text('{"step": 0, "reward": 0.1}\n{"step": 2, "reward": 0.5}\n')
    return tmp_path


def test_the_figures_of_runs_that_are_not_evaluated(monkeypatch):
    log = [{"step": 1, "reward": 0.5, "completion_length": 3.0, "length_incorrect": 3.0, "entropy": 1.0}]
    monkeypatch.setattr(ablate, "finished", lambda run: log)
    table = ablate.table(ablate.parse(["--vary", "beta=0", "--seeds", "1,2", "--out", "o", "--", "--eval_every", "0"]))
    assert re.findall(r"^\| (\w+)", table, re.MULTILINE)[1:] == [
        "reward", "completion_length", "length_incorrect", "entropy"
    ]  # fmt: skip


def test_only_unfinished_runs_are_made(out, capsys):
    words = f"--vary beta=0.1 --seeds 1 --out {out} --figures reward -- --learning_rate 1e-3 --steps 2".split()
    ablate.main(words)
    assert capsys.readouterr().out.endswith("\n| reward | 0.1 | 0.500 ± nan | | |\n"), "one variant is not compared"
    log = out / "0.1-1" / "metrics.jsonl"
    whole = log.read_text()
    for text, more in (whole, "--steps=3"), (whole[:-9], "--steps=2"):  # continued, and killed while writing
        log.write_text(text)
        with pytest.raises(TypeError):
            ablate.main([*words, more])


@pytest.mark.parametrize("words, message", WRONG)
def test_the_whole_grid_is_checked_before_the_first_run(words, message, out, capsys):
    with pytest.raises(SystemExit) as stop:
        ablate.main(["--out", str(out), *shlex.split(words)])
    assert message in capsys.readouterr().err + str(stop.value)


def test_runs_of_other_code_are_named_and_used_when_asked_for(out, monkeypatch, capsys):
    """Tools do not count as code. Also: a setting from a file, and the dtype that a GPU has chosen, do not count as
    settings that differ from the run's."""
    (out / "settings.json").write_text('{"learning_rate": 1e-3}')
    words = f"--out {out} {GRID} -- --config {out}/settings.json --steps 2".split()
    original = run_folder.sha256_of
    for name, is_other in (("loss.py", True), ("ablate.py", False)):
        edited = lambda file, name=name: "edited" if Path(file).name == name else original(file)  # noqa: E731
        monkeypatch.setattr(run_folder, "sha256_of", edited)
        with pytest.raises(SystemExit, match=r"0\.0-1 was made by other code") if is_other else nullcontext():
            ablate.main(words)
        ablate.main(["--keep", *words])
    monkeypatch.setattr(run_folder, "digests", lambda config: {"digest of rewards.py": "edited"})
    with pytest.raises(SystemExit, match=r"0\.0-1 was made by other code or files"):
        ablate.main(words)
    assert "| 0.1 | 0.500 ± nan | +0.000 (-inf to +inf) | too few seeds |" in capsys.readouterr().out


class Box:
    """Takes the place of the processes of a grid: a call writes the files of a finished run, unless its seed is in
    `fails`. `seen` has the command of each call, its GPUs, and those that other runs had at that time."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.fails, self.seen, self.busy = fails, [], []

    def run(self, command: list, stdout: object, stderr: object, env: dict) -> SimpleNamespace:
        words = [str(word) for word in command]
        gpus, flags = env.get("CUDA_VISIBLE_DEVICES"), words[words.index(f"{ROOT}/train.py") + 1 :]
        self.seen.append((words, gpus, [*self.busy]))
        self.busy.append(gpus)
        time.sleep(0.05)  # long enough for the other places to be taken
        given = parse(flags, on_gpu=False)
        if given.seed not in self.fails:
            run_folder.begin(ready(given, on_gpu=False), given, run_folder.claim(given), {})
            (Path(given.out) / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": given.beta}) + "\n")
        self.busy.remove(gpus)
        return SimpleNamespace(returncode=int(given.seed in self.fails))


@pytest.mark.parametrize(
    ("words", "visible", "places"),
    [
        ("", None, [*"01234567"]),
        ("--jobs 3", None, [*"012"]),
        ("--jobs 99", "5,GPU-1f, 2", ["5", "GPU-1f", "2"]),
        ("--launch 'torchrun --nproc_per_node 4'", None, ["0,1,2,3", "4,5,6,7"]),
        ("--launch 'torchrun --nproc-per-node=3'", "7,6,5,4,3", ["7,6,5"]),
    ],
)
def test_on_a_box_of_eight_gpus_each_run_has_its_own(tmp_path, monkeypatch, capsys, words, visible, places):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8 if visible is None else len(visible.split(",")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(ablate, "subprocess", box := Box())
    grid = f"--vary beta=0,0.1 --seeds 1,2,3,4,5,6 --figures reward --out {tmp_path} {words} -- --steps 1"
    assert ablate.main(shlex.split(grid)) == 0
    assert len(box.seen) == 12 and {gpus for _, gpus, _ in box.seen} == {*places}
    assert all(gpus not in others for _, gpus, others in box.seen), "no two runs share a GPU"
    assert max(len(others) for _, _, others in box.seen) == len(places) - 1, "all of the GPUs are used"
    program = shlex.split(words)[1].split() if "torchrun" in words else [sys.executable]
    own = ["--standalone"] if "torchrun" in words else []
    assert all(seen[: len(program) + len(own)] == program + own for seen, _, _ in box.seen)
    first, *made = capsys.readouterr().out.partition("| metric")[0].splitlines()
    assert first == f"12 runs, of which 0 are made; {len(places)} at once"
    assert all(f"; {n} of 12, " in line for n, line in enumerate(made, start=1)) and made[-1].endswith(", 0 s left")


def test_without_a_gpu_half_of_the_cores_are_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    words = "--vary beta=0,0.1 --out o".split()
    for more, count in ([], 96), (["--jobs", "99"], 99), (["--launch", "torchrun --nproc_per_node 4"], 24):
        assert ablate.places_of(ablate.parse([*words, *more])) == [""] * count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SystemExit, match="a run takes 4 GPUs, and there are 3"):
        ablate.places_of(ablate.parse([*words, *more]))


def test_a_run_that_fails_is_named_and_its_seed_is_left_out_for_every_variant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "subprocess", box := Box(fails=(2,)))
    words = f"--vary beta=0.0,0.1 --seeds 1,2,3 --figures reward --jobs 2 --out {tmp_path} -- --steps 1".split()
    assert ablate.main(words) == 1
    shown = capsys.readouterr().out
    assert "mean ± std of 2 seeds" in shown and "| 0.1 | 0.10 ± 0.00 | +0.10" in shown
    failed = [f"{tmp_path}/{beta}-2" for beta in ("0.0", "0.1")]
    assert sorted(shown.splitlines()[-2:]) == [f"failed, so its seed is left out: {x}, see {x}.log" for x in failed]
    assert len(box.seen) == 6
    box.fails = ()
    assert ablate.main(words) == 0 and len(box.seen) == 8, "only those that failed are made again"
    assert "mean ± std of 3 seeds" in (shown := capsys.readouterr().out) and "6 runs, of which 4 are made" in shown


def test_a_run_is_a_command(tmp_path, monkeypatch, capsys):
    # In place of Python, each run calls `false`, which fails, and then `echo`, which prints its arguments.
    words = f"--vary beta=0.0 --seeds 1,2 --out {tmp_path} --jobs 1 -- --steps 3"
    for command in ("false", "echo"):
        monkeypatch.setattr(sys, "executable", command)
        assert ablate.main(words.split()) == 1, "a run without the files of a finished one has failed, too"
        shown = capsys.readouterr().out
        assert "| metric" not in shown and shown.count("-1: failed; 1 of 2, ") == shown.count("failed, so ") - 1 == 1
    echoed = f"{ROOT}/train.py --steps 3 --beta=0.0 --seed=2 --out {tmp_path}/0.0-2\n"
    assert (tmp_path / "0.0-2.log").read_text() == echoed
