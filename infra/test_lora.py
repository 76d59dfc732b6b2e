"""LoRA agrees with PEFT and with full training, and a run does not depend on how it is computed."""

import copy
import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Conv1D, GenerationConfig

import train
from config import Config, UserError
from conftest import FAMILIES, assert_same_files, assert_same_run, at, die, distance, flags, metrics, run, tiny_model
from infra import lora
from infra.command_line import parse, ready
from infra.decoding import decoding
from infra.model import load_models, open_model
from infra.test_shard import save_model
from logprob import token_logprobs
from tasks._characters import EOS_ID

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
CPU = torch.device("cpu")


def score(model: nn.Module) -> Tensor:
    """Return a log-prob for each of the six tokens of each row. Those of the first two tokens are 0."""
    return token_logprobs(model, IDS, torch.ones_like(IDS), torch.arange(6).expand_as(IDS) > 1)[0]


def backward(model: nn.Module) -> Tensor:
    """Make a backward pass through a sum of the log-probs, each with another weight. Return the log-probs."""
    (score(model) * torch.arange(1.0, 7.0)).sum().backward()
    return score(model).detach()


def disturb(model: nn.Module) -> None:
    """Change the adapters as training does, so that B is not 0."""
    torch.manual_seed(1)
    for p in lora.trained_tensors(model).values():
        p.data += 0.1 * torch.randn_like(p)


@pytest.mark.filterwarnings("error::UserWarning")  # PEFT would correct fan_in_fan_out for GPT-2
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2", "gpt_neox"])
def test_log_probs_gradients_and_files_are_those_of_peft(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path / "base")
    from_folder = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float64)
    ours = lora.add_adapters(from_folder(tmp_path / "base"), rank=3, alpha=8)
    disturb(ours)
    lora.save_adapters(tmp_path, ours, lora.trained_tensors(ours))
    theirs = PeftModel.from_pretrained(from_folder(tmp_path / "base"), tmp_path, is_trainable=True)
    expected = backward(ours)
    # Given a folder of adapters, transformers loads their base model and adds them.
    for model in (theirs.base_model.model, from_folder(tmp_path)):
        torch.testing.assert_close(score(model), expected, rtol=1e-12, atol=1e-12)  # float64
    backward(theirs.base_model.model)
    gradients = {n.replace(".default.weight", ""): p.grad for n, p in theirs.base_model.model.named_parameters()}
    for name, p in lora.trained_tensors(ours).items():
        assert distance(p.grad, gradients[name]) < 1e-12, name
    assert all(gradient is None for name, gradient in gradients.items() if name not in lora.trained_tensors(ours))


@pytest.mark.parametrize("name", FAMILIES)
def test_new_adapters_change_nothing_and_their_gradient_follows_from_that_of_the_weights(name):
    """At first B = 0. So with s = alpha / rank, the gradients are dB = s dW A^T and dA = 0. With its adapters switched
    off, the model is the base model."""
    whole = tiny_model(name)
    model = lora.add_adapters(copy.deepcopy(whole), rank=3, alpha=6)
    before, weights = backward(whole), dict(whole.named_parameters())
    assert torch.equal(backward(model), before)
    for name, layer in lora.adapted_layers(model).items():
        if "dt_proj" not in name:  # Mamba uses this weight without calling the layer
            dW = weights[f"{name}.weight"].grad
            expected = 2 * (dW.T if isinstance(layer, Conv1D) else dW) @ layer.lora_A.T
            assert distance(layer.lora_B.grad, expected) < 1e-12  # float64
            assert not layer.lora_A.grad.any()
    assert all(p.grad is None for name, p in model.named_parameters() if name not in lora.trained_tensors(model))
    disturb(model)
    assert not torch.equal(score(model), before)
    with lora.starting_adapters(model):
        assert torch.equal(score(model), before)


def test_new_adapters_are_uniform_and_follow_from_the_seed():
    """A is uniform in +-1 / sqrt(in). Times sqrt(3 in), its mean is 0 and its standard deviation 1."""

    def all_A(seed: int) -> Tensor:
        layers = lora.adapted_layers(lora.add_adapters(tiny_model("llama"), rank=64, alpha=8, seed=seed)).values()
        return torch.cat([layer.lora_A.flatten() * (3 * layer.lora_A.shape[1]) ** 0.5 for layer in layers]).detach()

    first, other = all_A(seed=1), all_A(seed=2)
    assert torch.equal(first, all_A(seed=1)) and first.abs().max() <= 3**0.5
    assert len({*first.tolist()}) > 0.9 * len(first), "no two layers are alike"
    for A in (first, other, (first + other) / 2**0.5):  # the sum has this spread only if two seeds are independent
        # Of n independent numbers, the error of the mean is about 1 / sqrt(n), and that of the spread is less.
        assert abs(A.mean()) < 4 * len(A) ** -0.5 and abs(A.std() - 1) < 4 * len(A) ** -0.5


def test_what_adapters_do_not_train_is_reported():
    (experts,) = lora.notes(lora.add_adapters(tiny_model("qwen3_moe"), 2, 4))
    assert experts.startswith("no adapters for experts.down_proj, experts.gate_up_proj: ")
    convolution, unused = lora.notes(model := lora.add_adapters(tiny_model("mamba"), 2, 4))
    backward(model)
    without_gradient = [name for name, p in lora.trained_tensors(model).items() if p.grad is None]
    assert "conv1d.weight" in convolution and "dt_proj learn nothing" in unused
    assert without_gradient and all("dt_proj" in name for name in without_gradient)
    # Neither needs a note: this Llama has adapters in all layers, and this Qwen has no adapters.
    assert [*lora.notes(lora.add_adapters(tiny_model("llama"), 2, 4)), *lora.notes(tiny_model("qwen3_moe"))] == []


# ---- Runs ----


@pytest.fixture(scope="module")
def small(sorting, tmp_path_factory) -> dict:
    """Return the settings of a run with a reference, kept sets and several completions of each prompt. It saves a
    checkpoint after each step."""
    base = save_model(tmp_path_factory.mktemp("base"), "llama", spread=2.0, attention_dropout=0.5, resid_pdrop=0.5)
    # The model has an end token of its own, beside that of its configuration and tokenizer.
    GenerationConfig(eos_token_id=[EOS_ID, 5]).save_pretrained(base)
    return sorting | dict(
        model=base, lora_rank=3, lora_alpha=6, steps=3, num_iterations=2, minibatches=2, beta=0.1, top_p=0.9,
        learning_rate=1e-2, max_completion_length=6, save_every=1, eval_every=3, eval_prompts=5, eval_k=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    # The first line is the evaluation before training, which has neither value.
    assert all(line["kl"] > 0 and line["grad_norm"] > 0 for line in metrics(out)[1:])
    return out


def config_of(settings: dict, out: Path) -> Config:
    return ready(parse(flags(settings, out), on_gpu=False), on_gpu=False)


def loaded_models(config: Config) -> tuple[nn.Module, nn.Module | None]:
    return load_models(config.model, *open_model(config.model, config), config, CPU)


KILLED = partial(at, "torch.optim.AdamW.step", 7, die, after=True)  # a step has four updates
WAYS = {  # number of processes, settings
    "replicated, graphs": (2, dict(micro_batch_tokens=30, rollout_tokens=60, decode="graph")),
    "sharded, checkpointing": (2, dict(micro_batch_size=2, shard=True, gradient_checkpointing=True)),
}


@pytest.mark.parametrize("world, given", WAYS.values(), ids=WAYS)
def test_a_run_does_not_depend_on_how_it_is_computed(small, whole, tmp_path, world, given):
    """Nor on being killed in the second step."""
    run(small | given, tmp_path / "out", KILLED, world=world, code=None)
    run(small | given, tmp_path / "out", world=world)
    assert_same_run(tmp_path / "out", whole, tolerance=1e-5)  # a gradient is a sum of many numbers in float32


def test_the_reference_is_the_policy_at_its_start(small, whole, tmp_path):
    """The metrics equal those of a run whose reference is another model: the base model, or the adapters of a run as
    transformers loads them, which computes s (B (A x)) and so rounds differently."""
    more = small | dict(model=whole / "model", steps=2)
    run(more, tmp_path / "more")
    for settings, out, tolerance in (small, whole, 0), (more, tmp_path / "more", 1e-5):
        prepared, *_ = train.set_up(config_of(settings, tmp_path), CPU)
        prepared.reference = AutoModelForCausalLM.from_pretrained(settings["model"]).eval()
        for line in metrics(out)[1:]:
            made, _ = train.training_step(prepared, line["step"])
            for name in ("kl", "loss", "grad_norm"):
                assert made[name] == pytest.approx(line[name], tolerance, tolerance)


def test_checkpoints_and_the_trained_model_contain_only_adapters(whole):
    saved = {file.parent.name: load_file(file) for file in whole.glob("checkpoint/*/*/*.safetensors")}
    adapters = load_file(whole / "model" / "adapter_model.safetensors")
    # There are two layers with seven projections each, and a projection has the matrices A and B.
    assert saved.keys() == {"model", "optimizer"} and len(saved["model"]) == len(adapters) == 2 * 7 * 2
    assert (whole / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("shard", [False, True])
def test_saved_adapters_can_be_evaluated_and_trained_on(small, whole, tmp_path, shard):
    """The metrics equal the last evaluation of the run that saved them. Training begins with their values. The
    reference is the policy at its start, also after a restart, and not the base model."""
    without_rank = {name: x for name, x in small.items() if not name.startswith("lora")}
    saved = without_rank | dict(model=whole / "checkpoint/000003/model", shard=shard)
    run(saved | dict(steps=0), tmp_path / "out")
    last, evaluated = metrics(whole)[-1], metrics(tmp_path / "out")[-1]
    assert evaluated == {name: last[name] for name in evaluated if name != "step"} | {"step": 0}
    run(saved, tmp_path / "more", partial(at, "train.training_step", 3, die), code=None)
    run(saved, tmp_path / "more")
    run(saved, tmp_path / "one go")
    assert_same_files(tmp_path / "more", tmp_path / "one go")
    begun = {name: x for name, x in metrics(tmp_path / "more")[0].items() if name != "step"}
    assert begun.items() <= last.items()


def test_what_others_load_samples_as_the_run_evaluates(small, whole, tmp_path, watch):
    """The greedy completions of transformers and PEFT are those of an evaluation."""
    without_adapters = {name: x for name, x in small.items() if not name.startswith("lora")}
    run(without_adapters | dict(steps=1), weights := tmp_path / "weights")
    rollouts = watch(train, "rollout_and_limit")
    for folder in (
        f"{out}/{name}" for out, n in ((whole, 3), (weights, 1)) for name in ("model", f"checkpoint/00000{n}/model")
    ):
        out = tmp_path / "evaluation"
        assert train.main(flags(without_adapters | dict(steps=0, model=folder, overwrite=True), out)) == 0
        models = [AutoModelForCausalLM.from_pretrained(folder)]
        if lora.read_config(folder):
            models.append(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small["model"]), folder))
        greedy = rollouts[-1]
        how = dict(do_sample=False, max_new_tokens=6, eos_token_id=[EOS_ID, 5], pad_token_id=0)
        for model, (prompt, completion) in itertools.product(
            models, zip(greedy.args[1], greedy.result[0], strict=True)
        ):
            ids = model.generate(torch.tensor([prompt]), **how)[0, len(prompt) :]
            assert ids.tolist() == list(completion.ids)


def test_weights_that_are_not_trained_are_in_the_dtype_of_the_computation(small, tmp_path):
    """Otherwise a rollout and an update would compute with different weights."""
    config = config_of(small | dict(dtype="bfloat16", rollout_dtype="float32"), tmp_path)
    loaded, reference = loaded_models(config)
    adapters = lora.trained_tensors(loaded)
    assert {p.dtype for name, p in loaded.named_parameters() if name not in adapters} == {torch.bfloat16}
    assert {(p.dtype, p.requires_grad) for p in adapters.values()} == {(torch.float32, True)} and reference is loaded
    assert loaded_models(replace(config, steps=0))[1] is None, "an evaluation needs none"
    with decoding(loaded, torch.bfloat16):
        assert {p.dtype for p in adapters.values()} == {torch.bfloat16}
    assert {p.dtype for p in adapters.values()} == {torch.float32}


def test_a_teacher_is_the_reference_of_adapters_as_well(small, tmp_path, monkeypatch):
    monkeypatch.chdir(small["model"].parent)
    config = config_of(small | dict(reference=small["model"], dtype="bfloat16", seed=1), tmp_path)
    loaded, reference = loaded_models(replace(config, model=small["model"].name))
    assert lora.adapted_layers(loaded) and not lora.adapted_layers(reference) and reference.dtype == torch.float32
    assert loaded.config.name_or_path == config.model, "saved adapters name the whole path"
    assert loaded.config.attention_dropout == loaded.config.resid_pdrop == 0.0
    expected = lora.add_adapters(AutoModelForCausalLM.from_pretrained(config.model), rank=3, alpha=6, seed=1)
    assert all(map(torch.equal, *(lora.trained_tensors(model).values() for model in (loaded, expected))))
    assert {layer.lora_scale for layer in lora.adapted_layers(loaded).values()} == {6 / 3}


# ---- What is refused ----


def test_adapters_that_do_not_fit_are_refused(small, whole, tmp_path):
    folder = shutil.copytree(whole / "model", tmp_path / "model")
    config = config_of(small | dict(model=folder), tmp_path)
    (file := folder / "adapter_model.safetensors").write_bytes((whole / "model" / file.name).read_bytes())
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(3, 1)}, file)
    with pytest.raises(UserError, match=f"^{folder}: has other adapters than those of --lora_rank: {name} "):
        loaded_models(config)
    with pytest.raises(UserError, match="--lora_rank: give a --model"):
        # A task's own model is given as a pair: the model and its tokenizer, which is not needed here.
        open_model((tiny_model("llama"), None), Config(lora_rank=2, steps=1))


def test_only_adapters_that_are_computed_alike_are_taken(tmp_path):
    about = LoraConfig(
        r=3, lora_alpha=6, lora_dropout=0.1, task_type="CAUSAL_LM", base_model_name_or_path="b"
    ).to_dict()
    others = (
        dict(use_rslora=True),
        dict(alpha_pattern={"q_proj": 1}),
        dict(init_lora_weights="pissa"),
        dict(revision="x"),
    )
    for change in ({}, *others, dict(lora_alpha=0.5), dict(peft_type="IA3")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | {"peft_type": "LORA"} | change, default=list))
        if change:
            with pytest.raises(UserError, match="is not plain LoRA"):
                lora.read_config(str(tmp_path))
        else:
            assert lora.read_config(str(tmp_path))["r"] == 3
