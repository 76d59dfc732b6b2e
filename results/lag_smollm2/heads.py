"""What share of score centering over the whole vocabulary do heads of 5, 20 and 100 ids catch on a language model?

    python results/lag_smollm2/heads.py > results/lag_smollm2/heads.txt

The sampler is the model before training, the policy the one after 8 steps, as a delay of 8 makes them. The sampler
writes a completion for each of 64 prompts. Of the logits of a token, the correction is c - (sum c) pi, and over all
tokens, a head catches 1 - |its correction - the whole one| / |the whole one|. A head helps if this is well above 0.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from results.lag_smollm2.study import SUMS  # noqa: E402
from rollout import Sampling, rollout, uniforms  # noqa: E402

HEADS, PROMPTS, LENGTH = [5, 20, 100], 64, 32


def correction(pi: Tensor, mu: Tensor, head: Tensor | None, cap: float | None) -> Tensor:
    """Return the gradient (T, V) of the logits, if mu (T, V) is known for the ids of `head` (T, K) and proportional to
    pi for the others. Without a head, all of mu is known. The weight f of a token is 1, or min(pi / mu, cap)."""
    if head is not None:
        rest = torch.ones_like(mu, dtype=torch.bool).scatter_(1, head, False)
        masses = [(p * rest).sum(1, keepdim=True) for p in (mu, pi)]
        mu = torch.where(rest, pi * masses[0] / masses[1], mu)
    c = mu if cap is None else torch.minimum(pi, cap * mu)
    return c - c.sum(1, keepdim=True) * pi


def main() -> None:
    start, run = ROOT / "models" / "smollm2", ROOT / "runs" / "heads"
    words = [*SUMS, "--steps=8", "--learning_rate=1e-5", "--seed=1", "--out", run]
    subprocess.run([sys.executable, ROOT / "train.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    tokenizer = AutoTokenizer.from_pretrained(start)
    sampler, policy = (AutoModelForCausalLM.from_pretrained(name).eval() for name in (start, run / "model"))
    rows = [json.loads(line) for line in (ROOT / "runs/candidates/sum.jsonl").read_text().splitlines()[:PROMPTS]]
    chats = [row["prompt"] for row in rows]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True).input_ids for c in chats]
    sampling = Sampling(max_completion_length=LENGTH, eos_ids=[tokenizer.eos_token_id])
    completions = rollout(sampler, prompts, uniforms(0, 1, [(i, 0) for i in range(PROMPTS)], LENGTH), sampling)

    missed, whole, mass, tokens = Counter(), Counter(), Counter(), 0
    for prompt, completion in zip(prompts, completions):
        ids = torch.tensor([prompt + completion.ids.tolist()])
        with torch.no_grad():  # (T, V)
            mu, pi = (model(ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1) for model in (sampler, policy))
        tokens += len(mu)
        ranked = mu.topk(max(HEADS)).indices
        mass.update({K: float(mu.gather(1, ranked[:, :K]).sum()) for K in HEADS})
        for cap in (None, 2.0):
            exact = correction(pi, mu, None, cap)
            whole[cap] += float(exact.square().sum())
            for K in HEADS:
                missed[K, cap] += float((correction(pi, mu, ranked[:, :K], cap) - exact).square().sum())
    print(f"{tokens} tokens; norm of the correction: {whole[None] ** 0.5:.3g}, with tis_cap 2 {whole[2.0] ** 0.5:.3g}")
    for K in HEADS:
        plain, capped = (1 - (missed[K, cap] / whole[cap]) ** 0.5 for cap in (None, 2.0))
        print(f"head of {K:3}: probability {mass[K] / tokens:.3f}; caught {plain:.3f}, with tis_cap {capped:.3f}")


if __name__ == "__main__":
    main()
