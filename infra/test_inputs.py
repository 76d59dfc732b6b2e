"""Bad input is reported before anything is trained or written: with one line and exit code 2 or, if the user's own code
fails, as Python shows it. Unusual but valid input works."""

import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

import train
from conftest import flags, lines, metrics, replace, run, samples, save_chat_model
from infra import ranks

REWARDS = """
import multiprocessing
import random

def good(completions, **columns):
    return [float(len(text)) for text in completions]

def logs(completions, log_metric, log_extra, trainer_state, **columns):
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its process imports this file by name
        log_extra("backwards", pool.map(backwards, completions))
    log_extra("drawn", [random.random() for _ in completions])
    for text in completions:
        log_metric("letters", len(text))
    return [trainer_state.global_step + len(text) for text in completions]

def backwards(text):
    return text[::-1]

def leaves(completions, **columns):
    raise SystemExit(0)

async def calls(completions, **columns):
    raise RuntimeError("Connection reset by peer")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Return a folder with good prompts, rewards and a good model, and the models that are made from it."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "wish.py").write_text(REWARDS)
    rows = [f'{{"prompt": "{a}{b}>", "answer": "{a}"}}\n' for a in "abcdef" for b in "abcdef"]
    (folder / "rows.jsonl").write_text("".join(rows))
    save_chat_model(folder / "model", "abcdef>", template=None)
    # If the code that comes with this model is run, it leaves an empty file with the name "executed".
    (folder / "model" / "own.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")
    for name, spoil in MODELS.items():
        spoil(shutil.copytree(folder / "model", folder / name))
    return folder


def edit(name: str, folder: Path, **changes) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def add_adapters(folder: Path, **more) -> None:
    about = dict(peft_type="LORA", r=2, lora_alpha=4, base_model_name_or_path="/gone/base") | more
    (folder / "adapter_config.json").write_text(json.dumps(about))


MODELS = {
    "of_another": partial(edit, "config.json", num_hidden_layers=3, intermediate_size=32),
    "a_run": lambda folder: (folder / "config.json").write_text('{"settings": {"algorithm": "grpo"}}'),
    "far_eos": partial(edit, "config.json", eos_token_id=[1, 99]),
    "rs_lora": partial(add_adapters, use_rslora=True),
    "far_base": add_adapters,
    "pickled": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "code_of_its_own": partial(edit, "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"}),
    "no_pad": partial(edit, "tokenizer_config.json", pad_token=None),  # this model and the next one must work
    "pad_is_eos": partial(edit, "tokenizer_config.json", pad_token="<eos>"),
}


def settings_of(files: Path, **changes) -> dict:
    good = dict(model=files / "model", data=files / "rows.jsonl", reward=f"{files}/wish.py:good", samples_per_step=-1)
    return good | dict(prompts_per_step=3, num_generations=2, max_completion_length=5, steps=1, eval_every=0) | changes


BAD = [  # flags in addition to the good ones -> the error, in which ... stands for any text
    ('--chat_template_kwargs {"think":1}', "--chat_template_kwargs: ... of {0}/model does not read think"),
    ("--model {0}/nowhere", "--model {0}/nowhere: "),
    ("--model {0}/a_run", "--model {0}/a_run: is the folder of a run; the model is in {0}/a_run/model"),
    ("--data {0}/nowhere.jsonl", "{0}/nowhere.jsonl cannot be read: "),
    ("--model {0}/of_another", "{0}/of_another: its files lack 15 weights of this model: "),
    ("--model {0}/rs_lora", "{0}/rs_lora: is not plain LoRA ['use_rslora']; merge it into its base"),
    ("--model {0}/far_base", "--model {0}/far_base: .../gone/base"),
    ("--model {0}/far_base --lora_rank 3", "--lora_rank 3: the adapters in {0}/far_base have 2; leave it out"),
    (
        "--model {0}/model --reference {0}/far_base --beta 1",
        "--reference {0}/far_base: merge these adapters into their",
    ),
    ("--out {0}/rows.jsonl", "--out {0}/rows.jsonl: File exists"),
    # The ids of generation_config.json, config.json ([1, 99]) and the tokenizer, in this order.
    ("--model {0}/far_eos", "eos_token_id [1, 1, 99, 1] of model and tokenizer: must be token ids from 0 to 8"),
]
OF_THE_USER = [  # flags with a reward whose own code fails -> the end of what Python shows
    ("--reward {0}/wish.py:leaves", 'File "{0}/wish.py", line 20, in leaves\n    raise SystemExit(0)\nSystemExit: 0'),
    ("--reward {0}/wish.py:calls", 'File "{0}/wish.py", line 23, in calls\n...RuntimeError: Connection reset by peer'),
]


@pytest.fixture
def stderr_of_run(files, capsys, monkeypatch, tmp_path):
    """Return a function that starts a run with some flags, checks the exit code, and returns what the run printed to
    stderr."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(words: str, code: int) -> str:
        given = [*flags(settings_of(files), tmp_path / "out"), *words.replace("{0}", str(files)).split()]
        handler = signal.getsignal(signal.SIGINT)
        assert train.main(given) == code and signal.getsignal(signal.SIGINT) is handler
        shown = capsys.readouterr()
        assert "step 1/" not in shown.out
        return shown.err.replace(str(files), "{0}")

    return start


@pytest.mark.parametrize(("words", "message"), BAD + OF_THE_USER)
def test_bad_input_is_one_line_but_python_shows_errors_in_user_code(files, stderr_of_run, tmp_path, words, message):
    of_the_user = (words, message) in OF_THE_USER
    shown = stderr_of_run(words, code=1 if of_the_user else 2)
    message = "(.|\n)*".join(map(re.escape, message.split("...")))
    assert re.search(f"{message}.*\n\\Z" if of_the_user else f"^error: {message}.*\n\\Z", shown), shown
    assert shown.count("Traceback") == (1 if of_the_user else 0)
    if not of_the_user:
        assert shown.count("\n") == 1 and len(shown) < 1000
    left = {path.name for path in (tmp_path / "out").glob("*")} - {".lock"}
    assert bool(left) == of_the_user, "the files of the run are created before the first reward is called"
    assert not (files / "executed").exists()


def with_rank_logged(start_sampling):
    return lambda run, step: run.log("rank", ranks.rank()) or start_sampling(run, step)


def test_what_a_reward_logs_is_a_column_of_the_metrics(files, tmp_path):
    """The column is a mean over all ranks. What a reward logs for each completion is in the line of that completion. A
    reward gets the number of finished steps, may start processes, and draws different random numbers on each rank."""
    settings = settings_of(files, reward=f"{files}/wish.py:logs", steps=2, eval_every=2, eval_prompts=2)
    run(settings, tmp_path / "out", partial(replace, "train.start_sampling", with_rank_logged), world=2)
    assert [line["logged/rank"] for line in metrics(tmp_path / "out")[1:]] == [0.5, 0.5]
    for global_step, line in enumerate(metrics(tmp_path / "out")[1:]):
        assert line["reward"] == pytest.approx(global_step + line["logged/letters"]) and line["logged/letters"] > 0
    written = samples(tmp_path / "out") + samples(tmp_path / "out", "eval")
    for line in written:
        assert line["extras"]["backwards"] == re.sub("<pad>|<eos>", "", line["completion"])[::-1]
    # Every evaluation draws the same numbers, so the two lines of the second one have those of the first.
    assert len({line["extras"]["drawn"] for line in written}) == len(written) - 2


def test_models_that_must_work(files, tmp_path):
    """The pad token does not matter: completions end at EOS, and EOS is trained on."""
    for model in ("model", "no_pad", "pad_is_eos"):
        run(settings_of(files, model=files / model), tmp_path / model)
        assert lines(tmp_path / model / "samples.jsonl") == lines(tmp_path / "model/samples.jsonl")
        assert metrics(tmp_path / model) == metrics(tmp_path / "model")


def test_code_that_comes_with_a_model_is_run_only_when_asked_for(files, stderr_of_run, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert "no file named model.safetensors" in stderr_of_run("--model {0}/pickled", code=1)
    assert "contains custom code" in stderr_of_run("--model {0}/code_of_its_own", code=1)
    assert not (files / "executed").exists()
    # The model still cannot be loaded, because own.py has no class Own.
    stderr_of_run("--model {0}/code_of_its_own --trust_remote_code", code=1)
    (files / "executed").unlink()  # fails if the code was not run
