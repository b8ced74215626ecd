"""One forward of the same weights in draftline, z-lab's `dflash` and `speculators`: the same hidden states.

fp32 on the CPU, tiny random weights, tolerance 1e-5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from transformers import DynamicCache, Qwen3Config

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.blocks import make_blocks
from draftline.drafter.model import Drafter
from draftline.records import HiddenStateRow

FULL, SLIDE = "full_attention", "sliding_attention"
MASK_ID, VOCAB = 49, 50
ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]
# z-lab's top-level `is_causal` for each of our names; unset is its own default.
IS_CAUSAL = {"zlab": None, "causal": True, "bidirectional": False}


def spec_of(**changes: Any) -> DrafterSpec:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPES[0],
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "block_size": 4,
        "mask_token_id": MASK_ID,
        "taps": (1, 2),
        "num_target_layers": 6,
        "layer_types": (SLIDE, FULL),
        "sliding_window": 5,
    }
    return DrafterSpec(**{**fields, **changes})


def drafter_of(spec: DrafterSpec) -> Drafter:
    """Random weights, norms away from 1."""
    drafter, generator = Drafter(spec), torch.Generator().manual_seed(3)
    drafter.init_weights(generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


def qwen3_config(spec: DrafterSpec, **more: Any) -> Qwen3Config:
    slides = SLIDE in spec.layer_types
    return Qwen3Config(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(spec.rope_parameters),
        layer_types=list(spec.layer_types),
        use_sliding_window=slides,
        sliding_window=spec.sliding_window,
        tie_word_embeddings=False,
        **more,
    )


def zlab_model(drafter: Drafter) -> DFlashDraftModel:
    """z-lab's class with our weights; keys must match exactly."""
    spec = drafter.spec
    config = qwen3_config(
        spec,
        num_target_layers=spec.num_target_layers,
        block_size=spec.block_size,
        dflash_config={
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.taps),
        },
    )
    if IS_CAUSAL[spec.in_block_attention] is not None:
        config.is_causal = IS_CAUSAL[spec.in_block_attention]
    model = DFlashDraftModel(config)
    model.load_state_dict(drafter.state_dict(), strict=True)
    return model.eval()


def random_inputs(n_tokens: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(n_tokens, 64, generator=generator), torch.randn(block_size, 32, generator=generator)


CASES = [
    pytest.param(types, in_block, window, id=f"{'+'.join(t[0] for t in types)}-{in_block}-W{window}")
    for types in ((FULL, FULL), (SLIDE, FULL), (SLIDE, SLIDE))
    for in_block in IS_CAUSAL
    for window in ((None,) if SLIDE not in types else (2, 7, 100))
]


@pytest.mark.parametrize(("types", "in_block", "window"), CASES)
@torch.no_grad()
def test_z_lab_gives_our_hidden_states(types: tuple[str, ...], in_block: str, window: int | None) -> None:
    """Windows shorter than the block, than the context, and longer than both."""
    drafter = drafter_of(spec_of(layer_types=types, in_block_attention=in_block, sliding_window=window))
    theirs = zlab_model(drafter)
    for n_context, n_slots in ((1, 4), (6, 4), (23, 4), (23, 2)):
        taps, block = random_inputs(n_context, n_slots)
        ours = drafter.forward_block(block, taps, drafter.new_cache(), n_context)
        positions = torch.arange(n_context + n_slots)[None]
        other = theirs(position_ids=positions, noise_embedding=block[None], target_hidden=taps[None])[0]
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("types", "in_block", "window"), CASES)
@torch.no_grad()
def test_z_lab_gives_our_hidden_states_round_by_round_with_its_cache(
    types: tuple[str, ...], in_block: str, window: int | None
) -> None:
    drafter = drafter_of(spec_of(layer_types=types, in_block_attention=in_block, sliding_window=window))
    theirs = zlab_model(drafter)
    taps, _ = random_inputs(40, 4)
    their_cache, our_cache, held = DynamicCache(config=theirs.config), drafter.new_cache(), 0
    their_cache.activate_past_recording()
    for start in (5, 6, 9, 13, 27, 40):
        block, new = random_inputs(1, 4)[1] * start**0.5, taps[held:start]
        ours = drafter.forward_block(block, new, our_cache, start)
        positions = torch.arange(held, start + 4)[None]
        other = theirs(
            position_ids=positions,
            noise_embedding=block[None],
            target_hidden=new[None],
            past_key_values=their_cache,
            use_cache=True,
        )[0]
        their_cache.crop(start - their_cache.get_seq_length())
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=0)
        held = start


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@torch.no_grad()
def test_z_lab_turns_positions_as_we_do(rope: dict[str, Any]) -> None:
    drafter = drafter_of(spec_of(rope_parameters=rope, layer_types=(FULL, FULL), sliding_window=None))
    taps, block = random_inputs(300, 4)
    ours = drafter.forward_block(block, taps, drafter.new_cache(), 300)
    positions = torch.arange(304)[None]
    other = zlab_model(drafter)(position_ids=positions, noise_embedding=block[None], target_hidden=taps[None])[0]
    torch.testing.assert_close(ours, other, atol=1e-5, rtol=0)


def test_z_lab_ignores_a_partial_rotary_factor_as_we_do() -> None:
    """Why `drafter_rope` drops the field: z-lab's model rotates the whole head in any case."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    drafter = drafter_of(spec_of(rope_parameters=rope))
    assert torch.equal(zlab_model(drafter).rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)


def packed_row(lengths: tuple[int, ...]) -> HiddenStateRow:
    generator, n_tokens = torch.Generator().manual_seed(1), sum(lengths)
    return HiddenStateRow(
        row_id=0,
        epoch=0,
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        lengths=lengths,
        input_ids_T=torch.randint(0, MASK_ID, (n_tokens,), generator=generator),
        loss_mask_T=torch.ones(n_tokens, dtype=torch.bool),
        document_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int(),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        taps_TF=torch.randn(n_tokens, 64, generator=generator),
        final_hidden_TH=None,
        final_hidden_norm="pre",
        tap_layer_ids=(1, 2),
    )


def speculators_hidden(
    drafter: Drafter, row: HiddenStateRow, anchors_A: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (Q, H) of `speculators` for a packed row with given anchors, and its embedding (V, H)."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    spec = drafter.spec
    layers = qwen3_config(spec)
    layers._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=spec.vocab_size,
        block_size=spec.block_size,
        aux_hidden_state_layer_ids=[tap + 1 for tap in spec.taps],
        mask_token_id=spec.mask_token_id,
        sliding_window_non_causal=spec.in_block_attention == "bidirectional",
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=spec.block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = core.DFlashDraftModel(config)
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith(("layers.", "fc.", "norm.", "hidden_norm."))]
    model.embed_tokens.weight.copy_(torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(2)))
    keep_A = torch.ones_like(anchors_A, dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *_args: (anchors_A, keep_A))
    hidden = model.eval()._backbone_forward(
        hidden_states=row.taps_TF[None],
        input_ids=row.input_ids_T[None],
        loss_mask=row.loss_mask_T[None],
        verifier_last_hidden_states=torch.zeros(1, row.n_tokens, spec.hidden_size),
        document_ids=row.document_ids_T[None].long(),
        position_ids=row.position_ids_T[None],
        max_anchors=len(anchors_A),
    )[0][0]
    return hidden, model.embed_tokens.weight


@pytest.mark.parametrize(
    ("types", "in_block"),
    [((FULL, FULL), "zlab"), ((SLIDE, FULL), "zlab"), ((SLIDE, FULL), "bidirectional"), ((SLIDE, SLIDE), "zlab")],
)
@torch.no_grad()
def test_speculators_gives_our_hidden_states_for_a_packed_row(
    types: tuple[str, ...], in_block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window is measured from the anchor, which is our `window_origin: anchor`."""
    spec = spec_of(
        layer_types=types,
        in_block_attention=in_block,
        sliding_window=5 if SLIDE in types else None,
        window_origin="anchor",
    )
    drafter, row = drafter_of(spec), packed_row((17, 9, 23))
    anchors_A = torch.tensor([0, 3, 12, 18, 20, 26, 30, 41, 44])
    theirs, table_VH = speculators_hidden(drafter, row, anchors_A, monkeypatch)
    blocks = make_blocks(row, spec, anchors_A, torch.ones_like(anchors_A, dtype=torch.bool))
    ours = drafter(
        table_VH[blocks.block_ids_AB.flatten()],
        row.taps_TF,
        drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A),
        row.position_ids_T,
        blocks.position_ids_AB.flatten(),
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
