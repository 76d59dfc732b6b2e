"""Bad input and the line it gets: exit code 2, no stack trace, before anything is trained. And input that looks bad but
must work."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models
from transformers import LlamaForCausalLM, dynamic_module_utils

import train
from config import Config
from conftest import ROOT, lines, metrics, run, samples
from infra import command_line, faults
from infra.model import open_model
from tasks import Task, encode_prompt
from tasks._characters import char_tokenizer, small_config

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"

REWARDS = """
def good(completions, **columns):
    return [float(len(text)) for text in completions]

def logs(completions, log_metric, log_extra, trainer_state):
    for text in completions:
        log_metric("letters", len(text))
    log_extra("backwards", (text[::-1] for text in completions))
    return [trainer_state.global_step + len(text) for text in completions]

def leaves(completions, **columns):
    raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a good model, good prompts and rewards, and the bad ones that are made from them."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "mine.py").write_text(REWARDS)
    (folder / "syntax.py").write_text("def good(:\n")
    (folder / "exits.py").write_text("raise SystemExit(0)\n")
    for name, content in DATA.items():
        (folder / f"{name}.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    save_model("abcdef>", folder / "model").save_pretrained(folder / "model")
    for name, spoil in MODELS.items():
        spoil(shutil.copytree(folder / "model", folder / name))
    return folder


def save_model(letters: str, folder: Path):
    """-> its tokenizer"""
    tokenizer = char_tokenizer(letters)
    torch.manual_seed(0)
    LlamaForCausalLM(small_config(tokenizer, hidden_size=16, intermediate_size=16)).save_pretrained(folder)
    return tokenizer


def edit(name: str, folder: Path, **changes) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def no_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(name, folder, eos_token_id=None)
    edit("tokenizer_config.json", folder, eos_token=None)


def blind(folder: Path) -> None:
    """Its tokenizer knows one letter; the others are unknown tokens."""
    tokenizer = char_tokenizer("z")
    tokenizer.backend_tokenizer.model = models.WordLevel({"<pad>": 0, "<eos>": 1, "z": 2}, unk_token="<pad>")
    tokenizer.save_pretrained(folder)


def spoiled(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][2, 3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(LlamaForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def code_of_its_own(folder: Path) -> None:
    edit("config.json", folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")


DATA = {
    "rows": "".join(f'{{"prompt": "{a}{b}>", "answer": "{a}"}}\n' for a in "abcdef" for b in "abcdef"),
    "chat": '{"prompt": [{"role": "user", "content": "ab"}]}\n{"prompt": [{"role": "user", "content": "ba"}]}\n',
    "malformed": '{"prompt": "a"}\n{"prompt": "b"\n',
    "utf16": '{"prompt": "a"}\n'.encode("utf-16"),
    "long_malformed": '{"prompt": "a"}\n{"prompt": "' + "a" * 10_000_000,
    "deep": "[" * 200_000 + "\n",
    "digits": '{"prompt": "a", "n": ' + "1" * 5000 + "}\n",
    "nothing": '{"prompt": "a"}\n{"prompt": ""}\n',
    "too_long": '{"prompt": "a"}\n{"prompt": "' + "ab" * 200 + '"}' + 3 * ('\n{"prompt": "' + "ab" * 200 + '"}'),
    "half_a_megabyte": '{"prompt": "a"}\n{"prompt": "' + "a" * 500_000 + '"}\n',
    "surrogate": '{"prompt": "\\ud800"}\n',
    "one": '{"prompt": "a"}\n{"prompt": "a"}\n',
    "unknown_letter": '{"prompt": "xyz"}\n',
}
MODELS: dict[str, Callable[[Path], object]] = {
    "no_config": lambda folder: (folder / "config.json").unlink(),
    "no_tokenizer": lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    "no_weights": lambda folder: (folder / "model.safetensors").unlink(),
    "torn_weights": lambda folder: (folder / "model.safetensors").write_bytes(b"0" * 999),
    "torn_config": lambda folder: (folder / "config.json").write_text("{"),
    "torn_tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "unknown_kind": partial(edit, "config.json", model_type="zzz"),
    "more_layers": partial(edit, "config.json", num_hidden_layers=3),
    "other_shape": partial(edit, "config.json", intermediate_size=32),
    "small_vocabulary": partial(save_model, "abc"),
    "no_eos": no_eos,
    "masked": partial(edit, "config.json", model_type="bert", architectures=["BertForMaskedLM"]),
    "blind": blind,
    "far_eos": partial(edit, "config.json", eos_token_id=[1, 99]),
    "spoiled": spoiled,
    "pickled": pickled,
    "code_of_its_own": code_of_its_own,
    "bad_template": partial(edit, "tokenizer_config.json", chat_template="{{ raise_exception('alternate') }}"),
    # These must work.
    "no_pad": partial(edit, "tokenizer_config.json", pad_token=None),
    "pad_is_eos": partial(edit, "tokenizer_config.json", pad_token="<eos>"),
    "template": partial(edit, "tokenizer_config.json", chat_template=CHAT),
}

SHORT = "--max_completion_length 5 --steps 1 --eval_every 0"
GOOD = f"--model {{0}}/model --data {{0}}/rows.jsonl --reward {{0}}/mine.py:good {SHORT}"
DATA_OF = f"--model {{0}}/model --reward {{0}}/mine.py:good {SHORT} --data {{0}}/"
MODEL_OF = f"--data {{0}}/rows.jsonl --reward {{0}}/mine.py:good {SHORT} --model {{0}}/"
REWARD_OF = f"--model {{0}}/model --data {{0}}/rows.jsonl {SHORT} --reward {{0}}/"

BAD = [  # flags, the line they get (its beginning and, after ..., what else is in it)
    # Flags.
    ("--temperature nan", "--temperature nan: must be a number, above 0 and finite"),
    ("--data= ", "--data: needs a value: text"),
    (GOOD + " --chat_template_kwargs thinking", "--chat_template_kwargs thinking: must be a JSON object, such as "),
    # Data.
    (DATA_OF + "none.jsonl", "--data {0}/none.jsonl: No such file or directory"),
    (DATA_OF + "model", "--data {0}/model: Is a directory"),
    (DATA_OF + "malformed.jsonl", "{0}/malformed.jsonl:2: not JSON: ... at column 15"),
    (DATA_OF + "utf16.jsonl", "{0}/utf16.jsonl:1: not UTF-8 text; save the file as UTF-8"),
    (DATA_OF + "long_malformed.jsonl", "{0}/long_malformed.jsonl:2: not JSON: Unterminated string"),
    (DATA_OF + "deep.jsonl", "{0}/deep.jsonl:1: not JSON that can be read: "),
    (DATA_OF + "digits.jsonl", "{0}/digits.jsonl:1: not JSON that can be read: "),
    (DATA_OF + "nothing.jsonl", "a prompt has no tokens: {0}/nothing.jsonl:2: ''"),
    (
        DATA_OF + "too_long.jsonl",
        "4 prompts and a completion of 5 exceed the model's context of 256 (400 tokens, {0}/too_long.jsonl:2; "
        "... too_long.jsonl:4; and 1 more",
    ),
    (DATA_OF + "half_a_megabyte.jsonl", "1 prompts and a completion of 5 exceed the model's context ... 500000 tokens"),
    (DATA_OF + "surrogate.jsonl", "a prompt could not be encoded: "),
    (DATA_OF + "unknown_letter.jsonl", "a prompt could not be encoded: "),
    (DATA_OF + "one.jsonl --eval_every 1", "{0}/one.jsonl has 1 prompts and 1 are held out, ... --eval_data"),
    (DATA_OF + "chat.jsonl", "the prompts are chat messages, but the tokenizer has no chat template: use string"),
    (DATA_OF + "chat.jsonl --model {0}/bad_template", "a prompt could not be encoded: ... alternate"),
    (GOOD + " --max_completion_length 255", "36 prompts and a completion of 255 exceed the model's context"),
    # Models.
    (MODEL_OF + "none", "--model {0}/none: there is no such folder"),
    (MODEL_OF + "mine.py", "--model {0}/mine.py: there is no such folder"),
    (MODEL_OF + "no_config", "--model {0}/no_config: its configuration cannot be loaded: "),
    (MODEL_OF + "no_tokenizer", "--model {0}/no_tokenizer: its tokenizer cannot be loaded: "),
    (MODEL_OF + "no_weights", "--model {0}/no_weights: its weights cannot be loaded: ... model.safetensors"),
    (MODEL_OF + "torn_weights", "--model {0}/torn_weights: its weights cannot be loaded: "),
    (MODEL_OF + "torn_config", "--model {0}/torn_config: its configuration cannot be loaded: ... not a valid JSON"),
    (MODEL_OF + "torn_tokenizer", "--model {0}/torn_tokenizer: its tokenizer cannot be loaded: "),
    (MODEL_OF + "unknown_kind", "--model {0}/unknown_kind: its configuration cannot be loaded: ... zzz"),
    (MODEL_OF + "more_layers", "--model {0}/more_layers: 9 weights are not in its files"),
    (MODEL_OF + "other_shape", "--model {0}/other_shape: 6 weights are not in its files, or not of the shape"),
    (MODEL_OF + "small_vocabulary", "--model {0}/small_vocabulary: its tokenizer has 9 tokens, its model 5"),
    (MODEL_OF + "masked", "--model {0}/masked: BertForMaskedLM fills in masks and cannot continue a text"),
    (MODEL_OF + "blind", "--model {0}/blind: its tokenizer cannot encode the prompts (... letters are lost)"),
    (MODEL_OF + "far_eos", "eos_token_id 99 of the model or its tokenizer: must be a token, from 0 to 8"),
    (MODEL_OF + "no_eos", "neither the model nor its tokenizer names an end-of-sequence token"),
    (
        MODEL_OF + "spoiled",
        "--model {0}/spoiled: 1 weights are not finite (NaN or infinity): model.embed_tokens",
    ),
    (MODEL_OF + "pickled", "--model {0}/pickled: its weights cannot be loaded: ... model.safetensors"),
    (MODEL_OF + "code_of_its_own", "--model {0}/code_of_its_own: its configuration cannot be loaded: ... custom code"),
    (MODEL_OF + "model --attn_implementation fast", "--model {0}/model: its architecture cannot be loaded: ... fast"),
    ("--task addition --model {0}/no_eos", "--model {0}/no_eos: --task addition is for its own small model"),
    # Rewards.
    (REWARD_OF + "syntax.py:good", "--reward {0}/syntax.py:good: {0}/syntax.py could not be loaded: SyntaxError"),
    (REWARD_OF + "exits.py:good", "--reward {0}/exits.py:good: {0}/exits.py could not be loaded: SystemExit"),
    (REWARD_OF + "mine.py:leaves", "reward function leaves raised SystemExit: "),
]


# Nothing stands above the line, or what Python shows of a file of the user's.
FRAMES = r'(  File ".*files\d/\w+\.py", line \d+.*\n(    .*\n)*)*'


@pytest.fixture
def refused(files, capsys, monkeypatch, tmp_path):
    """-> a function that starts a run which must be refused, and gives the line it got"""
    monkeypatch.setattr(faults, "stop_requests", list)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(words: str) -> str:
        try:
            code = train.main([*words.replace("{0}", str(files)).split(), "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            code = stop.code
        shown = capsys.readouterr()
        assert code == 2, (code, shown)
        assert "Traceback" not in shown.out + shown.err and "step " not in shown.out.replace("a step: ", "")
        above, line = re.fullmatch(r"(?s:(.*?))error: (.*)\n", shown.err).groups()
        assert re.fullmatch(FRAMES, above) and len(line) < 1000, shown.err
        return line.replace(str(files), "{0}")

    return start


@pytest.mark.parametrize(("words", "message"), BAD, ids=[f"{i}: {words[-40:]}" for i, (words, _) in enumerate(BAD)])
def test_bad_input_gets_its_line(files, refused, words, message):
    line, (begin, *rest) = refused(words), message.split("...")
    assert line.startswith(begin.rstrip() if rest else begin) and all(part.strip() in line for part in rest)
    assert not (files / "code_of_its_own" / "executed").exists()


# ---- What is noted ----


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "answer": 1}, ["chat template is not applied"]),
        ({"prompt": [{"role": "user", "content": "a"}]}, []),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, ["which is answered, not continued"]),
        ({"prompt": [{"role": "user", "content": "a"}], "tools": [], "images": []}, ["column tools", "column images"]),
        ({"prompt": [{"role": "user", "content": "a"}], "completions": ["a"]}, ["column completions is not used"]),
    ],
)
def test_rows_that_may_be_meant_otherwise_are_noted(row, words):
    found = command_line.notes(Task([row], [], [], [], notes=["a fifth"]), SimpleNamespace(chat_template=CHAT))
    assert found[0] == "a fifth" and len(found) == 1 + len(words)
    assert all(word in note for word, note in zip(words, found[1:], strict=True))


def test_arguments_of_the_chat_template(files, tmp_path):
    template = CHAT + "{% if deep %}{{ deep }}{% endif %}"
    edit("tokenizer_config.json", shutil.copytree(files / "model", tmp_path / "model"), chat_template=template)
    given = {"deep": "abc"}
    tokenizer = open_model(f"{tmp_path}/model", Config(chat_template_kwargs=json.dumps(given))).tokenizer
    prompt = [{"role": "user", "content": "ab"}]
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == "ab>abc"
    tokenizer.save_pretrained(tmp_path / "model")
    assert open_model(f"{tmp_path}/model", Config()).tokenizer.chat_template == template


# ---- What must work ----


def works(files: Path, out: Path, **settings) -> Path:
    settings = dict(
        model=files / "model", data=files / "rows.jsonl", reward=f"{files}/mine.py:good", prompts_per_step=2,
        num_generations=2, max_completion_length=5, steps=1, eval_every=0, samples_per_step=-1,
    ) | settings  # fmt: skip
    run(settings, out)
    assert metrics(out)[-1]["step"] == 1
    return out


@pytest.fixture(scope="module")
def usual(files, tmp_path_factory) -> Path:
    return works(files, tmp_path_factory.mktemp("usual") / "out")


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_reward_logs_is_a_column_of_the_metrics(files, tmp_path, world):
    """A mean over all ranks; the step that it is told is that of the run. And what it logs of each completion stands
    beside that completion."""
    settings = dict(model=files / "model", data=files / "rows.jsonl", reward=f"{files}/mine.py:logs", steps=2)
    settings |= dict(prompts_per_step=3, num_generations=2, max_completion_length=5, eval_every=2, eval_prompts=2)
    run(settings, tmp_path / "out", world=world)
    steps = [line for line in metrics(tmp_path / "out") if line["step"] > 0]
    for done, line in enumerate(steps):
        assert line["reward"] == pytest.approx(done + line["logged/letters"]) and line["logged/letters"] > 0
    for line in samples(tmp_path / "out") + samples(tmp_path / "out", "eval"):
        assert line["extras"] == {"backwards": re.sub("<pad>|<eos>", "", line["completion"])[::-1]}


@pytest.mark.parametrize("model", ["no_pad", "pad_is_eos", "template"])
def test_models_that_must_work(files, usual, tmp_path, model):
    """The pad token plays no part: completions end at EOS, and EOS is trained on."""
    out = works(files, tmp_path / "out", model=files / model)
    assert lines(out / "samples.jsonl") == lines(usual / "samples.jsonl")
    assert metrics(out) == metrics(usual)
    assert (out / "model" / "tokenizer.json").exists()


POOL = """
import multiprocessing

def length(text):
    return float(len(text))

def pooled(completions, **columns):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(length, completions)
"""


def test_a_reward_may_start_processes_anew(files, tmp_path):
    """They import train.py and the file of the reward, though its neighbour has the name of a file of ours."""
    (tmp_path / "config.py").write_text("")
    (tmp_path / "mine.py").write_text(POOL)
    words = [*GOOD.replace("{0}", str(files)).split(), "--reward", "mine.py:pooled", "--out", "out"]
    command = [sys.executable, ROOT / "train.py", *words, "--prompts_per_step", "1", "--reward_timeout", "60"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended
    assert metrics(tmp_path / "out")[-1]["reward"] > 0


# ---- Nothing executes data ----

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "os.system"}
OWN = [path for path in ROOT.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executes_data(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("allow_pickle") is None and given.get("shell", "False") == "False"
            assert given.get("trust_remote_code", "False") in ("config.trust_remote_code", "False")


def test_code_that_comes_with_a_model_is_run_when_asked_for(files, refused, tmp_path, monkeypatch):
    """So that the tests above show something."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = shutil.copytree(files / "model", tmp_path / "own")
    code_of_its_own(model)
    refused(GOOD + f" --model {model} --trust_remote_code")
    assert (model / "executed").exists()
