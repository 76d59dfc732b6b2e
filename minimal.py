"""A whole GRPO run on one page. Read this first, and then train.py.

    python minimal.py

A small language model learns to add. Every step samples 8 completions for each of 16 prompts and rewards the
right ones. It then raises the probability of the completions that did better than the others of the same prompt.
`python train.py` does the same, and adds options, ranks, checkpoints, evaluation and logs.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from advantage import Group, group_advantages
from batch import Limits, collate, micro_batches
from logprob import token_logprobs
from loss import policy_loss, token_weights
from rollout import Sampling, rollout, uniforms
from tasks import addition

SEED, STEPS, PROMPTS, G, LENGTH = 0, 80, 16, 8, 64  # G completions of each prompt, of up to LENGTH tokens
LEARNING_RATE, WARMUP, BETAS, MAX_NORM, MICRO_BATCH = 2e-4, 5, (0.9, 0.99), 1.0, 16


def training_step(model, tokenizer, optimizer, task, step: int) -> list[Group]:
    groups = []
    rows = task.rows_from((step - 1) * PROMPTS, PROMPTS, SEED)  # the next rows of task.train, in random order
    for p, row in enumerate(rows):
        # Sample the completions. Each of them has its own random numbers, so it does not depend on the others.
        prompt_ids = tokenizer(row["prompt"]).input_ids
        uniform = uniforms(SEED, step, [(p, i) for i in range(G)], LENGTH)
        completions = rollout(model, [prompt_ids] * G, uniform, Sampling(LENGTH, eos_ids=[tokenizer.eos_token_id]))

        # Compute the rewards, 1 for a right answer, and the advantages, which compare them within the group.
        ids = [completion.ids for completion in completions]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = torch.tensor(addition.exact_sum([row["prompt"]] * G, texts, ids, [row["answer"]] * G))
        advantages = group_advantages(rewards[None])[0]
        groups.append(Group(prompt_ids, row, completions, rewards, advantages=advantages))

    # The weight of every token is computed from all completions of the step, before they are split. So the loss of a
    # micro-batch is a partial sum, and the gradients of all micro-batches add up to that of the step.
    batch = collate(groups, mask_truncated=False, device=model.device)
    batch.weights = token_weights(batch.mask, "sequence")
    for _, part in micro_batches(batch, Limits(rows=MICRO_BATCH, tokens=None)):
        logp, _ = token_logprobs(model, part.ids, part.attention, part.mask)
        # With one update per rollout, the old policy is the current one.
        loss, _ = policy_loss(logp, logp.detach(), part.advantages, part.weights, part.mask)
        loss.backward()

    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP)
    optimizer.step()
    optimizer.zero_grad()
    return groups


if __name__ == "__main__":
    folder = addition.model(None)  # None: this script has no settings that it could pass to the task
    task = addition.load(None)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    for step in range(1, STEPS + 1):
        groups = training_step(model, tokenizer, optimizer, task, step)
        print(f"step {step}  reward {torch.stack([group.rewards for group in groups]).mean():.3f}")
