"""Bad input and the line it gets: exit code 2, no stack trace, before anything is trained. And input that looks bad but
must work."""

import ast
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from test_checkpoint import figures, flags, lines, run
from transformers import LlamaForCausalLM, dynamic_module_utils

import train
from tasks import _files as data
from tasks._characters import char_tokenizer, small_config

HERE = Path(__file__).parent.parent
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"

REWARDS = """
def good(completions, **columns):
    return [float(len(text)) for text in completions]

def raises(prompts, completions, **columns):
    return [1 / prompt.count("a") for prompt in prompts]

def short(completions, **columns):
    return [1.0] * (len(completions) - 1)

def number(completions, **columns):
    return 1.0

def words(completions, **columns):
    return ["1.0" for text in completions]

def nan(completions, **columns):
    return [float("nan") for text in completions]

def huge(completions, **columns):
    return [10**400 for text in completions]

def narrow(completions):
    return [1.0 for text in completions]

def leaves(completions, **columns):
    raise SystemExit(0)

def same(prompts, completions, answer, **columns):
    assert all(a is None or prompt.startswith(a) for prompt, a in zip(prompts, answer))
    return [float(len(text)) for text in completions]

LIMIT = 3
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a good model, good prompts and rewards, and the bad ones that are made from them."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "mine.py").write_text(REWARDS)
    (folder / "syntax.py").write_text("def good(:\n")
    (folder / "imports.py").write_text("import no_such_module\n")
    (folder / "exits.py").write_text("raise SystemExit(0)\n")
    for name, content in DATA.items():
        (folder / f"{name}.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    write_model(folder / "model")
    for name, spoil in MODELS.items():
        spoil(shutil.copytree(folder / "model", folder / name))
    return folder


@pytest.fixture
def screen(tmp_path) -> Path:
    return tmp_path / "screen"


def write_model(folder: Path) -> None:
    tokenizer = char_tokenizer("abcdef>")
    torch.manual_seed(0)
    LlamaForCausalLM(small_config(tokenizer, hidden_size=16, intermediate_size=16)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def edit(name: str, folder: Path, **changes) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def no_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(name, folder, eos_token_id=None)
    edit("tokenizer_config.json", folder, eos_token=None)


def pickled(folder: Path) -> None:
    torch.save(LlamaForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def small_vocabulary(folder: Path) -> None:
    LlamaForCausalLM(small_config(char_tokenizer("abc"), hidden_size=16, intermediate_size=16)).save_pretrained(folder)


def code_of_its_own(folder: Path) -> None:
    edit("config.json", folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")


DATA = {
    "rows": "".join(f'{{"prompt": "{a}{b}>", "answer": "{a}"}}\n' for a in "abcdef" for b in "abcdef"),
    "chat": '{"prompt": [{"role": "user", "content": "ab"}]}\n{"prompt": [{"role": "user", "content": "ba"}]}\n',
    "malformed": '{"prompt": "a"}\n{"prompt": "b"\n',
    "list": '{"prompt": "a"}\n\n["a"]\n',
    "array": '[{"prompt": "a"},\n{"prompt": "b"}]\n',
    "unnamed": '{"question": "a", "answer": 1}\n',
    "integer": '{"prompt": 5}\n',
    "null": '{"prompt": null}\n',
    "no_messages": '{"prompt": []}\n',
    "no_role": '{"prompt": [{"content": "a"}]}\n',
    "no_content": '{"prompt": [{"role": "user", "content": null}]}\n',
    "reserved": '{"prompt": "a", "completions": 1}\n',
    "empty": "",
    "blank": "\n \n\n",
    "latin1": '{"prompt": "a"}\n{"prompt": "é"}\n'.encode("latin-1"),
    "utf16": '{"prompt": "a"}\n'.encode("utf-16"),
    "long_malformed": '{"prompt": "a"}\n{"prompt": "' + "a" * 10_000_000,
    "deep": "[" * 200_000 + "\n",
    "digits": '{"prompt": "a", "n": ' + "1" * 5000 + "}\n",
    "nothing": '{"prompt": "a"}\n{"prompt": ""}\n',
    "too_long": '{"prompt": "a"}\n{"prompt": "' + "ab" * 200 + '"}\n',
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
    "small_vocabulary": small_vocabulary,
    "no_eos": no_eos,
    "pickled": pickled,
    "code_of_its_own": code_of_its_own,
    # These must work.
    "no_pad": partial(edit, "tokenizer_config.json", pad_token=None),
    "pad_is_eos": partial(edit, "tokenizer_config.json", pad_token="<eos>"),
    "bad_template": partial(
        edit, "tokenizer_config.json", chat_template="{{ raise_exception('roles must alternate') }}"
    ),
    "template": partial(edit, "tokenizer_config.json", chat_template=CHAT),
}

SHORT = "--max_completion_length 5 --steps 1 --eval_every 0"
GOOD = f"--model {{0}}/model --data {{0}}/rows.jsonl --reward {{0}}/mine.py:good {SHORT}"
DATA_OF = f"--model {{0}}/model --reward {{0}}/mine.py:good {SHORT} --data {{0}}/"
MODEL_OF = f"--data {{0}}/rows.jsonl --reward {{0}}/mine.py:good {SHORT} --model {{0}}/"
REWARD_OF = f"--model {{0}}/model --data {{0}}/rows.jsonl {SHORT} --reward {{0}}/"

BAD = [  # flags, the line they get (its beginning and, after ..., what else is in it)
    # Flags: names.
    ("--temprature 1", "--temprature: there is no such flag; did you mean --temperature?"),
    ("--learning-rat 1", "--learning-rat: there is no such flag; did you mean --learning_rate?"),
    ("--lr 1e-6", "--lr: there is no such flag; did you mean --learning_rate?"),
    ("--loss_type=dapo", "--loss_type=dapo: there is no such flag; did you mean --normalization?"),
    ("--per_device_train_batch_size 4", "--per_device_train_batch_size: ... --micro_batch_size?"),
    ("--max_steps 4", "--max_steps: there is no such flag; did you mean --steps?"),
    ("--qqqq 1", "--qqqq: there is no such flag; see --help"),
    ("--temp 1", "--temp: there is no such flag"),
    ("train", "train: belongs to no flag"),
    ("--steps", "argument --steps: expected one argument"),
    # Flags: types.
    ("--steps ten", "--steps ten: must be a whole number"),
    ("--steps 2.5", "--steps 2.5: must be a whole number"),
    ("--learning_rate fast", "--learning_rate fast: must be a number"),
    ("--kl_importance maybe", "--kl_importance maybe: must be true or false"),
    ("--algorithm ppo", "--algorithm ppo: must be one of grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++"),
    ("--task chess", "--task chess: must be one of addition, sorting, countdown, gsm8k, tldr, data"),
    ("--normalization token", "--normalization token: must be one of sequence, global, constant, sum"),
    ("--scale_rewards std", "--scale_rewards std: must be one of group, batch, none"),
    ("--baseline median", "--baseline median: must be one of mean, leave_one_out, batch, none"),
    ("--objective ppo", "--objective ppo: must be one of clip, cispo, reinforce"),
    ("--ratio word", "--ratio word: must be one of token, sequence"),
    ("--kl_estimator k4", "--kl_estimator k4: must be one of k1, k2, k3"),
    ("--lr_schedule step", "--lr_schedule step: must be one of constant, linear, cosine"),
    ("--dtype float16", "--dtype float16: must be one of auto, float32, bfloat16"),
    ("--report_to mail", "--report_to mail: must be one of tensorboard, wandb"),
    # Flags: ranges.
    ("--steps 0", "--steps 0: must be at least 1"),
    ("--prompts_per_step -1", "--prompts_per_step -1: must be at least 1"),
    ("--num_generations 0", "--num_generations 0: must be at least 1"),
    ("--max_completion_length 0", "--max_completion_length 0: must be at least 1"),
    ("--micro_batch_size 0", "--micro_batch_size 0: must be at least 1"),
    ("--keep_checkpoints 0", "--keep_checkpoints 0: must be at least 1"),
    ("--save_every -5", "--save_every -5: must be at least 0"),
    ("--samples_per_step -2", "--samples_per_step -2: must be at least -1"),
    ("--seed -1", "--seed -1: must be at least 0"),
    ("--temperature 0", "--temperature 0.0: must be above 0.0 and finite"),
    ("--temperature nan", "--temperature nan: must be above 0.0 and finite"),
    ("--learning_rate inf", "--learning_rate inf: must be above 0.0 and finite"),
    ("--top_p 1.5", "--top_p 1.5: must be above 0.0 and at most 1.0"),
    ("--adam_beta2 1", "--adam_beta2 1.0: must be at least 0.0 and below 1.0"),
    ("--beta -0.1", "--beta -0.1: must be at least 0.0 and finite"),
    ("--beta inf", "--beta inf: must be at least 0.0 and finite"),
    ("--entropy_coef nan", "--entropy_coef nan: must be finite"),
    ("--epsilon_low -0.2", "--epsilon_low -0.2: must be at least 0.0"),
    ("--reward_timeout 0", "--reward_timeout 0.0: must be above 0.0"),
    # Flags: contradictions.
    ("--num_generations 1", "--num_generations 1: a group of one has nothing to compare with; use at least 2"),
    ("--prompts_per_step 2 --num_generations 2 --minibatches 5", "--minibatches 5: more than the 4 completions"),
    ("--micro_batch_size 4 --micro_batch_tokens 99", "--micro_batch_size and --micro_batch_tokens: give one of them"),
    ("--task gsm8k", "--task gsm8k: needs --model, a folder or a hub name"),
    ("--task data --model m --reward mine.py:good", "--task data: needs --data, a .jsonl file or a hub data set"),
    ("--data rows.jsonl --model m", "--data: needs --reward file.py:function"),
    ("--reward_weights 1", "--reward_weights: 1 for 0 rewards; give one for each"),
    (GOOD + " --reward_weights 1 2", "--reward_weights: 2 for 1 rewards; give one for each"),
    (GOOD + " --reward_weights nan", "--reward_weights nan: must be finite"),
    ("--objective reinforce --num_iterations 2", "--objective reinforce: has no ratio, so it is right for one update"),
    ("--algorithm rloo --minibatches 2", "--objective reinforce: has no ratio, so it is right for one update"),
    ("--epsilon_low 1.5", "--epsilon_low 1.5: ... use at most 1"),
    ("--delta 1.1", "--delta 1.1: must be above 1 + epsilon_high = 1.2"),
    ("--delta 3 --algorithm cispo", "--delta 3.0: is part of --objective clip, not of cispo; leave it out"),
    (
        "--ratio sequence --normalization sum",
        "--ratio sequence with --normalization sum: ... use --normalization sequence",
    ),
    ("--ratio sequence --normalization global", "--ratio sequence with --normalization global: "),
    ("--tis_cap 2 --top_p 0.9", "--tis_cap with --top_p or --top_k: ... set --top_p 1 --top_k 0"),
    ("--tis_cap 2 --top_k 5", "--tis_cap with --top_p or --top_k: ... set --top_p 1 --top_k 0"),
    (
        "--dynamic_sampling 2 --prompts_per_step 1",
        "--dynamic_sampling with --prompts_per_step 1: use at least 2 prompts",
    ),
    ("--dynamic_sampling 2 --algorithm reinforce++", "--dynamic_sampling: groups of equal rewards are no dead weight"),
    ("--ref_sync_every 5", "--ref_sync_every: there is no reference model without --beta above 0"),
    ("--kl_importance", "--kl_importance: there is no KL term without --beta above 0"),
    # Data.
    (DATA_OF + "none.jsonl", "--data {0}/none.jsonl: No such file or directory"),
    (DATA_OF + "model", "--data {0}/model: Is a directory"),
    (DATA_OF + "malformed.jsonl", "{0}/malformed.jsonl:2: not JSON: ... at column 15"),
    (DATA_OF + "list.jsonl", '{0}/list.jsonl:3: holds a list; each line must be an object with a "prompt"'),
    (DATA_OF + "array.jsonl", "{0}/array.jsonl:1: not JSON: "),
    (DATA_OF + "unnamed.jsonl", "{0}/unnamed.jsonl:1: has no \"prompt\"; it has 'question', 'answer'"),
    (DATA_OF + "integer.jsonl", "{0}/integer.jsonl:1: \"prompt\" must be a string or a list of chat messages: '5'"),
    (DATA_OF + "null.jsonl", '{0}/null.jsonl:1: "prompt" must be a string or a list of chat messages'),
    (DATA_OF + "no_messages.jsonl", '{0}/no_messages.jsonl:1: "prompt" must be a string or a list of chat messages'),
    (DATA_OF + "no_role.jsonl", '{0}/no_role.jsonl:1: "prompt" must be a string or a list of chat messages'),
    (DATA_OF + "no_content.jsonl", '{0}/no_content.jsonl:1: "prompt" must be a string or a list of chat messages'),
    (DATA_OF + "reserved.jsonl", "{0}/reserved.jsonl:1: a column is named 'completions', ... rename it"),
    (DATA_OF + "empty.jsonl", "--data {0}/empty.jsonl: holds no rows; each line must be like "),
    (DATA_OF + "blank.jsonl", "--data {0}/blank.jsonl: holds no rows; each line must be like "),
    (DATA_OF + "latin1.jsonl", "{0}/latin1.jsonl:2: not UTF-8 text; save the file as UTF-8"),
    (DATA_OF + "utf16.jsonl", "{0}/utf16.jsonl:1: not UTF-8 text; save the file as UTF-8"),
    (DATA_OF + "long_malformed.jsonl", "{0}/long_malformed.jsonl:2: not JSON: Unterminated string"),
    (DATA_OF + "deep.jsonl", "{0}/deep.jsonl:1: not JSON that can be read: "),
    (DATA_OF + "digits.jsonl", "{0}/digits.jsonl:1: not JSON that can be read: "),
    (DATA_OF + "nothing.jsonl", "a prompt has no tokens: ''"),
    (DATA_OF + "too_long.jsonl", "a prompt of 400 tokens and a completion of 5 exceed the model's context of 256: "),
    (
        DATA_OF + "half_a_megabyte.jsonl",
        "a prompt of 500000 tokens and a completion of 5 exceed the model's context of 256: ",
    ),
    (DATA_OF + "surrogate.jsonl", "a prompt could not be encoded: "),
    (DATA_OF + "unknown_letter.jsonl", "a prompt could not be encoded: "),
    (DATA_OF + "one.jsonl --eval_every 1", "{0}/one.jsonl has 1 prompts and 256 are held out, ... --eval_prompts"),
    (
        DATA_OF + "chat.jsonl",
        "the prompts are chat messages, but the tokenizer has no chat template: use string prompts",
    ),
    (DATA_OF + "chat.jsonl --model {0}/bad_template", "a prompt could not be encoded: ... roles must alternate"),
    (GOOD + " --max_completion_length 255", "a prompt of 3 tokens and a completion of 255 exceed the model's context"),
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
    (MODEL_OF + "no_eos", "neither the model nor its tokenizer names an end-of-sequence token"),
    (MODEL_OF + "pickled", "--model {0}/pickled: its weights cannot be loaded: ... model.safetensors"),
    (MODEL_OF + "code_of_its_own", "--model {0}/code_of_its_own: its configuration cannot be loaded: ... custom code"),
    (MODEL_OF + "model --attn_implementation fast", "--model {0}/model: its architecture cannot be loaded: ... fast"),
    ("--task addition --model {0}/no_eos", "--model {0}/no_eos: --task addition is for its own small model"),
    # Rewards.
    (REWARD_OF + "mine.py", "--reward {0}/mine.py: must be file.py:function"),
    (REWARD_OF + "mine.txt:good", "--reward {0}/mine.txt:good: must be file.py:function"),
    (REWARD_OF + "none.py:good", "--reward {0}/none.py:good: there is no file {0}/none.py"),
    (REWARD_OF + "mine.py:god", "--reward {0}/mine.py:god: {0}/mine.py has no function god; it has good, "),
    (REWARD_OF + "mine.py:LIMIT", "--reward {0}/mine.py:LIMIT: {0}/mine.py has no function LIMIT"),
    (REWARD_OF + "syntax.py:good", "--reward {0}/syntax.py:good: {0}/syntax.py could not be loaded: SyntaxError"),
    (REWARD_OF + "imports.py:good", "--reward {0}/imports.py:good: ... ModuleNotFoundError: No module named"),
    (REWARD_OF + "exits.py:good", "--reward {0}/exits.py:good: {0}/exits.py could not be loaded: SystemExit"),
    (REWARD_OF + "mine.py:raises", "reward function raises raised ZeroDivisionError: division by zero, for prompt '"),
    (REWARD_OF + "mine.py:short", "reward function short returned 127 values where 128 were due, one for each"),
    (REWARD_OF + "mine.py:number", "reward function number returned a float where 128 were due"),
    (REWARD_OF + "mine.py:words", "reward function words returned '1.0' where a finite number or None was due, for "),
    (REWARD_OF + "mine.py:nan", "reward function nan returned nan where a finite number or None was due, for prompt '"),
    (REWARD_OF + "mine.py:huge", "reward function huge returned 1000"),
    (REWARD_OF + "mine.py:narrow", "reward function narrow raised TypeError: ... unexpected keyword argument"),
    (REWARD_OF + "mine.py:leaves", "reward function leaves raised SystemExit: "),
]


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """-> a function that starts a run which must be refused, and gives the lines it got"""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "caught_signals", list)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(line: str) -> list[str]:
        capsys.readouterr()
        try:
            code = train.main([*line.split(), "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            code = stop.code
        shown = capsys.readouterr()
        assert code == 2, (code, shown)
        assert "Traceback" not in shown.out + shown.err and "step " not in shown.out.replace("a step: ", "")
        *rest, told = shown.err.removesuffix("\n").split("\nerror: ")
        told = [*rest, told]
        assert told[0].startswith("error: ") and not any("\n" in line for line in told), shown.err
        told[0] = told[0].removeprefix("error: ")
        assert all(len(line) < 1000 for line in told)
        return told

    return start


@pytest.mark.parametrize(("line", "message"), BAD, ids=[f"{i}: {line[-40:]}" for i, (line, _) in enumerate(BAD)])
def test_bad_input_gets_its_line(files, refused, line, message):
    (told,) = refused(line.format(files))
    begin, _, rest = message.format(files).partition("...") if "{0}" in message else message.partition("...")
    assert told.startswith(begin.rstrip() if rest else begin) and rest.strip() in told
    assert not (files / "code_of_its_own" / "executed").exists()


def test_the_table_is_long_enough():
    assert len(BAD) >= 60 and len({line for line, _ in BAD}) == len(BAD)


def test_all_mistakes_are_told_at_once(refused):
    told = refused(
        "--stepz 3 --steps ten --temperature 0 --algorithm ppo --weight_decay -1 --kl_importance --minibatches 999"
    )
    for word in (
        "--stepz",
        "--steps ten",
        "--temperature",
        "--algorithm ppo",
        "--weight_decay",
        "--kl_importance",
        "--minibatches",
    ):
        assert sum(line.startswith(word) for line in told) == 1, word
    assert len(told) == 7


def test_all_files_are_told_at_once(files, refused):
    told = refused(DATA_OF.format(files) + f"none.jsonl --reward {files}/none.py:good {files}/syntax.py:good")
    assert [line.split(":")[0] for line in told] == [
        f"--data {files}/none.jsonl", f"--reward {files}/none.py", f"--reward {files}/syntax.py",
    ]  # fmt: skip


# ---- What must work ----


def works(files: Path, tmp_path: Path, screen: Path, **settings) -> Path:
    settings = dict(
        model=files / "model", data=files / "rows.jsonl", reward=f"{files}/mine.py:good", prompts_per_step=2,
        num_generations=2, max_completion_length=5, steps=1, eval_every=0, samples_per_step=-1, out=tmp_path / "out",
    ) | settings  # fmt: skip
    run(flags(**settings), screen)
    assert figures(tmp_path / "out")[-1]["step"] == 1
    return tmp_path / "out"


@pytest.mark.parametrize("model", ["no_pad", "pad_is_eos", "template"])
def test_models_that_must_work(files, tmp_path, screen, model):
    """The pad token plays no part: completions end at EOS, and EOS is trained on."""
    usual = works(files, tmp_path / "usual", screen)
    out = works(files, tmp_path, screen, model=files / model)
    assert lines(out / "samples.jsonl") == lines(usual / "samples.jsonl")
    assert figures(out) == figures(usual)
    assert (out / "model" / "tokenizer.json").exists()


def test_chat_prompts_with_a_template(files, tmp_path, screen):
    out = works(files, tmp_path, screen, model=files / "template", data=files / "chat.jsonl")
    assert lines(out / "samples.jsonl")[0]["prompt"][0]["role"] == "user"


ROWS = DATA["rows"]
SAME = {  # other ways to write the same rows
    "BOM": b"\xef\xbb\xbf" + ROWS.encode(),
    "CRLF": ROWS.replace("\n", "\r\n").encode(),
    "blank lines": ROWS.replace("\n", "\n\n  \n").encode(),
    "no newline at the end": ROWS.rstrip("\n").encode(),
}


@pytest.mark.parametrize("how", SAME)
def test_the_same_rows_however_they_are_written(files, tmp_path, how):
    (tmp_path / "rows.jsonl").write_bytes(SAME[how])
    assert data.read_rows(str(tmp_path / "rows.jsonl")) == data.read_rows(str(files / "rows.jsonl"))


def test_a_line_of_ten_megabytes_is_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "column": "b" * 10_000_000}) + "\n")
    assert len(data.read_rows(str(tmp_path / "rows.jsonl"))[0]["column"]) == 10_000_000


def test_duplicate_prompts_stay_on_one_side(tmp_path):
    rows = [{"prompt": f"{i % 20}", "n": i} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_rows, held_out = data.hold_out(data.read_rows(str(tmp_path / "rows.jsonl")), 5, "rows.jsonl")
    assert len(held_out) == 5 and len(train_rows) == 45
    assert not {row["prompt"] for row in train_rows} & {row["prompt"] for row in held_out}


def test_a_column_that_some_rows_lack_is_none_for_them(files, tmp_path, screen):
    """Whichever rows a call of the reward happens to hold."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "ba", "answer": "b"}\n')
    works(files, tmp_path, screen, data=tmp_path / "rows.jsonl", reward=f"{files}/mine.py:same", prompts_per_step=4)


# ---- Nothing executes data ----


def own_modules() -> list[Path]:
    return sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("path", own_modules(), ids=lambda path: path.name)
def test_nothing_executes_data(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.split(".")[0] for alias in node.names} | {
                (getattr(node, "module", None) or "").split(".")[0]
            }
            assert not names & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in (
                "eval",
                "exec",
                "compile",
                "__import__",
                "torch.load",
                "numpy.load",
                "np.load",
                "os.system",
            )
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("allow_pickle") is None and given.get("shell", "False") == "False"
            assert given.get("trust_remote_code", "False") in ("config.trust_remote_code", "False")


def test_code_that_comes_with_a_model_is_run_when_asked_for(files, refused, tmp_path, monkeypatch):
    """So that the tests above show something."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = shutil.copytree(files / "model", tmp_path / "own")
    code_of_its_own(model)
    refused(GOOD.format(files) + f" --model {model} --trust_remote_code")
    assert (model / "executed").exists()


def test_trust_is_off_unless_asked_for():
    assert train.Config().trust_remote_code is False
