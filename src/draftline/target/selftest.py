"""The target proves itself before the first row: what is captured is what the model computes.

Checked on a few random token sequences, each against the model's own forward of that sequence alone:

    embedding   scale * row equals what enters the first layer
    head        the borrowed head on the model's last hidden state gives back the model's logits, best token and all
    final       the captured last hidden state is the model's, after the final norm
    taps        each captured layer is hidden_states[tap + 1] of the model
    health      no state is non-finite or zero, and each varies over positions
    isolation   with another first sample in the row, the others keep their states
    layout      the whole row equals each sample alone, also with `target.fused_norms`; a layout that does not prove
                itself falls back to the next

Errors are relative, |a - b| / |b| of a token's vector: the largest over tokens in fp32; in 16 bits the median, since a
rounding that sends one token to another expert makes it differ without anything being wrong. A state one layer off
differs from the right one by some 0.05 to 0.3, a missing norm by about 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from draftline.errors import RunFailedError, UserError
from draftline.records import FrozenHead, HiddenStateRow, PlannedRow
from draftline.target.capture import CaptureLayout, SampleLike, TargetCapture, fallback_layouts, natural_layout
from draftline.target.facts import first_line
from draftline.target.fused_norms import count_fused, with_fused_norms
from draftline.target.load import LoadedTarget

_LENGTHS = (24, 9, 31, 14)
_SEED = 20


class CaptureBackend(Protocol):
    """Whatever captures hidden states: this process, a server, files."""

    def capture(self, planned: PlannedRow, samples: Sequence[SampleLike]) -> HiddenStateRow:
        """Hidden states of a planned row, whose samples come in its order."""


MakeCapture = Callable[[LoadedTarget, tuple[int, ...], CaptureLayout], CaptureBackend]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed relative errors. `exact`: the same arithmetic twice; `layout`: other kernels, other batches."""

    exact: float
    layout: float


# bf16 keeps 8 bits: one rounding is 0.4 %, and layers add theirs up when kernels differ (0.04 after 34 layers of
# hidden size 4096; samples that see each other differ by 1.3 there).
_TOLERANCES = {
    torch.float32: Tolerance(exact=1e-5, layout=1e-3),
    torch.bfloat16: Tolerance(exact=1e-2, layout=0.15),
    torch.float16: Tolerance(exact=2e-3, layout=5e-2),
}


@dataclass(frozen=True)
class SelfTestReport:
    """The numbers of a self-test that passed. Errors are relative; see the module's text.

    Attributes:
        layout: how samples are kept apart; pass it to TargetCapture.
        head_top1: share of positions where the borrowed head picks the model's own best token.
        tap_errors, tap_rms: one a tapped layer.
        notes: what the user should know, for example a fall-back.
    """

    device: str
    dtype: str
    attention: str
    layout: CaptureLayout
    embedding_error: float
    head_error: float
    head_top1: float
    final_error: float
    tap_errors: dict[int, float]
    tap_rms: dict[int, float]
    isolation_error: float
    layout_error: float
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for the log."""
        worst = max(self.tap_errors.values())
        return (
            f"target self-test on {self.device} ({self.dtype}, {self.attention}, {self.layout}): "
            f"head {self.head_error:.1e}, top-1 {self.head_top1:.0%}, final {self.final_error:.1e}, taps {worst:.1e}, "
            f"isolation {self.isolation_error:.1e}, {self.layout} against alone {self.layout_error:.1e}"
        )


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """A sample made up for the test."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True, slots=True)
class _Truth:
    """What the model itself computes for one sample alone: hidden_states[0..N] as [T, H] each, and logits [T, V]."""

    hidden: tuple[torch.Tensor, ...]
    logits_TV: torch.Tensor


@dataclass
class _Checker:
    """Collects what is needed to raise an error that names device, layer and value."""

    target: LoadedTarget
    tolerance: Tolerance
    notes: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> RunFailedError:
        return RunFailedError(f"self-test: {reason}", origin=f"target on {self.target.device}")

    def within(self, what: str, error: float, limit: float, hint: str) -> float:
        if not error <= limit:  # also catches NaN
            raise self.fail(f"{what} differs from the model's own by {error:.3g} (allowed {limit:.0e}); {hint}")
        return error


def self_test(
    target: LoadedTarget, taps: tuple[int, ...], *, make_capture: MakeCapture | None = None
) -> SelfTestReport:
    """Prove a target's capture, head and embedding against the model's own forward.

    Args:
        taps: 0-based layer ids that will be captured.
        make_capture: builds the capture under test (with final hidden states); None: TargetCapture.

    Raises:
        RunFailedError: something differs, with the layer and the value.
        UserError: bad taps, or an embedding or head that a drafter cannot borrow.
    """
    make = make_capture or _make_capture
    tolerance = _TOLERANCES.get(target.dtype)
    if tolerance is None:
        raise UserError(f"no self-test for a target in {target.dtype}", mend="set target.dtype")
    checker = _Checker(target, tolerance)
    if target.config.fused_norms and make_capture is None:
        fused = count_fused(with_fused_norms(target.decoder))
        checker.notes.append(f"target.fused_norms: {fused or 'no'} norms of this target can run in one kernel each")
    samples = probe_samples(target.facts.vocab_size)
    truths = [_model_truth(target, sample) for sample in samples]
    embedding_error = _check_embedding(checker, samples, truths)
    head_error, head_top1 = _check_head(checker, truths)
    exact = make_capture or _make_exact_capture
    alone = [exact(target, taps, "single").capture(_row([s]), [s]) for s in samples]
    tap_errors, tap_rms = _check_taps(checker, taps, alone, truths)
    final_error = _check_final(checker, alone, truths)
    layout, isolation_error, layout_error = _settle_layout(checker, make, taps, samples, alone)
    return SelfTestReport(
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        attention=target.attention,
        layout=layout,
        embedding_error=embedding_error,
        head_error=head_error,
        head_top1=head_top1,
        final_error=final_error,
        tap_errors=tap_errors,
        tap_rms=tap_rms,
        isolation_error=isolation_error,
        layout_error=layout_error,
        notes=tuple(checker.notes),
    )


def probe_samples(vocab_size: int) -> list[ProbeSample]:
    """Random samples of unlike lengths, all supervised."""
    rng = np.random.default_rng(_SEED)
    return [_probe(f"probe-{i}", rng.integers(0, vocab_size, n)) for i, n in enumerate(_LENGTHS)]


def head_logits(head: FrozenHead, hidden_TH: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of the borrowed head, in the weights' dtype, in the order of the model's own operations."""
    logits_TV = F.linear(hidden_TH, head.weight_VH, head.bias_V) * head.multiplier
    return logits_TV if head.softcap is None else head.softcap * torch.tanh(logits_TV / head.softcap)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over the last dimension; see the module's text. Infinite if shapes differ or a value is
    not finite. States of several layers [T, layers, H] give the worst layer's error."""
    if got.shape != want.shape:
        return float("inf")
    error = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-30)
    over_tokens = error.amax(0) if got.dtype == torch.float32 else error.median(0).values
    worst = float(over_tokens.max())
    return worst if bool(torch.isfinite(error).all()) else float("inf")


def _make_capture(target: LoadedTarget, taps: tuple[int, ...], layout: CaptureLayout) -> CaptureBackend:
    return TargetCapture(target, taps, want_final=True, layout=layout)


def _make_exact_capture(target: LoadedTarget, taps: tuple[int, ...], layout: CaptureLayout) -> CaptureBackend:
    """In the model's own arithmetic, whatever kernels the rows are captured with."""
    return TargetCapture(target, taps, want_final=True, layout=layout, fused_norms=False)


def _probe(sample_id: str, ids: np.ndarray) -> ProbeSample:
    return ProbeSample(sample_id, ids.astype(np.int32), np.ones(len(ids), dtype=np.bool_))


def _row(samples: Sequence[SampleLike]) -> PlannedRow:
    tokens = sum(len(s.input_ids) for s in samples)
    return PlannedRow(0, 0, tuple(range(len(samples))), tokens, tokens)


def _model_truth(target: LoadedTarget, sample: ProbeSample) -> _Truth:
    ids = torch.from_numpy(sample.input_ids.astype(np.int64)).to(target.device)[None]
    with torch.no_grad():
        output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    hidden = tuple(h[0] for h in output.hidden_states)
    if len(hidden) != target.num_layers + 1:
        raise RunFailedError(
            f"self-test: the model gives {len(hidden)} hidden states for {target.num_layers} layers",
            origin=f"target on {target.device}",
        )
    return _Truth(hidden, output.logits[0])


def _check_embedding(checker: _Checker, samples: Sequence[ProbeSample], truths: Sequence[_Truth]) -> float:
    """What enters layer 0, less what a drafter would look up: nothing, or the same at the same position (learned
    positions, which are the target's own affair)."""
    target, added = checker.target, []
    worst = 0.0
    for sample, truth in zip(samples, truths, strict=True):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64)).to(target.device)
        looked_up_TH = target.embedding.weight_VH[ids] * target.embedding.scale
        worst = max(worst, relative_error(looked_up_TH, truth.hidden[0]))
        added.append((truth.hidden[0] - looked_up_TH).float())
    if worst <= checker.tolerance.exact:
        return worst
    common = min(len(a) for a in added)
    if max(relative_error(a[:common], added[0][:common]) for a in added[1:]) <= 10 * checker.tolerance.exact:
        checker.notes.append("the target adds learned positions to its embedding; the drafter gets the rows alone")
        return 0.0
    raise UserError(
        f"the target's input is not its embedding row times {target.embedding.scale:g} (off by {worst:.3g})",
        mend="a drafter cannot borrow this target's embedding",
    )


def _check_head(checker: _Checker, truths: Sequence[_Truth]) -> tuple[float, float]:
    error, agreed, total = 0.0, 0, 0
    for truth in truths:
        logits_TV = head_logits(checker.target.head, truth.hidden[-1])
        error = max(error, relative_error(logits_TV, truth.logits_TV))
        agreed += int((logits_TV.argmax(-1) == truth.logits_TV.argmax(-1)).sum())
        total += len(logits_TV)
    hint = "the last hidden state is before the final norm, or the head has a scale or cap that is not known"
    checker.within("the head's logits", error, checker.tolerance.exact, hint)
    if agreed != total and checker.target.dtype == torch.float32:
        raise checker.fail(f"the head picks the model's best token at {agreed} of {total} positions, not at all")
    return error, agreed / total


def _check_taps(
    checker: _Checker, taps: tuple[int, ...], alone: Sequence[HiddenStateRow], truths: Sequence[_Truth]
) -> tuple[dict[int, float], dict[int, float]]:
    errors: dict[int, float] = {}
    rms: dict[int, float] = {}
    for index, tap in enumerate(taps):
        got = [_tap(row, index, checker.target.hidden_size) for row in alone]
        rms[tap] = _check_health(checker, f"layer {tap}", got)
        want = [truth.hidden[tap + 1] for truth in truths]
        error = max(relative_error(g, w) for g, w in zip(got, want, strict=True))
        errors[tap] = checker.within(f"layer {tap}", error, checker.tolerance.exact, _nearest(got, truths, tap))
    return errors, rms


def _check_health(checker: _Checker, what: str, states: Sequence[torch.Tensor]) -> float:
    """RMS of the states; refuses what is not finite, zero, or the same at all positions."""
    for state_TH in states:
        values = state_TH.float()
        if not bool(torch.isfinite(values).all()):
            raise checker.fail(f"{what} has {int((~torch.isfinite(values)).sum())} values that are not finite")
        rms_T = values.pow(2).mean(-1).sqrt()
        if float(rms_T.min()) == 0.0:
            raise checker.fail(f"{what} is all zero at {int((rms_T == 0).sum())} of {len(rms_T)} positions")
        spread = float((values - values.mean(0)).norm() / values.norm())
        if spread < 1e-3:
            raise checker.fail(f"{what} hardly varies over positions (relative spread {spread:.1e})")
    return float(torch.cat([s.float().flatten() for s in states]).pow(2).mean().sqrt())


def _check_final(checker: _Checker, alone: Sequence[HiddenStateRow], truths: Sequence[_Truth]) -> float:
    finals = []
    for row in alone:
        if row.final_hidden_TH is None or row.final_hidden_norm != "post":
            raise checker.fail("the capture gave no last hidden state after the final norm")
        finals.append(row.final_hidden_TH)
    _check_health(checker, "the last hidden state", finals)
    error = max(relative_error(f, t.hidden[-1]) for f, t in zip(finals, truths, strict=True))
    hint = "the final norm is missing, or it is the state of another layer"
    return checker.within("the last hidden state", error, checker.tolerance.exact, hint)


def _nearest(got: Sequence[torch.Tensor], truths: Sequence[_Truth], tap: int) -> str:
    """Which hidden state the captured one really is."""
    count = len(truths[0].hidden)
    errors = [max(relative_error(g, t.hidden[i]) for g, t in zip(got, truths, strict=True)) for i in range(count)]
    best = int(np.argmin(errors))
    return f"nearest is hidden_states[{best}] (off by {errors[best]:.2g}), expected hidden_states[{tap + 1}]"


def _settle_layout(
    checker: _Checker,
    make: MakeCapture,
    taps: tuple[int, ...],
    samples: Sequence[ProbeSample],
    alone: Sequence[HiddenStateRow],
) -> tuple[CaptureLayout, float, float]:
    *hopeful, last = fallback_layouts(natural_layout(checker.target))
    for layout in hopeful:
        try:
            return (layout, *_check_layout(checker, make(checker.target, taps, layout), layout, samples, alone))
        except (RunFailedError, RuntimeError, TypeError) as error:  # also a kernel that this device or torch lacks
            checker.notes.append(f"{layout} rows are not used: {first_line(error)}")
    return (last, *_check_layout(checker, make(checker.target, taps, last), last, samples, alone))


def _check_layout(
    checker: _Checker,
    capture: CaptureBackend,
    layout: CaptureLayout,
    samples: Sequence[ProbeSample],
    alone: Sequence[HiddenStateRow],
) -> tuple[float, float]:
    """Isolation error (first sample exchanged) and error against each sample alone."""
    row = capture.capture(_row(samples), samples)
    other_ids = (samples[0].input_ids.astype(np.int64) + 1) % checker.target.facts.vocab_size
    others = [_probe("probe-other", other_ids), *samples[1:]]
    exchanged = capture.capture(_row(others), others)
    first = len(samples[0].input_ids)
    width = checker.target.hidden_size
    isolation = relative_error(_states(exchanged, width)[first:], _states(row, width)[first:])
    hint = "samples of a row see each other"
    checker.within(f"a {layout} row with another first sample", isolation, checker.tolerance.exact, hint)
    if torch.equal(_states(exchanged, width)[:first], _states(row, width)[:first]):
        raise checker.fail("another sample gave the same states: the capture returns stale data")
    error = relative_error(_states(row, width), torch.cat([_states(r, width) for r in alone]))
    checker.within(f"a {layout} row", error, checker.tolerance.layout, "each sample must be as if alone")
    return isolation, error


def _states(row: HiddenStateRow, width: int) -> torch.Tensor:
    """Taps and last hidden state, [T, L + 1, H]."""
    parts = [row.taps_TF] if row.final_hidden_TH is None else [row.taps_TF, row.final_hidden_TH]
    return torch.cat(parts, dim=-1).unflatten(-1, (-1, width))


def _tap(row: HiddenStateRow, index: int, width: int) -> torch.Tensor:
    return row.taps_TF[:, index * width : (index + 1) * width]
