"""Pictures of runs, and their fingerprints."""

import json
from pathlib import Path

import numpy as np
import pytest

from tools import plot


def folder(path: Path, lines: list[dict], **settings) -> Path:
    """Write the logs of a run."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"settings": dict(algorithm="grpo", seed=0, beta=0.0) | settings}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_runs_of_several_seeds_are_one_line(tmp_path):
    runs = [folder(tmp_path / f"{b}-{s}", [], beta=b, seed=s) for b in (0.0, 0.1) for s in (0, 1, 2)]
    groups = plot.by_settings([plot.read_log(run) for run in runs])
    assert {label: len(logs) for label, logs in groups.items()} == {"beta 0.0": 3, "beta 0.1": 3}
    assert len({*map(str, plot.STYLES)}) == 35, "no two lines look alike"


def test_null_leaves_a_gap_and_smoothing_is_a_centred_mean():
    logs = [[{"step": 1, "kl": 1.0}, {"step": 2, "kl": None}], [{"step": 1, "kl": 3.0}, {"step": 2, "kl": 5.0}]]
    steps, values = plot.series([plot.Log({}, lines) for lines in logs], "kl")
    assert steps == [1, 2] and values.tolist() == [[1.0, None], [3.0, 5.0]]
    # The mean over three steps leaves null out. Here it includes the other step, so no gap remains.
    assert plot.smooth(values, 3).tolist() == [[1.0, 1.0], [4.0, 4.0]]
    squares = np.ma.array([np.arange(20.0) ** 2])
    assert [plot.smooth(squares, 5)[0, t] for t in (0, 10)] == [squares[0, :3].mean(), squares[0, 8:13].mean()]


def test_a_picture_is_reproducible_and_has_a_fingerprint_of_its_logs_and_flags(tmp_path, capsys):
    lines = [{"step": s, "reward": s / 10, "eval/accuracy": 0.5, "kl": None, "reward/x": s} for s in range(9)]
    run, replaced, no_run = folder(tmp_path / "run", lines), folder(tmp_path / "run.replaced-1", lines), tmp_path
    words = f"{run} {replaced} {no_run} --panels reward accuracy kl reward/x --columns 1 --out".split()
    for name in ("a", "b"):
        plot.main([*words, f"{tmp_path}/{name}.png"])
    drawn, again = ((tmp_path / f"{name}.svg").read_text() for name in ("a", "b"))
    titles = ("accuracy", "kl", "reward/x")  # there is nothing to draw for "kl"
    assert drawn == again and [drawn.count(f"<!-- {title} -->") for title in titles] == [1, 0, 1]
    # If another run were drawn, the label of the line would end with "(2 seeds)".
    assert "seeds)" not in drawn, "replaced runs and other folders are left out"
    # picture_of returns the picture and its fingerprint.
    fingerprints = [plot.picture_of(plot.parse([*words, "a.png", *more]))[1] for more in ([], ["--smooth", "1"])]
    assert all(fingerprints[0].encode() in (tmp_path / name).read_bytes() for name in ("a.png", "a.svg"))
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.6}\n{"step": 2, "rew')  # a kill has torn a line
    assert len({*fingerprints, plot.picture_of(plot.parse([*words, "a.png"]))[1]}) == 3
    with pytest.raises(SystemExit, match=r"no run has rewardx; the logs have reward, step"):
        plot.main([str(run), "--panels", "rewardx"])
    plot.main([str(run), "--panels", "reward", "rewardx", "--out", str(tmp_path / "a.pdf")])
    assert capsys.readouterr().err.endswith("skipped, because no run has it: rewardx\n")
