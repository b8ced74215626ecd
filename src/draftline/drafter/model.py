"""The drafter: a DFlash block-diffusion model whose layers read the target's states as extra keys and values.

    context = hidden_norm(fc(taps))                      once, shared by all layers, never updated
    layer:    keys and values of [context ; block], queries of the block only, then the MLP on the block
    output:   norm(x), for the target's own head

Two forms give the same numbers: the packed form trains many blocks of a row at once, the block form drafts one
block with cached context keys and values. State-dict keys are those of z-lab's `DFlashDraftModel`; embedding and
head are the target's and not in it. Source of the architecture: DFlash (arXiv 2602.06036). DFlash2 puts convolutions
around attention and MLP (`convolution.py`) and a candidate selector behind the head (`selector.py`).

Shape letters: Q = A * B block tokens, T context tokens, S new context tokens, F = L * H tap features, H hidden size,
N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from draftline.config.drafter_spec import DrafterSpec, LayerType
from draftline.drafter.attention import Attend, Kernels, KeyValue, Rope, masked_attention
from draftline.drafter.context_cache import DrafterCache
from draftline.drafter.convolution import ShortConvolution, init_added, is_added
from draftline.drafter.masks import AttentionPath, DrafterMasks, MaskRule, build_masks, mask_rule
from draftline.drafter.mlp_fp8 import linear_fp8
from draftline.drafter.modules import Linear, RMSNorm
from draftline.drafter.selector import CandidateSelector
from draftline.drafter.spec import LENGTH_DEPENDENT_ROPE
from draftline.errors import UserError


class RotaryEmbedding(nn.Module):
    """cos and sin of positions. The frequencies stay exact fp32 through `.to(bfloat16)` and off the state dict."""

    inv_freq: torch.Tensor

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        with torch.device("cpu"):
            self._exact, self.scaling = rope_frequencies(spec)
        device = torch.get_default_device()
        # Never on the meta device: weights that are assigned to a hollow drafter would not bring frequencies along.
        device = self._exact.device if device.type == "meta" else device
        self.register_buffer("inv_freq", self._exact.to(device, copy=True), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        # Rounded frequencies turn far positions into noise: whatever the cast was, the values are those of fp32.
        self.inv_freq = self._exact.to(device=self.inv_freq.device, copy=True)
        return self

    def forward(self, positions_Q: torch.Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin, each (Q, 1, D)."""
        angles = positions_Q[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rope_frequencies(spec: DrafterSpec) -> tuple[torch.Tensor, float]:
    """fp32 (D / 2,) frequencies and the factor on cos and sin, by transformers' own rules for each RoPE type.

    Raises:
        UserError: a RoPE that depends on the length of the sequence, is unknown, or turns only a part of the head.
    """
    rope = dict(spec.rope_parameters)
    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    from transformers import Qwen3Config  # seconds of a processor, for most processes of a run in vain
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope_type in LENGTH_DEPENDENT_ROPE or rope_type not in ROPE_INIT_FUNCTIONS:
        raise UserError(f"RoPE type '{rope_type}' is not possible in a drafter", where="rope_parameters")
    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=rope,
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    if frequencies.shape != (spec.head_dim // 2,):
        raise UserError(f"RoPE type '{rope_type}' here turns only a part of the head", where="rope_parameters")
    return frequencies.float(), float(scaling)


def rotate(x_QND: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotary embedding [Q, N, D] in the half-split layout: pairs (i, i + D/2)."""
    cos, sin = rope
    low, high = x_QND.chunk(2, dim=-1)
    return x_QND * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention; context and block share the key and value projections."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.num_heads * spec.head_dim)
        self.k_proj = Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim)
        self.v_proj = Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim)
        self.o_proj = Linear(spec.num_heads * spec.head_dim, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def key_value(self, x_TH: torch.Tensor, rope: Rope) -> KeyValue:
        """Rotated keys and values (T, M, D) of context or block tokens."""
        k_TMD = self.k_norm(self.k_proj(x_TH).unflatten(-1, (-1, self.head_dim)))
        return rotate(k_TMD, rope), self.v_proj(x_TH).unflatten(-1, (-1, self.head_dim))

    def forward(self, x_QH: torch.Tensor, rope: Rope, attend_to: Attend) -> torch.Tensor:
        """Queries x [Q, H] attend to what `attend_to` joins with their own keys and values; gives [Q, H]."""
        q_QND = rotate(self.q_norm(self.q_proj(x_QH).unflatten(-1, (-1, self.head_dim))), rope)
        k_QMD, v_QMD = self.key_value(x_QH, rope)
        return self.o_proj(attend_to(q_QND, k_QMD, v_QMD).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Attributes:
        fp8: in training, form the products in fp8 (see `mlp_fp8.py`).
    """

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)
        self.fp8 = False

    def forward(self, x_QH: torch.Tensor) -> torch.Tensor:
        """down(silu(gate(x)) * up(x)) of x [Q, H]."""
        product = linear_fp8 if self.fp8 and self.training else nn.functional.linear
        gate_QI, up_QI = product(x_QH, self.gate_proj.weight), product(x_QH, self.up_proj.weight)
        return product(nn.functional.silu(gate_QI) * up_QI, self.down_proj.weight)


class DrafterLayer(nn.Module):
    """One decoder layer: pre-norm attention with injected context, pre-norm MLP; in DFlash2 inside convolutions."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = SwiGLU(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention_conv = None if spec.dflash2 is None else ShortConvolution(spec.hidden_size, spec.dflash2)
        self.mlp_conv = None if spec.dflash2 is None else ShortConvolution(spec.hidden_size, spec.dflash2)

    def forward(self, x_QH: torch.Tensor, rope: Rope, attend_to: Attend, slots_Q: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each behind a norm and added to its input; x and result [Q, H].

        Args:
            slots_Q: int64, place of each token in its own block; blocks lie end to end.
        """
        normed_QH = self.input_layernorm(x_QH)
        if self.attention_conv is None or self.mlp_conv is None:
            x_QH = x_QH + self.self_attn(normed_QH, rope, attend_to)
            return x_QH + self.mlp(self.post_attention_layernorm(x_QH))
        dynamic = self.attention_conv.dynamic(normed_QH)
        attended_QH = self.self_attn(self.attention_conv.before(normed_QH, dynamic, slots_Q), rope, attend_to)
        x_QH = x_QH + self.attention_conv.after(attended_QH, dynamic, slots_Q)
        normed_QH = self.post_attention_layernorm(x_QH)
        dynamic = self.mlp_conv.dynamic(normed_QH)
        y_QH = self.mlp(self.mlp_conv.before(normed_QH, dynamic, slots_Q))
        return x_QH + self.mlp_conv.after(y_QH, dynamic, slots_Q)


class Drafter(nn.Module):
    """A DFlash or DFlash2 drafter.

    Args:
        spec: architecture and semantics.
        attention: form of the packed attention; auto: blockwise on the CPU, flex on a GPU.

    Weights are drawn from seed 0 at construction (not on the meta device); call `init_weights` for another draw.

    Raises:
        UserError: an activation or a RoPE that a drafter cannot have.
    """

    def __init__(self, spec: DrafterSpec, *, attention: AttentionPath = "auto") -> None:
        super().__init__()
        if spec.hidden_act != "silu":
            raise UserError(
                f"activation '{spec.hidden_act}' is not supported", where="drafter.hidden_act", mend="use silu"
            )
        self.spec = spec
        self.attention: AttentionPath = attention
        self.kernels: Kernels | None = None  # None: those of the device, see `default_kernels`
        self.layers = nn.ModuleList(DrafterLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(spec)
        self.fc = Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.candidate_selector = None if spec.dflash2 is None else CandidateSelector(spec, spec.dflash2)
        self._rules: dict[LayerType, MaskRule] = {kind: mask_rule(spec, kind) for kind in set(spec.layer_types)}
        if self.fc.weight.device.type != "meta":
            self.init_weights(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights of standard deviation `spec.initializer_range`, norms at 1; drawn on the CPU in fp32.

        What DFlash2 adds is drawn last and starts without effect: the rest is, and drafts, as a DFlash drafter.
        """
        named = dict(self.named_parameters())
        for parameter in (value for name, value in named.items() if not is_added(name)):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape, device="cpu", dtype=torch.float32)
                parameter.copy_(drawn.normal_(0.0, self.spec.initializer_range, generator=generator))
        init_added(named, generator)

    def set_mlp_fp8(self, fp8: bool) -> None:
        """Whether the MLPs' products run in fp8 while training."""
        for layer in self._decoder_layers():
            cast("SwiGLU", layer.mlp).fp8 = fp8

    def _ready_kernels(self) -> Kernels:
        return self.kernels or default_kernels(self.fc.weight.device)

    def _decoder_layers(self) -> list[DrafterLayer]:
        return cast("list[DrafterLayer]", list(self.layers))

    def build_masks(
        self, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
    ) -> DrafterMasks:
        """Masks of a row for `forward`, in the form of this drafter; see `masks.build_masks`."""
        return build_masks(self.spec, document_ids_T, anchors_A, document_A, attention=self.attention)

    def context(self, taps_TF: torch.Tensor) -> torch.Tensor:
        """What all layers read of the target: (T, H)."""
        return self.hidden_norm(self.fc(taps_TF.to(self.fc.weight.dtype)))

    def forward(
        self,
        block_embeddings_QH: torch.Tensor,
        taps_TF: torch.Tensor,
        mask: DrafterMasks,
        context_positions_T: torch.Tensor,
        block_positions_Q: torch.Tensor,
    ) -> torch.Tensor:
        """Packed form: all blocks of a row at once.

        Args:
            block_embeddings_QH: embedded block tokens, blocks end to end.
            taps_TF: tap features of the row.
            mask: from `build_masks`.
            context_positions_T, block_positions_Q: positions in the document.

        Returns:
            hidden_QH after the final norm, for the target's head.
        """
        x_QH = block_embeddings_QH.to(self.fc.weight.dtype)
        context_TH = self.context(taps_TF)
        rope_T = self.rotary_emb(context_positions_T, x_QH.dtype)
        rope_Q = self.rotary_emb(block_positions_Q, x_QH.dtype)
        slots_Q = torch.arange(x_QH.shape[0], device=x_QH.device) % self.spec.block_size
        kernels = self._ready_kernels()
        for layer, kind in zip(self._decoder_layers(), self.spec.layer_types, strict=True):
            x_QH = kernels.run_layer(layer, x_QH, context_TH, rope_T, rope_Q, slots_Q, mask[kind], kernels.flex)
        return self.norm(x_QH)

    def new_cache(self, capacity_tokens: int = 0) -> DrafterCache:
        """An empty cache; `capacity_tokens` reserves room when the final length is known."""
        return DrafterCache(self.spec.num_layers, capacity_tokens)

    @torch.no_grad()
    def extend_cache(self, new_taps_SF: torch.Tensor, cache: DrafterCache) -> None:
        """Append the context of the tokens at positions cache.length.. to the cache."""
        context_SH = self.context(new_taps_SF)
        positions_S = torch.arange(cache.length, cache.length + context_SH.shape[0], device=context_SH.device)
        rope_S = self.rotary_emb(positions_S, context_SH.dtype)
        for index, layer in enumerate(self._decoder_layers()):
            cache.write(index, *layer.self_attn.key_value(context_SH, rope_S))
        cache.advance(context_SH.shape[0])

    @torch.no_grad()
    def forward_block(
        self, block_embeddings_BH: torch.Tensor, new_taps_SF: torch.Tensor, cache: DrafterCache, start: int
    ) -> torch.Tensor:
        """Block form: draft one block whose first slot stands at position `start`.

        The taps are those of the tokens committed since the last call, so afterwards `cache.length == start`. A block
        may have fewer slots than `block_size` (near a length limit). Keys and values of the block are not kept.

        Returns:
            hidden_BH after the final norm.

        Raises:
            ValueError: the context, with the new taps, does not end at `start`.
        """
        self.extend_cache(new_taps_SF, cache)
        if cache.length != start:
            raise ValueError(f"the cache holds {cache.length} context tokens, the block starts at {start}")
        x_BH = block_embeddings_BH.to(self.fc.weight.dtype)
        slots_B = torch.arange(x_BH.shape[0], device=x_BH.device)
        rope_B = self.rotary_emb(slots_B + start, x_BH.dtype)
        visible = {kind: _block_visibility(rule, start, slots_B) for kind, rule in self._rules.items()}
        for index, (layer, kind) in enumerate(zip(self._decoder_layers(), self.spec.layer_types, strict=True)):
            held = cache.read(index, self._rules[kind].context_floor(start), start)
            x_BH = layer(x_BH, rope_B, _attend_cached(held, visible[kind]), slots_B)
        return self.norm(x_BH)


def default_kernels(device: torch.device) -> Kernels:
    """Compiled kernels of the process's cache on a GPU, where uncompiled flex_attention would hold all scores."""
    if device.type != "cuda":
        return Kernels()
    from draftline.drafter.compile_cache import compiled_kernels, process_cache  # loads torch's compiler

    return compiled_kernels(process_cache().device(str(device)))


def _block_visibility(rule: MaskRule, start: int, slots_B: torch.Tensor) -> torch.Tensor | None:
    """bool (B, C + B) over the context from the rule's floor and the block itself; None where all is visible."""
    if rule.window is None and not rule.causal:
        return None
    keys_C = torch.arange(rule.context_floor(start), start, device=slots_B.device)
    anchor = torch.tensor(start, device=slots_B.device)
    context = rule.context(anchor, slots_B[:, None], keys_C)
    return torch.cat((context, rule.block(slots_B[:, None], slots_B)), dim=-1)


def _attend_cached(held: KeyValue, visible: torch.Tensor | None) -> Attend:
    def attend_to(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return masked_attention(q, torch.cat((held[0], k)), torch.cat((held[1], v)), visible)

    return attend_to
