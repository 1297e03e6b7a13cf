"""Guides as matchers of llguidance: what the engine and the processes that try guides first have in common. No JAX."""

import json
import re
from typing import Any

from jllm.errors import RequestError
from jllm.guides.guide import Guide
from jllm.guides.guide_schema import parse, served

SPACES = r"[ \n]{0,20}"  # between the parts of JSON: enough to indent, and no place to stay in for ever


def make_matcher(words: Any, guide: Guide) -> Any:
    """Returns an LLMatcher at the guide's beginning; `words` is an LLTokenizer. Raises RequestError for a guide that is
    not valid."""
    from llguidance import LLMatcher, LLParserLimits

    # Limits are the library's own. Its errors would tell its whole state.
    made = LLMatcher(words, _grammar(guide), log_level=0, limits=LLParserLimits(verbose_errors=False))
    if made.is_error():
        raise RequestError(f"the guide ({guide.kind}) is not valid: {one_line(made.get_error())}")
    return made


def _grammar(guide: Guide) -> str:
    from llguidance import LLMatcher

    if guide.kind == "json":
        schema = json.dumps(served(parse(guide.text)))
        try:
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACES})
        except ValueError as error:
            raise RequestError(f"the guide (json) is not valid: {one_line(str(error))}") from None
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind == "grammar":
        return LLMatcher.grammar_from_lark(guide.text)
    # One lexeme: rules of so many texts are more than a step may hold.
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(guide.text))))


def one_line(text: str) -> str:
    """Returns an error of llguidance."""
    return " ".join(text.replace("<non-verbose/>", "").split())
