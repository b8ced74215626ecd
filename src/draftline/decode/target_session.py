"""One prompt inside the target: forwards with a key/value cache, tap features by hook, commit and roll-back.

Shape letters: N tokens of a forward, V vocabulary, L taps, F = L * hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from draftline.decode.cache import RollbackCache
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """How the tokens of one forward hang together: token 0 is the root, the others are drafts below it.

    Attributes:
        depths_N: distance from the root; the position of token i is the root's plus its depth.
        visible_NN: True where token i may see token j: its ancestors and itself.
    """

    depths_N: torch.Tensor
    visible_NN: torch.Tensor


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
        self._target = target
        self._taps = tuple(taps)
        self._appended_N: torch.Tensor | None = None
        self._snapshot: list[Any] = []
        self._slices_logits = "logits_to_keep" in inspect.signature(target.model.forward).parameters

    @property
    def length(self) -> int:
        """Tokens in the cache that are committed."""
        return self.cache.length

    def prefill(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the prompt and commits it.

        Returns:
            Logits [V] behind the last prompt token, and tap features [N, F] of all prompt tokens (None without taps).
        """
        ids_N = torch.as_tensor(ids, dtype=torch.long, device=self._target.device)
        logits_NV, taps_NF = self._forward(ids_N, last_only=True)
        self.cache.keep(len(ids), len(ids))
        return logits_NV[-1], taps_NF

    def extend(self, ids_N: torch.Tensor, tree: TreeLayout | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs tokens behind the committed ones without committing them.

        Returns:
            Logits [N, V] and tap features [N, F] (None without taps).
        """
        if tree is not None:
            self.refuse_tree()
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
        kinds = set(getattr(self._target.text_config, "layer_types", None) or ())
        unknown = sorted(kinds - {"full_attention", "sliding_attention"})
        if unknown:
            raise UserError(
                f"the target has layers of kind {', '.join(unknown)}, for which no ancestor mask is known",
                where="decode",
                mend="use chain decoding",
            )
        if self._target.attention not in ("sdpa", "eager"):
            raise UserError(
                f"attention backend {self._target.attention} takes no ancestor mask",
                where="target.attention",
                mend="use sdpa or eager",
            )

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
        with self._tapped() as captured:
            output = self._target.model(
                input_ids=ids_N[None],
                position_ids=(steps_N + self.length)[None],
                past_key_values=self.cache.hf,
                use_cache=True,
                **options,
            )
        taps_NF = torch.cat([captured[tap] for tap in self._taps], dim=-1) if self._taps else None
        return output.logits[0], taps_NF

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, torch.Tensor]]:
        """Hooks the tap layers for one forward and collects their outputs [N, hidden]."""
        captured: dict[int, torch.Tensor] = {}

        def hook_for(tap: int) -> Any:
            def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                captured[tap] = hidden[0]

            return hook

        handles = [self._target.layers[tap].register_forward_hook(hook_for(tap)) for tap in self._taps]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

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
        device, dtype = self._target.device, self._target.dtype
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
