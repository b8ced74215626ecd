"""The fake server of our tests is one that speculators 0.9.0 and hs-connectors 0.9.0 take for a vLLM."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import torch
from hs_connectors import FileTransfer
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import save_file
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import generate_hidden_states

from decoding_kit import tiny_target
from draftline.target.remote.clients import FilesClient
from fake_vllm import FakeVllm, captured_layers, serve

pytestmark = pytest.mark.interop


def test_their_client_and_transfer_get_the_captured_layers(tmp_path: Path) -> None:
    target, ids = tiny_target(), [3, 1, 4, 1, 5]
    with serve(FakeVllm(target, (1, 3, 4), tmp_path)) as endpoint:
        client = openai.OpenAI(base_url=endpoint, api_key="EMPTY", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        handle, place = generate_hidden_states(client, "tiny", {"input_ids": ids}, max_retries=0)
        states = FileTransfer(tmp_path).get_generated(place)
    assert states is not None and Path(handle).is_file()
    check_hidden_states(states, ids)
    torch.testing.assert_close(states["hidden_states"], captured_layers(target, ids, (1, 3, 4))[0])


def test_files_that_their_fp8_connector_would_write_are_expanded_alike(tmp_path: Path) -> None:
    """Its own rounding; its own expansion works in bf16, ours in fp32."""
    target, ids = tiny_target(), [3, 1, 4, 1, 5]
    hidden_TLH, _ = captured_layers(target, ids, (1, 3, 4))
    rounded, scales = quantize_tensor_to_fp8(hidden_TLH)
    payload = {"hidden_states": rounded, "hidden_states_scales": scales, "token_ids": torch.tensor(ids)}
    save_file(payload, tmp_path / "hs_0.safetensors")
    got = FilesClient(tmp_path).fetch(ids).hidden_TLH
    torch.testing.assert_close(got, hidden_TLH, atol=0.1, rtol=0.07)
