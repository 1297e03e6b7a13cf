"""Defines quantization schemes as data: ordered rules from a pattern of weight names to a format. The first match wins.

Names are those of Hugging Face modules. Query, key and value rows are one weight here, and so are gate and up:

| weight | name | also matched as |
|---|---|---|
| query, key, value | model.layers.3.self_attn.qkv_proj | ...self_attn.q_proj, k_proj, v_proj |
| attention output | model.layers.3.self_attn.o_proj | |
| gate, up | model.layers.3.mlp.gate_up_proj | ...mlp.gate_proj, up_proj |
| down | model.layers.3.mlp.down_proj | |
| embedding | model.embed_tokens | |
| output head | lm_head | |

A pattern is such a name or the end of one after a dot (`o_proj`, `layers.3.mlp.down_proj`). It may end in `.weight`,
and `*` matches anything (`layers.*.o_proj`, `*_proj`). A weight without a rule is not quantized. Nor is one with the
format "bf16". A format is one of parse_weight_format's, or several in order of preference with "|" between them. The
first that can hold the weight's shape is taken. Modules that are one weight must get one format. Without its own rule,
the head of a tied model is its embedding, quantized or not. A rule for lm_head gives it a head of its own. Every rule
must decide something. It is an error if a rule matches no name, or only names that earlier rules have taken.

A scheme may have the model rotated first (rotation.py): `rotate = "kv"` or "all" in a file, and after any name
`+rotate-kv` or `+rotate-all`.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jllm.errors import QuantizationError
from pallas_kernels.formats.block_floats import KINDS
from pallas_kernels.formats.weight_formats import LLM_INT8, WeightFormat, check_shape, parse_weight_format

PLAIN = "bf16"  # a rule's format that leaves the weight in the model's dtype
ROTATIONS = ("kv", "all")
NEAR = 4  # names that an error suggests

Formats = tuple[WeightFormat, ...]  # in order of preference; none: not quantized
Modules = Mapping[str, tuple[str, ...]]  # a model's weights by name -> their merged modules: params.matrix_modules


def parse_formats(name: str) -> Formats:
    """Reads the format of a rule. Raises ValueError."""
    return () if name == PLAIN else tuple(parse_weight_format(choice.strip()) for choice in name.split("|"))


def choose_format(name: str, shape: tuple[int, ...], formats: Formats) -> WeightFormat:
    """Returns the first of at least one format that can hold weight `name`. Raises QuantizationError if none can."""
    for fmt in formats:
        try:
            check_shape(shape, fmt)  # type: ignore[arg-type]
        except ValueError as error:
            problem = error
        else:
            return fmt
    raise QuantizationError(f"{name}: {problem}")


@dataclass(frozen=True)
class Scheme:
    """Maps weights to formats by rules. Raises QuantizationError for an unknown format."""

    name: str
    rules: tuple[tuple[str, str], ...]  # pattern, format
    rotate: str | None = None  # one of ROTATIONS, applied before rounding

    def __post_init__(self) -> None:
        if self.rotate not in (None, *ROTATIONS):
            known = ", ".join(ROTATIONS)
            raise QuantizationError(f"scheme {self.name!r}: rotate must be one of {known}, not {self.rotate!r}")
        for pattern, name in self.rules:
            try:
                parse_formats(name)
            except ValueError as error:
                raise QuantizationError(f"scheme {self.name!r}, rule {pattern!r}: {error}, {PLAIN}") from None

    def formats(self, modules: Modules) -> dict[str, Formats]:
        """Returns the name of each weight that a rule matches -> its formats in order of preference. "bf16" gives no
        formats.

        Raises QuantizationError for a pattern that matches nothing, or only weights that earlier rules have taken. Also
        raises it for merged modules of different formats.
        """
        matching = {
            (weight, part): [i for i, (pattern, _) in enumerate(self.rules) if _matches_module(pattern, weight, part)]
            for weight, parts in modules.items()
            for part in parts
        }
        self._check_rules(matching)
        chosen = {weight: self._choose(weight, parts, matching) for weight, parts in modules.items()}
        return {weight: parse_formats(name) for weight, name in chosen.items() if name is not None}

    def _check_rules(self, matching: Mapping[tuple[str, str], Sequence[int]]) -> None:
        """Raises QuantizationError for a rule that decides nothing. `matching` has each module's rules by index."""
        for i, (pattern, _) in enumerate(self.rules):
            found = [rules for rules in matching.values() if i in rules]
            if not found:
                hint = near(pattern, (name for names in matching for name in names))
                raise QuantizationError(f"scheme {self.name!r}: pattern {pattern!r} matches no weight; {hint}")
            if all(rules[0] < i for rules in found):
                first = ", ".join(dict.fromkeys(repr(self.rules[rules[0]][0]) for rules in found))
                raise QuantizationError(
                    f"scheme {self.name!r}: pattern {pattern!r} matches only names that {first} before it has taken: "
                    "the first rule that matches wins; put it earlier, or remove it"
                )

    def _choose(
        self, weight: str, parts: tuple[str, ...], matching: Mapping[tuple[str, str], Sequence[int]]
    ) -> str | None:
        """Returns the format's name by the first rule that matches, or None if no rule does."""
        found = {part: next((self.rules[i][1] for i in matching[weight, part]), None) for part in parts}
        if len(set(found.values())) > 1:
            first: dict[tuple[str, str | None], str] = {}  # of all experts' modules, one for each format
            for part, name in found.items():
                own = part.rpartition(".")[2]
                first.setdefault((own, name), part.partition(".experts.")[2] or own)
            given = ", ".join(f"{part}: {name or 'none'}" for (_, name), part in first.items())
            raise QuantizationError(
                f"scheme {self.name!r}: {weight} is one weight, but its modules get different formats ({given})"
            )
        return found[parts[0]]

    def to_json(self) -> str:
        rotate = {} if self.rotate is None else {"rotate": self.rotate}
        return json.dumps({"name": self.name, **rotate, "rules": self.rules}, indent=2) + "\n"

    def to_toml(self) -> str:
        rules = "".join(f"  [{_quoted(pattern)}, {_quoted(name)}],\n" for pattern, name in self.rules)
        rotate = "" if self.rotate is None else f"rotate = {_quoted(self.rotate)}\n"
        head = f"name = {_quoted(self.name)}\n{rotate}"
        return f"{head}rules = [  # pattern, format; the first that matches wins\n{rules}]\n"

    @staticmethod
    def from_dict(raw: Mapping[str, Any], *, source: str = "scheme") -> "Scheme":
        """Reads {"name": ..., "rotate": ..., "rules": [[pattern, format], ...]}. Errors call it `source`."""
        if unknown := sorted(set(raw) - {"name", "rules", "rotate"}):
            raise QuantizationError(f"{source}: unknown key {unknown[0]!r}; a scheme has name, rules and rotate")
        name, rules = raw.get("name", source), raw.get("rules")
        pairs = isinstance(rules, list | tuple) and all(isinstance(r, list | tuple) and len(r) == 2 for r in rules)
        if not isinstance(name, str) or not pairs or not all(isinstance(s, str) for r in rules or () for s in r):
            raise QuantizationError(f"{source}: a scheme needs rules = [[pattern, format], ...], all of them strings")
        return Scheme(name, tuple((pattern, fmt) for pattern, fmt in rules or ()), raw.get("rotate"))


def _quoted(text: str) -> str:
    """Returns a basic string of TOML: JSON's without surrogates, and with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _linears(name: str, fmt: str, *before: tuple[str, str]) -> Scheme:
    return Scheme(name, (*before, ("*_proj", fmt)))


def _int4_names(suffix: str) -> list[str]:
    """Returns formats with groups of 128, 64 and 32. Each falls back to the smaller groups if it does not divide a
    weight's columns."""
    groups = [f"w4a16-g{g}{suffix}" for g in (128, 64, 32)]
    return ["|".join(groups[i:]) for i in range(len(groups))]


_TALK = ("o_proj", PLAIN)  # attention and its output projection stay in 16 bits, as in PPL's talk
_ACTIVATION_GROUPS = "|".join((*(f"w8a8-act-g{g}" for g in (128, 64, 32)), "w8a8"))  # the first that divides K
PRESETS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("bf16", (("*", PLAIN),)),
        _linears("w8a16", "w8a16"),
        _linears("w8a8", "w8a8", _TALK),
        _linears("w8a8-all", "w8a8"),
        _linears("w8a8-head", "w8a8", ("lm_head", "w8a8")),
        # A scale for each group of a token's values needs no pass over all values after attention and SiLU.
        _linears("w8a8-groups", "w8a8", *((name, _ACTIVATION_GROUPS) for name in ("o_proj", "down_proj"))),
        _linears("w8a8-tensor", "w8a8-tensor", _TALK),  # for experiments: it is not batch-invariant
        *(_linears(name.partition("|")[0], name) for zp in ("", "-zp") for name in _int4_names(zp)),
        *(
            _linears(name, name)
            for name in ("nf4", "nf4-dq", "fp4", "fp4-dq", "fp8", "fp8-weight", "fp8-b128", "uint8-zp")
        ),
        _linears(LLM_INT8, LLM_INT8),
    )
}


GONE = {"w8a8-talk": "w8a8"}  # removed names -> their successors


def find_scheme(scheme: "str | Path | Scheme") -> Scheme:
    """Returns a scheme from its name, its file or itself. A name is a preset, a weight format for all linear layers
    (`nf4-g128`), or one of these rotated (`nf4-g128+rotate-all`). A file ends in .toml or .json. Raises
    QuantizationError."""
    if isinstance(scheme, Scheme):
        return scheme
    if isinstance(scheme, Path) or (isinstance(scheme, str) and scheme.endswith((".toml", ".json"))):
        return read_scheme(Path(scheme))
    if not isinstance(scheme, str):
        raise QuantizationError(f"a quantization scheme is a name, a file or a Scheme, not {scheme!r}")
    base, plus, which = scheme.partition("+rotate-")
    if plus:
        return replace(find_scheme(base), name=scheme, rotate=which)
    if scheme in PRESETS:
        return PRESETS[scheme]
    if scheme in GONE:
        raise QuantizationError(f"quantization scheme {scheme!r} is gone: use {GONE[scheme]!r}, which is the same")
    try:
        parse_weight_format(scheme)
    except ValueError:
        names = (*PRESETS, *KINDS)
        close = _near(scheme, names)
        hint = f"near ones: {', '.join(close)}" if close else f"schemes: {', '.join(names)}"
        raise QuantizationError(f"unknown quantization scheme {scheme!r}; {hint}, or a .toml or .json file") from None
    return _linears(scheme, scheme)


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Returns the names of `known` that a name may mean, in either case. Names that begin with it come first."""
    lower = name.strip().lower()
    lower = {"int8": "w8a", "int4": "w4a16"}.get(lower, lower)  # names of other projects
    begin = [each for each in known if lower and each.startswith(lower)]
    return list(dict.fromkeys(begin + get_close_matches(lower, known, NEAR, 0.5)))[:NEAR]


def read_scheme(file: Path) -> Scheme:
    """Reads a TOML or JSON file. A scheme without a name is called after the file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise QuantizationError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise QuantizationError(f"{file}: not valid {kind}: {error}") from None
    if not isinstance(raw, dict):
        raise QuantizationError(f"{file}: holds a {type(raw).__name__}, not a scheme")
    return Scheme.from_dict({"name": file.stem} | raw, source=str(file))


def wide_rules(scheme: Scheme) -> dict[str, list[str]]:
    """Returns the patterns that quantize the embedding or the head along with layers, and which of the two."""
    found: dict[str, list[str]] = {}
    for name in ("embed_tokens", "lm_head"):
        whole = f"model.{name}" if name == "embed_tokens" else name
        pattern, fmt = next((rule for rule in scheme.rules if matches(rule[0], whole)), ("", PLAIN))
        if fmt != PLAIN and matches(pattern, "model.layers.0.self_attn.o_proj"):
            found.setdefault(pattern, []).append(name)
    return found


def _matches_module(pattern: str, weight: str, part: str) -> bool:
    return matches(pattern, weight) or matches(pattern, part)


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern is a name, or its end after a dot."""
    pattern = pattern.removesuffix(".weight")
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def near(pattern: str, known: Iterable[str]) -> str:
    """Returns a hint of the names that `pattern` may mean: all below it, or similar names with an open layer number."""
    known = list(known)
    if any(matches(f"{pattern}.*", name) for name in known):
        return f"all below it: '{pattern}.*'"
    names = list(dict.fromkeys(map(_of_any_layer, known)))
    ends = {end: None for name in names for end in (name, name.rpartition(".")[2])}
    close = get_close_matches(pattern.removesuffix(".weight").lower(), ends, NEAR, 0.5)
    return f"near ones: {', '.join(close)}" if close else f"names: {', '.join(names)}"


def _of_any_layer(name: str) -> str:
    """Returns a pattern for the weight of this name in each layer."""
    return re.sub(r"\b\d+\b", "*", name)


def scheme_of(formats: Mapping[str, WeightFormat], modules: Modules) -> Scheme:
    """Returns the scheme that gives these formats and leaves other weights alone. It is a preset if one does so."""
    wanted = {name: (fmt,) for name, fmt in formats.items()}
    for scheme in PRESETS.values():
        if {name: found for name, found in scheme.formats(modules).items() if found} == wanted:
            return scheme
    rules: dict[str, WeightFormat | None] = {}
    alike: dict[str, list[str]] = {}
    for name in modules:
        alike.setdefault(_of_any_layer(name), []).append(name)
    for pattern, names in alike.items():
        found = {name: formats.get(name) for name in names}
        rules |= {pattern: found[names[0]]} if len(set(found.values())) == 1 else found
    used = {fmt.name for fmt in formats.values()}
    return Scheme(
        used.pop() if len(used) == 1 else "mixed",
        tuple((pattern, fmt.name) for pattern, fmt in rules.items() if fmt is not None),
    )
