"""A step of a real language model. `pytest -m real` runs this test if there is a models/smollm2."""

import json
import statistics

import pytest
import torch

import train
from conftest import ROOT, distance, flat_gradient
from infra.command_line import parse, ready

MODEL = ROOT / "models" / "smollm2"
pytestmark = [pytest.mark.real, pytest.mark.skipif(not MODEL.is_dir(), reason="python -m bench.make_models smollm2")]


def varied(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def test_a_step_has_the_gradient_of_a_plain_loop(tmp_path, monkeypatch):
    texts = "What is 7 + 5?", "Name a colour.", "Write a sentence about the sea.", "Say yes.", "Why?", "What is rain?"
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"""--model {MODEL} --data {tmp_path}/rows.jsonl --out {tmp_path}/run --reward {__name__}:varied
        --eval_prompts 1 --prompts_per_step 3 --num_generations 4 --max_completion_length 12 --warmup_steps 0
        --learning_rate 1e-5 --max_grad_norm 1e9 --micro_batch_tokens 200""".split()
    run, *_ = train.set_up(ready(parse(words, on_gpu=False), on_gpu=False), torch.device("cpu"))
    gradients = []
    # Keep the gradient instead of changing the weights. After this, `training_step` sets the gradient to zero, and the
    # loop below can add up its own.
    monkeypatch.setattr(run.optimizer, "step", lambda: gradients.append(flat_gradient(run.model)))
    _, groups = train.training_step(run, 1)
    for group in groups:
        rewards = varied([made.ids for made in group.completions])
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        for made, reward in zip(group.completions, rewards, strict=True):
            ids = torch.tensor([group.prompt_ids + made.ids])
            logits = run.model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
            logp = logits.log_softmax(-1)[range(len(made.ids)), made.ids]
            # The rollout has a cache and other shapes of batches, so rounding errors of thirty layers differ.
            torch.testing.assert_close(torch.as_tensor(made.logp), logp.detach(), rtol=0, atol=1e-4)
            # The loss is the mean over the tokens of each completion, and then over the 3 * 4 completions.
            (-(reward - mean) / (std + 1e-4) * logp.mean() / (3 * 4)).backward()
    # An error of 1e-4 in a log-prob is a relative error of 1e-4 in the probability, and about that in the gradient.
    assert len(gradients) == 1 and distance(gradients[0], flat_gradient(run.model)) < 1e-4
