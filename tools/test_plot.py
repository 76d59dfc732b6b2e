"""Pictures of runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tools import plot


def folder(path: Path, lines: list[dict], **settings) -> Path:
    """With the logs of a run in it."""
    path.mkdir(parents=True)
    settings = {"algorithm": "grpo", "seed": 0, "beta": 0.0} | settings
    (path / "config.json").write_text(json.dumps({"settings": settings}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_of_several_seeds_are_one_line_and_the_legend_names_what_differs(tmp_path):
    lines = [{"step": 1, "reward": 0.5}]
    runs = [folder(tmp_path / f"{b}-{s}", lines, beta=b, seed=s) for b in (0.0, 0.1) for s in (0, 1, 2)]
    groups = plot.by_settings([plot.read_log(run) for run in runs])
    assert {label: len(of) for label, of in groups.items()} == {"beta 0.0": 3, "beta 0.1": 3}


def test_a_metric_that_is_null_leaves_a_gap():
    logs = [
        plot.Log({}, [{"step": 1, "kl": 1.0}, {"step": 2, "kl": None}]),
        plot.Log({}, [{"step": 1, "kl": 3.0}, {"step": 2, "kl": 5.0}]),
    ]
    steps, values = plot.series(logs, "kl")
    assert steps.tolist() == [1, 2] and values[:, 0].tolist() == [1.0, 3.0]
    assert math.isnan(values[0, 1]) and values[1, 1] == 5.0


def test_smoothing_is_a_centred_mean():
    values = np.arange(20.0)[None] ** 2
    smoothed = plot.smooth(values, 5)
    assert smoothed[0, 10] == values[0, 8:13].mean() and smoothed[0, 0] == values[0, :3].mean()


def test_the_picture_is_written_twice_and_is_the_same_each_time(tmp_path):
    run = folder(tmp_path / "run", [{"step": s, "reward": s / 10, "eval/accuracy": 0.5, "kl": None} for s in range(9)])
    words = [str(run), "--out", str(tmp_path / "a.png")]
    plot.main(words)
    first = (tmp_path / "a.svg").read_bytes()
    plot.main(words)
    assert (tmp_path / "a.svg").read_bytes() == first and (tmp_path / "a.png").stat().st_size > 1000
    assert first.count(b"held-out accuracy") == 1 and b"KL to the reference" not in first  # nothing to draw there


def test_the_fingerprint_in_a_picture_is_that_of_its_logs_and_flags(tmp_path):
    run = folder(tmp_path / "run", [{"step": 1, "reward": 0.5}])
    args = plot.parse([str(run), "--out", str(tmp_path / "a.png"), "--panels", "reward"])
    picture, before = plot.picture_of(args)
    plot.save(picture, before, args.out)
    assert all(before.encode() in (tmp_path / name).read_bytes() for name in ("a.png", "a.svg"))
    assert plot.picture_of(plot.parse([str(run), "--panels", "reward", "--smooth", "1"]))[1] != before
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.6}')
    assert plot.picture_of(args)[1] != before


def test_any_metric_is_a_panel_and_what_no_run_has_is_named(tmp_path):
    runs = [folder(tmp_path / b, [{"step": 1, "reward/x": 0.5}], beta=float(b), seed=1) for b in ("0.0", "0.1")]
    (tmp_path / "0.0.log").touch()
    plot.main(
        [*map(str, tmp_path.iterdir()), "--out", str(tmp_path / "a.png"), "--panels", "reward/x", "--columns", "1"]
    )
    drawn = (tmp_path / "a.svg").read_text()
    assert [drawn.count(f"<!-- {text} -->") for text in ("reward/x", "beta 0.0", "beta 0.1")] == [1, 1, 1]
    with pytest.raises(SystemExit, match=r"no run has rewardx; there are reward/x, step"):
        plot.main([*map(str, runs), "--panels", "rewardx"])


def test_no_two_lines_of_a_picture_look_alike():
    assert len({str(plot.style(i)) for i in range(35)}) == 35


def test_what_is_no_run_is_left_out_with_a_note(tmp_path, capsys):
    run = folder(tmp_path / "run", [{"step": 1, "reward": 0.5}])
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.log").touch()
    plot.main([str(run), str(tmp_path / "empty"), str(tmp_path / "run.log")])
    shown = capsys.readouterr()
    assert shown.err.count("note: ") == 2 and f"note: {tmp_path}/empty is left out, it is no run" in shown.err
    assert shown.out == f"{tmp_path}/plot.png, {tmp_path}/plot.svg\n"
    with pytest.raises(SystemExit, match="there is no run to draw"):
        plot.main([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    "out, files", [("a.pdf", ["a.pdf"]), ("a.svg", ["a.png", "a.svg"]), ("lr-0.2", ["lr-0.2.png", "lr-0.2.svg"])]
)
def test_the_suffix_that_is_given_counts(tmp_path, out, files):
    run = folder(tmp_path / "run", [{"step": 1, "reward": 0.5}])
    plot.main([str(run), "--out", str(tmp_path / "new" / out)])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == files
