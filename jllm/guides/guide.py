"""Defines a guide, the required form of a continuation: a JSON schema, a regular expression, a choice or a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jllm.errors import RequestError
from jllm.guides import guide_schema

KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Guide:
    """Holds the required form of a continuation. It is made by `Guide.json`, `Guide.regex`, `Guide.choice` or
    `Guide.grammar`. A model's tokenizer decides whether it is valid, so an engine checks it when a request comes."""

    kind: str
    text: str  # a schema for json, a list of strings for choice, both as JSON

    def __post_init__(self):
        if self.kind not in KINDS or not isinstance(self.text, str):
            raise RequestError(f"a guide is made by Guide.{', Guide.'.join(KINDS)}, not of {self.kind!r}")

    @classmethod
    def parse(cls, value: object) -> "Guide":
        """Returns a guide from {"json": schema}, {"regex": text}, {"choice": [texts]} or {"grammar": text}."""
        if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in KINDS:
            raise RequestError(
                f'a guide must be like {{"regex": "[0-9]+"}}, with one of {", ".join(KINDS)}, not {value!r}'
            )
        kind, given = next(iter(value.items()))
        made: Guide = getattr(cls, kind)(given)
        return made

    def as_json(self) -> dict[str, object]:
        """Returns the guide in the form that `parse` takes."""
        return {self.kind: json.loads(self.text) if self.kind in ("json", "choice") else self.text}

    @classmethod
    def json(cls, schema: Mapping[str, object] | str | None = None) -> "Guide":
        """Returns a guide for JSON that a schema accepts. The schema is a mapping or its text; None accepts any
        object."""
        if isinstance(schema, str):
            schema = guide_schema.parse(schema)
        elif schema is None:
            schema = {"type": "object"}
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"a JSON schema must be a mapping, not {schema!r}")
        guide_schema.served(schema)  # checked here, where numbers still have their original text
        try:
            return cls("json", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not JSON: {error}") from None

    @classmethod
    def regex(cls, pattern: str) -> "Guide":
        """Returns a guide for text that a regular expression matches from its first character to its last. The syntax
        is that of Rust's regex crate, without look-around."""
        if not isinstance(pattern, str):
            raise RequestError(f"a regular expression must be a string, not {pattern!r}")
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Guide":
        """Returns a guide for one of some texts."""
        some = [] if isinstance(texts, str) or not isinstance(texts, Sequence) else list(texts)
        if not some or not all(isinstance(text, str) and text for text in some):
            raise RequestError(f"a choice must be a list of non-empty strings, not {texts!r}")
        return cls("choice", json.dumps(some))

    @classmethod
    def grammar(cls, text: str) -> "Guide":
        """Returns a guide for text of a context-free grammar in llguidance's dialect of Lark, whose first rule is
        `start`."""
        if not isinstance(text, str) or not text.strip():
            raise RequestError(f"a grammar must be a non-empty string, not {text!r}")
        return cls("grammar", text)
