"""A model while it decodes, and after it."""

import pytest
import torch

from conftest import tiny_model
from infra.decoding import decoding


def test_decoding_has_weights_in_the_dtype_of_the_computation_and_gives_the_very_weights_back():
    """Buffers keep their precision; tied weights stay tied; whatever happens within."""
    model = tiny_model("llama tied", torch.float32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), decoding(model, torch.bfloat16):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {x.dtype for x in model.buffers()} == {torch.float32}
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        raise KeyboardInterrupt
    after = model.state_dict()
    assert all(after[name].dtype == x.dtype and after[name].equal(x) for name, x in before.items())
