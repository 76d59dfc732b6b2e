"""Tables and pictures are those of the logs, and what is not is named."""

import json
import shutil

import pytest

from tools import evidence, plot

FINDING = """
```
python -m tools.ablate --vary epsilon_high=0.2,0.5 --seeds 1,2,3 --out runs/clip_higher \\
    --figures entropy
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
    (tmp_path / "docs" / "benchmarks.md").write_text(block("step") + block("logprobs"))
    return tmp_path


def test_what_is_not_that_of_the_logs_is_named_and_made_anew(root, capsys):
    assert evidence.main([]) == 0 and evidence.stale() == []
    page = root / "docs" / "benchmarks.md"
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


def test_a_table_on_no_page_and_a_picture_of_no_command_are_named(root):
    (root / "README.md").write_text("![Reward](results/default.png)\n")
    assert {
        "README.md: no command on a page draws results/default.png",
        "the table default is on no page",
    } < {*evidence.stale()}


def test_kept_logs_are_those_of_the_runs(root):
    run = root / "runs" / "beta" / "0.1-1"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"settings": {"beta": 0.1}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.23456789e-07, "kl": null, "tokens": 1234567}\n')
    (run / "samples.jsonl").touch()
    assert evidence.main(["--keep", str(root / "runs" / "beta")]) == 0
    kept = root / "results" / "beta" / "0.1-1"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "metrics.jsonl"]
    lines = [{"step": 1, "loss": 1.23456789e-07, "kl": None, "tokens": 1234567}]
    assert plot.read_log(kept) == plot.Log({"beta": 0.1}, lines)


def measured(command: str, **more) -> dict:
    about = {"command": command, "commit": "abcdef0123", "hardware": "2 CPU cores", "threads": 1}
    about |= {"transformers": "1.2.3"}
    return about | more


def test_the_tables_come_from_the_newest_measurements(root):
    phases = [
        f"{phase}{unit}" for phase in ("rollout", "forward", "backward", "update", "step") for unit in ("", "_cpu")
    ]
    results = {way: {n: [s, s, 9 * s] for n in [*phases, "memory_gb"]} for way, s in (("ours", 2.0), ("TRL", 4.0))}
    step = dict(size="12m", prompts=4, group=8, limit=256, lengths="ragged", tokens=1000, results=results)
    passes = {name: [1.0, 3.0, 2.0] for name in ("seconds", "cpu_seconds", "memory_gb")}
    lines = [
        measured("python bench.py step", **step | {"tokens": 7, "hardware": "1 CPU core"}),
        measured("python -m tools.bench step --repeats 9", **step),
        measured("python -m tools.bench step --equal", **step | {"lengths": "equal", "tokens": 9}),
        measured("python -m tools.bench step --prompts 5", **step | {"prompts": 5, "tokens": 11}),
        measured("python -m tools.bench step", **step | {"transformers": "1.2.4", "tokens": 12}),
        measured("python bench.py overhead", shares={"rollout": 0.6}),
        measured("python bench.py logprobs", results={"token_logprobs": passes, "full logits": passes}),
    ]
    (root / evidence.BENCH_LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = evidence.tables()
    shown = [n for n in (7, 9, 11, 12, 1000) if f": {n} tokens" in tables["step"]]
    assert shown == [9, 11, 12, 1000], "on another CPU, before: 7"
    assert "| ours | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 500 | 2.00 |" in tables["step"]
    assert "| ours / TRL | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 2.0 | 0.50 |" in tables["step"]
    assert "| token_logprobs | 2.0 | 2.0 | 2.00 |" in tables["logprobs"]
    assert "(2 CPU cores; threads: 1; transformers 1.2.3; commit `abcdef0`)" in tables["logprobs"]
