"""Rows out of states that were computed elsewhere, and the proof that they are what the drafter takes them for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from draftline.errors import RunFailedError, UserError
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.capture import SampleLike, assemble_row
from draftline.target.conventions import CaptureOrder
from draftline.target.remote.clients import CapturedStates, StatesClient
from draftline.target.selftest import head_logits
from draftline.target.states.stored_target import StoredTarget

# Of a log-probability, between two implementations: rounding of the whole model, not of one operation.
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.1}


class RemoteCapture:
    """Same contract as TargetCapture; the target runs elsewhere. One for each worker thread.

    Args:
        client: gives the states of one sample; shared.
        target: what is borrowed, on the device where rows are wanted.
        order: which layers a payload holds, and which of them are taps.
        concurrent: samples of a row that are asked for at once.
    """

    def __init__(
        self, client: StatesClient, target: StoredTarget, order: CaptureOrder, *, want_final: bool, concurrent: int
    ) -> None:
        self._client, self._order, self._concurrent = client, order, concurrent
        self.target, self.want_final, self.taps = target, want_final, order.taps
        if want_final:
            order.require_final()

    def capture(self, planned: PlannedRow, samples: Sequence[SampleLike]) -> HiddenStateRow:
        """Hidden states of a row, on the target's device.

        Raises:
            RunFailedError: the client cannot give them, or they do not fit the order.
        """
        if sum(len(s.input_ids) for s in samples) != planned.n_tokens:
            raise RunFailedError(f"row {planned.row_id} is planned otherwise than its samples", origin="target capture")
        with ThreadPoolExecutor(min(self._concurrent, len(samples)), thread_name_prefix="target-request-") as pool:
            states = list(pool.map(lambda s: self._client.fetch([int(i) for i in s.input_ids]), samples))
        parts = [self.split(state) for state in states]
        taps_TF = torch.cat([taps for taps, _ in parts])
        finals = [final for _, final in parts if final is not None] if self.want_final else []
        return assemble_row(planned, samples, taps_TF, torch.cat(finals) if finals else None, taps=self.taps)

    def split(self, state: CapturedStates) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Taps [T, F] and last hidden state [T, H], after the final norm, in the target's dtype and on its device.

        Raises:
            RunFailedError: states of another hidden size than the target's.
        """
        hidden_TLH = state.hidden_TLH.to(device=self.target.device, dtype=self.target.dtype)
        hidden_size = self.target.embedding.weight_VH.shape[1]
        if hidden_TLH.shape[-1] != hidden_size:
            what = f"states of {hidden_TLH.shape[-1]} numbers a layer, the target's hidden size is {hidden_size}"
            raise RunFailedError(what, origin=self._client.origin)
        taps_TF, before_norm_TH = self._order.split(hidden_TLH)
        if before_norm_TH is None or self.target.final_norm is None:
            return taps_TF, before_norm_TH
        with torch.no_grad():
            return taps_TF, self.target.final_norm(before_norm_TH)

    def assemble(
        self,
        planned: PlannedRow,
        samples: Sequence[SampleLike],
        taps_TF: torch.Tensor,
        final_TH: torch.Tensor | None,
    ) -> HiddenStateRow:
        """A row from states kept earlier; see TargetCapture."""
        return assemble_row(planned, samples, taps_TF, final_TH, taps=self.taps)


@dataclass(frozen=True, slots=True)
class RemoteReport:
    """What the proof found; errors raise.

    Attributes:
        logprob_errors: of the server's own next tokens; empty if nothing could be compared.
    """

    origin: str
    samples: int
    logprob_errors: tuple[float, ...]
    notes: tuple[str, ...]

    def line(self) -> str:
        """One line for the log."""
        if not self.logprob_errors:
            return f"states from {self.origin}: {self.samples} samples are finite, vary, and differ between taps"
        worst = max(self.logprob_errors)
        return f"states from {self.origin}: {self.samples} samples, next token's log-probability within {worst:.1e}"


def prove_remote(capture: RemoteCapture, client: StatesClient, samples: Sequence[SampleLike]) -> RemoteReport:
    """Refuses states that cannot be those of this target.

    With a server, our head on its last state must give the log-probability that it gives its own next token: one layer
    early, or a norm too few or too many, differs by far more than rounding. Tap layers in between cannot be told apart
    from outside; that they are the right ones rests on `aux_layer_ids` being what the server was started with.

    Raises:
        RunFailedError: names the layer, or both log-probabilities.
    """
    errors: list[float] = []
    for sample in samples:
        state = client.fetch([int(i) for i in sample.input_ids])
        taps_TF, final_TH = capture.split(state)
        _check_health(taps_TF, final_TH, capture.taps, client.origin)
        if final_TH is not None and state.next_token is not None and state.next_logprob is not None:
            logits_V = head_logits(capture.target.head, final_TH[-1:])[0]
            if state.next_token >= len(logits_V):
                what = f"the server writes token {state.next_token}, the target knows {len(logits_V)}"
                raise RunFailedError(what, origin=client.origin)
            ours = float(torch.log_softmax(logits_V.float(), dim=-1)[state.next_token])
            errors.append(abs(ours - state.next_logprob))
            if not errors[-1] <= _TOLERANCE[capture.target.dtype]:
                raise RunFailedError(
                    f"the head gives token {state.next_token} a log-probability of {ours:.3f}, the server "
                    f"{state.next_logprob:.3f}: the last captured layer is another, or its final norm was applied",
                    origin=client.origin,
                )
    notes = () if errors else ("the last hidden state could not be compared with what the target writes",)
    return RemoteReport(client.origin, len(samples), tuple(errors), notes)


def _check_health(taps_TF: torch.Tensor, final_TH: torch.Tensor | None, taps: tuple[int, ...], origin: str) -> None:
    layers = list(taps_TF.chunk(len(taps), dim=-1))
    names = [f"layer {tap}" for tap in taps]
    if final_TH is not None:
        layers, names = [*layers, final_TH], [*names, "the last hidden state"]
    for name, state_TH in zip(names, layers, strict=True):
        values = state_TH.float()
        if not bool(torch.isfinite(values).all()):
            raise RunFailedError(f"{name} is not finite", origin=origin)
        if float(values.pow(2).mean(-1).min()) == 0.0:
            raise RunFailedError(f"{name} is all zero at a position", origin=origin)
        if len(values) > 1 and float((values - values.mean(0)).norm() / values.norm()) < 1e-3:
            raise RunFailedError(f"{name} hardly varies over positions", origin=origin)
    for first, second, a, b in zip(names, names[1:], layers, layers[1:], strict=False):
        if torch.equal(a, b):
            raise RunFailedError(f"{first} and {second} are the same numbers", origin=origin)


def require_layers(order: CaptureOrder, client: StatesClient, samples: Sequence[SampleLike]) -> None:
    """Refuses (UserError) a payload that holds another number of layers than `aux_layer_ids` names."""
    found = client.fetch([int(i) for i in samples[0].input_ids]).hidden_TLH.shape[1]
    if found != len(order.aux_ids):
        raise UserError(
            f"names {len(order.aux_ids)} layers, {client.origin} gives {found}",
            where="target.backend.aux_layer_ids",
            mend="give the ids that it was captured with, in their order",
        )
