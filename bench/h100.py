"""What was measured on one H100, beside tools/first_hour.py: where the time of a rollout and of an update goes, whether
completions should share the row of their prompt, and whether 7B weights with adapters fit on a GPU of 24 GB.

    python -m bench.h100 rollout        results/h100/rollout.txt
    python -m bench.h100 shared_rows    the end of rollout.txt
    python -m bench.h100 adapters       results/h100/adapters.txt
    python -m bench.h100 model          saves the model of 0.5B in runs/half, for bench/against_trl.py

The models have the shapes of Qwen2.5-0.5B and 7B and random weights. Random weights never write the end token that is
given here, so every completion has its full length. The logs were made with an earlier form of this script, which
measured the same and printed more.
"""

import argparse
import time
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import infra.model
import train
from batch import Limits, micro_batches
from infra import ranks
from infra.command_line import parse, ready
from infra.shard import made_up_batch
from tasks import addition
from tasks._characters import EOS_ID, char_tokenizer
from tools import first_hour

NEVER = [151_005]  # an id that the models do not sample
SHAPES = [(64, 256, 8), (256, 256, 8), (512, 128, 8), (1024, 128, 8), (1024, 512, 4)]  # prompt, completion, prompts


def set_up(words: str) -> train.Run:
    run, _, noted = train.set_up(ready(parse(words.split(), True), True), ranks.start())
    print(*noted, sep="\n", flush=True)
    run.sampling.eos_ids = NEVER
    return run


def half_a_billion() -> train.Run:
    addition.model = first_hour.larger_model
    # The sampler term gives every micro-batch a gradient, although no answer is right.
    return set_up("--sampler_coef 1e-6 --max_completion_length 512 --eval_every 0 --out /tmp/half")


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def rollout() -> None:
    run = half_a_billion()
    for decode in ("graph", "graph", "plain"):
        run.config = replace(run.config, decode=decode)
        looks: list[tuple[int, float]] = []
        run.progress = lambda tokens, rows, looks=looks: looks.append((tokens, time.perf_counter()))
        metrics, _ = train.training_step(run, 1)
        names = "seconds_rollout seconds_update tokens peak_memory_gb sampler_gap"
        print(decode, {name: metrics[name] for name in names.split()}, flush=True)
        pairs = list(zip(looks, looks[1:]))[::6]
        print("ms for each token from", [(a, round(1e3 * (t - s) / (b - a), 1)) for (a, s), (b, t) in pairs])


def shared_rows() -> None:
    """Time the gradients of a batch, with rows for one completion each, and with shared rows by three rules."""
    run = half_a_billion()
    hidden_size = run.model.config.hidden_size
    for prompt, completion, prompts in SHAPES:
        run.config = replace(run.config, max_completion_length=completion)
        batch, found = made_up_batch(run, prompt, prompts, 8), {}
        for name, size in {"separate": None, "h/5": hidden_size // 5, "h": hidden_size, "all": 10**7}.items():
            run.limits = Limits(None, 16384, size)
            together = max(max(part.completions_per_row) for _, part in micro_batches(batch, run.limits))
            train.accumulate(run, batch)
            start = clock()
            train.accumulate(run, batch)
            found[name] = together, round(clock() - start, 3)
            run.optimizer.zero_grad()
        print(f"prompt {prompt}, completion {completion}, {8 * prompts} completions: (together, s)", found, flush=True)


def adapters(capacity: float = 24e9) -> None:
    shape = Qwen2Config(
        hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28, vocab_size=152_064,
        num_key_value_heads=4, tie_word_embeddings=False, eos_token_id=EOS_ID,
    )  # fmt: skip

    def load(*_: object) -> torch.nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
        torch.set_default_dtype(torch.float32)
        return model

    free = torch.cuda.mem_get_info
    before, whole = free()
    torch.cuda.mem_get_info = lambda: (int(capacity - before + free()[0]), int(capacity))  # PyTorch's context counts
    torch.cuda.set_per_process_memory_fraction(capacity / whole)
    infra.model.open_model = lambda *_: (shape, char_tokenizer(addition.ALPHABET))
    infra.model.whole_model = load
    flags = "--model x/y --task addition --lora_rank 16 --learning_rate 1e-5 --gradient_checkpointing --eval_every 0"
    run = set_up(f"{flags} --max_completion_length 1024 --prompts_per_step 8 --entropy_coef 1e-6 --out /tmp/adapters")
    print({name: x for name, x in train.training_step(run, 1)[0].items() if "seconds" in name or "peak" in name})


def model() -> None:
    for part in first_hour.larger_model(None):
        part.save_pretrained("runs/half")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {"rollout": rollout, "shared_rows": shared_rows, "adapters": adapters, "model": model}
    parser.add_argument("what", choices=measures)
    measures[parser.parse_args().what]()
