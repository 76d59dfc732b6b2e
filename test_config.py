"""Settings: which of several values is used, and that each setting has the effect that it is for."""

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import train
from config import ALGORITHMS, Config, resolve
from conftest import distance, metrics, samples, save_chat_model
from infra import faults
from loss import policy_loss

TASK = dict(num_generations=6, max_completion_length=12, steps=150, learning_rate=1e-3, warmup_steps=5, baseline="none")
GIVEN = dict(epsilon_high=0.3, dynamic_sampling=0, learning_rate=0.5, micro_batch_tokens=5, dtype="bfloat16")
GIVEN |= dict(algorithm="dapo", out="here")


# The values of `machine` are those of dtype, micro_batch_tokens and rollout_tokens.
@pytest.mark.parametrize(
    "on_gpu, machine", [(False, ("float32", 2048, 1 << 15)), (True, ("bfloat16", 1 << 14, 1 << 19))]
)
def test_what_is_given_wins_and_what_is_not_is_filled_in(on_gpu, machine):
    """Values come from the preset of the algorithm, from the task, and from what the machine has."""
    config = Config(**GIVEN)
    resolved = resolve(config, TASK, on_gpu)
    # In this union, the later value of a setting wins.
    assert (TASK | ALGORITHMS["dapo"] | dict(task="addition") | GIVEN).items() <= vars(resolved).items()
    # Values that are resolved stay, even if the task has others.
    assert config == Config(**GIVEN) and resolve(resolved, {name: 99 for name in TASK}, on_gpu) == resolved
    filled = resolve(Config(), TASK, on_gpu)
    assert (filled.dtype, filled.micro_batch_tokens, filled.rollout_tokens) == machine
    # A limit of completions leaves tokens without a limit.
    assert resolve(Config(micro_batch_size=3), TASK, on_gpu).micro_batch_tokens is None
    assert resolve(Config(shard=True), TASK, on_gpu).micro_batch_tokens == (4096 if on_gpu else 2048)


def test_the_loss_gets_every_setting_that_it_takes():
    """The default of each of these settings, as `resolve` returns it, is also the default of policy_loss."""
    switches, settings = policy_loss.__kwdefaults__, vars(resolve(Config(), TASK, on_gpu=False))
    assert {*train.LOSS_SWITCHES} == switches.keys() - {
        "ref_logp",
        "entropy",
        "sampler_logp",
        "head_logp",
        "sampler_head_logp",
    }
    assert all(settings[name] == switches[name] for name in train.LOSS_SWITCHES)


def test_a_run_goes_on_with_the_settings_that_decide_its_steps():
    """Of the first four sections of --help, it may have other values of these only. Of the last two, it must keep the
    dtype and the seed."""
    headings = [*dict.fromkeys(x.metadata["heading"] for x in fields(Config))]
    free = {x.name for x in fields(Config) if x.metadata["may_change"] and x.metadata["heading"] in headings[:4]}
    assert free == {"reward_timeout", "server", "server_folder", "server_timeout", "steps", "warmup_steps"}
    kept = {x.name for x in fields(Config) if not x.metadata["may_change"] and x.metadata["heading"] in headings[4:]}
    assert kept == {"dtype", "seed"}


# ---- Each setting has the effect that it is for, and no other ----


def letters(prompts, completions, **columns):
    """Reward every different letter, and every copy of the prompt's first letter."""
    return [len(set(text)) + 0.5 * text.count(prompt[0]) for prompt, text in zip(prompts, completions)]


def short(completion_ids, **columns):
    """Reward short completions."""
    return [1.0 / len(ids) for ids in completion_ids]


def reply_with_c(row, turns):
    """Reply to a turn of the model, which then writes another one."""
    return "c"


# A chat begins with "a", or with `mark` if --chat_template_kwargs sets it, as one entry of DIFFERS does.
TEMPLATE = "{{ mark or 'a' }}{% for message in messages %}{{ message.content }}{% endfor %}"

# This takes the place of the package wandb, and writes a file when metrics are logged. It counts as installed because
# its __spec__ is not None.
TRACKER = SimpleNamespace(__spec__="it is installed", login=lambda prompt: True, Table=dict)
TRACKER.init = lambda **about: SimpleNamespace(log=lambda figures, step: Path("tracked").touch())

PLAIN = dict(
    model="model", data="rows.jsonl", reward=["letters"], prompts_per_step=3, num_generations=4,
    max_completion_length=8, steps=2, learning_rate=1e-3, warmup_steps=0, max_grad_norm=1e6, eval_every=0,
    samples_per_step=-1, out="~/out",
)  # fmt: skip

# The reference has no chat template, and needs none.
CHAT = dict(data="chat.jsonl", reward=["short"], beta=0.1, reference="plain")

# Each setting is tested by two runs that differ in nothing else. Its entry has the value that only the second run gets,
# the settings that both runs get, and the results that must differ between them, by the names that `run_in` gives them.
# What follows a comma in a key is a remark, so that a setting can have two entries.
# Three kinds of settings are left out: arguments of policy_loss (test_loss.py), settings that most runs of tests need,
# such as --model, --task, --data and --out, and settings for which another file compares a run with an equation or with
# another run (test_train.py, test_lora.py, test_shard.py or test_checkpoint.py).
DIFFERS = {
    "chat_template_kwargs": ('{"mark": "f"}', CHAT, "completions"),
    "max_turns": (1, dict(reply=f"{__name__}:reply_with_c", stop=[">"], eval_every=1), "completions turns eval/turns"),
    "stop": (["a", "bc", ">"], dict(reply=f"{__name__}:reply_with_c", eval_every=1), "completions turns eval/turns"),
    "combine_rewards": ("gdpo", dict(reward=["letters", "short"]), "advantages weights"),
    "keep_set": (False, dict(top_p=0.5), "weights"),
    "micro_batch_size": (1, {}, "update"),
    "micro_batch_tokens": (30, {}, "update"),
    "rollout_tokens": (60, {}, "rollout"),
    "dtype": ("bfloat16", {}, "rollout update sampler_gap weights"),
    "rollout_dtype": ("bfloat16", dict(shard=True), "rollout sampler_gap"),
    "decode": ("graph", {}, "rollout"),
    "attn_implementation": ("eager", {}, "rollout update"),
    "gradient_checkpointing": (True, {}, "update"),
    "gradient_checkpointing, sharded": (True, dict(shard=True), "update"),
    "report_to": ("wandb", {}, "files"),
    "seed": (1, {}, "prompts completions"),
    "seed, of one prompt": (1, dict(data="one.jsonl"), "completions"),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Callable[..., dict]:
    """Return a function that makes a run with these settings and returns its results. It makes no run twice."""
    folder, made = tmp_path_factory.mktemp("given"), {}
    save_chat_model(folder / "model", "abcdef>", TEMPLATE)
    save_chat_model(folder / "plain", "abcdef>", template=None)
    words = ["cab>", "fed>", "abe>", "daf>", "beef>", "ace>", "fab>", "dec>"]
    chats = [[{"role": "user", "content": word}] for word in words]
    for name, prompts in {"rows": words, "one": words[:1], "chat": chats}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def results_of(settings: dict) -> dict:
        if str(settings) not in made:
            made[str(settings)] = run_in(tmp_path_factory.mktemp("run"), folder, PLAIN | settings)
        return made[str(settings)]

    return results_of


def run_in(here: Path, folder: Path, settings: dict) -> dict:
    """Make a run in the folder `here`, with the model and the data from `folder`, and return its results by name."""
    settings |= {name: str(folder / settings[name]) for name in ("model", "data", "reference") if name in settings}
    settings["reward"] = [f"{__name__}:{name}" for name in settings["reward"]]
    work: dict[str, list[str]] = {"rollout": [], "update": []}

    def note(module: nn.Module, args: tuple, output: object) -> None:
        """Note the shape and dtype of an output, and the kind of attention. Calls with gradients
        belong to an update, all others to a rollout."""
        how = [getattr(output, name, None) for name in ("shape", "dtype")]
        how += [getattr(getattr(module, "config", None), "_attn_implementation", None)]
        work["update" if torch.is_grad_enabled() else "rollout"].append(f"{type(module).__name__} {how}")

    with pytest.MonkeyPatch.context() as patch, register_module_forward_hook(note):
        patch.chdir(here)
        patch.setenv("HOME", str(here))
        patch.setitem(sys.modules, "wandb", TRACKER)
        # Install no signal handlers, so that Ctrl-C stops the tests at once.
        patch.setattr(faults, "stop_requests", lambda: [])
        try:
            assert train.train(Config(**settings)) == 0
        finally:
            if dist.is_initialized():  # as it is with --shard
                dist.destroy_process_group()
    out, steps = here / "out", [line for line in metrics(here / "out") if line["step"]]
    first = [line for line in samples(out) if line["step"] == 1]
    # In float32, the sampler and the trainer differ by nothing but rounding.
    assert "bfloat16" in settings.values() or all(line["sampler_gap"] < 1e-5 for line in steps)
    weights = load_file(*out.glob("model/*.safetensors"))
    return {name: [line[name] for line in steps] for name in steps[-1]} | {
        "prompts": [str(line["prompt"]) for line in first],
        "completions": [line["completion"] for line in first],
        "advantages": [line["advantage"] for line in first],
        "rewards": [line["reward"] for line in first],
        "weights": torch.cat([weights[name].flatten() for name in sorted(weights)]),
        "files": sorted(str(path.relative_to(here)) for path in here.rglob("*")),
        **work,
    }


def same(ours: object, theirs: object) -> bool:
    """Compare two results. Numbers may differ by rounding in float32, which Adam enlarges."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.shape == theirs.shape and distance(ours, theirs) <= 1e-4
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == (pytest.approx(theirs, rel=1e-4, abs=1e-6) if isinstance(theirs, float) else theirs)


@pytest.mark.parametrize("key", DIFFERS)
def test_a_setting_has_its_effect(outcome, key):
    value, others, names = DIFFERS[key]
    setting = next(field for field in fields(Config) if field.name == key.partition(",")[0])  # without the remark
    without, given, expected = outcome(others), outcome(others | {setting.name: value}), {*names.split()}
    changed = {name for name in without | given if not same(given.get(name), without.get(name))}
    assert expected <= changed and ("completions" in changed or "rewards" not in changed)
    if setting.metadata["may_change"]:
        # A run may resume with another value of this setting, so its weights must not depend on it. Apart from the
        # expected results, only the way of computing ("rollout", "update") may differ.
        assert changed <= (expected | {"rollout", "update"}) - {"weights"}
