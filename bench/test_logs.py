"""The logs of a study in one file: what is kept, and what is made of its paths."""

import json

import pytest

from bench import logs
from conftest import contents

SETTINGS = {"task": "addition", "tis_cap": None, "reward": ["x.py:f"]}
OLDER = {"commit": "abc", "versions": {"torch": "2.12"}, "settings": SETTINGS | {"seed": 1}}
NEWER = OLDER | {"versions": {"torch": "2.13"}, "digests": {}, "settings": SETTINGS | {"seed": 2, "sapo_tau": None}}
SHARED = {"commit": "abc", "versions": {}, "settings": SETTINGS}
LINES = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward": 1 / 3, "loss": None, "entropy": 0.1}]


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "ROOT", tmp_path)
    for name, config in {"a,1e-4-1": OLDER, "a,1e-4-2": NEWER, "a,1e-4-2.replaced-1": OLDER}.items():
        folder = tmp_path / "runs" / "mine" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "metrics.jsonl").write_text(logs.as_jsonl(LINES))
    return tmp_path / "runs" / "mine"


def test_a_study_comes_back_without_replaced_runs_and_without_the_other_columns(study, tmp_path):
    logs.main(["keep", str(study)])
    archive = tmp_path / "results" / "mine"
    assert logs.read(archive) == logs.read(study) == {"a,1e-4-1": (OLDER, LINES), "a,1e-4-2": (NEWER, LINES)}
    assert logs.read_gz(archive / "metrics.jsonl.gz")[0] == {"shared": SHARED}
    study.rename(tmp_path / "before")
    logs.main(["unpack", str(archive)])
    assert logs.read(study) == logs.read(archive) and len(contents(study)) == 4
    logs.main(["keep", str(study), "--columns", "reward", "loss", "--whole", "abc"])
    about, *_ = logs.read_gz(archive / "metrics.jsonl.gz")
    assert about["whole"] == "git show abc:results/mine/RUN/metrics.jsonl"
    assert logs.read(archive)["a,1e-4-2"].lines == [{"step": 0}, {"step": 1, "reward": 1 / 3, "loss": None}]
    with pytest.raises(SystemExit, match="/results has no folders of runs"):
        logs.main(["keep", str(tmp_path / "results")])


def test_absolute_paths_become_relative(study, tmp_path):
    config = study / "a,1e-4-1" / "config.json"
    settings = OLDER["settings"] | {"out": f"{study}/a,1e-4-1", "reward": [f"{tmp_path}/x.py:f"]}
    config.write_text(json.dumps({"settings": settings}))
    logs.keep(study)
    kept = logs.read(tmp_path / "results" / "mine")["a,1e-4-1"].config["settings"]
    assert kept["out"] == "runs/mine/a,1e-4-1" and kept["reward"] == ["x.py:f"]
