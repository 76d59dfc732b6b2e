"""Show how rounding to bf16 changes the gradient of models/smollm2, before and after one small update.

    OMP_NUM_THREADS=1 PYTHONPATH=. python results/real_model/rounding.py > results/real_model/rounding.txt

A weight that lies exactly halfway between two bf16 numbers is rounded to the one whose last bit is 0. That may be the
one above or the one below, so the rounding errors of such weights have no common direction. After an update, each of
them is rounded the way that the update has moved it, however little. All these errors then point along the update,
and this changes the gradient.
"""

import json

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra import run_folder

RATE = 1e-6
TEXTS = [f"What is {a} + {b}? {a} + {b} = {a + b}." for a, b in ((7, 5), (12, 19), (3, 8), (20, 14))]


def gradient(model: torch.nn.Module, batch: dict, dtype: torch.dtype) -> Tensor:
    """Return the gradient of all parameters as one vector. The model keeps it, too."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def cosine(model: torch.nn.Module, batch: dict) -> float:
    in_bf16 = gradient(model, batch, torch.bfloat16)
    in_fp32 = gradient(model, batch, torch.float32)  # the last one, so the model keeps it for the update below
    return float(torch.cosine_similarity(in_bf16, in_fp32, dim=0))


def is_halfway(x: Tensor) -> Tensor:
    """Return which fp32 numbers lie exactly halfway between two bf16 numbers. bf16 keeps the upper 16 bits of fp32, so
    the lower 16 bits of such a number are a one and then only zeros."""
    return (x.view(torch.int32) & 0xFFFF) == 0x8000


model = AutoModelForCausalLM.from_pretrained("models/smollm2", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
batch = dict(tokenizer(TEXTS, return_tensors="pt", padding=True))
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
print(f"halfway between two bf16 numbers: {is_halfway(weights).double().mean():.3f} of {len(weights)} weights")
print(f"cosine of the gradients in bf16 and in fp32, before an update: {cosine(model, batch):.4f}")
# The parameters still have the gradient in fp32 that `cosine` computed last.
torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0).step()
print(f"after one update of AdamW at a learning rate of {RATE}: {cosine(model, batch):.4f}")
print(json.dumps(run_folder.provenance()))
