"""What works with the packages of requirements.txt alone, and what names the package that it lacks."""

import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

from config import Config
from conftest import PROCESSES, ROOT, errors, exit_codes, forked, metrics, run, samples

MODEL = ROOT / "models" / "addition"


class Missing:
    """Hides packages: Python asks this finder first, and it says that they are not installed."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *args: object) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def packages(file: Path) -> set[str]:
    """Return the names under which Python imports the packages that a file of requirements lists."""
    return {name.replace("-", "_") for name in re.findall(r"^\w[\w-]*", file.read_text(), re.MULTILINE)}


def only_requirements() -> None:
    named = set().union(*map(packages, ROOT.glob("requirements-*.txt")))
    missing = named - packages(ROOT / "requirements.txt")
    for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
        del sys.modules[name]
    sys.meta_path.insert(0, Missing(missing))


def script(tool: str, words: list[str]) -> None:
    """Be `python PATH/tools/TOOL.py` in another folder, where only the path of the script leads to this program."""
    os.chdir("/")
    sys.path[:] = [str(ROOT / "tools"), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and str(getattr(module, "__file__", "")).startswith(f"{ROOT}/"):
            del sys.modules[name]
    sys.argv = [f"{tool}.py", *words]
    runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")


def compare(words: list[str]) -> None:
    from tools import compare

    sys.exit(compare.main(words))


def screen(folder: Path, *calls: partial) -> tuple[int, str]:
    """Make these calls in a process. Return its exit code and what it prints."""
    process = PROCESSES.Process(target=forked, args=(folder / "screen", {}, all_of, calls))
    process.start()
    return exit_codes([process])[0], (folder / "screen").read_text()


def all_of(calls: tuple[partial, ...]) -> None:
    for call in calls:
        call()


NEED = [
    (dict(task="gsm8k", model=MODEL), "datasets"),
    (dict(task="addition", data="rows.parquet"), "datasets"),
    (dict(task="gym:chain_sum", model=MODEL), "reasoning_gym"),
]


@pytest.mark.parametrize(("settings", "package"), NEED)
def test_a_package_that_is_missing_is_named_in_one_line(tmp_path, settings, package):
    shown = run(settings, tmp_path / "out", only_requirements, code=2)
    assert shown == f"error: this needs the package {package}: pip install {package}\n"


def test_the_packages_of_the_gpu_commands_are_in_the_file_that_the_readme_installs():
    block = re.search(r"^pip install -r (\S+).*\n(?:.+\n)*?.*--task gsm8k", (ROOT / "README.md").read_text(), re.M)
    assert "datasets" in packages(ROOT / block[1])


def test_a_file_of_parquet_and_its_name_is_no_pattern(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(9)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows[1].parquet")
    settings = dict(task="addition", data=tmp_path / "rows[1].parquet", steps=1, max_completion_length=4, eval_every=0)
    run(settings, tmp_path / "out")
    assert {(x["prompt"], x["columns"]["answer"]) for x in samples(tmp_path / "out")} < {(*x.values(),) for x in rows}


def test_a_run_its_page_and_a_comparison_need_nothing_else(tmp_path, sorting):
    shown = run(sorting | dict(steps=1), tmp_path / "a run", only_requirements)
    look = shown.rpartition("for its completions: ")[2].strip()
    assert look == f"python {ROOT}/tools/look.py '{tmp_path}/a run'"
    out = f"{tmp_path}/a run"
    assert screen(tmp_path, only_requirements, partial(script, "look", [out])) == (0, f"{out}/look.html\n")
    assert len(metrics(tmp_path / "a run")) == 1


def test_a_plot_and_a_picture_name_the_package_and_a_plot_is_drawn_from_any_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"settings": vars(Config())}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    words = [str(tmp_path), "--panels", "reward", "--out", f"{tmp_path}/a.png"]
    named = "error: this needs the package matplotlib: pip install matplotlib\n"
    assert screen(tmp_path, only_requirements, partial(script, "plot", words)) == (1, named)
    (tmp_path / "screen").unlink()
    pytest.importorskip("matplotlib")
    assert screen(tmp_path, partial(script, "plot", words)) == (0, f"{tmp_path}/a.png {tmp_path}/a.svg\n")


@pytest.mark.parametrize("picture", [[], ["--picture", "a.png"]])
def test_a_comparison_needs_matplotlib_only_for_a_picture(tmp_path, picture):
    words = "--task sorting --prompts_per_step 2 --num_generations 2 --vary normalization=sequence,sum".split()
    code, shown = screen(tmp_path, only_requirements, partial(compare, [*words, *picture]))
    if picture:
        assert (code, errors(shown)) == (2, ["error: this needs the package matplotlib: pip install matplotlib"])
    else:
        assert code == 0 and " directions: " in shown
