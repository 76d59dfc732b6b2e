"""Tables and pictures match the logs, and a mismatch is reported."""

import shutil

import pytest

from bench import evidence, logs

BLOCK = "<!-- made by bench.evidence: {} -->\n<!-- end -->\n"
# The logs of runs/NAME are kept in results/NAME. Two of the commands below are ignored: the one for runs/not_kept,
# because there is no results/not_kept, and the one that draws elsewhere.png, which is not in results/.
FINDING = """
python -m tools.ablate --vary normalization=sequence,global --seeds 1,2,3 --out runs/normalization \\
    --figures entropy -- --task sorting --learning_rate 3e-4 --max_completion_length 32 --max_grad_norm 100
python -m tools.ablate --vary beta=0,1 --out runs/not_kept
python -m tools.plot runs/normalization/* --out results/normalization.png --panels entropy
python -m tools.plot runs/* --out elsewhere.png

![Entropy](../results/normalization.png)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Make a root folder with small pages and with some logs of this repository."""
    for name in ("default", "normalization"):
        shutil.copytree(evidence.ROOT / "results" / name, tmp_path / "results" / name)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence.logs, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(BLOCK.format("default"))
    (tmp_path / "docs" / "findings.md").write_text(FINDING + BLOCK.format("normalization"))
    return tmp_path


def test_a_mismatch_is_reported_and_repaired(root):
    def reports(message: str) -> None:
        """Assert that --check ends with this message."""
        with pytest.raises(SystemExit, match=message):
            evidence.main(["--check"])

    evidence.main([])
    page, log = root / "README.md", root / "results" / "normalization" / "metrics.jsonl.gz"
    made = page.read_text()
    page.write_text(made.replace("| seed 1 | 0.", "| seed 1 | 1."))
    logs.write_gz(log, logs.as_jsonl(logs.read_gz(log)).replace('"entropy": 0.', '"entropy": 1.'))
    reports(r"^README.md: the table default .*\n.* table normalization .*\nresults/normalization.png does")
    evidence.main([])
    evidence.main(["--check"])
    assert page.read_text() == made
    page.write_text("![Reward](results/other.png)\n")
    (root / "results" / "other.png").touch()
    reports("^README.md: no command on a page draws results/other.png$")
    (root / "docs" / "findings.md").write_text(FINDING.replace("--max_grad_norm 100", "--max_grad_norm 9"))
    reports(r"sequence-1 was made with --max_grad_norm 100\.0, not 9\.0")
