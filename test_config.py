"""Settings: what a preset switches, which value wins over another, and that each setting changes something."""

import json
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaForCausalLM

import train
from config import ALGORITHMS, Config, UserError, resolve
from conftest import ROOT, distance, metrics, samples
from infra import faults
from loss import policy_loss
from tasks._characters import char_tokenizer, small_config

TASK = dict(num_generations=6, max_completion_length=12, steps=150, learning_rate=1e-3, warmup_steps=5)
GIVEN = dict(
    epsilon_high=0.3, normalization="sequence", dynamic_sampling=0, num_generations=3, learning_rate=0.5, steps=7,
    warmup_steps=0, micro_batch_tokens=5, rollout_tokens=7, dtype="bfloat16", out="here", reward=["a.py:f"],
)  # fmt: skip
RESOLVED = [  # on a GPU?, what is given, what is filled in
    (False, {}, TASK | dict(task="addition", dtype="float32", micro_batch_tokens=2048, rollout_tokens=32768)),
    (True, {}, dict(dtype="bfloat16", micro_batch_tokens=None, rollout_tokens=None)),  # decided by its memory, later
    (True, dict(dtype="float32"), {}),
    (False, {}, {name: x for name, x in policy_loss.__kwdefaults__.items() if name in vars(Config())}),  # one default
    (False, dict(data="d.jsonl", task="sorting"), {}),
    (False, dict(task='gym:chain_sum:{"size": 9}', seed=4), dict(out="runs/gym-chain_sum-grpo-4")),  # without its JSON
    (False, dict(algorithm="dapo") | GIVEN, dict(epsilon_low=0.2, max_completion_length=12)),
    (True, GIVEN, {}),
    *((False, dict(algorithm=name), switches) for name, switches in ALGORITHMS.items()),  # docs/test_docs.py has these
]


@pytest.mark.parametrize("on_gpu, given, filled_in", RESOLVED)
def test_what_is_given_wins_and_what_is_not_is_filled_in(on_gpu, given, filled_in):
    config = Config(**given)
    once = resolve(config, TASK, on_gpu)
    assert vars(once) | given | filled_in == vars(once)
    assert config == Config(**given) and resolve(once, {name: 99 for name in TASK}, on_gpu) == once
    with pytest.raises(FrozenInstanceError):
        config.beta = 0.1


# ---- Every setting does something ----


def letters(prompts, completions, **columns):
    return [len(set(text)) + 0.5 * text.count(prompt[0]) for prompt, text in zip(prompts, completions)]


def short(completion_ids, **columns):
    return [1.0 / len(ids) for ids in completion_ids]


def alike(prompts, completions, **columns):
    return [0.5 if prompt[0] in "abc" else float(len(text)) for prompt, text in zip(prompts, completions)]


def again(row, turns):
    return "c"


TEMPLATE = "{{ mark or 'a' }}{% for message in messages %}{{ message.content }}{% endfor %}"

TRACKER = SimpleNamespace(__spec__="it is there", login=lambda prompt: True)
TRACKER.init = lambda **about: SimpleNamespace(log=lambda figures, step: Path("tracked").touch())

PLAIN = dict(
    model="model", data="rows.jsonl", eval_data="held.jsonl", reward=["letters"], prompts_per_step=3, num_generations=4,
    max_completion_length=8, steps=2, learning_rate=1e-3, warmup_steps=0, max_grad_norm=1e6, eval_every=0,
    eval_prompts=3, samples_per_step=-1, out="out",
)  # fmt: skip
OFF_POLICY = dict(num_iterations=2, learning_rate=0.02, beta=0.5)
SAPO = OFF_POLICY | dict(objective="sapo")

# For each setting another value, what is set beside it, and what must come out otherwise than without that value: an
# aspect of `outcome`. Or the test that holds it.
DIFFERS = {
    "model": ("other", {}, "completions"),
    "task": ("sorting", dict(model=None, data=None, reward=[], eval_data=None), "prompts completions"),
    "data": ("held.jsonl", {}, "prompts completions"),
    "eval_data": ("rows.jsonl", dict(eval_every=1), "eval"),
    "chat_template_kwargs": ('{"mark": "f"}', dict(data="chat.jsonl", reward=["short"]), "completions"),
    "reward": (["short"], {}, "reward weights"),
    "reward_weights": ([1.0, 9.0], dict(reward=["letters", "short"]), "reward weights"),
    "drop_long_prompts": (True, dict(data="long.jsonl"), "error"),
    "correct": ("letters", {}, "length_correct"),
    "reward_timeout": "infra/test_faults.py: test_a_reward_that_hangs_ends_the_run_and_shows_where_it_was",
    "reply": (f"{__name__}:again", {}, "completions turns"),
    "max_turns": (1, dict(reply=f"{__name__}:again"), "completions turns"),
    "trust_remote_code": "infra/test_inputs.py: test_code_that_comes_with_a_model_is_run_when_asked_for",
    "lora_rank": (4, {}, "update weights"),
    "lora_alpha": (8, dict(lora_rank=4), "weights"),
    "prompts_per_step": (4, {}, "prompts completions weights"),
    "num_generations": (5, {}, "prompts completions weights"),
    "max_completion_length": (5, {}, "completions"),
    "temperature": (0.7, {}, "completions entropy"),
    "top_p": (0.5, {}, "completions"),
    "top_k": (2, {}, "completions"),
    "min_p": (0.3, {}, "completions"),
    "stop": (["a", "bc"], {}, "completions truncated"),
    "keep_set": (False, dict(top_p=0.5), "grad_norm weights"),
    "algorithm": ("dr_grpo", {}, "advantages loss weights"),
    "normalization": ("global", {}, "loss weights"),
    "combine_rewards": ("gdpo", dict(reward=["letters", "short"]), "advantages weights"),
    "scale_rewards": ("none", {}, "advantages grad_norm weights"),
    "baseline": ("none", {}, "advantages loss weights"),
    "objective": ("cispo", OFF_POLICY | dict(epsilon_high=5.0), "loss weights"),
    "ratio": ("sequence", OFF_POLICY, "loss weights"),
    "old_policy": ("sampler", dict(dtype="bfloat16"), "loss weights"),
    "epsilon_low": (0.01, OFF_POLICY, "clip_low weights"),
    "epsilon_high": (0.01, OFF_POLICY, "clip_high weights"),
    "sapo_tau_pos": (3.0, SAPO, "loss weights"),
    "sapo_tau_neg": (3.0, SAPO, "loss weights"),
    "delta": (1.21, OFF_POLICY, "loss weights"),
    "beta": (0.5, {}, "kl weights"),
    "kl_estimator": ("k1", OFF_POLICY, "kl weights"),
    "kl_importance": (True, OFF_POLICY, "loss weights"),
    "ref_sync_every": (1, dict(beta=0.5), "kl weights"),
    "tis_mode": ("token_mask", dict(tis_cap=0.5), "grad_norm weights"),
    "tis_cap": (0.5, {}, "grad_norm"),
    "tis_floor": (2.0, {}, "grad_norm"),
    "gate_low": (2.0, {}, "grad_norm gate_dropped"),
    "gate_high": (0.5, {}, "grad_norm gate_dropped"),
    "off_policy_mask": (0.01, OFF_POLICY, "off_policy weights"),
    "sampler_coef": (0.5, OFF_POLICY, "loss weights"),
    "top_entropy": (0.5, {}, "grad_norm weights"),
    "entropy_coef": (0.5, {}, "loss weights"),
    "mask_truncated": (True, {}, "grad_norm weights"),
    "mask_truncated, lengths": (True, dict(baseline="length"), "advantages"),
    "dynamic_sampling": (2, dict(reward=["alike"]), "prompts completions groups_replaced"),
    "steps": (3, {}, "reward weights"),
    "num_iterations": (2, {}, "weights"),
    "minibatches": (2, {}, "weights"),
    "learning_rate": (2e-3, {}, "learning_rate weights"),
    "lr_schedule": ("linear", {}, "learning_rate weights"),
    "warmup_steps": (2, {}, "learning_rate weights"),
    "adam_beta1": (0.5, {}, "weights"),
    "adam_beta2": (0.5, {}, "weights"),
    "weight_decay": (1.0, {}, "weights"),
    "max_grad_norm": (0.1, {}, "weights"),
    "micro_batch_size": (1, {}, "update"),
    "micro_batch_tokens": (30, {}, "update"),
    "rollout_tokens": (60, {}, "rollout"),
    "dtype": ("bfloat16", {}, "rollout update sampler_gap weights"),
    "decode": ("graph", {}, "rollout"),
    "attn_implementation": ("eager", {}, "rollout update"),
    "gradient_checkpointing": (True, {}, "update"),
    "gradient_checkpointing, sharded": (True, dict(shard=True), "update"),
    "shard": (True, {}, "rollout update"),
    "shard_size": (2, dict(shard=True), "error"),  # there is one rank
    "eval_every": (1, {}, "eval"),
    "eval_prompts": (2, dict(eval_every=1), "eval"),
    "eval_k": (2, dict(eval_every=1), "eval"),
    "save_every": (1, dict(keep_checkpoints=2), "files"),
    "keep_checkpoints": (2, dict(save_every=1), "files"),
    "samples_per_step": (1, {}, "prompts completions advantages"),
    "report_to": ("wandb", {}, "files"),
    "seed": (1, {}, "prompts completions"),
    "seed, of one prompt": (1, dict(data="one.jsonl"), "completions"),
    "out": ("elsewhere", {}, "files"),
    "overwrite": (True, dict(beta=0.1, out="taken"), "error"),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Callable[..., dict]:
    """-> a function that makes a run with some settings, once for the same settings, and returns its results"""
    folder, made = tmp_path_factory.mktemp("given"), {}
    tokenizer = char_tokenizer("abcdef>")
    tokenizer.chat_template = TEMPLATE
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(small_config(tokenizer, hidden_size=32, intermediate_size=48))
        for weights in model.parameters():
            weights.data *= 3 if weights.dim() > 1 else 1  # so that a prompt counts
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    words = ["cab>", "fed>", "abe>", "daf>", "beef>", "ace>", "fab>", "dec>"]
    chats = [[{"role": "user", "content": word}] for word in words]
    files = {"rows": words, "one": words[:1], "held": [word[1] + word for word in words], "chat": chats}
    files["long"] = [*words, "f" * 300]
    for name, prompts in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def of(settings: dict) -> dict:
        if str(settings) not in made:
            made[str(settings)] = run_in(tmp_path_factory.mktemp("run"), folder, PLAIN | settings)
        return made[str(settings)]

    return of


def run_in(here: Path, folder: Path, settings: dict) -> dict:
    """A run in the folder `here`, with models and data of the other folder. -> its results"""
    for name in ("model", "data", "eval_data"):
        settings[name] = settings[name] and str(folder / settings[name])
    settings["reward"] = [f"{__name__}:{name}" for name in settings["reward"]]
    work: dict[str, list[str]] = {"rollout": [], "update": []}

    def note(module: nn.Module, args: tuple, output: object) -> None:
        how = [getattr(output, name, None) for name in ("shape", "dtype")]
        how += [getattr(getattr(module, "config", None), "_attn_implementation", None)]
        work["update" if torch.is_grad_enabled() else "rollout"].append(f"{type(module).__name__} {how}")

    with pytest.MonkeyPatch.context() as patch, register_module_forward_hook(note):
        patch.chdir(here)
        patch.setitem(sys.modules, "wandb", TRACKER)
        patch.setattr(faults, "stop_requests", list)
        try:
            if settings["out"] == "taken":
                train.train(Config(**settings | dict(overwrite=False, beta=0.0)))
            assert train.train(Config(**settings)) == 0
        except UserError as error:
            return {"error": str(error)}
        finally:
            if dist.is_initialized():  # by --shard
                dist.destroy_process_group()
    out, lines = here / settings["out"], metrics(here / settings["out"])
    steps, first = [line for line in lines if line["step"]], [line for line in samples(out) if line["step"] == 1]
    assert settings.get("dtype") == "bfloat16" or all(line["sampler_gap"] < 1e-5 for line in steps)  # of float32
    weights = load_file(*out.glob("model/*.safetensors"))
    return {name: [line[name] for line in steps] for name in steps[-1] if not name.startswith("eval/")} | {
        "prompts": [str(line["prompt"]) for line in first],
        "completions": [line["completion"] for line in first],
        "advantages": [line["advantage"] for line in first],
        "weights": torch.cat([weights[name].flatten() for name in sorted(weights)]),
        "eval": [x for line in lines for name, x in line.items() if name.startswith("eval/")],
        "files": sorted(str(path.relative_to(here)) for path in here.rglob("*")),
        **work,
    }


def same(ours: object, theirs: object) -> bool:
    """Up to rounding."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.shape == theirs.shape and distance(ours, theirs) <= 1e-4
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == (theirs if not isinstance(theirs, float) else pytest.approx(theirs, rel=1e-4, abs=1e-6))


@pytest.mark.parametrize("line", [line for line in DIFFERS if isinstance(DIFFERS[line], tuple)])
def test_every_setting_does_something(outcome, line):
    value, beside, aspects = DIFFERS[line]
    setting = next(each for each in fields(Config) if each.name == line.partition(",")[0])
    without, given, expected = outcome(beside), outcome(beside | {setting.name: value}), {*aspects.split()}
    changed = {name for name in without | given if not same(given.get(name), without.get(name))}
    assert expected <= changed and ("error" in without) + ("error" in given) == ("error" in expected)
    if setting.metadata["heading"].startswith(("The objective", "Optimization")):
        assert changed & {"prompts", "completions"} <= expected, "the first step is sampled before"
    if setting.metadata["may_change"] and setting.name != "steps" and expected != {"error"}:
        assert changed <= expected - {"weights"} | {"rollout", "update"}, "nothing that is computed"


def test_the_loss_gets_every_setting_that_it_takes():
    tensors = {"ref_logp", "sampler_logp"}
    assert {*train.LOSS_SWITCHES} == policy_loss.__kwdefaults__.keys() - tensors
    assert {*train.LOSS_SWITCHES} <= vars(Config()).keys()


def test_each_line_is_of_a_setting_or_names_its_test():
    """A setting without a line is tested in infra/test_command_line.py, by what config.py says of it."""
    assert {line.partition(",")[0] for line in DIFFERS} <= {each.name for each in fields(Config)}
    for file, test in (line.split(": ") for line in DIFFERS.values() if isinstance(line, str)):
        assert f"\ndef {test}(" in (ROOT / file).read_text()
