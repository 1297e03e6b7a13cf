"""Makes llguidance matchers of guides, for the engine and for the processes that try guides first. Needs no JAX."""

import json
import re
from typing import TYPE_CHECKING

from jllm.errors import RequestError
from jllm.guides.guide import Guide
from jllm.guides.guide_schema import parse, served
from jllm.guides.lark import served_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACES = r"[ \n]{0,20}"  # between the parts of JSON: enough to indent, but not endless


def make_matcher(words: "LLTokenizer", guide: Guide) -> "LLMatcher":
    """Returns a matcher at the guide's beginning. Raises RequestError for an invalid guide."""
    from llguidance import LLMatcher, LLParserLimits

    # Limits are the library's defaults. Verbose errors would print its whole state.
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
        return LLMatcher.grammar_from_lark(served_lark(guide.text))
    # One lexeme: a rule for each of many texts would exceed llguidance's limits of a step.
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(guide.text))))


def one_line(text: str) -> str:
    """Returns an error text of llguidance on one line, without the trace of a panic."""
    return " ".join(text.replace("<non-verbose/>", "").partition("<backtrace>")[0].split())
