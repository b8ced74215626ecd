"""Products with a wide weight in parts, and the head that uses them."""

from __future__ import annotations

import torch
from torch import nn

from draftline.products import WideLinear, wide_product, widen_head


def test_parts_of_a_wide_product_are_the_whole_product_for_any_number_of_rows_and_columns() -> None:
    g = torch.Generator().manual_seed(0)
    for n_rows, n_columns in ((1, 9000), (8, 8192), (9, 8193), (30, 20_001), (30, 100)):
        a_NK = torch.randn(n_rows, 16, generator=g, dtype=torch.float64)
        b_KV = torch.randn(n_columns, 16, generator=g, dtype=torch.float64).t()
        torch.testing.assert_close(wide_product(a_NK, b_KV), a_NK @ b_KV, rtol=1e-12, atol=1e-12)


def test_a_wide_linear_layer_shares_the_parameters_and_gives_the_layers_output_and_gradient() -> None:
    torch.manual_seed(0)
    for bias in (False, True):
        layer = nn.Linear(16, 9000, bias=bias)
        wide = WideLinear.in_place_of(layer)
        assert wide.weight is layer.weight and wide.bias is layer.bias
        x = torch.randn(3, 5, 16, requires_grad=True)
        with torch.no_grad():
            torch.testing.assert_close(wide(x), layer(x), rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad(layer(x).square().sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(wide(x).square().sum(), x)[0], wanted)


def test_only_a_plain_fp32_head_is_exchanged() -> None:
    class Model(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def set_output_embeddings(self, head: nn.Module) -> None:
            self.head = head

    plain, half, other = Model(nn.Linear(4, 8)), Model(nn.Linear(4, 8).bfloat16()), Model(nn.Identity())
    names = list(plain.state_dict())
    for model in (plain, half, other):
        widen_head(model)
    assert [type(m.head) for m in (plain, half, other)] == [WideLinear, nn.Linear, nn.Identity]
    assert list(plain.state_dict()) == names
