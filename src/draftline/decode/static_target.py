"""The target's verifying forward with static shapes: buffers instead of a growing cache, one function a size.

A forward of N tokens is filled up to the next prepared width, and attention reads the columns up to the next prepared
length; a mask hides the rest. What a round computes depends on its tokens; of the context it reads keys and values.

Shape letters: N tokens of a forward, V vocabulary, F tap features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from draftline.decode.batch import require_rows
from draftline.decode.buffers import KeyValueBuffers, Masks, Place, RowForward, check_buffer_memory, lay_out
from draftline.decode.generation import device_clock
from draftline.decode.memory import free_bytes
from draftline.decode.static_call import Outputs, StaticCall, StaticCompiler, column_stops, smallest_fit
from draftline.decode.steps import Forwarded, Tokens, TreeLayout
from draftline.decode.target_session import slices_logits
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


class StaticTarget:
    """Buffers and prepared forwards for one prompt at a time. Close it (or use `with`): it hooks the target's layers.

    Args:
        target: the frozen model.
        columns: longest text with the drafts of its last round.
        compiler: of the target's device.

    Raises:
        UserError: a target with recurrent layers or without mask support, or too little memory.
    """

    def __init__(self, target: LoadedTarget, columns: int, compiler: StaticCompiler) -> None:
        cache = require_rows(target)
        _refuse_changing_rope(target)
        check_buffer_memory(target, 1, columns, free_bytes(target.device))
        self.target, self.columns = target, columns
        self.stops = column_stops(columns)
        self._windows = cache.windows
        self._buffers = KeyValueBuffers(len(cache.hf.layers), 1, columns, target.device)
        self._compiler = compiler
        self._calls: dict[tuple[tuple[int, ...], int, int], tuple[StaticCall, Place]] = {}
        self._slices_logits = slices_logits(target)
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks: dict[int, Any] = {}

    def __enter__(self) -> StaticTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the hooks off the target."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._seen.clear()

    def session(self, taps: Sequence[int] = (), widths: Sequence[int] = (1,)) -> StaticSession:
        """A new text in the one row; the session before it ends.

        Args:
            taps: 0-based decoder layers whose outputs are returned with each forward.
            widths: numbers of tokens to prepare forwards for, rising.
        """
        for tap in taps:
            if tap not in self._hooks:
                self._hooks[tap] = self.target.layers[tap].register_forward_hook(self._hook(tap))
        return StaticSession(self, tuple(taps), tuple(widths))

    @torch.inference_mode()
    def warm(self, taps: Sequence[int], widths: Sequence[int]) -> None:
        """Compiles and captures every size, so that none is when time is taken."""
        session = self.session(taps, widths)
        session.prefill([0])
        for width in widths:
            for stop in self.stops:
                # As if behind a text of that length: what is read there does not matter. All positions are 0: drafts
                # take columns behind the longest text, for which a table of learned positions has no rows.
                session.length = max(1, stop - width)
                ids_N = torch.zeros(width, dtype=torch.long, device=self.target.device)
                own_NN = torch.eye(width, dtype=torch.bool)
                session.extend(ids_N, TreeLayout(torch.full((width,), -session.length), own_NN))
                session.commit(0)

    @torch.inference_mode()
    def run_prompt(self, ids_N: torch.Tensor, taps: tuple[int, ...]) -> Forwarded:
        """Runs a prompt of any length, not compiled."""
        n_tokens = ids_N.shape[0]
        inputs = lay_out(
            [RowForward(Tokens((), ids_N), 0)],
            self._windows,
            width=n_tokens,
            stop=n_tokens,
            spare=self.columns,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        self._buffers.place = Place(None, inputs.columns_BN, n_tokens)
        options = {"logits_to_keep": 1} if self._slices_logits else {}
        outputs = self._forward(inputs.ids_BN, inputs.positions_BN, inputs.masks, taps, options)
        return outputs[0][0], outputs[1][0] if taps else None

    @torch.inference_mode()
    def run(self, row: RowForward, taps: tuple[int, ...], widths: tuple[int, ...]) -> Forwarded:
        """Runs tokens behind the text in the row, in the prepared form of the next width and length."""
        n_tokens = len(row.tokens)
        width = smallest_fit(widths, n_tokens)
        stop = smallest_fit(self.stops, row.length + n_tokens)
        inputs = lay_out(
            [row],
            self._windows,
            width=width,
            stop=stop,
            spare=self.columns,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        masks = list(inputs.masks.values()) if isinstance(inputs.masks, dict) else [inputs.masks]
        values = [inputs.ids_BN, inputs.positions_BN, inputs.columns_BN, *masks]
        if (taps, width, stop) not in self._calls:
            kinds = tuple(inputs.masks) if isinstance(inputs.masks, dict) else None
            self._calls[taps, width, stop] = self._prepare(values, kinds, taps, stop)
        call, self._buffers.place = self._calls[taps, width, stop]
        outputs = call(*values)
        return outputs[0][0, width - n_tokens :], outputs[1][0, width - n_tokens :] if taps else None

    @torch.inference_mode()
    def move_path(self, first: int, path: Sequence[int]) -> None:
        """Moves the columns first + path together, to first, first + 1, ..."""
        device = self.target.device
        source_1P = first + torch.tensor([list(path)], device=device)
        aim_1P = first + torch.arange(len(path), device=device)[None]
        self._buffers.move(self._buffers.all_rows, source_1P, aim_1P)

    def _prepare(
        self, values: Sequence[torch.Tensor], kinds: tuple[str, ...] | None, taps: tuple[int, ...], stop: int
    ) -> tuple[StaticCall, Place]:
        def verify(ids_BN: torch.Tensor, positions_BN: torch.Tensor, _columns: torch.Tensor, *masks: Any) -> Outputs:
            by_kind: Masks = masks[0] if kinds is None else dict(zip(kinds, masks, strict=True))
            return self._forward(ids_BN, positions_BN, by_kind, taps, {})

        call = self._compiler.prepare(verify, [value.clone() for value in values])
        return call, Place(None, call.inputs[2], stop)

    def _forward(
        self,
        ids_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        masks: Masks,
        taps: tuple[int, ...],
        options: dict[str, Any],
    ) -> Outputs:
        """Logits [B, N, V], and tap features [B, N, F] if there are taps."""
        output = self.target.model(
            input_ids=ids_BN,
            position_ids=positions_BN,
            attention_mask=masks,
            past_key_values=self._buffers.hf,
            use_cache=True,
            **options,
        )
        if not taps:
            return (output.logits,)
        return output.logits, torch.cat([self._seen[tap] for tap in taps], dim=-1)

    def _hook(self, tap: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._seen[tap] = output[0] if isinstance(output, tuple) else output

        return hook


class StaticSession:
    """Decoding state of one prompt; see `steps.SoloSession`. Made by `StaticTarget.session`."""

    def __init__(self, owner: StaticTarget, taps: tuple[int, ...], widths: tuple[int, ...]) -> None:
        self.n_forwards = self.n_replays = self.length = 0
        self.target = owner.target
        self.clock = device_clock(owner.target.device)
        self._owner, self._taps, self._widths = owner, taps, widths

    def refuse_tree(self) -> None:
        """Static forwards verify trees as well as lines."""

    def prefill(self, ids: Sequence[int]) -> Forwarded:
        """Run the prompt: logits [V] of its last token, taps of all of it."""
        ids_N = torch.as_tensor(ids, dtype=torch.long, device=self.target.device)
        logits_NV, taps_NF = self._owner.run_prompt(ids_N, self._taps)
        self.length = len(ids)
        return logits_NV[-1], taps_NF

    def extend(self, ids_N: torch.Tensor, tree: TreeLayout | None = None) -> Forwarded:
        """Run a line or a tree of N tokens: logits [N, V] and taps of each."""
        self.n_forwards += 1
        return self._owner.run(RowForward(Tokens((), ids_N), self.length, tree), self._taps, self._widths)

    def commit(self, n_kept: int) -> None:
        """Keep the first `n_kept` tokens of the last forward."""
        self.length += n_kept

    def commit_path(self, path: Sequence[int]) -> None:
        """Keep the nodes of a path through the last forward's tree, root first."""
        if list(path) != list(range(len(path))):
            self._owner.move_path(self.length, path)
        self.length += len(path)


def _refuse_changing_rope(target: LoadedTarget) -> None:
    if target.facts.rope_changes_at is not None:
        raise UserError(
            "the target chooses its rotary frequencies by the text's length, which a captured forward cannot",
            where="decode",
            mend="decode without --compile",
        )
