"""Tables and pictures match the logs, and a mismatch is reported."""

import json
import shutil

import pytest

from conftest import contents
from tools import evidence

BLOCK = "<!-- made by tools.evidence: {} -->\n<!-- end -->\n"
FINDING = """
python -m tools.ablate --vary epsilon_high=0.2,0.5 --seeds 1,2,3 --out runs/clip_higher \\
    --figures entropy -- --task sorting --steps 100 --learning_rate 5e-4 --num_iterations 4 --minibatches 2
python -m tools.ablate --vary beta=0,1 --out runs/not_kept
python -m tools.plot results/clip_higher/* --out results/clip_higher.png --panels entropy
python -m tools.plot runs/* --out elsewhere.png

![Entropy](../results/clip_higher.png)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root folder with small pages, and with some logs of this repository."""
    for name in ("default", "clip_higher"):
        shutil.copytree(evidence.ROOT / "results" / name, tmp_path / "results" / name)
    shutil.copy(evidence.ROOT / "results" / "bench.jsonl", tmp_path / "results")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(BLOCK.format("default"))
    (tmp_path / "docs" / "findings.md").write_text(FINDING + BLOCK.format("clip_higher"))
    (tmp_path / "docs" / "benchmarks.md").write_text(BLOCK.format("step"))
    return tmp_path


def test_a_mismatch_is_reported_and_repaired(root):
    def assert_reported(message: str) -> None:
        with pytest.raises(SystemExit, match=message):
            evidence.main(["--check"])

    evidence.main([])
    page, log = root / "docs" / "benchmarks.md", root / "results" / "clip_higher" / "0.5-2" / "metrics.jsonl"
    made = page.read_text()
    page.write_text(made.replace("| ours / TRL | 0.", "| ours / TRL | 1.", 1))
    log.write_text(log.read_text().replace('"entropy": 0.', '"entropy": 1.'))
    assert_reported(r"^docs/benchmarks.md: the table step .*\n.* table clip_higher .*\nresults/clip_higher.png does")
    evidence.main([])
    evidence.main(["--check"])
    assert page.read_text() == made
    (root / "README.md").write_text("![Reward](results/other.png)\n")
    assert_reported("^README.md: no command on a page draws results/other.png$")
    (root / "docs" / "findings.md").write_text(FINDING.replace("--steps 100", "--steps 90"))
    assert_reported(r"0\.2-1 was made with --steps 100, not 90")


def test_the_newest_step_table_of_each_kind(root):
    about = {"hardware": "2 CPU cores", "threads": 1, "transformers": "1.2.3", "commit": "0123456789", "size": "12m"}
    about |= {"prompts": 3, "group": 4, "lengths": "ragged", "limit": 12}
    results = {way: {"rollout_cpu": [n], "step_cpu": [2 * n], "memory_gb": [n]} for way, n in (("ours", 2), ("TRL", 4))}
    ours = {"ours": results["ours"]}
    measured = [(".py step", 7, ours), (" step --seeds 9", 1000, ours), (" step", 11, results), (".py old", 13, ours)]
    entries = [about | {"command": f"bench{a}", "tokens": n, "results": made} for a, n, made in measured]
    entries[0]["hardware"] = "1 CPU core"  # all CPUs count as one
    (root / "results" / "bench.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    tables = evidence.step_tables()
    assert [n for n in (7, 11, 13, 1000) if f": {n} tokens" in tables] == [11, 1000]
    assert "| ours / TRL | 0.50 | 0.50 | 0.50 | 0.50 | 2.0 |" in tables


def test_kept_logs_are_copies(root):
    made = root / "results" / "clip_higher" / "0.5-2"
    for name in ("0.1-1", "0.1-1.replaced-1"):
        run = shutil.copytree(made, root / "runs" / "beta" / name)
        (run / "samples.jsonl").write_text("")
    evidence.main(["--keep", str(root / "runs" / "beta")])
    (kept,) = (root / "results" / "beta").iterdir()
    assert kept.name == "0.1-1" and contents(kept) == contents(made)
