"""minimal.py takes the same steps as train.py, with the same completions and the same gradients."""

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

import minimal
import train
from conftest import distance
from infra.command_line import parse, ready
from rollout import Completion
from tasks import addition


def steps_of(step, model: torch.nn.Module) -> tuple[list[list[Completion]], list[Tensor]]:
    """Take two steps. Return the completions of each, and the clipped gradients."""
    gradients = []
    hook = register_optimizer_step_pre_hook(
        lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    )
    completions = [[made for group in step(n) for made in group.completions] for n in (1, 2)]
    hook.remove()
    return completions, gradients


def test_the_steps_are_those_of_train(tmp_path, monkeypatch):
    monkeypatch.setattr(minimal, "PROMPTS", 2)
    folder, task = addition.model(None), addition.load(None)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=minimal.LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    plain = steps_of(lambda n: minimal.training_step(model, tokenizer, optimizer, task, n), model)

    words = ["--prompts_per_step", "2", "--eval_every", "0", "--out", str(tmp_path)]
    run, *_ = train.set_up(ready(parse(words, on_gpu=False), on_gpu=False), torch.device("cpu"))
    full = steps_of(lambda n: train.training_step(run, n)[1], run.model)
    for ours, theirs in zip(plain[0], full[0], strict=True):
        assert [made.ids for made in ours] == [made.ids for made in theirs]
    for ours, theirs in zip(plain[1], full[1], strict=True):
        assert ours.norm() > 0.1 and distance(ours, theirs) < 1e-4  # other micro-batches, in fp32


def test_its_settings_are_the_defaults():
    cfg = ready(parse([], on_gpu=False), on_gpu=False)
    ours = minimal.SEED, minimal.STEPS, minimal.PROMPTS, minimal.G, minimal.LENGTH
    assert ours == (cfg.seed, cfg.steps, cfg.prompts_per_step, cfg.num_generations, cfg.max_completion_length)
    assert (cfg.learning_rate, cfg.warmup_steps) == (minimal.LEARNING_RATE, minimal.WARMUP)
