"""The drafter's block forward with static shapes, context keys and values in buffers.

A round brings at most a block of new context tokens; their keys and values are written behind the held ones, filled up
to a block with tokens that go to a column no mask shows. A block that the length limit shortens keeps its shape, and
the slots past its end are hidden.

Shape letters: B slots, S = B new context tokens, C columns, F tap features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from draftline.decode.chain import BoundDrafter
from draftline.decode.draft_batch import block_visibility, layers_of
from draftline.decode.static_call import Outputs, StaticCall, StaticCompiler, column_stops, smallest_fit
from draftline.decode.steps import Drafted, RoundContext
from draftline.drafter.attention import Attend, KeyValue, masked_attention
from draftline.drafter.masks import MaskRule, mask_rule


class StaticDrafter:
    """A `DraftModel` whose block forward has one shape for each prepared length of context.

    Args:
        bound: the drafter with its target's embedding and head.
        columns: longest context.
        compiler: of its device.
    """

    def __init__(self, bound: BoundDrafter, columns: int, compiler: StaticCompiler) -> None:
        self.bound, self._compiler = bound, compiler
        self._spec = bound.spec
        weight = bound.drafter.fc.weight
        shape = (columns + 1, self._spec.num_kv_heads, self._spec.head_dim)
        self._held: list[KeyValue] = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(self._spec.num_layers)
        ]
        self._no_taps_SF = weight.new_zeros(self.block_size, bound.drafter.fc.in_features)
        self._spare, self._length = columns, 0
        self._stops = column_stops(columns)
        self._calls: dict[int, StaticCall] = {}

    @property
    def block_size(self) -> int:
        """B: the anchor's token and B - 1 drafts."""
        return self.bound.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states it reads."""
        return self.bound.taps

    @property
    def spec(self) -> object:
        """Shape and conventions of the drafter."""
        return self._spec

    @property
    def mask_token_id(self) -> int:
        """The token that stands in slots to be drafted."""
        return self.bound.mask_token_id

    def fork(self) -> BoundDrafter:
        """The same weights with a context of its own, not compiled: a batch decodes in other shapes."""
        return self.bound.fork()

    def start(self) -> None:
        """Begin a text: the buffers count as empty."""
        self._length = 0

    @torch.inference_mode()
    def warm(self) -> None:
        """Compiles and captures every length."""
        for stop in self._stops:
            self._length = max(0, stop - 1)
            ids_B = torch.zeros(self.block_size, dtype=torch.long, device=self._no_taps_SF.device)
            self._draft(ids_B, self._no_taps_SF[:0], self.block_size)
        self.start()

    @torch.inference_mode()
    def block_logits(self, context: RoundContext) -> Drafted:
        """Logits [B - 1, V] of the drafted slots of one block, or path scores; the new taps enter the buffers.

        Raises:
            ValueError: the block does not begin where the buffers' context ends.
        """
        assert context.new_taps_SF is not None, "a drafter needs tap features"
        taps_SF = context.new_taps_SF.to(self._no_taps_SF.dtype)
        if taps_SF.shape[0] > self.block_size:
            self._take_prompt(taps_SF)
            taps_SF = taps_SF[:0]
        if self._length + taps_SF.shape[0] != context.start:
            raise ValueError(f"the buffers hold {self._length} context tokens, the block starts at {context.start}")
        found = self._draft(self._padded_ids(context), taps_SF, context.slots)[: context.slots - 1]
        if self.bound.drafter.candidate_selector is None:
            return found
        return self.bound.draft(found, context.tokens[-1])

    def _padded_ids(self, context: RoundContext) -> torch.Tensor:
        ids_B = self.bound.block_ids(context)
        return torch.nn.functional.pad(ids_B, (0, self.block_size - context.slots), value=self.mask_token_id)

    def _draft(self, ids_B: torch.Tensor, taps_SF: torch.Tensor, slots: int) -> torch.Tensor:
        """Logits [B - 1, V] of a whole block, or its hidden states [B - 1, H] where a candidate selector goes on from
        there; takes the new taps into the buffers.
        """
        n_new, device = taps_SF.shape[0], ids_B.device
        steps_S = torch.arange(self.block_size, device=device)
        columns_S = torch.where(steps_S < n_new, steps_S + self._length, self._spare)
        filled_SF = torch.nn.functional.pad(taps_SF, (0, 0, 0, self.block_size - n_new))
        start = self._length + n_new
        stop = smallest_fit(self._stops, start)
        if stop not in self._calls:
            scalars = [torch.zeros((), dtype=torch.long, device=device) for _ in range(2)]
            inputs = [ids_B.clone(), filled_SF.clone(), columns_S.clone(), *scalars]
            self._calls[stop] = self._prepare(inputs, stop)
        (found_K,) = self._calls[stop](ids_B, filled_SF, columns_S, start, slots)
        self._length = start
        return found_K

    def _prepare(self, inputs: list[torch.Tensor], stop: int) -> StaticCall:
        drafter, spec = self.bound.drafter, self._spec
        rules: dict[str, MaskRule] = {kind: mask_rule(spec, kind) for kind in sorted(set(spec.layer_types))}
        layers, held = layers_of(drafter), self._held

        def draft(
            ids_B: torch.Tensor,
            taps_SF: torch.Tensor,
            columns_S: torch.Tensor,
            start: torch.Tensor,
            slots: torch.Tensor,
        ) -> Outputs:
            context_SH = drafter.context(taps_SF)
            rope_S = drafter.rotary_emb(columns_S, context_SH.dtype)
            x_BH = self.bound.embed(ids_B)
            slots_B = torch.arange(ids_B.shape[0], device=ids_B.device)
            rope_B = drafter.rotary_emb(slots_B + start, x_BH.dtype)
            visible = {kind: _visible(rule, start, slots_B, slots, stop) for kind, rule in rules.items()}
            for index, layer in enumerate(layers):
                k_SMD, v_SMD = layer.self_attn.key_value(context_SH, rope_S)
                held[index][0].index_copy_(0, columns_S, k_SMD)
                held[index][1].index_copy_(0, columns_S, v_SMD)
                seen = (held[index][0][:stop], held[index][1][:stop])
                x_BH = layer(x_BH, rope_B, _attend(seen, visible[spec.layer_types[index]]), slots_B)
            hidden_KH = drafter.norm(x_BH)[1:]
            return (hidden_KH,) if drafter.candidate_selector is not None else (self.bound.head(hidden_KH),)

        return self._compiler.prepare(draft, inputs)

    def _take_prompt(self, taps_SF: torch.Tensor) -> None:
        """Writes the context of a whole prompt, of any length, not compiled."""
        drafter, first = self.bound.drafter, self._length
        context_SH = drafter.context(taps_SF)
        self._length += taps_SF.shape[0]
        rope_S = drafter.rotary_emb(torch.arange(first, self._length, device=taps_SF.device), context_SH.dtype)
        for (keys, values), layer in zip(self._held, layers_of(drafter), strict=True):
            k_SMD, v_SMD = layer.self_attn.key_value(context_SH, rope_S)
            keys[first : self._length] = k_SMD
            values[first : self._length] = v_SMD


def _visible(
    rule: MaskRule, start: torch.Tensor, slots_B: torch.Tensor, slots: torch.Tensor, stop: int
) -> torch.Tensor:
    """bool [B, stop + B]. Slots past the block's end see themselves, so that no softmax is over nothing."""
    visible = block_visibility(rule, start, slots_B, torch.arange(stop, device=slots_B.device))
    exists = (slots_B < slots) | (slots_B == slots_B[:, None])
    own = (visible[:, stop:] & exists) | (slots_B == slots_B[:, None])
    return torch.cat((visible[:, :stop], own), dim=-1)


def _attend(held: KeyValue, visible: torch.Tensor) -> Attend:
    def attend_to(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return masked_attention(q, torch.cat((held[0], k)), torch.cat((held[1], v)), visible)

    return attend_to
