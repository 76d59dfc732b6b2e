"""Make models/addition, the small checkpoint that `train.py` starts from by default. About six CPU-minutes.

    python -m tools.make_addition

A supervised warm-up teaches two ways to add: to answer at once, which is mostly wrong, and to think first, digit by
digit from the right with the carry, which is mostly right. Both are shown for every kind of sum, but long sums are
mostly answered at once. So the greedy model thinks about short sums only, and reinforcement learning can find that
thinking pays for the others, too. Held-out prompts are never trained on.
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from config import Config
from tasks import addition
from tasks._characters import EOS, EOS_ID, char_tokenizer, held_out, small_config

DIRECT_SHARE = {2: 0.4, 3: 0.4, 4: 0.75}  # of the lines, by digits of the longer operand; 0.6 in all
FILLER = 0.2  # chance of a "." after a step, and of another one after that
STEPS, BATCH_SIZE, PART_SIZE, LEARNING_RATE, WARMUP = 2000, 96, 24, 3e-3, 50


def scratch_pad(a: int, b: int, rng: random.Random) -> str:
    """47 + 85 -> "7+5+0=12,4+8+1=13": digits from the right, the third summand is the carry."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        step = f"{x}+{y}+{carry}={x + y + carry}"
        while rng.random() < FILLER:
            step += "."
        steps.append(step)
        carry = (x + y + carry) // 10
    return ",".join(steps)


def training_line(rng: random.Random) -> tuple[str, str]:
    """(prompt, completion) of a prompt that is not held out."""
    row = addition.draw_row(rng)
    while held_out(row["prompt"]):
        row = addition.draw_row(rng)
    a, b = map(int, row["prompt"].rstrip("=").split("+"))
    thought = "" if rng.random() < DIRECT_SHARE[len(str(max(a, b)))] else scratch_pad(a, b, rng)
    return row["prompt"], f"{thought}#{row['answer']}{EOS}"


def training_parts(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch as (ids, labels) of similar lengths, to save padding. Prompts and padding carry no label."""
    lines = sorted((training_line(rng) for _ in range(BATCH_SIZE)), key=lambda line: len(line[0] + line[1]))
    parts = []
    for start in range(0, BATCH_SIZE, PART_SIZE):
        part = lines[start : start + PART_SIZE]
        batch = tokenizer([a + b for a, b in part], padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for row, (prompt, _) in zip(labels, part, strict=True):
            row[: len(prompt)] = -100
        parts.append((batch.input_ids, labels))
    return parts


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
        parts = training_parts(tokenizer, rng)
        tokens = sum((labels != -100).sum() for _, labels in parts)
        total = 0.0
        for ids, labels in parts:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {total:.3f}", flush=True)


def until_eos(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids


@torch.no_grad()
def accuracy_and_length(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict], sample: bool, batch_size: int = 64
) -> tuple[float, float]:
    """-> accuracy and mean completion length (EOS included), at temperature 1 if `sample`, else greedy"""
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    rewards, lengths = [], []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        prompts = [row["prompt"] for row in part]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        output = model.generate(**inputs, **settings, max_new_tokens=64)
        ids = [until_eos(row) for row in output[:, inputs.input_ids.shape[1] :].tolist()]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards += addition.exact_sum(prompts, texts, ids, answer=[row["answer"] for row in part])
        lengths += map(len, ids)
    return sum(rewards) / len(rows), sum(lengths) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=Path(__file__).parent.parent / "models" / "addition")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # for the same sums in the same order, and no slower at this size
    torch.manual_seed(args.seed)
    tokenizer = char_tokenizer(addition.ALPHABET)
    model = LlamaForCausalLM(small_config(tokenizer, hidden_size=128, intermediate_size=256))
    warm_up(model, tokenizer, random.Random(args.seed))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    model.eval()
    rows = addition.load(Config()).eval
    for name, sample in (("greedy", False), ("sampled", True)):
        accuracy, length = accuracy_and_length(model, tokenizer, rows, sample)
        print(f"held-out, {name}: accuracy {accuracy:.3f}, mean completion length {length:.1f}")


if __name__ == "__main__":
    main()
