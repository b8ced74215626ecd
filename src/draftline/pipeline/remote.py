"""A run whose target is served elsewhere, or was captured by others: what is loaded, asked and proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from draftline.config.sections import FilesBackend, LocalBackend, VllmBackend
from draftline.target.conventions import CaptureOrder, capture_order
from draftline.target.remote.capture import RemoteCapture, RemoteReport, prove_remote, require_layers
from draftline.target.remote.clients import StatesClient, open_client
from draftline.target.remote.lender import load_lender
from draftline.target.spread import first_device
from draftline.target.states.stored_target import StoredTarget

if TYPE_CHECKING:
    from draftline.pipeline.runplan import RunPlan
    from draftline.target.load import LoadedTarget

_PROVED_SAMPLES = 3


def load_lenders(plan: RunPlan, tokenizer: Any) -> list[StoredTarget]:
    """One for each target worker: embedding, head and final norm, shared by workers on one device.

    Args:
        tokenizer: the target's.

    Raises:
        UserError: the drafter's taps are not captured; see `load_lender`.
    """
    _order(plan)
    loaded: list[StoredTarget] = []
    for name in plan.config.pipeline.target_devices:
        device = torch.device(first_device(name))
        same = next((t for t in loaded if t.device == device), None)
        loaded.append(load_lender(plan.config.target, device, share_with=same, tokenizer=tokenizer))
    return loaded


def remote_captures(plan: RunPlan, targets: Sequence[LoadedTarget | StoredTarget]) -> list[RemoteCapture]:
    """One for each target worker, over one client."""
    backend = plan.config.target.backend
    assert not isinstance(backend, LocalBackend)
    client = open_client(backend)
    return [_capture(plan, client, target) for target in targets if isinstance(target, StoredTarget)]


def prove_backend(plan: RunPlan, target: LoadedTarget | StoredTarget) -> RemoteReport:
    """Asks for the states of the run's first samples and looks whether they can be right.

    Raises:
        UserError, RunFailedError: they cannot.
    """
    backend = plan.config.target.backend
    assert not isinstance(backend, LocalBackend) and isinstance(target, StoredTarget)
    client = open_client(backend)
    samples = [plan.dataset.sample(i) for i in plan.rows[0].samples[:_PROVED_SAMPLES]]
    require_layers(_order(plan), client, samples)
    return prove_remote(_capture(plan, client, target), client, samples)


def _capture(plan: RunPlan, client: StatesClient, target: StoredTarget) -> RemoteCapture:
    backend = plan.config.target.backend
    concurrent = backend.concurrent_requests if isinstance(backend, VllmBackend) else 1
    want_final = plan.config.objective.needs_teacher
    return RemoteCapture(client, target, _order(plan), want_final=want_final, concurrent=concurrent)


def _order(plan: RunPlan) -> CaptureOrder:
    backend = plan.config.target.backend
    assert isinstance(backend, VllmBackend | FilesBackend)
    order = capture_order(backend.aux_layer_ids, plan.spec.taps, plan.facts.num_layers)
    if plan.config.objective.needs_teacher:
        order.require_final()
    return order
