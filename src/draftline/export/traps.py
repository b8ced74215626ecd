"""The serving traps: what a server would do otherwise than the training did, and would not say.

Each rule looks at one export and yields findings for the servers that fall into it. "refuse" means that the export
would be served otherwise than it was trained; "note" is what whoever serves it has to know. Sources: the servers' own
readers (dflash 0.1.0, speculators 0.9.0, vLLM, SGLang) and the reports that docs/faults.md names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftline.config.drafter_spec import DrafterSpec
from draftline.errors import UserError
from draftline.export.common import ExportFormat, causal_layers, slides
from draftline.export.model_card import PREFIX_CACHE_WARNING
from draftline.export.quantized_traps import FP8, raw_readers, rounded_otherwise
from draftline.export.speculators_config import non_causal, refuse_unservable_by_vllm
from draftline.export.vocabulary import HEAD, NOT_THE_DRAFTERS
from draftline.export.zlab_config import refuse_unservable
from draftline.target.facts import TargetFacts

Server = Literal["dflash", "vllm", "sglang"]
SERVERS: tuple[Server, ...] = ("dflash", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class TrapFinding:
    """One line of a check. `server` "any": whoever serves it."""

    level: Literal["refuse", "note"]
    server: Server | Literal["any"]
    what: str
    mend: str

    def line(self) -> str:
        """The finding for people: level, server, what is wrong, how to mend it."""
        return f"{self.level:6}  {self.server}: {self.what}; {self.mend}"


@dataclass(frozen=True, slots=True)
class Subject:
    """An export under examination.

    Attributes:
        config: its config.json.
        spec: as it was trained.
        is_ours: draftline.json says how it was trained; without it the spec is what the format's own trainer would do.
        shapes, dtypes: of its tensors, by name.
        target: where it is known; files of speculators tell no end-of-text token.
    """

    form: ExportFormat
    config: Mapping[str, Any]
    spec: DrafterSpec
    is_ours: bool
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    provenance: Mapping[str, Any]
    target: TargetFacts | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end text, of the drafter's file and of the target."""
        return (*_ends(self.spec), *(() if self.target is None else self.target.eos_token_ids))

    @property
    def drafters_own(self) -> frozenset[str]:
        """Names of its tensors without those that are the target's, or a map."""
        return frozenset(self.dtypes) - NOT_THE_DRAFTERS

    @property
    def transformer(self) -> Mapping[str, Any]:
        """The Qwen3 part of the configuration."""
        return _mapping(self.config, "transformer_layer_config") if self.form == "speculators" else self.config


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside an object; empty where something else stands there."""
    inner = config.get(key)
    return inner if isinstance(inner, Mapping) else {}


Rule = Callable[[Subject], Iterator[TrapFinding]]
_EXPORT_AGAIN = "export it again with draftline, which writes it right"
_AS_ZLAB = "export it with --format zlab"


def find_traps(subject: Subject) -> list[TrapFinding]:
    """All findings, the refusals first."""
    found = [finding for rule in RULES for finding in rule(subject)]
    return sorted(found, key=lambda f: f.level != "refuse")


def unreadable_servers(subject: Subject) -> Iterator[TrapFinding]:
    """Servers that cannot read the format at all."""
    if subject.form == "speculators":
        unable: tuple[Server, ...] = ("dflash", "sglang")
        for server in unable:
            yield TrapFinding("refuse", server, "cannot read speculators' format", _AS_ZLAB)


def causality(subject: Subject) -> Iterator[TrapFinding]:
    """Each server's rule for which slots of a block see later ones, against the training's."""
    trained = causal_layers(subject.spec)
    for server, served, why in _served_causality(subject):
        if served != trained:
            yield TrapFinding(
                "refuse",
                server,
                f"layers causal inside a block: trained {_flags(trained)}, served {_flags(served)} ({why})",
                _AS_ZLAB if subject.form == "speculators" else "train with drafter.sliding.in_block: zlab",
            )


def _served_causality(subject: Subject) -> Iterator[tuple[Server, tuple[bool, ...], str]]:
    sliding = tuple(kind == "sliding_attention" for kind in subject.spec.layer_types)
    if subject.form == "speculators":
        causal = not non_causal(subject.config)
        yield "vllm", (causal,) * len(sliding), "sliding_window_non_causal counts for all layers"
        return
    inner = _mapping(subject.config, "dflash_config")
    override = inner.get("causal")
    served = sliding if override is None else (bool(override),) * len(sliding)
    yield "vllm", served, "only dflash_config.causal is read"
    yield "sglang", sliding, "it knows causal sliding and bidirectional full layers only"


def window_origin(subject: Subject) -> Iterator[TrapFinding]:
    """Windows that training and serving measure from different places."""
    spec = subject.spec
    if not slides(spec) or spec.window_origin == "query":
        return
    what = f"the window of {spec.sliding_window} is measured from the query, not from the anchor"
    slots = f"late slots see up to {spec.block_size} tokens less than in training"
    yield TrapFinding(
        "refuse" if subject.is_ours else "note", "any", f"{what}: {slots}", "import it and train on with the query's"
    )


def one_geometry(subject: Subject) -> Iterator[TrapFinding]:
    """vLLM makes the context's keys and values of all layers in one product."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        shapes = {shape for key, shape in subject.shapes.items() if key.endswith(f".self_attn.{name}.weight")}
        if len(shapes) > 1:
            yield TrapFinding("refuse", "vllm", f"{name} differs between layers: {sorted(shapes)}", "train it alike")
    rope = _mapping(subject.transformer, "rope_parameters")
    if any(isinstance(value, Mapping) for value in rope.values()):
        yield TrapFinding("refuse", "vllm", "rotary parameters differ between layer types", "train with one for all")


def rotary(subject: Subject) -> Iterator[TrapFinding]:
    """Rotary parameters that a reader drops, contradicts or applies otherwise."""
    config = subject.transformer
    rope = _mapping(config, "rope_parameters")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial is not None and partial != 1:
        what = f"partial_rotary_factor {partial}: servers rotate a part of each head, training rotated all of it"
        yield TrapFinding("refuse", "any", what, "remove it from config.json")
    if "rope_parameters" not in config or "rope_theta" not in config:
        only = "rope_parameters" if "rope_parameters" in config else "rope_theta and rope_scaling"
        what = f"rotary parameters stand in {only} only: a server of another age takes its default base"
        yield TrapFinding("note", "any", what, _EXPORT_AGAIN)
    stored = [name for name in subject.shapes if name.endswith("inv_freq")]
    if stored:
        what = f"{stored[0]} is stored as {subject.dtypes[stored[0]]}: rounded frequencies lose far positions"
        yield TrapFinding("refuse", "any", what, "drop it from the weights; it follows from config.json")


def dimensions(subject: Subject) -> Iterator[TrapFinding]:
    """Sizes that a reader would fill in from its defaults."""
    for name in ("head_dim", "layer_types", "num_key_value_heads", "intermediate_size", "rms_norm_eps", "vocab_size"):
        if subject.transformer.get(name) is None:
            yield TrapFinding("refuse", "any", f"{name} is missing: servers fill in a default", _EXPORT_AGAIN)
    if subject.form == "zlab":
        inner = _mapping(subject.config, "dflash_config")
        if "block_size" not in inner or "block_size" not in subject.config:
            what = "block_size stands in one place only: a reader that looks in the other takes 16"
            yield TrapFinding("note", "any", what, _EXPORT_AGAIN)


def proposals(subject: Subject) -> Iterator[TrapFinding]:
    """What vLLM takes from speculators_config."""
    if subject.form != "speculators":
        return
    inner = _mapping(subject.config, "speculators_config")
    methods = inner.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    wanted = subject.spec.block_size - 1
    if tokens != wanted:
        what = f"speculative_tokens is {tokens}, a block of {wanted + 1} drafts {wanted}"
        yield TrapFinding("refuse", "vllm", what, _EXPORT_AGAIN)
    name = _mapping(inner, "verifier").get("name_or_path")
    if not isinstance(name, str) or not name:
        what = f"speculators_config.verifier.name_or_path is {'missing' if name is None else f'{name!r}, no name'}"
        yield TrapFinding("refuse", "vllm", what, "export with --target")


def mask_token(subject: Subject) -> Iterator[TrapFinding]:
    """A mask token that text may hold."""
    spec, target = subject.spec, subject.target
    for use, ids in (
        ("end-of-text", subject.ends),
        ("padding", (spec.pad_token_id, target and target.pad_token_id)),
        ("begin-of-text", (spec.bos_token_id, target and target.bos_token_id)),
    ):
        if spec.mask_token_id in ids:
            what = f"mask_token_id {spec.mask_token_id} is the target's {use} token"
            yield TrapFinding("refuse", "any", what, "train with a row that text never uses")


def factors(subject: Subject) -> Iterator[TrapFinding]:
    """Scale of the embedding, multiplier and soft cap of the logits."""
    spec = subject.spec
    if spec.input_embedding_scale != 1.0:
        what = f"input_embedding_scale {spec.input_embedding_scale:g} is read by dflash only"
        level: Literal["refuse", "note"] = "refuse" if subject.form == "speculators" else "note"
        yield TrapFinding(level, "vllm", what, "see whether the server scales by itself: measure its acceptance")
    if spec.output_multiplier != 1.0 or spec.final_logit_softcapping is not None:
        what = "vLLM leaves out the drafter's logit multiplier and soft cap"
        if spec.dflash2 is not None:
            what += ", to which the candidate selector adds its scores"
            yield TrapFinding("refuse", "vllm", what, "serve it with SGLang or dflash")
        else:
            yield TrapFinding("note", "vllm", what, "greedy drafts are the same; sampled ones are not")


def precision(subject: Subject) -> Iterator[TrapFinding]:
    """Weights in several dtypes, or in another than the file says."""
    if subject.config.get("quantization_config") is not None:
        yield from _quantised(subject)
        return
    yield from _other_dtypes(subject)
    named = str(subject.config.get("dtype") or subject.config.get("torch_dtype") or "").removeprefix("torch.")
    found = sorted({dtype for name, dtype in subject.dtypes.items() if name.endswith("_proj.weight")})
    if len(found) > 1:
        yield TrapFinding("refuse", "any", f"weights are stored in {', '.join(found)}", _EXPORT_AGAIN)
    elif found and named and named != found[0]:
        yield TrapFinding("refuse", "any", f"dtype is {named}, the weights are {found[0]}", _EXPORT_AGAIN)
    elif found and found[0] != "bfloat16":
        yield TrapFinding("note", "any", f"weights are {found[0]}; servers compute in bfloat16", "export with --dtype")


def _other_dtypes(subject: Subject) -> Iterator[TrapFinding]:
    """Norms and the like in another dtype than the projections: servers read all in one."""
    main = {dtype for name, dtype in subject.dtypes.items() if name.endswith("_proj.weight")}
    others = [n for n, d in subject.dtypes.items() if d == "float32" and n in subject.drafters_own]
    if len(main) == 1 and "float32" not in main and others:
        what = f"{others[0]} is float32 beside {main.pop()}: servers round it to the dtype of config.json"
        yield TrapFinding("note", "any", what, "export it in one dtype, and measure that")


def _quantised(subject: Subject) -> Iterator[TrapFinding]:
    raw = raw_readers(subject.dtypes)
    if raw:
        what = f"{raw[0]} is {FP8}: servers join the raw key and value weights of all layers"
        if not raw[0].endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            what = f"{raw[0]} is {FP8}: servers read it as it is, without its scale"
        yield TrapFinding("refuse", "vllm", what, "leave all but o_proj and the MLP in bf16")
    for what, mend in rounded_otherwise(_mapping(subject.config, "quantization_config"), subject.dtypes):
        yield TrapFinding("refuse", "any", what, mend)
    unscaled = [n for n, d in subject.dtypes.items() if d == FP8 and f"{n}_scale" not in subject.dtypes]
    if unscaled:
        yield TrapFinding("refuse", "any", f"{unscaled[0]} is {FP8} without a scale", _EXPORT_AGAIN)
    yield TrapFinding("note", "dflash", "weights are in 8 bits", "install compressed-tensors beside transformers")


def pruned_vocabulary(subject: Subject) -> Iterator[TrapFinding]:
    """A head with a part of the target's tokens, and the map to them."""
    ids = subject.spec.draft_vocabulary
    if ids is None:
        return
    rows = subject.shapes.get(HEAD)
    if rows != (len(ids), subject.spec.hidden_size):
        found = "is missing" if rows is None else f"has shape {rows}"
        what = f"{HEAD} {found}: a head of {len(ids)} tokens has ({len(ids)}, {subject.spec.hidden_size})"
        yield TrapFinding("refuse", "vllm", what, "export it again with --target")
    missing = [token for token in subject.ends if token not in set(ids)]
    if missing:
        what = f"the end-of-text token {missing[0]} cannot be drafted: each answer's last round is cut short"
        yield TrapFinding("note", "any", what, "keep it when pruning")
    if not subject.ends:
        yield TrapFinding(
            "note", "any", "names no end-of-text token: whether it can be drafted is not known", "--target"
        )
    what = f"drafts {len(ids)} of {subject.spec.vocab_size} tokens: a round ends where the target writes another one"
    yield TrapFinding("note", "any", what, "compare its acceptance with that of the whole vocabulary")


def _ends(spec: DrafterSpec) -> list[int]:
    ends = spec.eos_token_id if isinstance(spec.eos_token_id, list) else [spec.eos_token_id]
    return [token for token in ends if token is not None]


def mixed_layers(subject: Subject) -> Iterator[TrapFinding]:
    """Sliding beside full layers."""
    if slides(subject.spec) and "full_attention" in subject.spec.layer_types:
        what = "sliding beside full layers need vLLM's second model runner"
        yield TrapFinding("note", "vllm", what, "set VLLM_USE_V2_MODEL_RUNNER=1 and compare the acceptance")


def expressible(subject: Subject) -> Iterator[TrapFinding]:
    """What our own exporters refuse to write, found in a folder all the same."""
    server: Server = "vllm" if subject.form == "speculators" else "dflash"
    refuse = refuse_unservable_by_vllm if subject.form == "speculators" else refuse_unservable
    spec = subject.spec if subject.is_ours else subject.spec.model_copy(update={"window_origin": "query"})
    try:
        refuse(spec)
    except UserError as error:
        yield TrapFinding("refuse", server, error.what, error.mend or _EXPORT_AGAIN)


def recurrent_target(subject: Subject) -> Iterator[TrapFinding]:
    """A target whose state a server does not roll back."""
    if subject.provenance.get("target_is_recurrent") and subject.form == "zlab":
        what = "the target has recurrent layers, whose state dflash does not roll back: wrong text without an error"
        yield TrapFinding("refuse", "dflash", what, "decode with draftline, vLLM or SGLang")


def prefix_cache(subject: Subject) -> Iterator[TrapFinding]:
    """Tokens from a prefix cache, which the drafter never sees."""
    del subject  # true of every drafter
    yield TrapFinding("note", "any", PREFIX_CACHE_WARNING.partition(": ")[0], "see README.md for the options")


def chat_template(subject: Subject) -> Iterator[TrapFinding]:
    """Template arguments of training, which serving must repeat."""
    if "chat_template_kwargs" not in subject.provenance:
        what = "not recorded: the chat template arguments of training (thinking on or off)"
        yield TrapFinding("note", "any", what, "serve with those that the data was made with")
    elif subject.provenance["chat_template_kwargs"]:
        what = f"trained with chat template arguments {subject.provenance['chat_template_kwargs']}"
        yield TrapFinding("note", "any", what, "serve with the same")


def _flags(layers: tuple[bool, ...]) -> str:
    if len(set(layers)) == 1:
        return "all" if layers[0] else "none"
    return ", ".join(str(i) for i, causal in enumerate(layers) if causal)


RULES: tuple[Rule, ...] = (
    unreadable_servers,
    causality,
    window_origin,
    one_geometry,
    rotary,
    dimensions,
    proposals,
    mask_token,
    factors,
    precision,
    pruned_vocabulary,
    mixed_layers,
    expressible,
    recurrent_target,
    prefix_cache,
    chat_template,
)
