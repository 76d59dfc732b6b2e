"""The atlas: how a grid is tuned, and that the page agrees with the logs, and the logs with the grids."""

import json

from bench import logs
from infra.command_line import parse, ready
from results.atlas import atlas
from tools import ablate


def lines_of(accuracy: float, length: float) -> list[dict]:
    last = {"step": 1, "completion_length": length, "entropy": 0.5, "reward": accuracy, "eval/pass@1": accuracy}
    return [{"step": 0, "eval/pass@1": 0.0}, last]


def test_a_grid_is_tuned_run_and_kept(tmp_path, monkeypatch, capsys):
    """Each objective gets the rate that is best on seeds that are not reported. The grid's log is empty at first. --run
    does not read it, and --keep fills it."""
    made = []

    def run_one(run: ablate.Run, launch: str, gpus: str) -> int:
        made.append(run)
        (run.folder).mkdir()
        settings = vars(ready(parse([*run.words, "--out", str(run.folder)], on_gpu=False), on_gpu=False))
        about = {"settings": settings, "commit": "abc", "versions": {}, "hardware": {}}
        (run.folder / "config.json").write_text(json.dumps(about))
        rate, accuracy = {"grpo": (1e-4, 0.8), "dapo": (2e-4, 0.85)}[run.config.algorithm]
        accuracy = accuracy + 0.0123456 * run.config.seed if run.config.learning_rate == rate else 0.1
        lines = lines_of(accuracy, 9 + run.config.seed)
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 0

    grid = atlas.Grid("grpo,dapo", "1e-4,2e-4", "1,2,3", "completion_length", "--task chain --steps 1")
    monkeypatch.setitem(atlas.GRIDS, "chain_on", grid)
    monkeypatch.setattr(atlas, "HERE", tmp_path)
    monkeypatch.setattr(ablate, "run_one", run_one)
    logs.write_gz(tmp_path / "chain_on.jsonl.gz", "")
    assert atlas.main(["--run", "chain_on", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    headings, _, *rows = shown.splitlines()[-4:]
    assert headings.endswith("| difference from grpo at 1e-4 (95 % interval) | completion_length |") and rows == [
        "| grpo | 1e-4 | 0.825 ± 0.012 | | 11.00 |",
        "| dapo | 2e-4 | 0.875 ± 0.012 | +0.050 (+0.050 to +0.050) **holds** | 11.00 |",
    ]
    assert [run.config.seed for run in made] == [101] * 4 + [102] * 4 + [1, 1, 2, 2, 3, 3]

    assert atlas.main(["--keep", "chain_on", "--out", str(tmp_path / "out")]) == 0
    atlas.logged.cache_clear()
    assert atlas.table(*atlas.logged("chain_on"), describe=True) in shown
    atlas.logged.cache_clear()
    rows = logs.read_gz(tmp_path / "chain_on.jsonl.gz")
    assert len(rows) == 14 and rows[0]["commit"] == "abc" and "out" not in rows[0]["settings"]
    first = {row["run"]: row for row in rows}["dapo,2e-4-1"]
    assert first["columns"] == {"step": [0, 1], "eval/pass@1": [0.0, 0.86235], "completion_length": [None, 10]}


def test_the_page_agrees_with_the_logs_and_the_logs_with_the_grids():
    assert atlas.stale() == []
