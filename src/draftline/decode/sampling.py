"""The request's sampling rule, and the acceptance of drafts that leaves the target's distribution as it is.

Shape letters: N positions, V vocabulary, K drafts of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from draftline.drafter.selector import PathScores
from draftline.errors import UserError
from draftline.limits import MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE, is_temperature


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's next token is chosen.

    Attributes:
        temperature: 0 is greedy; else within the bounds of `limits`.
        top_p: smallest set of tokens with at least this much probability; 1 keeps all.
        top_k: most likely tokens kept; 0 keeps all.
        seed: of the request's own generator.
        proposals: "argmax" drafts the drafter's most likely token of each slot, "sampled" draws it from the drafter's
            distribution under the same filter. Both leave the output distribution exact; the acceptance differs.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    proposals: Literal["argmax", "sampled"] = "argmax"

    def __post_init__(self) -> None:
        if not is_temperature(self.temperature) or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError(
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k} cannot be sampled from",
                where="sampling",
                mend=f"temperature 0 or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, 0 < top_p <= 1, top_k >= 0",
            )
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed {self.seed} is none", where="sampling", mend=f"give 0 to {MAX_SEED}")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def samples_drafts(self) -> bool:
        """True if a chain draws its drafts instead of taking the likeliest."""
        return not self.is_greedy and self.proposals == "sampled"


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one block.

    Attributes:
        drafts_K: int64 token ids of slots 1..K; on the host if no drafter made them.
        probs_KV: distribution each was drawn from; None for a proposal without chance (all mass on the draft).
        tokens_KV: the tokens that `probs_KV` is over, where it is not the whole vocabulary in order.
    """

    drafts_K: torch.Tensor
    probs_KV: torch.Tensor | None = None
    tokens_KV: torch.Tensor | None = None

    def distribution(self, vocab_size: int) -> torch.Tensor | None:
        """`probs_KV` over the whole vocabulary."""
        if self.probs_KV is None or self.tokens_KV is None:
            return self.probs_KV
        whole_KV = self.probs_KV.new_zeros(len(self.probs_KV), vocab_size)
        return whole_KV.scatter(-1, self.tokens_KV, self.probs_KV)


class Sampler:
    """Chooses tokens under one `Sampling`, with one generator per request.

    Args:
        sampling: the rule.
        device: where the logits are.
    """

    def __init__(self, sampling: Sampling, device: torch.device | str) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device=device).manual_seed(sampling.seed)

    def probs(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Filtered distribution [N, V] in fp32: top-k of the logits, softmax at the temperature, then top-p of that."""
        scores_NV = logits_NV.float() / self.sampling.temperature
        vocab_size = scores_NV.shape[-1]
        if 0 < self.sampling.top_k < vocab_size:
            best = scores_NV.topk(self.sampling.top_k, dim=-1)
            scores_NV = torch.full_like(scores_NV, -torch.inf).scatter(-1, best.indices, best.values)
        probs_NV = scores_NV.softmax(dim=-1)
        if self.sampling.top_p == 1.0:
            return probs_NV
        ordered = probs_NV.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.values.cumsum(dim=-1) - ordered.values
        is_outside = mass_before >= self.sampling.top_p
        is_outside[..., 0] = False  # whatever fp32 makes of a tiny top_p
        kept = ordered.values.masked_fill(is_outside, 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs_NV).scatter(-1, ordered.indices, kept)

    def pick(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The target's own token [N] for each position: argmax, or a draw."""
        if self.sampling.is_greedy:
            return logits_NV.argmax(dim=-1)
        return self.draw(self.probs(logits_NV))

    def draw(self, probs_NV: torch.Tensor) -> torch.Tensor:
        """One token [N] from each row of probabilities."""
        return torch.multinomial(probs_NV, 1, generator=self._generator)[:, 0]

    def propose(self, logits_KV: torch.Tensor | PathScores) -> Proposal:
        """Drafts from the drafter's logits of slots 1..K, or along the paths of a candidate selector."""
        if isinstance(logits_KV, PathScores):
            return self._propose_path(logits_KV)
        if not self.sampling.samples_drafts:
            return Proposal(logits_KV.argmax(dim=-1))
        probs_KV = self.probs(logits_KV)
        return Proposal(self.draw(probs_KV), probs_KV)

    def _propose_path(self, paths: PathScores) -> Proposal:
        """The greedy walk; or a walk that draws each step from softmax(S / T) over the slot's candidates.

        top_k and top_p filter the target's distribution only, as in `dflash`.
        """
        if not self.sampling.samples_drafts:
            return Proposal(paths.chain()[0])
        probs_KCC = (paths.scores_AKCC[0].float() / self.sampling.temperature).softmax(dim=-1)
        tokens_KC = paths.tokens_AKC[0]
        at = torch.zeros(1, dtype=torch.int64, device=tokens_KC.device)
        drafts, rows = [tokens_KC.new_zeros(0)], []
        for probs_CC, tokens_C in zip(probs_KCC, tokens_KC, strict=True):
            probs_1C = probs_CC[at]
            at = self.draw(probs_1C)
            drafts.append(tokens_C[at])
            rows.append(probs_1C)
        return Proposal(torch.cat(drafts), torch.cat(rows) if rows else probs_KCC[:, 0], tokens_KC)

    def verify(self, proposal: Proposal, logits_NV: torch.Tensor) -> list[int]:
        """Tokens to commit: the accepted drafts, then one token of the target's own.

        Without draft probabilities the target's token of each position is chosen first and a draft is accepted if it
        is that token. With them it is accepted with probability min(1, p / q), and a rejected one is replaced by a
        draw from max(p - q, 0) normalised (Leviathan et al. 2023).

        Args:
            proposal: K drafts.
            logits_NV: the target's logits of the N = K + 1 block positions.
        """
        drawn_from_KV = proposal.distribution(logits_NV.shape[-1])
        if drawn_from_KV is not None and not self.sampling.is_greedy:
            return self._reject(proposal.drafts_K, drawn_from_KV, self.probs(logits_NV))
        own_N = self.pick(logits_NV)
        joined = torch.cat([own_N, proposal.drafts_K.to(own_N.device)]).tolist()  # one wait for the device
        return agreed(joined[: own_N.shape[0]], joined[own_N.shape[0] :])

    def _reject(self, drafts_K: torch.Tensor, q_KV: torch.Tensor, p_NV: torch.Tensor) -> list[int]:
        n_drafts = drafts_K.shape[0]
        p_K = p_NV[:n_drafts].gather(-1, drafts_K[:, None])[:, 0]
        q_K = q_KV.gather(-1, drafts_K[:, None])[:, 0]
        chance_K = torch.rand(n_drafts, generator=self._generator, device=p_NV.device)
        n_accepted = int((chance_K * q_K < p_K).long().cumprod(dim=0).sum())
        last_V = p_NV[n_accepted]
        if n_accepted < n_drafts:
            residual_V = (last_V - q_KV[n_accepted]).clamp_min(0.0)
            # p == q up to rounding leaves nothing; p itself is then the right distribution.
            last_V = torch.where(residual_V.sum() > 0, residual_V, last_V)
        return [*drafts_K[:n_accepted].tolist(), int(self.draw(last_V[None]))]


def agreed(own: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Tokens to commit: the leading drafts that are the target's own choice, then one more of its own.

    Args:
        own: the target's token behind the root and behind each draft.
    """
    n_accepted = next((k for k, draft in enumerate(drafts) if draft != own[k]), len(drafts))
    return list(own[: n_accepted + 1])
