"""The page of a run: what is in the file, and what a browser shows."""

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from urllib.parse import unquote

import pytest

from tools import look

EVIL = "</script><script>console.error('executed')</script><img src=x onerror=\"console.error('executed')\">"
TEXTS = [[EVIL, "<!--"], ["שלום", " abc", "\n", ""], ["👩\u200d🚀", "\ufffd", "\ud800"], ["\u202e", "&lt;", EVIL]]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=9999 --dump-dom".split()
READER = """
<script type="module">
const seen = {}
for (const part of ["#trained .card", "#held_out .card", "#curves > *", "#trained > div", "script, img", ".reply"])
    seen[part] = [...document.querySelectorAll(part)].map(element => element.textContent)
document.body.textContent = encodeURIComponent(JSON.stringify(seen))
</script>
"""


def sample(step: int, i: int, kind: str = "train") -> dict:
    """Return the line of completion i. Completions 0 and 1 belong to the first prompt, which is a text, and 2 and 3 to
    the second, which is a chat."""
    line = {"step": step, "kind": kind, "prompt": EVIL if i < 2 else [{"role": "user", "content": EVIL}]}
    line |= {"tokens": [[text, -1.0] for text in TEXTS[i]], "truncated": i == 1, "length": [12, 9, 10, 11][i]}
    line |= {"advantage": [0.2, 0.0, -2.0, 1.0][i] if kind == "train" else None, "rewards": {EVIL: 0.25}}
    line |= {"columns": {"answer": EVIL, "n": [1]}, "extras": {"why": EVIL}}
    if i == 3:  # its last token is from a reply, and its tokens have different advantages
        line["tokens"][-1][1] = None
        line["advantage"] = [0.5, 1.5, 0.0] if kind == "train" else None
    return line | {"reward": [0.5, None, 1.0, -1.0][i]}


@pytest.fixture
def run(tmp_path) -> Path:
    """Write the files of a run of three steps, with an evaluation before step 1 and after the steps 1 and 2. The last
    line of each file is cut off."""
    metrics = [{"step": step, "reward": step / 2, f"reward/{EVIL}": -step, "kl": None, "beta": 1} for step in range(4)]
    samples = [sample(step, i) for step in (1, 2, 3) for i in range(4)]
    samples += [sample(step, i, "eval") for step in (0, 1, 2) for i in (0, 3)]
    for name, lines in {"metrics": metrics, "samples": sorted(samples, key=lambda line: line["step"])}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"to')
    return tmp_path


def test_a_page_leaves_out_steps_when_there_are_too_many_and_a_folder_without_any_is_named(run):
    look.main([str(run)])
    whole = json.loads(re.search('json">([^<]*)</script>', (run / "look.html").read_text())[1])
    # Of the three evaluations, the page has only the first and the last, each with two completions.
    assert whole["title"] == run.name and [line["step"] for line in whole["held_out"]] == [0, 0, 2, 2]
    size = sum(len(json.dumps(line)) for line in whole["trained"]) / 1e6
    # The dictionary has limits in megabytes, and the steps that are then shown. The first limit has room for all steps,
    # and the second for two of the three. The others have less room than the last step needs, so only a part of it is
    # shown, at the least one completion.
    for megabytes, steps in {1.0: [1, 2, 3], size / 1.4: [1, 3], size / 4: [3], size / 100: [3]}.items():
        part = look.content(run, megabytes)
        assert sorted({line["step"] for line in part["trained"]}) == steps
        assert len(json.dumps(part["trained"])) <= megabytes * 1.1e6 or len(part["trained"]) == 1
        assert part["metrics"] == whole["metrics"] and part["held_out"] == whole["held_out"]
    assert part["title"] == f"{run.name}; 1 of 12 completions" and part["trained"] == whole["trained"][-1:]
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(25_001)))
    (run / "samples.jsonl").unlink()
    part = look.content(run, 1.0)
    assert part["title"] == f"{run.name}; 8,334 of 25,001 points of the curves"
    # Every third point is shown, counted from the last one.
    assert [line["step"] for line in part["metrics"]] == [*range(1, 25_001, 3)]
    assert (part["trained"], part["held_out"]) == ([], [])
    for folder in (run, run / "missing"):
        (run / "metrics.jsonl").write_text("")
        with pytest.raises(SystemExit, match=f"error: {folder} has no metrics.jsonl"):
            look.main([str(folder)])


def test_a_browser_shows_all_text_and_executes_none_of_it(run):
    if CHROMIUM is None:
        warnings.warn("NOT TESTED, because there is no Chromium here: that no text of a run is executed", stacklevel=1)
        pytest.skip("no Chromium here")
    look.main([str(run)])
    (run / "read.html").write_text((run / "look.html").read_text() + READER)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={run}/profile", f"file://{run}/read.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in shown.stderr  # no error, nothing executed
    seen = json.loads(unquote(re.search("<body>(.*)</body>", shown.stdout)[1]))
    middle = f"({EVIL} 0.25), advantage"  # in parentheses is the value of the only reward function
    # The advantage of the last completion is the mean over the two tokens that are not from a reply.
    figures = [f"0.5 {middle} 0.2, length 12", f"none {middle} 0, length 9, truncated"]
    figures += [f"1 {middle} -2, length 10", f"-1 {middle} 1, length 11"]
    cards = [f"step 3, reward {figure}{''.join(texts)}why: {EVIL}" for figure, texts in zip(figures, TEXTS)]
    assert seen["#trained .card"] == cards
    assert [card[:6] for card in seen["#held_out .card"]] == ["step 0", "step 2"] * 2
    # "kl" is always null and "beta" never changes, so they have no curve.
    assert seen["#curves > *"] == ["reward1.5 (0 to 1.5)", f"reward/{EVIL}-3 (-3 to 0)"]
    prompts = [text.split("step")[0] for text in seen["#trained > div"]]
    assert prompts == [f"{prompt}answer: {EVIL}\nn: [1]" for prompt in (EVIL, f"role: user\ncontent: {EVIL}")]
    assert len(seen["script, img"]) == 3  # two of the page, and READER
    assert seen[".reply"] == [EVIL] * 3  # completion 3 is shown in a step and in two evaluations
