"""What several tests share. One thread for each process: the tests start several, and more threads than cores would
wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

# ---- Models of every kind, small enough to be run in milliseconds; gradients as vectors ----

EOS = PAD = 2  # one id for both
VOCAB = 61
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
    tie_word_embeddings=False,
)  # fmt: skip
GPT = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=False,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip
BLOOM = dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, tie_word_embeddings=False)
MPT = dict(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
HYBRID = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
FAMILIES = {  # name: model type, settings
    "qwen2": ("qwen2", SIZES),
    "qwen2 tied": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SIZES),
    "llama": ("llama", SIZES),
    "llama tied": ("llama", SIZES | {"tie_word_embeddings": True}),
    "mistral": ("mistral", SIZES | {"sliding_window": 4}),
    "gemma": ("gemma", SIZES),
    "gemma2": ("gemma2", SIZES | {"final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", SIZES | {"sliding_window": 4}),
    "granite": ("granite", SIZES | {"logits_scaling": 8.0}),
    "granite unscaled": ("granite", SIZES),
    "cohere": ("cohere", SIZES),
    "gpt2": ("gpt2", GPT),
    "gpt2 tied": ("gpt2", GPT | {"tie_word_embeddings": True}),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "mixtral": ("mixtral", SIZES | EXPERTS),
    "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS),
    "gpt_oss": ("gpt_oss", SIZES | EXPERTS | {"sliding_window": 4}),
    "phi": ("phi", SIZES),
    "opt": ("opt", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bloom": ("bloom", BLOOM),  # no position ids
    "mpt": ("mpt", MPT),
    "mamba": ("mamba", SIZES | {"state_size": 4}),  # no attention
    "falcon_h1": ("falcon_h1", SIZES | HYBRID | {"lm_head_multiplier": 0.5}),
}


def tiny_model(
    name: str = "qwen2", dtype: torch.dtype = torch.float64, spread: float = 4.0, **settings: object
) -> nn.Module:
    """Random weights, logits of this standard deviation, no dropout; in train mode, as in an update."""
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | settings))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.02)
        logits = model(torch.arange(3, 15)[None]).logits
        model.get_output_embeddings().weight.mul_(spread / logits.std())
    return model.train()


def flat_gradient(model: nn.Module) -> Tensor:
    """All parameters' gradients as one vector."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative to the length of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
