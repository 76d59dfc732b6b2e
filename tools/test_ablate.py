"""A grid of runs, and its table."""

import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.command_line import parse
from tools import ablate

T = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 15: 2.131, 30: 2.042}  # Student's, at 97.5 %, by degrees of freedom


@pytest.mark.parametrize("df, t", T.items())
def test_student_as_printed_tables_have_it(df, t):
    """A mean that is just as far from 0 as its interval is wide has a p-value of one in twenty."""
    differences = [-1.0, 1.0] * ((df + 1) // 2) + [0.0] * ((df + 1) % 2)
    half = t * statistics.stdev(differences) / math.sqrt(df + 1)
    assert ablate.interval([2.0 + each for each in differences]) == (2.0, pytest.approx(half, rel=3e-4))
    expected = 0.05 if df > 1 else 1.0  # nothing is claimed
    assert ablate.p_value([half + each for each in differences]) == pytest.approx(expected, abs=5e-5)


def test_what_has_no_interval_and_what_is_certain():
    assert ablate.interval([1.0, math.nan, 3.0])[1] == math.inf and ablate.interval([1.0])[1] == math.inf
    assert ablate.p_value([math.nan] * 8) == 1.0
    assert ablate.p_value([0.1, 0.1, 0.1]) < 1e-10 and ablate.p_value([-1.0, 1.0, 0.0]) == pytest.approx(1.0)


def test_holm_stops_at_the_first_that_does_not_hold():
    assert ablate.holm([0.01, 0.04, 0.02]) == [True, True, True]  # against 0.05/3, 0.05/1, 0.05/2
    assert ablate.holm([0.01, 0.03, 0.03]) == [True, False, False]
    assert ablate.holm([0.04, 0.02, 0.03]) == [False, False, False] and ablate.holm([]) == []


def test_the_steps_of_a_figure():
    lines = [{"step": 0, "eval/accuracy": 0.1}]
    lines += [{"step": s, "entropy": s * 1.0, "length_incorrect": None if s == 5 else 7.0} for s in range(1, 7)]
    assert ablate.figure(lines, "entropy") == 5.0  # of 4, 5, 6
    assert ablate.figure(lines, "entropy:2-3") == 2.5 and ablate.figure(lines, "entropy:last") == 6.0
    assert ablate.figure(lines, "length_incorrect") == 7.0 and ablate.figure(lines, "eval/accuracy:last") == 0.1
    assert math.isnan(ablate.figure(lines, "length_incorrect:5-5"))
    with pytest.raises(SystemExit, match="entropie: no such metric; there are step, eval/accuracy, entropy"):
        ablate.figure(lines, "entropie")


def one_step(accuracy: float, length: float) -> list[dict]:
    return [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "completion_length": length, "eval/accuracy": accuracy}]


def test_the_table_says_what_can_be_told_from_noise():
    a = [one_step(0.50, 10), one_step(0.60, 11), one_step(0.70, 12)]
    b = [one_step(0.61, 10), one_step(0.70, 12), one_step(0.80, 11)]  # better for each seed; length as it happens
    names = ["eval/accuracy:last", "completion_length"]
    rows = ablate.table([{"beta": "0"}, {"beta": "1"}], [a, b], names).splitlines()
    assert rows[0] == "| figure | beta | mean ± std of 3 seeds | minus 0, 95 % interval | |"
    assert rows[2:] == [
        "| eval/accuracy:last | 0 | 0.600 ± 0.100 | | |",
        "| | 1 | 0.703 ± 0.095 | +0.103, +0.089 to +0.118 | **differs** |",
        "| completion_length | 0 | 11.00 ± 1.00 | | |",
        "| | 1 | 11.00 ± 1.00 | +0.00, -2.48 to +2.48 | not told from noise |",
    ]
    few = ablate.table([{"beta": "0"}, {"beta": "1"}], [a[:2], b[:2]], names)
    assert few.count("too few seeds") == 2 and "differs" not in few


def test_the_figure_that_decides_is_compared_and_the_others_describe():
    values = {"grpo": [0.50, 0.60, 0.70], "dapo": [0.61, 0.70, 0.80], "opo": [0.45, 0.65, 0.70]}
    runs = [[one_step(accuracy, 10 + seed) for seed, accuracy in enumerate(its)] for its in values.values()]
    variants = [{"algorithm": name, "learning_rate": "1e-4"} for name in values]
    decides = "eval/accuracy:last"
    assert ablate.table(variants, runs, [decides, "completion_length"], decides).splitlines() == [
        "| figure | algorithm | learning_rate | mean ± std of 3 seeds | minus grpo, 1e-4, 95 % interval | | worst "
        "| completion_length |",
        "|---|---|---|---|---|---|---|---|",
        "| eval/accuracy:last | grpo | 1e-4 | 0.600 ± 0.100 | | | 0.500 | 11.00 |",
        "| | dapo | 1e-4 | 0.703 ± 0.095 | +0.103, +0.089 to +0.118 | **holds** | 0.610 | 11.00 |",
        "| | opo | 1e-4 | 0.600 ± 0.132 | +0.000, -0.124 to +0.124 | not told from noise | 0.450 | 11.00 |",
    ]


def test_a_grid_is_every_combination_and_each_run_has_a_folder():
    args = ablate.parse("--vary a=1,2 --vary b=x,y --out o --figures entropy reward:1-2 -- --steps 3".split())
    assert args.flags == ["--steps", "3"] and args.figures == ["entropy", "reward:1-2"]
    folders = [str(ablate.folder_of(args.out, v, seed)) for v in args.variants for seed in args.seeds]
    assert folders[:4] == ["o/1-x-1", "o/1-x-2", "o/1-x-3", "o/1-y-1"] and len(set(folders)) == 12


@pytest.mark.parametrize("words", ["--vary a=1,2 --figures entropy:late", "--vary a", "--vary a=1,,2"])
def test_what_cannot_be_read_is_said_before_anything_runs(words, capsys):
    with pytest.raises(SystemExit):
        ablate.parse(f"--out o {words}".split())
    assert f"cannot be read: {words.split()[-1]}" in capsys.readouterr().err


def test_the_grid_repeats_nothing_and_its_table_runs_nothing(tmp_path, monkeypatch, capsys):
    def words(seeds: str) -> list[str]:
        given = f"--vary beta=0.0 --seeds {seeds} --jobs 1 --out {tmp_path} --figures completion_length --".split()
        return given + "--task sorting --steps 2 --prompts_per_step 2 --num_generations 2 --eval_every 0".split()

    ablate.main(words("1"))
    log = tmp_path / "0.0-1" / "metrics.jsonl"
    before = log.read_text(), log.stat().st_mtime_ns
    ablate.main(words("1,2"))
    assert (log.read_text(), log.stat().st_mtime_ns) == before
    (runs,) = ablate.read_runs(tmp_path, [{"beta": "0.0"}], ["1", "2"])
    of_each = [statistics.fmean(line["completion_length"] for line in lines[1:]) for lines in runs]
    made = (tmp_path / "table.md").read_text()
    assert f"| 0.0 | {statistics.fmean(of_each):.2f} ± " in made

    monkeypatch.setattr(ablate, "run_all", None)  # whoever runs anything fails
    capsys.readouterr()
    ablate.main(["--table", *words("1,2")])
    assert capsys.readouterr().out == made
    with pytest.raises(SystemExit, match=r"0\.0-3: there is no such run"):
        ablate.main(["--table", *words("1,2,3")])
    log.write_text(before[0].splitlines()[0] + "\n")
    with pytest.raises(SystemExit, match=r"0\.0-1: not finished, 1 of 2 steps"):
        ablate.main(["--table", *words("1,2")])


GRID = "--vary beta=0.0,0.1 --seeds 1,2"
WRONG = [  # flags of the grid, what is said
    ("--vary beta=0,0", "given twice: 0, 0"),
    ("--vary beta=0 --seeds 1,1", "given twice: 1, 1"),
    ("--vary beta=0 --vary beta=1", "given twice: beta, beta"),
    ("--vary beta=0 --tune beta=1,2 --decides entropy", "given twice: beta, beta"),
    ("--vary beta=0 --tune learning_rate=1e-4 --tune_seeds 3", "--tune needs --decides"),
    ("--vary beta=0 --tune learning_rate=1e-4 --tune_seeds 3 --decides entropy", "given twice: 1, 2, 3, 3"),
    ("--vary beta=0 --tune learning_rate=1e-4,-1 --decides entropy", "error: --learning_rate -1: must be a number"),
    ("--vary out=a,b", "the grid itself gives each run its seed and folder: leave out out"),
    (f"{GRID} -- --seed=3", "leave out seed"),
    ("--vary bta=0,1", "error: --bta: there is no such flag; did you mean --beta?"),
    ("--vary beta=0,-1", "error: --beta -1: must be a number, at least 0 and finite"),
    ("--vary algorithm=grpo,rloo -- --num_iterations 2", "error: --objective reinforce: has no ratio"),
    (f"{GRID},x", "error: --seed x: must be a whole number"),
    (f"{GRID} -- --eval_every 0", "0.0-1 will have no such figure"),
    (f"{GRID} --figures entropy:9-10 -- --steps 8", "error: entropy:9-10: "),
]


@pytest.mark.parametrize("words, told", WRONG)
def test_the_whole_grid_is_checked_before_the_first_run(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "run_one", None)  # whoever runs anything fails
    with pytest.raises(SystemExit) as stop:
        ablate.main(["--out", str(tmp_path / "out"), *words.split()])
    assert told in capsys.readouterr().err + str(stop.value) and not (tmp_path / "out").exists()


def test_every_run_is_inside_the_folder_of_the_grid(tmp_path):
    folders = [ablate.folder_of(tmp_path, {"model": model}, "1") for model in ("/models/a", "../b", "org/c")]
    assert all(folder.parent == tmp_path for folder in folders)


def test_a_figure_that_the_first_run_does_not_have_stops_the_grid(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"settings": {"steps": 1}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "entropy": 0.5}\n')
    started = []
    monkeypatch.setattr(ablate, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(ablate, "run_one", lambda folder, words: started.append(folder) or (run, 1.0))
    words = f"--jobs 1 --out {tmp_path / 'out'} --figures entropie {GRID}"
    with pytest.raises(SystemExit, match="entropie: no such metric; there are step, entropy"):
        ablate.main(words.split())


def test_a_difference_is_shown_in_digits_that_tell():
    assert ablate.with_interval([0.001, 0.0012, 0.0011], 2) == "+0.00110, +0.00085 to +0.00135"


def test_a_run_that_fails_stops_the_grid_with_its_own_line(tmp_path):
    with pytest.raises(SystemExit, match=r"error: --model none/x/y: .*\n.*0\.0-1 ended with 2; see .*0\.0-1\.log"):
        ablate.main(f"--vary beta=0.0 --seeds 1 --out {tmp_path} -- --model none/x/y".split())


def finished_run(folder, accuracy: float, flags: str = "") -> None:
    folder.mkdir(parents=True)
    settings = vars(parse([*f"--steps 1 --out {folder}".split(), *flags.split()], on_gpu=False))
    (folder / "config.json").write_text(json.dumps({"settings": settings, "commit": "abc"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in one_step(accuracy, 1 / 3)))


TUNED = (
    "--vary algorithm=grpo,dapo --tune learning_rate=1e-4,2e-4 --tune_seeds 7,8 --decides eval/accuracy:last --table"
)


def test_each_variant_gets_the_value_that_is_best_on_seeds_that_are_not_reported(tmp_path, capsys):
    for name, low, high in (("grpo", 0.3, 0.2), ("dapo", 0.4, 0.5)):
        for seed in (7, 8):
            finished_run(tmp_path / f"{name}-1e-4-{seed}", low)
            finished_run(tmp_path / f"{name}-2e-4-{seed}", high)
    for seed in (1, 2):
        finished_run(tmp_path / f"grpo-1e-4-{seed}", 0.6)
        finished_run(tmp_path / f"dapo-2e-4-{seed}", 0.8)
    ablate.main(f"{TUNED} --table --seeds 1,2 --figures completion_length --out {tmp_path}".split())
    shown = capsys.readouterr().out
    assert " | grpo | 1e-4 | 0.600 ± 0.000 |" in shown and "| dapo | 2e-4 | 0.800 ± 0.000 |" in shown


def test_runs_that_are_kept_are_a_line_each_and_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "RESULTS", tmp_path)
    ablate.kept.cache_clear()
    out = tmp_path / "runs" / "grid"
    words = f"--vary beta=0.0,0.1 --seeds 1,2 --figures eval/accuracy:last completion_length:1-1 --out {out}".split()
    for beta, accuracy in (("0.0", 0.5), ("0.1", 0.123456789)):
        for seed in (1, 2):
            finished_run(out / f"{beta}-{seed}", accuracy, f"--beta {beta} --seed {seed}")
    ablate.main([*words, "--table", "--keep"])
    made = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["0.0-1", "0.0-2", "0.1-1", "0.1-2"] and rows[0]["commit"] == "abc"
    assert rows[0]["settings"]["steps"] == 1 and rows[2]["settings"]["beta"] == 0.1
    assert not {"beta", "out"} & rows[0]["settings"].keys()  # the default, and a folder
    columns = {"step": [0, 1], "eval/accuracy": [0.0, 0.12346], "completion_length": [None, 0.33333]}
    assert rows[2]["columns"] == columns

    out.rename(tmp_path / "gone")
    ablate.kept.cache_clear()
    monkeypatch.setattr(ablate, "run_one", None)  # whoever runs anything fails
    ablate.main([*words, "--", "--steps", "1"])
    assert capsys.readouterr().out == "4 runs; what is in results/grid.jsonl is not run again\n" + made
    with pytest.raises(SystemExit, match=r"grid\.jsonl has 0\.0-1 with another --steps: give another --out"):
        ablate.main([*words, "--", "--steps", "2"])
    ablate.kept.cache_clear()
