"""Traps of exports in 8 bits: what a server would round, or take for rounded, that training and evaluation did not.

A folder says twice what is rounded: by the dtype of each tensor, and in `quantization_config`, by which a server reads
it. Both must agree; activations and caches are never rounded here, so nothing may ask for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftline.export.quantize import ROUNDED

FP8 = "float8_e4m3fn"
# Patterns that cannot take long: no quantifier on a group, and few of them.
_SLOW = re.compile(r"\)[*+{?]|[*+}][*+{]")
_MOST_QUANTIFIERS, _MOST_PATTERN = 4, 200
_LINEAR = re.compile(r"(_proj|fc|_projection)\.weight$")


def rounded_otherwise(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(what, mend) of everything in `quantization_config` that is not weights of `ROUNDED` in fp8, each with a scale.

    Args:
        config: `quantization_config`.
        dtypes: of the folder's tensors, by name.
    """
    if config.get("quant_method") not in (None, "compressed-tensors"):
        yield f"quant_method is {config['quant_method']!r}", "export it again with --dtype fp8"
    if config.get("kv_cache_scheme") is not None:
        yield "kv_cache_scheme is set: keys and values were not rounded in training", "set it to null"
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        yield "config_groups is missing: servers cannot tell what is rounded", "export it again with --dtype fp8"
        return
    for name, group in groups.items():
        for part in ("input_activations", "output_activations"):
            if group.get(part) is not None:
                yield f"{part} are rounded in {name}: in training they were not", f"set {part} to null"
        yield from _scheme(str(name), group.get("weights"))
    yield from _disagreements(groups, config.get("ignore"), dtypes)


def raw_readers(dtypes: Mapping[str, str]) -> list[str]:
    """Tensors in fp8 whose numbers servers read raw: joined over layers, or outside their quantised layers."""
    return sorted(name for name, dtype in dtypes.items() if dtype == FP8 and not _may_be_rounded(name))


def _scheme(name: str, weights: Any) -> Iterator[tuple[str, str]]:
    found = weights if isinstance(weights, Mapping) else {}
    wanted: dict[str, tuple[Any, ...]] = {
        "num_bits": (8,),
        "type": ("float",),
        "strategy": ("channel", "tensor"),
        "symmetric": (True, None),
        "dynamic": (False, None),
    }
    for key, values in wanted.items():
        if found.get(key) not in values:
            yield (
                f"weights.{key} of {name} is {found.get(key)!r}, not {values[0]!r}",
                "export it again with --dtype fp8",
            )


def _disagreements(groups: Mapping[str, Any], ignore: Any, dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Layers that the configuration takes for rounded and that are not, or the other way round."""
    targets = [t for group in groups.values() for t in _names(group.get("targets"))]
    left_out = _names(ignore)
    unclear = [pattern for pattern in (*targets, *left_out) if not _is_simple(pattern)]
    if unclear:
        yield f"the pattern {unclear[0][:60]!r} cannot be judged", "name the layers"
        return
    for name in sorted(name for name in dtypes if _LINEAR.search(name)):
        module = name.removesuffix(".weight")
        told = any(t == "Linear" or _matches(t, module) for t in targets)
        told = told and not any(_matches(i, module) for i in left_out)
        if told != (dtypes[name] == FP8):
            says = "rounded" if told else "not rounded"
            yield f"{name} is {dtypes[name]}, quantization_config takes it for {says}", "make the two agree"
            return


def _names(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def _is_simple(pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return True
    text = pattern.removeprefix("re:")
    few = sum(text.count(sign) for sign in "*+{?") <= _MOST_QUANTIFIERS and len(text) <= _MOST_PATTERN
    if not few or _SLOW.search(text):
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def _may_be_rounded(name: str) -> bool:
    return name.endswith(tuple(f"{part}.weight" for part in ROUNDED))
