"""Grouped-query attention with a mask, without repeated keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftline.target.grouped import grouped_attention


def make_model(kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.inference_mode()
def test_a_padded_batch_gets_the_logits_of_the_usual_attention(kv_heads: int) -> None:
    model = make_model(kv_heads)
    ids = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.ones(3, 9, dtype=torch.long)
    seen[0, :4], seen[2, :1] = 0, 0
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    wanted = model(ids, attention_mask=seen, position_ids=positions).logits
    with grouped_attention(model, wanted=True):
        found = model(ids, attention_mask=seen, position_ids=positions).logits
        assert model.config._attn_implementation == "sdpa_grouped"
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found[seen.bool()], wanted[seen.bool()], rtol=1e-10, atol=1e-12)
    again = model(ids, attention_mask=seen, position_ids=positions).logits
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)


def test_the_usual_attention_is_back_after_an_error_and_untouched_where_not_wanted() -> None:
    model = make_model(2)
    with pytest.raises(ZeroDivisionError), grouped_attention(model, wanted=True):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    with grouped_attention(model, wanted=False):
        assert model.config._attn_implementation == "sdpa"
