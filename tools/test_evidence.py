"""Tables and pictures are those of the logs, and what is not is named."""

import json
import shutil

import pytest

from tools import evidence, plot

FINDING = """
```
python -m tools.ablate --vary epsilon_high=0.2,0.5 --seeds 1,2,3 --out runs/clip_higher \\
    --figures entropy -- --task sorting --steps 100
python -m tools.ablate --vary beta=0,1 --out runs/not_kept
python -m tools.plot results/clip_higher/* --out results/clip_higher.png --panels entropy
python -m tools.plot runs/* --out elsewhere.png
```

![Entropy](../results/clip_higher.png)
"""


def block(name: str) -> str:
    return f"<!-- made by tools.evidence: {name} -->\n<!-- end -->\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Small pages, and logs of this repository."""
    results = evidence.ROOT / "results"
    for name in ("default", "clip_higher"):
        shutil.copytree(results / name, tmp_path / "results" / name)
    shutil.copy(results / "bench.jsonl", tmp_path / "results")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(block("default"))
    (tmp_path / "docs" / "findings.md").write_text(FINDING + block("clip_higher"))
    (tmp_path / "docs" / "benchmarks.md").write_text(block("step"))
    return tmp_path


def test_what_is_not_that_of_the_logs_is_named_and_made_anew(root, capsys):
    assert evidence.main([]) == 0 and evidence.stale() == []
    page, finding = root / "docs" / "benchmarks.md", root / "docs" / "findings.md"
    made = page.read_text()
    page.write_text(made.replace("| ours / TRL | 0.", "| ours / TRL | 1.", 1))
    log = root / "results" / "clip_higher" / "0.5-2" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"entropy": 0.', '"entropy": 1.'))
    assert evidence.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "docs/benchmarks.md: the table step is not that of the logs",
        "docs/findings.md: the table clip_higher is not that of the logs",
        "results/clip_higher.png is not the picture of the logs",
    ]
    assert evidence.main([]) == 0 and evidence.main(["--check"]) == 0 and page.read_text() == made
    finding.write_text(finding.read_text().replace("--steps 100", "--steps 90"))  # the logs are of another command
    with pytest.raises(SystemExit, match=r"0\.2-1 was made with --steps 100, not 90"):
        evidence.stale()


def test_a_table_on_no_page_and_a_picture_of_no_command_are_named(root):
    (root / "README.md").write_text("![Reward](results/default.png)\n")
    assert {
        "README.md: no command on a page draws results/default.png",
        "the table default is on no page",
    } < {*evidence.stale()}


def test_kept_logs_are_those_of_the_runs(root):
    log = '{"step": 1, "loss": 1.23456789e-07, "kl": null, "tokens": 1234567}\n'
    for name in ("0.1-1", "0.1-1.replaced-1"):
        run = root / "runs" / "beta" / name
        run.mkdir(parents=True)
        (run / "config.json").write_text('{"given": {"beta": 0.1}, "settings": {"beta": 0.1}}')
        (run / "metrics.jsonl").write_text(log)
        (run / "samples.jsonl").touch()
    (root / "runs" / "beta" / "0.1-1.log").touch()
    assert evidence.main(["--keep", str(root / "runs" / "beta")]) == 0
    (kept,) = (root / "results" / "beta").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "metrics.jsonl"]
    assert plot.read_log(kept) == plot.Log({"beta": 0.1}, [json.loads(log)])


def test_the_tables_come_from_the_newest_measurements(root):
    phases = ("rollout", "forward", "backward", "update", "step")
    names = ["memory_gb", *(f"{phase}_cpu" for phase in phases)]  # on a CPU
    results = {way: {name: [s, s, 9 * s] for name in names} for way, s in (("ours", 2.0), ("TRL", 4.0))}
    about = {"commit": "abcdef0123", "hardware": "2 CPU cores", "threads": 1, "transformers": "1.2.3"}
    about |= dict(size="12m", prompts=4, group=8, limit=256, lengths="ragged", results=results)
    lines = [  # command, tokens, what differs
        ("python bench.py step", 7, {"hardware": "1 CPU core"}),
        ("python -m tools.bench step --repeats 9", 1000, {}),
        ("python -m tools.bench step --equal", 9, {"lengths": "equal"}),
        ("python -m tools.bench step --prompts 5", 11, {"prompts": 5}),
        ("python -m tools.bench step", 12, {"transformers": "1.2.4"}),
        ("python bench.py logprobs", 13, {}),
    ]
    lines = [about | {"command": command, "tokens": tokens} | other for command, tokens, other in lines]
    (root / evidence.BENCH_LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = evidence.tables()["step"]
    shown = [n for n in (7, 9, 11, 12, 13, 1000) if f": {n} tokens" in table]
    assert shown == [9, 11, 12, 1000], "on another CPU, before: 7"
    assert "| ours | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 500 | 2.00 |" in table
    assert "| ours / TRL | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 2.0 | 0.50 |" in table
    assert "(2 CPU cores; threads: 1; transformers 1.2.3; commit `abcdef0`)" in table
