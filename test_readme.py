"""What the README says, against the repository: its tests, flags, files and figures are there."""

import dataclasses
import json
import re
from pathlib import Path

from config import Config

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text()


def test_every_test_it_names_is_there():
    tests = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 20 and [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_every_flag_and_file_it_names_is_there():
    of_tools = {"nproc_per_node", "max", "panels", "repeats"}
    flags = set(re.findall(r"--([a-z]\w+)", README)) - of_tools
    assert len(flags) > 15 and flags - {field.name for field in dataclasses.fields(Config)} == set()
    files = set(re.findall(r"`(\w+\.(?:py|txt))`", README))
    assert len(files) > 12 and [name for name in sorted(files) if not (HERE / name).exists()] == []


def test_the_figures_of_the_default_run_are_those_of_its_log():
    rows = re.findall(r"^\| seed (\d) \| (.+) \|$", README, re.MULTILINE)
    assert [seed for seed, _ in rows] == ["0", "1", "2"]
    for seed, cells in rows:
        log = HERE / "results" / "default" / f"seed-{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        evaluations = [line for line in lines if "eval/accuracy" in line]
        seconds = sum(line["seconds_rollout"] + line["seconds_update"] for line in lines if "reward" in line)
        ends = evaluations[0], evaluations[-1]
        shares = [f"{line[name]:.3f}" for name in ("eval/accuracy", "eval/pass@1") for line in ends]
        lengths = [f"{line['eval/completion_length']:.1f}" for line in ends]
        assert cells.split(" | ") == [*shares, *lengths, f"{seconds:.0f}"]
