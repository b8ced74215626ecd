"""DFlash2's convolutions are what the formula says, stay inside a block, and start without effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_rows import blocks_at, embedding, make_row, packed_hidden, tiny_drafter, tiny_spec

from dflash2_kit import DFLASH2, awake
from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec
from draftline.drafter.convolution import ShortConvolution, convolve
from draftline.drafter.model import Drafter

ANCHORS = [2, 9, 14, 20]


def spec2(**changes: Any) -> DrafterSpec:
    return tiny_spec(dflash2=Dflash2Spec(**(DFLASH2 | changes)))


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 4, 12])
def test_a_convolution_is_the_formula_slot_by_slot(taps: int, group: int) -> None:
    generator = torch.Generator().manual_seed(taps)
    hidden, slots = 12, [0, 1, 2, 3, 0, 1, 0, 1, 2]  # three blocks end to end, two of them cut short
    y, base = torch.randn(9, hidden, generator=generator).double(), torch.randn(taps, hidden, generator=generator)
    dynamic = torch.randn(9, taps, hidden // group, generator=generator).double()
    found = convolve(y, base.double(), dynamic, torch.tensor(slots))
    for q, slot in enumerate(slots):
        for c in range(hidden):
            wanted = sum(
                (float(base[o, c]) + float(dynamic[q, o, c // group])) * float(y[q - o, c])
                for o in range(taps)
                if slot >= o
            )
            assert float(found[q, c]) == pytest.approx(wanted, abs=1e-12)


def test_rows_of_the_projection_are_side_tap_group_in_that_order() -> None:
    module = ShortConvolution(8, Dflash2Spec(conv_kernel_size=2, conv_group_size=4, selector_rank=1, selector_top_k=1))
    with torch.no_grad():
        module.kernel_projection.weight.copy_(torch.arange(8.0)[:, None].expand(-1, 8))
    dynamic = module.dynamic(torch.ones(1, 8) / 8)
    assert torch.allclose(dynamic[:, 0], torch.arange(8.0).view(2, 2, 2))


@pytest.mark.parametrize("attention", ["blockwise", "dense"])
def test_slot_j_moves_no_earlier_slot_and_no_other_block(attention: Any) -> None:
    """With attention that is causal in the block in all layers: what is left are the convolutions."""
    spec = spec2().model_copy(update={"in_block_attention": "causal"})
    drafter, row = awake(tiny_drafter(spec, attention)), make_row((30,))
    blocks = blocks_at(row, spec, ANCHORS)
    masks = drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A)
    x = embedding()[blocks.block_ids_AB.flatten()]

    def run(x: torch.Tensor) -> torch.Tensor:
        return drafter(x, row.taps_TF, masks, row.position_ids_T, blocks.position_ids_AB.flatten()).view(4, 4, -1)

    before = run(x)
    moved = x.clone()
    moved[4 + 2] += 1.0  # slot 2 of the second block
    changed = (run(moved) - before).abs().amax(-1) > 0
    assert changed.tolist() == [[False] * 4, [False, False, True, True], [False] * 4, [False] * 4]


def test_what_another_block_holds_cannot_poison_a_block() -> None:
    y = torch.ones(4, 4)
    y[1] = torch.nan
    found = convolve(y, torch.ones(2, 4), torch.zeros(4, 2, 1), torch.tensor([0, 1, 0, 1]))
    assert torch.isfinite(found[2:]).all() and not torch.isfinite(found[1]).any()


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_packed_blocks_equal_each_block_drafted_alone(kernel: int) -> None:
    spec = spec2(conv_kernel_size=kernel)
    drafter, row = awake(tiny_drafter(spec, dtype=torch.float64)), make_row((30,), dtype=torch.float64)
    packed = packed_hidden(drafter, row, blocks_at(row, spec, ANCHORS))
    for index, anchor in enumerate(ANCHORS):
        blocks, cache = blocks_at(row, spec, [anchor]), drafter.new_cache()
        x = embedding(torch.float64)[blocks.block_ids_AB[0]]
        alone = drafter.forward_block(x, row.taps_TF[:anchor], cache, anchor)
        torch.testing.assert_close(alone, packed[index], rtol=1e-9, atol=1e-9)


def test_a_new_dflash2_drafter_is_bitwise_the_dflash_drafter_of_the_same_seed() -> None:
    plain, extended = Drafter(tiny_spec()), Drafter(spec2())
    row = make_row((30, 21))
    for name, value in plain.state_dict().items():
        assert torch.equal(extended.state_dict()[name], value), name
    ours = packed_hidden(extended, row, blocks_at(row, spec2(), ANCHORS))
    assert torch.equal(ours, packed_hidden(plain, row, blocks_at(row, tiny_spec(), ANCHORS)))
    assert not torch.equal(ours, packed_hidden(awake(extended), row, blocks_at(row, spec2(), ANCHORS)))


def test_names_and_shapes_are_those_of_published_checkpoints() -> None:
    added = {n: tuple(v.shape) for n, v in Drafter(spec2()).state_dict().items() if "conv" in n or "selector" in n}
    one = {"base_kernel": (2, 2, 32), "kernel_projection.weight": (2 * 2 * 8, 32)}
    wanted = {f"layers.{i}.{kind}_conv.{n}": s for i in (0, 1) for kind in ("attention", "mlp") for n, s in one.items()}
    selector = {"predecessor_codebook": (50, 6), "successor_codebook": (50, 6), "hidden_projection.weight": (6, 32)}
    assert added == wanted | {f"candidate_selector.{name}": shape for name, shape in selector.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 5}, "hidden_size 32 is not a multiple of conv_group_size 5"),
        ({"conv_kernel_size": 5}, "conv_kernel_size 5 is above block_size 4"),
        ({"selector_top_k": 51}, "selector_top_k 51 is above the vocabulary of 50"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec2(**changes)
