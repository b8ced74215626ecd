"""The drafter's two forms agree, nothing leaks from the future, and its weights and RoPE keep their contracts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from drafter_rows import (
    MASK_ID,
    blocks_at,
    document_start,
    embedding,
    make_row,
    packed_hidden,
    tiny_drafter,
    tiny_spec,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.blocks import BlockBatch, pad_row
from draftline.drafter.masks import AttentionPath
from draftline.drafter.model import Drafter, DrafterCache
from draftline.errors import UserError
from draftline.records import HiddenStateRow

PATHS: tuple[AttentionPath, ...] = ("dense", "blockwise", "flex")
FULL, SLIDE = "full_attention", "sliding_attention"
Case = tuple[DrafterSpec, HiddenStateRow, BlockBatch]


@st.composite
def specs(draw: st.DrawFn) -> DrafterSpec:
    types = draw(st.sampled_from([(FULL, FULL), (SLIDE, FULL), (SLIDE, SLIDE)]))
    return tiny_spec(
        block_size=draw(st.integers(2, 6)),
        layer_types=types,
        sliding_window=draw(st.integers(1, 12)) if SLIDE in types else None,
        in_block_attention=draw(st.sampled_from(["zlab", "causal", "bidirectional"])),
        window_origin=draw(st.sampled_from(["query", "anchor"])),
    )


@st.composite
def packed(draw: st.DrawFn) -> Case:
    """A specification, a row of 1-4 documents, rising anchors anywhere in it, and up to 3 padding blocks."""
    spec = draw(specs())
    lengths = tuple(draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)))
    row = make_row(lengths, seed=draw(st.integers(0, 1000)), spec=spec, dtype=torch.float64)
    anchors = draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=6, unique=True))
    return spec, row, blocks_at(row, spec, sorted(anchors), padding=draw(st.integers(0, 3)))


def one_by_one(drafter: Drafter, row: HiddenStateRow, blocks: BlockBatch) -> torch.Tensor:
    """Each kept block drafted alone from the features before its anchor: (kept, B, H)."""
    table_VH, out = embedding(drafter.fc.weight.dtype), []
    for block in range(int(blocks.keep_A.sum())):
        anchor, start = int(blocks.anchors_A[block]), document_start(row, int(blocks.document_A[block]))
        taps = row.taps_TF[start:anchor]
        out.append(
            drafter.forward_block(table_VH[blocks.block_ids_AB[block]], taps, drafter.new_cache(), anchor - start)
        )
    return torch.stack(out)


@settings(max_examples=40, deadline=None)
@given(packed(), st.sampled_from(PATHS))
def test_packed_form_equals_the_block_form_of_each_block(case: Case, path: AttentionPath) -> None:
    spec, row, blocks = case
    drafter = tiny_drafter(spec, path, dtype=torch.float64)
    with torch.no_grad():
        packed_form = packed_hidden(drafter, row, blocks)[blocks.keep_A]
    torch.testing.assert_close(packed_form, one_by_one(drafter, row, blocks), atol=1e-9, rtol=0)


@settings(max_examples=15, deadline=None)
@given(packed())
def test_packed_form_equals_the_block_form_in_fp32(case: Case) -> None:
    spec, row, blocks = case
    row = replace(row, taps_TF=row.taps_TF.float())
    drafter = tiny_drafter(spec)
    with torch.no_grad():
        packed_form = packed_hidden(drafter, row, blocks)[blocks.keep_A]
    torch.testing.assert_close(packed_form, one_by_one(drafter, row, blocks), atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(packed())
def test_blockwise_gives_the_dense_reference_and_its_gradients(case: Case) -> None:
    spec, row, blocks = case
    results = []
    for path in ("dense", "blockwise"):
        drafter = tiny_drafter(spec, path, dtype=torch.float64)  # type: ignore[arg-type]
        hidden = packed_hidden(drafter, row, blocks)
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
        results.append([hidden.detach(), *(p.grad for p in drafter.parameters())])
    for reference, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-9)


def changed(drafter: Drafter, row: HiddenStateRow, other: HiddenStateRow, anchors: list[int]) -> torch.Tensor:
    """Per block: whether any hidden state differs between the two rows."""
    with torch.no_grad():
        before, after = (packed_hidden(drafter, r, blocks_at(r, drafter.spec, anchors)) for r in (row, other))
    return ((after - before).abs() > 1e-12).flatten(1).any(1)


def with_noise_at(row: HiddenStateRow, where_T: torch.Tensor) -> HiddenStateRow:
    return replace(row, taps_TF=torch.where(where_T[:, None], row.taps_TF + 1.5, row.taps_TF))


@settings(max_examples=50, deadline=None)
@given(packed(), st.sampled_from(PATHS), st.integers(0, 5))
def test_nothing_leaks_from_the_anchor_on_or_from_other_documents(case: Case, path: AttentionPath, choice: int) -> None:
    """Features from the anchor on and of other documents, and all other tokens, are changed; the block is not."""
    spec, row, blocks = case
    anchors = blocks.anchors_A[blocks.keep_A].tolist()
    anchor = anchors[choice % len(anchors)]
    index_T = torch.arange(sum(row.lengths))
    same_T = row.document_ids_T == row.document_ids_T[anchor]
    seen_T = same_T & (index_T < anchor)
    ids = torch.where(same_T & (index_T <= anchor), row.input_ids_T, (row.input_ids_T + 7) % MASK_ID)
    other = replace(with_noise_at(row, ~seen_T), input_ids_T=ids)
    drafter = tiny_drafter(spec, path, dtype=torch.float64)
    assert not changed(drafter, row, other, anchors)[anchors.index(anchor)]


@settings(max_examples=40, deadline=None)
@given(packed(), st.sampled_from(PATHS), st.integers(0, 5))
def test_what_a_block_may_see_does_change_it(case: Case, path: AttentionPath, choice: int) -> None:
    """The controls: the token at the anchor and the feature just before it change the block."""
    spec, row, blocks = case
    anchors = blocks.anchors_A[blocks.keep_A].tolist()
    anchor = anchors[choice % len(anchors)]
    drafter = tiny_drafter(spec, path, dtype=torch.float64)
    ids = row.input_ids_T.clone()
    ids[anchor] = (ids[anchor] + 1) % MASK_ID
    assert changed(drafter, row, replace(row, input_ids_T=ids), anchors)[anchors.index(anchor)]
    window = spec.sliding_window or 99
    reaches_back = FULL in spec.layer_types or window > 1 or spec.window_origin == "anchor"
    if int(row.position_ids_T[anchor]) > 0 and reaches_back:
        before_T = torch.arange(sum(row.lengths)) == anchor - 1
        assert changed(drafter, row, with_noise_at(row, before_T), anchors)[anchors.index(anchor)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("origin", "reach"), [("query", 4), ("anchor", 5)])
def test_sliding_layers_see_no_feature_before_their_window(path: AttentionPath, origin: str, reach: int) -> None:
    spec = tiny_spec(layer_types=(SLIDE, SLIDE), sliding_window=5, window_origin=origin)
    row, anchor = make_row((30,), spec=spec, dtype=torch.float64), 20
    drafter = tiny_drafter(spec, path, dtype=torch.float64)
    index_T = torch.arange(30)
    assert not changed(drafter, row, with_noise_at(row, index_T < anchor - reach), [anchor])[0]
    assert changed(drafter, row, with_noise_at(row, index_T == anchor - reach), [anchor])[0]


def test_query_window_moves_with_the_slot() -> None:
    spec = tiny_spec(num_layers=1, layer_types=(SLIDE,), sliding_window=5)
    row, anchor = make_row((30,), spec=spec, dtype=torch.float64), 20
    drafter = tiny_drafter(spec, dtype=torch.float64)
    for slot in range(4):
        edge = torch.arange(30) == anchor + slot - 4
        with torch.no_grad():
            a, b = (packed_hidden(drafter, r, blocks_at(r, spec, [anchor]))[0] for r in (row, with_noise_at(row, edge)))
        touched = ((a - b).abs() > 1e-12).any(-1).tolist()
        assert touched == [k <= slot and anchor + slot - 4 < anchor for k in range(4)]


@pytest.mark.parametrize("path", ["dense", "blockwise"])
def test_padding_blocks_are_finite_and_leave_gradients_alone(path: AttentionPath) -> None:
    spec, row = tiny_spec(), make_row((64, 8), dtype=torch.float64)
    grads = []
    for padding in (0, 5):
        blocks = blocks_at(row, spec, [10, 60, 66], padding)
        drafter = tiny_drafter(spec, path, dtype=torch.float64)
        hidden = packed_hidden(drafter, row, blocks)
        assert hidden.isfinite().all()
        hidden[blocks.keep_A].square().sum().backward()
        grads.append([p.grad for p in drafter.parameters()])
    for alone, padded in zip(*grads, strict=True):
        torch.testing.assert_close(alone, padded, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("path", PATHS)
def test_padding_the_row_changes_nothing(path: AttentionPath) -> None:
    spec, row = tiny_spec(), make_row((11, 6), dtype=torch.float64)
    blocks = blocks_at(row, spec, [3, 9, 14], padding=2)
    drafter = tiny_drafter(spec, path, dtype=torch.float64)
    with torch.no_grad():
        plain, padded = (packed_hidden(drafter, r, blocks) for r in (row, pad_row(row, 32)))
    torch.testing.assert_close(plain, padded, atol=1e-12, rtol=0)


def test_drafting_round_by_round_equals_drafting_at_once() -> None:
    spec, row = tiny_spec(), make_row((40,), dtype=torch.float64)
    drafter, table_VH = tiny_drafter(spec, dtype=torch.float64), embedding(torch.float64)
    cache, held = drafter.new_cache(), 0
    for start in (7, 8, 11, 19, 33):
        ids = torch.tensor([int(row.input_ids_T[start]), MASK_ID, MASK_ID, MASK_ID])
        grown = drafter.forward_block(table_VH[ids], row.taps_TF[held:start], cache, start)
        at_once = drafter.forward_block(table_VH[ids], row.taps_TF[:start], drafter.new_cache(64), start)
        torch.testing.assert_close(grown, at_once, atol=1e-12, rtol=0)
        held = start
    assert cache.length == 33


def test_a_short_block_is_allowed_near_the_length_limit() -> None:
    spec, row = tiny_spec(layer_types=(SLIDE, SLIDE)), make_row((20,), dtype=torch.float64)
    drafter, table_VH = tiny_drafter(spec, dtype=torch.float64), embedding(torch.float64)
    ids = torch.tensor([3, MASK_ID, MASK_ID, MASK_ID])
    whole = drafter.forward_block(table_VH[ids], row.taps_TF[:9], drafter.new_cache(), 9)
    short = drafter.forward_block(table_VH[ids[:2]], row.taps_TF[:9], drafter.new_cache(), 9)
    torch.testing.assert_close(short, whole[:2], atol=1e-12, rtol=0)  # all layers are causal in the block


def test_a_cropped_cache_forgets() -> None:
    row, drafter = make_row((20,), dtype=torch.float64), tiny_drafter(tiny_spec(), dtype=torch.float64)
    block, cache = embedding(torch.float64)[:4], drafter.new_cache()
    first = drafter.forward_block(block, row.taps_TF[:8], cache, 8)
    drafter.extend_cache(row.taps_TF[10:15] * 3, cache)
    cache.crop(8)
    torch.testing.assert_close(drafter.forward_block(block, row.taps_TF[:0], cache, 8), first, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="crop"):
        cache.crop(9)


def test_a_block_away_from_the_end_of_its_context_is_refused() -> None:
    row, drafter = make_row((20,)), tiny_drafter(tiny_spec())
    with pytest.raises(ValueError, match="holds 5 context tokens, the block starts at 7"):
        drafter.forward_block(embedding()[:4], row.taps_TF[:5], drafter.new_cache(), 7)
    with pytest.raises(ValueError, match="does not hold"):
        DrafterCache(2).read(0, 0, 1)


def test_state_dict_has_the_keys_and_shapes_of_z_lab() -> None:
    spec = tiny_spec()
    shapes = {name: tuple(value.shape) for name, value in Drafter(spec).state_dict().items()}
    expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for i in range(spec.num_layers):
        expected |= {
            f"layers.{i}.self_attn.q_proj.weight": (64, 32),
            f"layers.{i}.self_attn.k_proj.weight": (32, 32),
            f"layers.{i}.self_attn.v_proj.weight": (32, 32),
            f"layers.{i}.self_attn.o_proj.weight": (32, 64),
            f"layers.{i}.self_attn.q_norm.weight": (16,),
            f"layers.{i}.self_attn.k_norm.weight": (16,),
            f"layers.{i}.mlp.gate_proj.weight": (48, 32),
            f"layers.{i}.mlp.up_proj.weight": (48, 32),
            f"layers.{i}.mlp.down_proj.weight": (32, 48),
            f"layers.{i}.input_layernorm.weight": (32,),
            f"layers.{i}.post_attention_layernorm.weight": (32,),
        }
    assert shapes == expected


def test_rope_frequencies_stay_exact_fp32_through_casts_and_copies() -> None:
    spec = tiny_spec(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=32)
    exact = Drafter(spec).rotary_emb.inv_freq.clone()
    for cast in (
        Drafter(spec).to(torch.bfloat16),
        copy.deepcopy(Drafter(spec)).half(),
        Drafter(spec).bfloat16().float(),
    ):
        assert cast.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(cast.rotary_emb.inv_freq, exact)
    with torch.device("meta"):
        hollow = Drafter(spec)
    hollow.to_empty(device="cpu")
    assert torch.equal(hollow.rotary_emb.inv_freq, exact)


def test_weights_can_be_assigned_to_a_drafter_made_on_the_meta_device() -> None:
    spec, row = tiny_spec(), make_row((12,))
    source = tiny_drafter(spec)
    with torch.device("meta"):
        hollow = Drafter(spec, attention="blockwise")
    hollow.load_state_dict(source.state_dict(), assign=True)
    blocks = blocks_at(row, spec, [5])
    assert torch.equal(packed_hidden(hollow, row, blocks), packed_hidden(source, row, blocks))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_changes_the_frequencies_as_transformers_does(rope: dict) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    spec = tiny_spec(rope_parameters=rope)
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, head_dim=16, max_position_embeddings=512)
    config.rope_parameters = dict(rope)
    theirs = Qwen3RotaryEmbedding(config)
    positions = torch.tensor([0, 1, 77, 500])
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = Drafter(spec).rotary_emb(positions, torch.float32)
    assert torch.equal(ours[0][:, 0], cos[0])
    assert torch.equal(ours[1][:, 0], sin[0])
    assert not torch.equal(ours[0], Drafter(tiny_spec()).rotary_emb(positions, torch.float32)[0])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5},
        {"rope_type": "unheard", "rope_theta": 1e4},
    ],
    ids=["length-dependent", "partial", "unknown"],
)
def test_rope_that_cannot_be_served_alike_is_refused(rope: dict) -> None:
    with pytest.raises(UserError, match="RoPE type"):
        Drafter(tiny_spec(rope_parameters=rope))


def test_initial_weights_depend_on_the_generator_alone() -> None:
    spec = tiny_spec()
    torch.manual_seed(1)
    one = Drafter(spec)
    torch.manual_seed(2)
    two = Drafter(spec)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    two.init_weights(torch.Generator().manual_seed(5))
    assert not torch.equal(one.fc.weight, two.fc.weight)
    assert abs(float(two.fc.weight.detach().std()) - spec.initializer_range) < 0.02
    assert torch.equal(two.norm.weight, torch.ones(32))


def test_bf16_drafter_follows_its_fp32_twin() -> None:
    spec, row = tiny_spec(), make_row((40,))
    blocks = blocks_at(row, spec, [5, 30])
    wide, narrow = tiny_drafter(spec), tiny_drafter(spec, dtype=torch.bfloat16)
    with torch.no_grad():
        a, b = packed_hidden(wide, row, blocks), packed_hidden(narrow, row, blocks)
    assert b.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.float().flatten(), dim=0) > 0.999


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(UserError, match="gelu"):
        Drafter(tiny_spec(hidden_act="gelu"))
