"""Promises about what a served answer becomes: the target's own ids where they are given, proven; else its words.

A8/A9: thinking is kept, ids are equal or refused. A22/A23: the template's arguments stand at top level.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data_kit as kit
import pytest
from fake_server import MODEL, FakeServer, always
from server_kit import exactly_once, options, prompts, rejects, rows, run

from draftline.config.schema import TargetConfig
from draftline.data.conversations import Conversation
from draftline.data.prepare import prepare
from draftline.data.sampling import Prompt, Sampling
from draftline.data.servers.protocol import Asking, Fault, ServedModel, read_answer, read_models
from draftline.data.servers.verify import AnswerVerifier
from draftline.data.shards import TokenDataset
from draftline.data.template import ChatTemplate
from draftline.errors import UserError

REASONS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}" + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
ASKED = Conversation("p", [{"role": "user", "content": "hello"}], None, 1, "f")


def served(template: ChatTemplate, **changes: Any) -> dict[str, Any]:
    """What `AnswerVerifier` makes of a reply; `message` and `choice` change its parts."""
    ids = template.tokenizer.apply_chat_template(ASKED.messages, add_generation_prompt=True, return_dict=False)
    message = {"role": "assistant", "content": "one two"} | changes.pop("message", {})
    choice = {"index": 0, "finish_reason": "stop", "message": message} | changes.pop("choice", {})
    reply = {"model": "m", "choices": [choice], "usage": {"prompt_tokens": len(ids)}} | changes
    model = ServedModel("m", "openai", None)
    answer = read_answer(json.dumps(reply).encode(), model, vocab_size=len(template.tokenizer))
    return AnswerVerifier(template, "chat").row(ASKED, Prompt("p", ids), answer)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(kit.tokenizer_with(source))


def ids_of(text: str, *, end: bool = True) -> list[int]:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    return [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if end else [])]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a8_reasoning_goes_where_the_template_reads_it(name: str) -> None:
    row = served(template(REASONS), message={name: "maybe no"})
    assert row["messages"][-1] == {"role": "assistant", "content": "one two", "reasoning_content": "maybe no"}
    row = served(template(kit.CHANNELS), message={name: "maybe no"})
    assert row["messages"][-1]["thinking"] == "maybe no"
    row = served(template(kit.DROPS_THINKING), message={name: "maybe no"})
    assert row["messages"][-1]["content"] == "<think>\nmaybe no\n</think>\n\none two"
    with pytest.raises(Fault, match="reasoning without a place"):
        served(template(kit.CHATML), message={name: "maybe no"})


def test_a8_with_ids_the_thinking_is_in_the_text_as_the_target_wrote_it() -> None:
    whole = "<think>\nmaybe no\n</think>\n\none two"
    row = served(template(kit.CHATML), message={"reasoning": "maybe no"}, choice={"token_ids": ids_of(whole)})
    assert row["messages"][-1] == {"role": "assistant", "content": whole}
    assert row["answer_token_ids"] == ids_of(whole)


def test_a9_ids_that_our_tokenizer_would_not_choose_are_kept_and_said_to_be_others() -> None:
    spelled = [i for letter in "one two" for i in ids_of(letter, end=False)]
    row = served(template(kit.CHATML), choice={"token_ids": [*spelled, ids_of("")[-1]]})
    assert row["answer_token_ids"][:-1] == spelled and row["retokenized"] == "other ids"
    row = served(template(kit.CHATML), choice={"token_ids": ids_of("one two")})
    assert row["retokenized"] == "equal"


def test_an_end_that_the_server_keeps_to_itself_is_put_back() -> None:
    row = served(template(kit.CHATML), choice={"token_ids": ids_of("one two", end=False)})
    assert row["answer_token_ids"] == ids_of("one two") and row["retokenized"] == "equal" and not row["answer_cut"]
    cut = {"finish_reason": "length"}
    row = served(template(kit.CHATML), choice={"token_ids": ids_of("one two", end=False), **cut})
    assert row["answer_token_ids"] == ids_of("one two", end=False) and row["answer_cut"]
    row = served(template(kit.CHATML), choice={"token_ids": ids_of("one two"), **cut})
    assert not row["answer_cut"], "it ended by itself on the last token allowed"


@pytest.mark.parametrize("place", ["choice", "top", "verbose", "logprobs"])
def test_ids_are_found_where_each_kind_of_server_puts_them(place: str) -> None:
    ids = ids_of("one two")
    change: dict[str, Any] = {
        "choice": {"choice": {"token_ids": ids}},
        "top": {"tokens": ids},
        "verbose": {"__verbose": {"tokens": ids}},
        "logprobs": {"choice": {"logprobs": {"content": [{"id": i, "token": "x"} for i in ids]}}},
    }[place]
    assert served(template(kit.CHATML), **change)["answer_token_ids"] == ids


def test_without_ids_the_lengths_are_compared() -> None:
    n = len(ids_of("one two"))
    for count, verdict in ((n, "same length"), (n + 1, "another length"), (None, None)):
        row = served(template(kit.CHATML), usage={"completion_tokens": count})
        assert row["retokenized"] == verdict and "answer_token_ids" not in row


def test_tool_calls_are_kept_with_arguments_as_objects_and_sent_as_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "fox"}'}}
    row = served(template(kit.CHATML), message={"content": None, "tool_calls": [call]})
    kept = row["messages"][-1]["tool_calls"]
    assert kept == [{"type": "function", "function": {"name": "look", "arguments": {"at": "fox"}}}]
    asking = Asking(Sampling(), 8, "chat", {}, [2], {})
    body = asking.body(ServedModel("m", "openai", None), Prompt("p", [1]), row["messages"], None, 0)
    assert body["messages"][-1]["tool_calls"][0]["function"]["arguments"] == '{"at": "fox"}'
    with pytest.raises(Fault, match="arguments of a tool call are not JSON"):
        broken = {"function": {"name": "look", "arguments": "{"}}
        served(template(kit.CHATML), message={"tool_calls": [broken]})


def test_a23_template_arguments_stand_at_top_level_and_each_kind_gets_only_fields_it_knows() -> None:
    asking = Asking(Sampling(0.5, 0.9, 7), 8, "chat", {"enable_thinking": False}, [2, 5], {"min_p": 0.1})
    fields = {kind: asking.fields(kind) for kind in ("vllm", "sglang", "llama.cpp", "transformers", "openai")}
    for kind, given in fields.items():
        assert given["chat_template_kwargs"] == {"enable_thinking": False} and given["min_p"] == 0.1, kind
        assert (given["temperature"], given["top_p"], given["max_tokens"]) == (0.5, 0.9, 8)
    assert fields["vllm"]["return_token_ids"] and fields["sglang"]["return_token_ids"]
    assert fields["llama.cpp"]["return_tokens"] and fields["llama.cpp"]["repeat_penalty"] == 1.0
    assert "return_token_ids" not in fields["openai"] | fields["transformers"] | fields["llama.cpp"]
    config = json.loads(fields["transformers"]["generation_config"])
    assert config["do_sample"] and config["top_k"] == 7 and config["eos_token_id"] == [2, 5]


def test_the_model_is_looked_for_by_name_and_by_root() -> None:
    def listed(*models: dict[str, Any]) -> bytes:
        return json.dumps({"data": list(models)}).encode()

    assert read_models(listed({"id": "x", "root": "org/m", "owned_by": "vllm"}), "org/m", "auto").name == "x"
    assert read_models(listed({"id": "m", "owned_by": "sglang", "max_model_len": 99}), "m", "auto").max_tokens == 99
    assert read_models(listed(), "m", "auto") == ServedModel("m", "openai", None)
    with pytest.raises(Fault, match="it serves a, b, not m") as caught:
        read_models(listed({"id": "a"}, {"id": "b"}), "m", "auto")
    assert caught.value.blame == "fatal"


@pytest.mark.parametrize(("named", "is_same"), [("m", 1), ("m@main", 1), ("m-2024-08-06", 1), ("m-base", 0), ("n", 0)])
def test_an_answer_by_another_model_is_none(named: str, is_same: int) -> None:
    reply = {"model": named, "choices": [{"finish_reason": "stop", "message": {"content": "x"}}]}
    if is_same:
        assert read_answer(json.dumps(reply).encode(), ServedModel("m", "openai", None), vocab_size=9).content == "x"
    else:
        with pytest.raises(Fault, match="another model"):
            read_answer(json.dumps(reply).encode(), ServedModel("m", "openai", None), vocab_size=9)


@pytest.mark.parametrize("kind", ["vllm", "other"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a9_prepare_takes_served_answers_and_supervises_exactly_their_ids(
    tmp_path: Path, target: TargetConfig, kind: str, endpoint: str
) -> None:
    source = prompts(tmp_path, 6)
    with FakeServer(kind=kind) as server:
        server.words = lambda text: "yes, one two" if kind == "other" else f"yes, {text[-9:].strip()}"
        report = run(source, target, options(server, endpoint=endpoint))
        assert ("prompt" in server.bodies[0]) == (endpoint == "completions")
    assert exactly_once(source, report, 6) and report.rejected == 0
    prepare([str(report.output)], tmp_path / "data", target=target, max_tokens=200)
    data = TokenDataset.open(tmp_path / "data")
    wanted = {row["id"]: row.get("answer_token_ids", ids_of("yes, one two")) for row in rows(source)}
    assert len(data) == 6
    for i in range(len(data)):
        sample = data.sample(i)
        assert sample.input_ids[sample.loss_mask].tolist() == wanted[sample.sample_id]


def test_cut_answers_are_kept_and_marked_and_their_end_is_not_learned(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 4)
    with FakeServer(kind="other") as server:
        server.finish = "length"
        report = run(source, target, options(server))
    assert report.n_answer_cut == 4 and all(row["answer_cut"] for row in rows(source))
    assert {row["retokenized"] for row in rows(source)} == {"same length"}
    prepare([str(report.output)], tmp_path / "data", target=target, max_tokens=200)
    data = TokenDataset.open(tmp_path / "data")
    assert all(data.sample(i).input_ids[-1] != server.tokenizer.eos_token_id for i in range(len(data)))


def test_prompts_too_long_for_target_or_server_are_rejected_unasked(tmp_path: Path, target: TargetConfig) -> None:
    given = [{"id": "p0", "prompt": "hello " * 300}, {"id": "p1", "prompt": "a"}]
    source = kit.write_lines(tmp_path / "prompts.jsonl", given)
    with FakeServer() as server:
        report = run(source, target, options(server))
        assert server.asked.total() == 1
    assert exactly_once(source, report, 2) and rejects(source) == {"p0": "prompt too long"}
    with FakeServer() as server, pytest.raises(UserError, match="max_new_tokens is 256, the context is 256"):
        run(prompts(tmp_path / "other", 2), target, options(server), max_new_tokens=256)


def test_an_unusable_sampled_answer_is_drawn_anew(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 1)
    with FakeServer(always("empty", "drop")) as server:
        run(source, target, options(server), temperature=1.0)
    seeds = [body["seed"] for body in server.bodies]
    assert len(seeds) == 3 and seeds[0] != seeds[1] == seeds[2]


def test_wrong_names_are_refused_before_any_prompt_is_asked(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 2)
    with FakeServer() as server:
        with pytest.raises(UserError, match=f"another model: it serves {MODEL}, not {target.model}; name the target"):
            run(source, target, options(server, model=None))
        assert not server.bodies
    with pytest.raises(UserError, match=r"unreachable.*start the server, or mend --server"):
        run(source, target, options(server))
