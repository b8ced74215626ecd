"""Attention of several prompts' blocks in one call: contexts and blocks padded to the longest.

Prompt by prompt it takes some ten launches a prompt and layer, which is what a round of many prompts waits for on a
GPU; here it is one attention a layer.

Shape letters: P prompts, B slots of the longest block, C context tokens of the longest, N query and M key/value heads,
D head size, Q slots of all blocks end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftline.drafter.attention import Attend, KeyValue
from draftline.drafter.masks import MaskRule


@dataclass(frozen=True, slots=True)
class PaddedView:
    """What one kind of layer reads and sees.

    Attributes:
        columns_PC: positions of each prompt's context to read, from the rule's floor on.
        visible_PBS: bool [P, B, C + B], what each slot sees of them and of its block.
    """

    columns_PC: Tensor
    visible_PBS: Tensor


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """The blocks of one round.

    Attributes:
        starts: position of each block's first slot.
        sizes: slots of each block.
    """

    starts: Sequence[int]
    sizes: Sequence[int]

    def view(self, rule: MaskRule, device: torch.device) -> PaddedView:
        """What a kind of layer reads and sees; filling slots see themselves."""
        floors = [rule.context_floor(start) for start in self.starts]
        width, longest = max(self.sizes), max(s - f for s, f in zip(self.starts, floors, strict=True))
        table = torch.tensor([self.starts, floors, self.sizes], device=device)
        starts_P11, floors_P1, sizes_P11 = table[0, :, None, None], table[1, :, None], table[2, :, None, None]
        slots_B = torch.arange(width, device=device)
        keys_PC = floors_P1 + torch.arange(longest, device=device)
        context_PBC = rule.context(starts_P11, slots_B[:, None], keys_PC[:, None])
        block_PBB = rule.block(slots_B[:, None], slots_B) & (slots_B < sizes_P11)
        block_PBB = block_PBB | torch.eye(width, dtype=torch.bool, device=device)
        # A shorter context is filled up with columns that are held, whatever is there: none of its slots sees them.
        return PaddedView(keys_PC.clamp(max=max(self.starts) - 1), torch.cat((context_PBC, block_PBB), dim=-1))

    def attend(self, held: KeyValue, visible_PBS: Tensor) -> Attend:
        """Attention of all blocks over their held contexts [P, C, M, D] and themselves."""

        def attend_to(q_QND: Tensor, k_QMD: Tensor, v_QMD: Tensor) -> Tensor:
            groups = q_QND.shape[1] // k_QMD.shape[1]
            q_PNBD = self._padded(q_QND).transpose(1, 2)
            k_PNSD, v_PNSD = (
                torch.cat((context_PCMD, self._padded(own)), dim=1).transpose(1, 2).repeat_interleave(groups, dim=1)
                for context_PCMD, own in zip(held, (k_QMD, v_QMD), strict=True)
            )
            out_PNBD = F.scaled_dot_product_attention(q_PNBD, k_PNSD, v_PNSD, attn_mask=visible_PBS[:, None])
            return self._end_to_end(out_PNBD.transpose(1, 2))

        return attend_to

    def _padded(self, x_QND: Tensor) -> Tensor:
        """[P, B, N, D]."""
        if min(self.sizes) == max(self.sizes):
            return x_QND.unflatten(0, (len(self.sizes), -1))
        return pad_sequence(list(x_QND.split(list(self.sizes))), batch_first=True)

    def _end_to_end(self, x_PBND: Tensor) -> Tensor:
        """Inverse of `_padded`."""
        if min(self.sizes) == max(self.sizes):
            return x_PBND.flatten(0, 1)
        return torch.cat([x_BND[:size] for x_BND, size in zip(x_PBND.unbind(), self.sizes, strict=True)])
