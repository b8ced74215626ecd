"""One prompt inside the target: forwards with a key/value cache, tap features by hook, commit and roll-back.

Shape letters: N tokens of a forward, V vocabulary, L taps, F = L * hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from draftline.decode.cache import RollbackCache
from draftline.decode.generation import device_clock
from draftline.decode.steps import TreeLayout
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


class TargetSession:
    """Decoding state of one prompt. Use: `prefill`, then rounds of `extend` and one of `commit`, `commit_path`.

    Args:
        target: the frozen model.
        taps: 0-based decoder layers whose outputs are returned with each forward.

    Attributes:
        n_forwards: verifying or extending forwards so far, the prefill not counted.
        n_replays: forwards spent on replaying accepted prefixes through recurrent layers.
    """

    def __init__(self, target: LoadedTarget, taps: Sequence[int] = ()) -> None:
        self.cache = RollbackCache(target)
        self.n_forwards = 0
        self.n_replays = 0
        self.target = target
        self.clock = device_clock(target.device)
        self._taps = tuple(taps)
        self._appended_N: torch.Tensor | None = None
        self._snapshot: list[Any] = []
        self._slices_logits = slices_logits(target)

    @property
    def length(self) -> int:
        """Tokens in the cache that are committed."""
        return self.cache.length

    def prefill(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the prompt and commits it.

        Returns:
            Logits [V] behind the last prompt token, and tap features [N, F] of all prompt tokens (None without taps).
        """
        ids_N = torch.as_tensor(ids, dtype=torch.long, device=self.target.device)
        logits_NV, taps_NF = self._forward(ids_N, last_only=True)
        self.cache.require_use()
        self.cache.keep(len(ids), len(ids))
        return logits_NV[-1], taps_NF

    def extend(self, ids_N: torch.Tensor, tree: TreeLayout | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs tokens behind the committed ones without committing them.

        Returns:
            Logits [N, V] and tap features [N, F] (None without taps).
        """
        if tree is not None:
            self.refuse_tree()
            tree = tree.to(self.target.device)
        if self.cache.is_recurrent and ids_N.shape[0] > 1:
            _require_carried_state(self.target)
        self._snapshot = self.cache.snapshot()
        self._appended_N = ids_N
        self.n_forwards += 1
        return self._forward(ids_N, tree=tree)

    def commit(self, n_kept: int) -> None:
        """Keeps the first `n_kept` tokens of the last `extend`; the others leave no trace."""
        ids_N = self._take_appended()
        n_appended = ids_N.shape[0]
        if not self.cache.is_recurrent or n_kept == n_appended:
            self.cache.keep(n_appended, n_kept)
            return
        self.cache.restore(self._snapshot, n_appended)
        if n_kept:
            self.n_replays += 1
            self._forward(ids_N[:n_kept], last_only=True)
        self.cache.keep(n_kept, n_kept)

    def commit_path(self, path: Sequence[int]) -> None:
        """Keeps the tokens of index `path` (rising) of the last `extend`, in that order."""
        self.cache.keep_path(self._take_appended().shape[0], path)

    def refuse_tree(self) -> None:
        """Raises UserError if this target cannot verify a tree in one forward."""
        if self.cache.is_recurrent:
            raise UserError(
                "the target has recurrent layers, so a tree cannot be verified in one forward",
                where="decode",
                mend="use chain decoding, or the tree replayed along the target's own output (evaluate does so)",
            )
        require_masks(self.target, "an ancestor mask", mend="use chain decoding")

    def _take_appended(self) -> torch.Tensor:
        assert self._appended_N is not None, "commit without extend"
        ids_N, self._appended_N = self._appended_N, None
        return ids_N

    def _forward(
        self, ids_N: torch.Tensor, *, last_only: bool = False, tree: TreeLayout | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        steps_N = torch.arange(ids_N.shape[0], device=ids_N.device) if tree is None else tree.depths_N
        options: dict[str, Any] = {}
        if last_only and self._slices_logits:
            options["logits_to_keep"] = 1
        if tree is not None:
            options["attention_mask"] = self._tree_masks(tree)
        with tapped(self.target, self._taps) as captured:
            output = self.target.model(
                input_ids=ids_N[None],
                position_ids=(steps_N + self.length)[None],
                past_key_values=self.cache.hf,
                use_cache=True,
                **options,
            )
        taps_NF = torch.cat([captured[tap][0] for tap in self._taps], dim=-1) if self._taps else None
        return output.logits[0], taps_NF

    def _tree_masks(self, tree: TreeLayout) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [1, 1, N, past + N]: one for all layers, or one a layer type where they differ."""
        windows = set(self.cache.windows)
        if len(windows) == 1:
            return self._tree_mask(tree, windows.pop())
        sliding = sorted(window for window in windows if window is not None)
        if len(sliding) > 1:
            raise UserError(f"the target mixes sliding windows {sliding}", where="decode", mend="use chain decoding")
        return {
            "full_attention": self._tree_mask(tree, None),
            "sliding_attention": self._tree_mask(tree, sliding[0]),
        }

    def _tree_mask(self, tree: TreeLayout, window: int | None) -> torch.Tensor:
        device, dtype = self.target.device, self.target.dtype
        n_past = self.length if window is None else min(self.length, window - 1)
        visible = torch.ones((tree.depths_N.shape[0], n_past), dtype=torch.bool, device=device)
        square = tree.visible_NN
        if window is not None:
            # Distances in the sequence: past tokens lie before the root, and the root is at depth 0.
            behind = torch.arange(n_past, 0, -1, device=device)
            visible = tree.depths_N[:, None] + behind[None, :] < window
            square = square & (tree.depths_N[:, None] - tree.depths_N[None, :] < window)
        allowed = torch.cat([visible, square], dim=1)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]


def slices_logits(target: LoadedTarget) -> bool:
    """True if the model can be asked for the logits of the last positions only."""
    return "logits_to_keep" in inspect.signature(target.model.forward).parameters


def _require_carried_state(target: LoadedTarget) -> None:
    if not target.carries_state_through_blocks:
        raise UserError(
            f"{target.facts.model_type} forgets its recurrent state where several tokens follow at once, so a block "
            "cannot be verified",
            where="decode",
            mend="use plain, and tree@N counted along its text",
        )


def require_masks(target: LoadedTarget, what: str, *, mend: str) -> None:
    """Raises UserError if `what`, a mask of our own making, cannot be given to this target's layers."""
    kinds = set(getattr(target.text_config, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"the target has layers of kind {', '.join(unknown)}, for which {what} is not known",
            where="decode",
            mend=mend,
        )
    if _counts_distance_in_columns(target):
        raise UserError(
            f"the target ({target.facts.model_type}) weighs keys by their place in the cache (ALiBi), for which {what} "
            "is not known",
            where="decode",
            mend=mend,
        )
    if target.attention not in ("sdpa", "eager"):
        raise UserError(
            f"attention backend {target.attention} does not take {what}",
            where="target.attention",
            mend="use sdpa or eager",
        )


def _counts_distance_in_columns(target: LoadedTarget) -> bool:
    """True for attention biases by distance (ALiBi): siblings of a tree share a position, but not a column."""
    text = target.text_config
    own = getattr(text, "attn_config", None)
    return text.model_type == "bloom" or bool(getattr(text, "alibi", False)) or bool(getattr(own, "alibi", False))


@contextmanager
def tapped(target: LoadedTarget, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Hooks the tap layers while it is open, and holds the newest outputs [batch, N, hidden] of each."""
    captured: dict[int, torch.Tensor] = {}

    def hook_for(tap: int) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            captured[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [target.layers[tap].register_forward_hook(hook_for(tap)) for tap in taps]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
