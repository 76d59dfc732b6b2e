"""Tables and pictures match the logs, and a mismatch is reported."""

import shutil

import pytest

from bench import evidence
from conftest import contents

BLOCK = "<!-- made by bench.evidence: {} -->\n<!-- end -->\n"
# The logs of runs/NAME are kept in results/NAME. Two of the commands below are ignored: the one for runs/not_kept,
# because there is no results/not_kept, and the one that draws elsewhere.png, which is not in results/.
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
    """Make a root folder with small pages and with some logs of this repository."""
    for name in ("default", "clip_higher"):
        shutil.copytree(evidence.ROOT / "results" / name, tmp_path / "results" / name)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(BLOCK.format("default"))
    (tmp_path / "docs" / "findings.md").write_text(FINDING + BLOCK.format("clip_higher"))
    return tmp_path


def test_a_mismatch_is_reported_and_repaired(root):
    def reports(message: str) -> None:
        """Assert that --check ends with this message."""
        with pytest.raises(SystemExit, match=message):
            evidence.main(["--check"])

    evidence.main([])
    page, log = root / "README.md", root / "results" / "clip_higher" / "0.5-2" / "metrics.jsonl"
    made = page.read_text()
    page.write_text(made.replace("| seed 1 | 0.", "| seed 1 | 1."))
    log.write_text(log.read_text().replace('"entropy": 0.', '"entropy": 1.'))
    reports(r"^README.md: the table default .*\n.* table clip_higher .*\nresults/clip_higher.png does")
    evidence.main([])
    evidence.main(["--check"])
    assert page.read_text() == made
    page.write_text("![Reward](results/other.png)\n")
    (root / "results" / "other.png").touch()
    reports("^README.md: no command on a page draws results/other.png$")
    (root / "docs" / "findings.md").write_text(FINDING.replace("--steps 100", "--steps 90"))
    reports(r"0\.2-1 was made with --steps 100, not 90")


def test_only_folders_of_runs_are_kept(root):
    kept = root / "results" / "clip_higher"
    before, runs = contents(kept), kept.rename(root / "clip_higher")
    (runs / "0.2-1").rename(runs / "0.2-1.replaced-1")
    config = runs / "0.2-2" / "config.json"
    config.write_text(config.read_text().replace("runs/", f"{root}/"))  # the absolute path of --out
    evidence.main(["--keep", str(runs)])
    assert contents(kept) == {name: text for name, text in before.items() if not name.startswith("0.2-1/")}
    with pytest.raises(SystemExit, match="/docs has no folders of runs"):
        evidence.main(["--keep", str(root / "docs")])
