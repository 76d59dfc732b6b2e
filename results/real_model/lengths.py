"""Show how long sampled answers are, and how many are right, before any training: 2 samples for each of 64 prompts.

    python results/real_model/lengths.py 96 runs/candidates/sum.jsonl ...    at most 96 tokens; a row for each file

A sample is right if its last number is the answer in the file. The first eight samples for each file go to stderr.
"""

import json
import sys
from pathlib import Path

import numpy as np
from candidates import last_number
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(1, str(Path(__file__).parents[2]))
from rollout import Sampling, rollout, uniforms

PROMPTS, SAMPLES = 64, 2


def spread(lengths: np.ndarray) -> str:
    """Return the 10th, 50th and 90th percentiles."""
    if not len(lengths):
        return "none"
    return " / ".join(f"{x:.0f}" for x in np.percentile(lengths, [10, 50, 90]))


def row(file: Path, model: AutoModelForCausalLM, tokenizer: AutoTokenizer, limit: int) -> str:
    asked = [json.loads(line) for line in file.open()][:PROMPTS]
    ids = [tokenizer.apply_chat_template(each["prompt"], add_generation_prompt=True).input_ids for each in asked]
    places = [(p, i) for p in range(len(asked)) for i in range(SAMPLES)]
    sampling = Sampling(max_completion_length=limit, eos_ids=[tokenizer.eos_token_id])
    completions = rollout(model, [ids[p] for p, _ in places], uniforms(0, 0, places, limit), sampling)
    texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in completions]
    right = np.array(last_number(texts, [asked[p]["answer"] for p, _ in places])) == 1.0
    cut_off = np.mean([completion.truncated for completion in completions])
    lengths = np.array([completion.length for completion in completions])
    for text, is_right in zip(texts[:8], right[:8], strict=True):
        print(int(is_right), text.replace("\n", " / "), file=sys.stderr)
    cells = [
        file.stem,
        f"{np.mean(right):.3f}",
        f"{cut_off:.3f}",
        *map(spread, [lengths, lengths[right], lengths[~right]]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained("models/smollm2").eval()
    tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
    print("| candidate | right | cut off | tokens: 10 %, half, 90 % | of right ones | of wrong ones |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[2:]:
        print(row(Path(name), model, tokenizer, int(sys.argv[1])), flush=True)
