"""minimal.py makes the same steps as train.py, with the same completions and the same gradients."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import minimal
import train
from conftest import distance
from infra.command_line import parse, ready
from tasks import addition


def test_the_steps_are_those_of_train(tmp_path, monkeypatch, updates):
    for name, value in dict(PROMPTS=6, LENGTH=16, MAX_NORM=0.05).items():  # some completions are truncated
        monkeypatch.setattr(minimal, name, value)
    # None stands for the settings of the run, which this task does not need. Its model is in `folder`.
    folder, task = addition.model(None), addition.load(None)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=minimal.LEARNING_RATE, betas=minimal.BETAS, weight_decay=0.0)
    plain = [minimal.training_step(model, tokenizer, optimizer, task, step) for step in (1, 2)]

    words = "--prompts_per_step 6 --max_completion_length 16 --max_grad_norm 0.05 --eval_every 0 --out".split()
    run, *_ = train.set_up(ready(parse([*words, str(tmp_path)], on_gpu=False), on_gpu=False), torch.device("cpu"))
    # minimal.training_step returns the groups, and train.training_step returns metrics and groups.
    full = [train.training_step(run, step)[1] for step in (1, 2)]

    def ids(steps):
        return [made.ids.tolist() for groups in steps for group in groups for made in group.completions]

    assert ids(plain) == ids(full)
    for (ours, _), (theirs, _) in zip(updates[:2], updates[2:], strict=True):
        assert abs(ours.norm() - 0.05) < 1e-5, "the gradient is clipped"
        assert distance(ours, theirs) < 1e-4  # in float32, other micro-batches mean other roundings


def test_the_settings_of_minimal_are_the_defaults_of_train():
    cfg = ready(parse([], on_gpu=False), on_gpu=False)
    ours = minimal.SEED, minimal.STEPS, minimal.PROMPTS, minimal.G, minimal.LENGTH
    assert ours == (cfg.seed, cfg.steps, cfg.prompts_per_step, cfg.num_generations, cfg.max_completion_length)
    ours = minimal.LEARNING_RATE, minimal.WARMUP, minimal.BETAS, minimal.MAX_NORM
    assert ours == (cfg.learning_rate, cfg.warmup_steps, (cfg.adam_beta1, cfg.adam_beta2), cfg.max_grad_norm)
