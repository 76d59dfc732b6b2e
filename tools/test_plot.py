"""Pictures of runs, and their fingerprints."""

import json
from pathlib import Path

import pytest

from tools import plot


def folder(path: Path, lines: list[dict], **settings) -> Path:
    """Write the logs of a run."""
    path.mkdir(parents=True)
    settings = dict(algorithm="grpo", seed=0, beta=0.0, out=str(path)) | settings
    about = dict(settings=settings, code="c", digests={"digest of r.py": "d"})
    (path / "config.json").write_text(json.dumps(about))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_runs_of_several_seeds_are_one_line(tmp_path):
    names = {f"{b}-{s}": dict(beta=b, seed=s, report_to=["wandb", None][s % 2]) for b in (0.0, 0.1) for s in (0, 1, 2)}
    lines = {0.0: [], 0.1: [{"step": 1, "completion_length": 3.0}]}
    groups = plot.by_settings([plot.read_log(folder(tmp_path / x, lines[names[x]["beta"]], **names[x])) for x in names])
    assert {label: len(logs) for label, logs in groups.items()} == {"beta 0.0": 3, "beta 0.1": 3}
    assert len({*map(str, plot.STYLES)}) == 35, "no two lines look alike"
    (legend,) = (picture := plot.draw_picture(groups, ["length"], 1, 1, "step")).legends
    assert [text.get_text() for text in legend.get_texts()] == ["beta 0.0 (3 seeds)", "beta 0.1 (3 seeds)"]
    assert plot.seeds([plot.Log({}, [{"step": n}] * 2) for n in (4, 9, 8, 9)]) == "4 seeds, 2 shorter"
    (line,) = picture.axes[0].lines  # the runs with beta 0.0 have no such metric
    assert line.get_color() == legend.get_lines()[1].get_color() and line.get_ydata().tolist() == [3.0]
    (band,) = picture.axes[0].collections
    assert tuple(band.get_facecolor()[0, :3]) == plot.matplotlib.colors.to_rgb(line.get_color())
    own = [plot.ALGORITHMS[name] | dict(algorithm=name, beta=0.0) for name in ("grpo", "dapo")]
    read = {*groups["beta 0.0"][0].settings.items()}
    assert {("code", "c"), ("digest of r.py", "d")} < read, "runs of other code or files are not seeds of the same run"
    labels = [[*plot.by_settings([plot.Log(x, []) for x in runs])] for runs in (own, own[1:])]
    assert labels == [["algorithm grpo", "algorithm dapo"], ["dapo"]]
    for other in dict(normalization="sum"), dict(beta=0.1), dict(delay=8):
        assert len(plot.by_settings([plot.Log(x, []) for x in (*own, own[0] | other)])) == 3


def test_a_legend_names_the_folders_of_runs_from_other_files_and_is_not_cut_off(tmp_path):
    def labels(*names: str) -> list[str]:
        groups = plot.by_settings([plot.read_log(tmp_path / name) for name in names])
        figure = plot.draw_picture(groups, ["reward"], 1, 1, "step")
        figure.draw_without_rendering()
        box, (legend,) = figure.bbox, figure.legends
        assert all(box.x0 <= edge <= box.x1 for edge in legend.get_window_extent().intervalx)
        assert all(box.y0 <= edge <= box.y1 for edge in legend.get_window_extent().intervaly)
        return [*groups]

    for name, digest in {"a-0": "d", "a-1": "d", "b-0": "e", "x/c-0": "d", "y/c-0": "e"}.items():
        run = folder(tmp_path / name, [{"step": 1, "reward": 0.5}], seed=int(name[-1]))
        about = json.loads((run / "config.json").read_text()) | {"digests": {f"digest of {tmp_path}/r.py": digest}}
        (run / "config.json").write_text(json.dumps(about))
    assert labels("a-0", "a-1", "b-0") == ["a", "b"]
    assert labels("x/c-0", "y/c-0") == [f"{tmp_path}/x/c-0", f"{tmp_path}/y/c-0"]


def drawn(logs: list[list[dict]], panel: str, width: int, x: str = "step") -> list[list[list[float]]]:
    """Draw the runs with these logs, which differ in their seed. Return what the axes have for each step: [step, the
    line, the lower and the upper edge of the band]."""
    axes = plot.Figure().add_subplot()
    plot.draw_panel(axes, {"runs": [plot.Log({}, lines) for lines in logs]}, panel, width, x)
    (line,), (band,) = axes.lines, axes.collections
    edges = {}
    for step, y in band.get_paths()[0].vertices:
        edges.setdefault(step, []).append(y)
    return [[step, y, min(edges[step]), max(edges[step])] for step, y in line.get_xydata().tolist()]


def test_a_line_is_the_mean_over_seeds_and_a_band_reaches_from_the_lowest_to_the_highest():
    runs = [1, 2, 6, 4], [3, 4, 5, 12]
    logs = [[{"step": t, "kl": x, "eval/accuracy": x} for t, x in enumerate(values)] for values in runs]
    assert drawn(logs, "kl", width=1) == [[0, 2, 1, 3], [1, 3, 2, 4], [2, 5.5, 5, 6], [3, 8, 4, 12]]
    # Smoothing takes the mean over a step and its neighbours, for each run: [1.5, 3, 4, 5] and [3.5, 4, 7, 8.5].
    smooth = [[0, 2.5, 1.5, 3.5], [1, 3.5, 3, 4], [2, 5.5, 4, 7], [3, 6.75, 5, 8.5]]
    assert drawn(logs, "kl", width=3) == smooth
    for panel in ("accuracy", "eval/accuracy"):
        assert drawn(logs, panel, width=3) == drawn(logs, "kl", width=1), "evaluations are not smoothed"
    logs[0][0]["kl"] = None  # a missing value does not count
    assert drawn(logs, "kl", width=1)[0] == [0, 3, 3, 3] and drawn(logs, "kl", width=3)[0] == [0, 2.75, 2, 3.5]


def test_curves_against_what_was_spent():
    """The place of a step is the mean of what the seeds had spent at its end."""
    spent = dict(tokens=(10, 30), seconds_rollout=(1.0, 2.0), seconds_update=(0.5, 0.5))
    steps = (1, 2), (1, 2, 3)  # of each seed
    logs = [[{"step": t, "kl": t} | {k: x[seed] for k, x in spent.items()} for t in steps[seed]] for seed in (0, 1)]
    logs[0].insert(0, {"step": 0, "eval/accuracy": 0.5})
    assert [place for place, *_ in drawn(logs, "kl", 1, "tokens")] == [20, 40, 90]  # of 10 and 30, 20 and 60
    assert [place for place, *_ in drawn(logs, "kl", 1, "seconds")] == [2.0, 4.0, 7.5]  # of 1.5 and 2.5, 3 and 5
    assert [place for place, *_ in drawn(logs, "kl", 1)] == [1, 2, 3]


def test_a_picture_is_reproducible_and_has_a_fingerprint_of_its_logs_and_flags(tmp_path):
    lines = [{"step": s, "reward": s / 10, "eval/accuracy": 0.5, "kl": None, "reward/x": s} for s in range(9)]
    run, replaced, no_run = folder(tmp_path / "run", lines), folder(tmp_path / "run.replaced-1", lines), tmp_path
    foreign = folder(tmp_path / "foreign", lines)
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    words = f"{run} {replaced} {no_run} {foreign} --panels reward accuracy kl reward/x --columns 2 --out".split()
    for name in ("a", "b"):
        plot.main([*words, f"{tmp_path}/{name}.png"])
    drawn, again = ((tmp_path / f"{name}.svg").read_text() for name in ("a", "b"))
    titles = ("accuracy", "kl", "reward/x")  # there is nothing to draw for "kl"
    assert drawn == again and [drawn.count(f"<!-- {title} -->") for title in titles] == [1, 0, 1]
    # If another run were drawn, the label of the line would end with "(2 seeds)".
    assert "seeds)" not in drawn, "replaced runs and other folders are left out"
    # picture_of returns the picture and its fingerprint.
    flags = [], ["--smooth=1"], ["--x=tokens"]
    pictures, fingerprints = zip(*(plot.picture_of(plot.parse([*words, "a.png", *more])) for more in flags))
    assert [picture.axes[0].get_xlabel() for picture in pictures] == ["step", "step", "tokens"]
    assert all(fingerprints[0].encode() in (tmp_path / name).read_bytes() for name in ("a.png", "a.svg"))
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.6}\n{"step": 2, "rew')  # a kill has torn a line
    assert len({*fingerprints, plot.picture_of(plot.parse([*words, "a.png"]))[1]}) == 4
    with pytest.raises(SystemExit, match=r"no run has rewardx; the logs have reward, step"):
        plot.main([str(run), "--panels", "rewardx"])
    plot.main([str(run), "--panels", "reward", "rewardx", "--out", str(tmp_path / "a.pdf")])
    assert (tmp_path / "a.pdf").exists() and not (tmp_path / "a.pdf.png").exists()
    assert plot.parse([str(run), "another"]).out == tmp_path / "plot.png"
