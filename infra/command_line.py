"""The command line -> settings, and everything that can be wrong with them before a run.

A flag is made of each field of Config. Every mistake is told at once, each in a line that says what was given, what is
allowed and what to change. Left out: what only the model or the machine can tell (model.py, memory.py).
"""

import argparse
import dataclasses
import difflib
import functools
import itertools
import math
import operator
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import Field
from typing import Any, get_args, get_origin

from advantage import compares_in_group
from config import ALGORITHMS, Config, UserError, resolve, task_of
from infra.faults import report_failure
from infra.model import Opened
from tasks import Task, encode_prompt, task_defaults, task_file, task_names, text_of
from tasks._files import Row, excerpt
from tasks._rewards import GIVEN

SETTINGS = {field.name: field for field in dataclasses.fields(Config)}


def parse(args: list[str], on_gpu: bool) -> Config:
    """The command line -> resolved settings; or all that is wrong with it on stderr, and exit code 2."""
    words, errors = _sort_words(args)
    parser = _make_parser()
    namespace, stray = parser.parse_known_args(words)
    errors += [f"{word.strip()}: belongs to no flag" for word in stray]
    given = vars(namespace)
    wants_help = given.pop("help", False)
    config = Config(**{name: _read(SETTINGS[name], value) for name, value in given.items()})
    context = []  # frames of a task's file that cannot be loaded
    try:
        if wants_help:
            parser.set_defaults(**_defaults_in_words(config))
            parser.print_help()
            raise SystemExit(0)
        config = ready(config, on_gpu)
    except UserError as error:
        errors.append(str(error))
        context = getattr(error, "__notes__", [])
    if errors:
        message = "\n".join([*context, *(f"error: {line}" for line in errors)])
        report_failure(message, show=os.environ.get("RANK", "0") == "0")
        raise SystemExit(2)
    return config


def ready(config: Config, on_gpu: bool) -> Config:
    """Resolved settings that a run can start with; or a UserError with a line for each mistake."""
    wrong = wrong_values(config)
    resolved = _resolve_with_task(_without(wrong, config), on_gpu)
    errors = [*wrong.values(), *check(resolved)]
    if errors:
        raise UserError("\nerror: ".join(errors))
    return resolved


def _resolve_with_task(config: Config, on_gpu: bool) -> Config:
    return resolve(config, task_defaults(task_of(config), config.model), on_gpu)


def _without(wrong: Iterable[str], config: Config) -> Config:
    """The default stands in for a value that cannot be, so that the rest can be checked."""
    plain = Config()
    return dataclasses.replace(config, **{name: getattr(plain, name) for name in wrong})


# ---- Words -> values ----

YES, NO = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
OTHER_NAMES = {  # what others call them
    "lr": "learning_rate", "epsilon": "epsilon_low", "max_steps": "steps", "loss_type": "normalization",
    "per_device_train_batch_size": "micro_batch_size", "gradient_accumulation_steps": "micro_batch_size",
    "steps_per_generation": "minibatches", "importance_sampling_level": "ratio", "output_dir": "out",
    "use_bias_correction_kl": "kl_importance", "mask_truncated_completions": "mask_truncated",
    "ref_model_sync_steps": "ref_sync_every", "reward_funcs": "reward", "bf16": "dtype", "fp16": "dtype",
    "save_steps": "save_every", "save_freq": "save_every", "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every", "test_freq": "eval_every", "lr_scheduler_type": "lr_schedule",
    "group_size": "num_generations", "max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length",
    "model_name_or_path": "model", "model_name": "model", "dataset_name": "data", "dataset": "data",
    "kl_coef": "beta", "kl_loss_coef": "beta", "init_kl_coef": "beta", "clip_ratio": "epsilon_low",
    "clip_ratio_low": "epsilon_low", "clip_ratio_high": "epsilon_high", "ppo_epochs": "num_iterations",
    "train_batch_size": "prompts_per_step", "train_file": "data",
}  # fmt: skip
NOT_HERE = {  # what others have, and what is here in its place
    "num_train_epochs": "the length of a run is its --steps", "total_epochs": "the length of a run is its --steps",
    "num_epochs": "the length of a run is its --steps", "epochs": "the length of a run is its --steps",
    "max_prompt_length": "prompts are never cut", "logging_steps": "every step is logged",
    "warmup_ratio": "give the number of --warmup_steps", "generation_batch_size": "give --prompts_per_step",
    "resume_from_checkpoint": "the same command with the same --out continues a run",
    "overwrite_output_dir": "the same command with the same --out continues a run", "optim": "it is AdamW",
    "use_vllm": "the model itself samples", "use_peft": "all weights are trained", "deepspeed": "see --shard",
    "lora_r": "all weights are trained", "fsdp": "see --shard",
}  # fmt: skip


def _kind_of(setting: Field) -> type:
    """str, int, float or bool: what an optional setting is if it is given, and each value of a list."""
    return (get_args(setting.type) or (setting.type,))[0]


def _is_list(setting: Field) -> bool:
    return get_origin(setting.type) is list


def _sort_words(args: list[str]) -> tuple[list[str], list[str]]:
    """-> the words for argparse, and a line for each flag that does not exist; such a flag is left out with its values.

    argparse would end the program at a flag whose value is missing, and take -1e-3 for a flag: the one gets an empty
    value, the other a space before it. Hyphens in the name of a setting become underscores.
    """
    words, errors = [], []
    is_known = True  # the flag that the word belongs to
    for word, following in itertools.pairwise([*args, "--"]):
        if _is_flag(word):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            is_setting = word.startswith("--") and name in SETTINGS
            is_known = is_setting or word in ("-h", "--help")
            if not is_known:
                errors.append(_no_such_flag(word))
            elif is_setting:
                is_missing = _is_flag(following) and _kind_of(SETTINGS[name]) is not bool
                words.append(f"--{name}={value}" if equals or is_missing else f"--{name}")
            else:
                words.append(word)
        elif is_known:
            words.append(" " + word if word.startswith("-") else word)
    return words, errors


def _no_such_flag(word: str) -> str:
    name = word.lstrip("-").split("=")[0].replace("-", "_")
    near = OTHER_NAMES.get(name) or "".join(difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.8))  # a slip
    hint = NOT_HERE.get(name) or (f"did you mean --{near}?" if near else "see --help")
    return f"{word}: there is no such flag; {hint}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and isinstance(_as_kind(float, word), str)


def _read(setting: Field, words: str | list[str]) -> Any:
    kind = _kind_of(setting)
    return [_as_kind(kind, word) for word in words] if _is_list(setting) else _as_kind(kind, words)


def _as_kind(kind: type, word: str) -> Any:
    """A word that cannot be read stays as it is, and `wrong_values` tells it."""
    word = word.strip()
    if kind is bool and word.lower() in (*YES, *NO):
        return word.lower() in YES
    try:
        return word if kind is bool else kind(word)
    except ValueError:
        return word


# ---- --help ----

METAVARS = {str: "TEXT", int: "N", float: "X", bool: "true|false"}


def _make_parser() -> argparse.ArgumentParser:
    """All values are read as text: argparse would stop at the first that is none."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="%(prog)s [--setting value ...]",
        description="GRPO of a language model. Defaults by task and algorithm are those of the --task and --algorithm "
        "that stand beside --help.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=32),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    groups = {}
    for name, setting in SETTINGS.items():
        heading = setting.metadata["heading"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        kind = _kind_of(setting)
        groups[heading].add_argument(
            f"--{name}",
            nargs="+" if _is_list(setting) else "?" if kind is bool else None,
            const="true" if kind is bool else None,
            metavar="NAME" if _names_of(setting) else METAVARS[kind],
            help=_help_of(setting),
        )
    parser.add_argument("-h", "--help", action="store_true", help="show this, and end")
    return parser


def _help_of(setting: Field) -> str:
    brackets = ", ".join(_names_of(setting)) or " and ".join(_limits_of(setting))
    brackets = f"{brackets}; default %(default)s" if brackets else "default %(default)s"
    return f"{setting.metadata['text'].replace('%', '%%')} ({brackets})"


def _defaults_in_words(config: Config) -> dict[str, str]:
    """Of every setting; where it is by task or algorithm, for those of `config`."""
    chosen = Config(task=config.task, algorithm=config.algorithm)
    plain = _without(wrong_values(chosen), chosen)
    on_cpu, on_gpu = (_resolve_with_task(plain, on_gpu) for on_gpu in (False, True))
    by_task = task_defaults(on_cpu.task, None)
    words = {}
    for name in SETTINGS:
        default, here, there = getattr(Config(), name), getattr(on_cpu, name), getattr(on_gpu, name)
        if default is not None:
            words[name] = _in_words(default)
        elif here != there:
            words[name] = f"{_in_words(here)}, on a GPU {'what fits' if there is None else _in_words(there)}"
        elif name in by_task:
            words[name] = f"{_in_words(here)}, by task"
        elif name in ALGORITHMS[plain.algorithm]:
            words[name] = f"{_in_words(here)}, by algorithm"
        else:
            words[name] = _in_words(here)
    return words | {"task": task_of(Config())}


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, []) else str(value)


# ---- Each setting by itself ----

KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def wrong_values(config: Config) -> dict[str, str]:
    """A line for each setting whose value cannot be, whatever the others are."""
    lines = {}
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        if value is None and setting.default is None:
            continue
        if _is_list(setting) and not isinstance(value, list):
            lines[name] = f"--{name} {_in_words(value)}: must be a list"
            continue
        wrong = [item for item in (value if _is_list(setting) else [value]) if not _is_allowed(setting, item)]
        if wrong:
            given = " ".join([f"--{name}", *map(_in_words, wrong)]).rstrip()
            lines[name] = f"{given}: {'needs a value: ' if wrong == [''] else 'must be '}{_allowed(setting)}"
    return lines


def _is_allowed(setting: Field, value: Any) -> bool:
    kind = _kind_of(setting)
    of_kind = isinstance(value, (int, float) if kind is float else kind)
    if not of_kind or (isinstance(value, bool) and kind is not bool):
        return False
    if _names_of(setting):
        return value in _names_of(setting)
    if kind is str:
        return value != ""
    bounds = setting.metadata["bounds"]
    is_finite = isinstance(value, int) or math.isfinite(value) or value == bounds.get("at_most")
    return is_finite and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def _allowed(setting: Field) -> str:
    if _names_of(setting):
        return f"one of {', '.join(_names_of(setting))}"
    kind, limits = _kind_of(setting), _limits_of(setting)
    if kind is float and not setting.metadata["bounds"].keys() & {"below", "at_most"}:
        limits.append("finite")
    return f"{KINDS[kind]}, {' and '.join(limits)}" if limits else KINDS[kind]


def _names_of(setting: Field) -> list[str]:
    """Those of a choice. A task is a file, so its name is not known to config.py."""
    return task_names() if setting.name == "task" else list(setting.metadata["names"] or [])


def _limits_of(setting: Field) -> list[str]:
    """ "at least 0", "below 1" """
    bounds = setting.metadata["bounds"].items()
    return [f"{name.replace('_', ' ')} {bound:g}" for name, bound in bounds if math.isfinite(bound)]


# ---- Settings together ----


def check(config: Config) -> list[str]:
    """What is wrong with resolved settings, a line each."""
    wrong = wrong_values(config)
    if wrong:
        return list(wrong.values())
    return [*_contradictions_of_task(config), *_contradictions_of_objective(config), *_contradictions_of_step(config)]


def _contradictions_of_task(config: Config) -> Iterator[str]:
    if config.model is None and not hasattr(task_file(config.task), "model"):
        yield f"--task {config.task}: needs --model, a folder or a hub name"
    if config.task == "data" and not config.data:
        yield "--task data: needs --data, a .jsonl file or a hub data set"
    if config.task == "data" and not config.reward:
        yield "--data: needs --reward file.py:function, or a --task whose rewards it is for"
    weights, rewards = len(config.reward_weights), len(config.reward)
    if weights and weights != rewards:
        yield f"--reward_weights: {weights} for {rewards} rewards; give one for each"


def _contradictions_of_objective(config: Config) -> Iterator[str]:
    updates = config.num_iterations * config.minibatches
    if config.objective == "reinforce" and updates > 1:
        yield (
            f"--objective reinforce: has no ratio, so it is right for one update a rollout, not {updates}; "
            "set --num_iterations 1 --minibatches 1, or use --objective clip"
        )
    if config.objective == "clip" and config.epsilon_low > 1.0:
        yield f"--epsilon_low {config.epsilon_low:g}: 1 - epsilon_low must not be negative; use at most 1"
    if config.delta is not None and config.objective == "clip" and config.delta <= 1 + config.epsilon_high:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high = {1 + config.epsilon_high:g}"
    if config.delta is not None and config.objective != "clip":
        yield f"--delta {config.delta:g}: is part of --objective clip, not of {config.objective}; leave it out"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: clips by itself and is part of --objective clip, not of {config.objective}"
    if config.tis_cap and config.tis_floor and config.tis_floor > config.tis_cap:
        yield f"--tis_floor {config.tis_floor:g}: must not be above --tis_cap {config.tis_cap:g}"
    of_sampler = ["tis_cap", "tis_floor", "off_policy_mask"]
    of_sampler = [f"--{name}" for name in of_sampler if getattr(config, name) is not None]
    of_sampler += ["--old_policy sampler"] if config.old_policy == "sampler" else []
    if of_sampler and (config.top_p < 1.0 or config.top_k > 0):
        yield (
            f"{of_sampler[0]} with --top_p or --top_k: the sampler's recorded log-probs are of the whole distribution, "
            "so the correction would be wrong; set --top_p 1 --top_k 0"
        )
    if config.ref_sync_every and config.beta == 0.0:
        yield "--ref_sync_every: there is no reference model without --beta above 0"
    if config.kl_importance and config.beta == 0.0:
        yield "--kl_importance: there is no KL term without --beta above 0"


def _contradictions_of_step(config: Config) -> Iterator[str]:
    completions = config.prompts_per_step * config.num_generations
    in_group = compares_in_group(config.scale_rewards, config.baseline)
    if config.num_generations == 1 and in_group:
        yield (
            "--num_generations 1: a group of one has nothing to compare with; use at least 2, "
            "or --baseline batch --scale_rewards batch"
        )
    if config.minibatches > completions:
        yield f"--minibatches {config.minibatches}: more than the {completions} completions of a step"
    if config.dynamic_sampling and not in_group:
        yield "--dynamic_sampling: groups of equal rewards are no dead weight under a baseline of the batch"
    if config.dynamic_sampling and config.prompts_per_step == 1:
        yield "--dynamic_sampling with --prompts_per_step 1: use at least 2 prompts, or --dynamic_sampling 0"
    if config.shard_size and not config.shard:
        yield f"--shard_size {config.shard_size}: is part of --shard; give both or neither"


def warnings(config: Config) -> list[str]:
    """What is allowed but worth a line."""
    notes = []
    if config.top_p < 1.0 or config.top_k > 0:
        notes.append(
            "top_p or top_k: completions come from a truncated distribution, log-probs are of the whole one, so the "
            "update is slightly off-policy"
        )
    if config.ratio != "token" and config.normalization != "sequence":
        notes.append(
            f"ratio {config.ratio} with normalization {config.normalization}: a completion's ratio counts for each "
            "of its tokens, so long ones weigh more (LUSPO wants this, GSPO and GMPO do not)"
        )
    if config.objective == "dppo" and config.ratio == "sequence":
        notes.append("objective dppo with ratio sequence: dppo drops tokens by their own probability")
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        notes.append("kl_estimator k1: on-policy its gradient is 0 on average, so beta adds noise alone; use k2 or k3")
    if config.temperature != 1.0 and config.eval_every:
        notes.append(f"pass@k is sampled at temperature {config.temperature:g}")
    return notes


# ---- Prompts ----


def check_prompts(task: Task, opened: Opened, config: Config) -> int:
    """Every prompt can be encoded and leaves room for its completion. -> tokens of the longest"""
    tokenizer, context, limit = opened.tokenizer, opened.context, config.max_completion_length
    if task.eos_id is not None and tokenizer.eos_token_id != task.eos_id:
        raise UserError(
            f"--model {config.model}: --task {config.task} is for its own small model, or one trained from it"
        )
    longest, too_long, letters, lost = 0, [], 0, 0
    for row in task.train + task.eval:
        prompt = row["prompt"]
        shown = f"{row.where}: {excerpt(prompt)}" if isinstance(row, Row) else excerpt(prompt)
        if not isinstance(prompt, str) and tokenizer.chat_template is None:
            raise UserError("the prompts are chat messages, but the tokenizer has no chat template: use string prompts")
        try:
            ids = encode_prompt(tokenizer, prompt)
        except Exception as error:  # of a chat template, say
            raise UserError(f"a prompt could not be encoded: {type(error).__name__}: {error}: {shown}") from error
        if not ids:
            raise UserError(f"a prompt has no tokens: {shown}")
        if context and len(ids) + limit > context:
            too_long.append(f"{len(ids)} tokens, {row.where if isinstance(row, Row) else shown}")
        elif letters < 1000:
            wanted = _letters(text_of(prompt))
            letters += wanted.total()
            known = [token for token in ids if token not in (tokenizer.unk_token_id, tokenizer.pad_token_id)]
            lost += (wanted - _letters(tokenizer.decode(known))).total()
        longest = max(longest, len(ids))
    if too_long:
        more = f"; and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        raise UserError(
            f"{len(too_long)} prompts and a completion of {limit} exceed the model's context of {context}: "
            f"shorten them, or lower --max_completion_length: {'; '.join(too_long[:3])}{more}"
        )
    if lost > letters / 2:
        raise UserError(
            f"--model {config.model}: its tokenizer cannot encode the prompts ({lost} of {letters} letters are lost): "
            "is one of its files missing, or is it for other text?"
        )
    return longest


def _letters(text: str) -> Counter:
    return Counter(letter for letter in unicodedata.normalize("NFKD", text).casefold() if letter.isalnum())


def notes(task: Task, tokenizer: Any) -> list[str]:
    found, columns = [*task.notes], task.train[0].keys()
    if tokenizer.chat_template is not None and any(isinstance(row["prompt"], str) for row in task.train):
        found.append(
            "the prompts are strings, so the model's chat template is not applied; give chat messages to apply it"
        )
    if any(not isinstance(row["prompt"], str) and row["prompt"][-1]["role"] == "assistant" for row in task.train):
        found.append("some prompts end with a message of the assistant, which is answered, not continued")
    for name in [name for name in ("tools", "images", "image", "chat_template_kwargs") if name in columns]:
        found.append(f"the column {name} goes to the rewards alone: no prompt is made with it")
    for name in [name for name in GIVEN if name in columns]:
        found.append(f"the column {name} is not used: rewards are given the {name} of the run under that name")
    return found
