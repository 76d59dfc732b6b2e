"""How much of an H100 the measured speeds use: of the memory's bandwidth for a token, of the products for an update.

    python results/h100/roofline.py

A model in the shape of Qwen2.5-0.5B samples 128 completions of 512 tokens after prompts of 10, in bf16. A token reads
all weights and the cache. An update multiplies each weight of the layers three times (forward, and two products
backward) and each of the head four times (its forward pass is computed again). Attention and all else is left out.
"""

BANDWIDTH, PRODUCTS = 3.35e12, 989e12  # bytes and bf16 operations per second of an H100 SXM, by its data sheet
LAYERS, HIDDEN, MLP, KV, VOCABULARY = 24, 896, 4864, 2 * 64, 151936
ROWS, PROMPT, LENGTH = 128, 10, 512
TOKEN_SECONDS, UPDATE_SECONDS = (4.7e-3, 5.2e-3), 1.2  # docs/distributed.md

layers = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * MLP)
head = VOCABULARY * HIDDEN  # tied to the embedding
cache = [2 * 2 * LAYERS * KV * ROWS * tokens for tokens in (PROMPT, PROMPT + LENGTH)]  # bytes of keys and values
token = [2 * (layers + head) + bytes_of_cache for bytes_of_cache in cache]
read, written = ROWS * (PROMPT + LENGTH), ROWS * LENGTH
update = 2 * (3 * layers * read + 4 * head * written)

print(f"a token reads {token[0] / 1e9:.2f} to {token[1] / 1e9:.2f} GB, with the cache empty and full,")
least = [x / BANDWIDTH for x in token]
shares = [sum(least) / 2 / seconds for seconds in TOKEN_SECONDS]
print(f"at least {1000 * least[0]:.2f} to {1000 * least[1]:.2f} ms: ", end="")
print(f"{min(shares):.0%} to {max(shares):.0%} of the bandwidth")
print(f"an update multiplies {update / 1e12:.0f} TFLOP, at least {update / PRODUCTS:.2f} s: ", end="")
print(f"{update / PRODUCTS / UPDATE_SECONDS:.0%} of the peak")
