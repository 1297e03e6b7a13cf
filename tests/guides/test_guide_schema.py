"""What a schema asks for is what its texts are, or it is refused: no number and no keyword is changed in silence."""

import json
import random
import time
from decimal import Decimal
from fractions import Fraction

import pytest

from jllm.errors import RequestError
from jllm.guides import guide_trials
from jllm.guides.grammars import make_matcher
from jllm.guides.guide import Guide
from jllm.guides.guide_trials import Words
from jllm.guides.lark import served_lark

pytest.importorskip("llguidance")
pytest.importorskip("hypothesis")
from hypothesis import assume, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

TOKENIZER = guide_trials._tokenizer(Words([b"", *(bytes([byte]) for byte in range(256))], [0]))


def allows(matcher, text: str) -> bool:
    state = matcher.deep_copy()
    return state.consume_tokens([1 + byte for byte in text.encode()]) and state.is_accepting()


NUMBERS = [
    *("9007199254740993", "-9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775808"),
    *("18446744073709551615", "1e20", "-1e19", "1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400, "1e-400"),
    *("0.12345678901234567890", "0.10000000000000001", "915.4245987733325", "3.656383438479174e-08", "1e-30"),
]
PLACES = ["const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_would_be_changed_is_refused(number):
    schemas = [f'{{"{place}": {number}}}' for place in PLACES]
    schemas += [f'{{"enum": [1, {{"a": [{number}]}}]}}', f'{{"properties": {{"const": {{"maximum": {number}}}}}}}']
    schemas += [f'{{"anyOf": [{{"items": {schemas[0]}}}]}}', f'{{"$defs": {{"default": {schemas[0]}}}}}']
    schemas += [f'{{"$ref": "#/components/x", "components": {{"x": {schemas[1]}}}}}']
    for schema in schemas:
        with pytest.raises(RequestError, match="of a JSON schema cannot be ") as error:
            Guide.json(schema)
        assert len(str(error.value)) < 200
    for name in ("default", "examples"):
        assert Guide.json(f'{{"{name}": {number}, "properties": {{"minimum": {{"type": "string"}}}}}}')


def test_numbers_of_python_are_refused_too():
    for value in (2**53 + 1, 2**20_000, -(2**63), float("inf"), float("nan"), 0.1 + 0.2):
        with pytest.raises(RequestError, match="const of a JSON schema cannot be"):
            Guide.json({"const": value})


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ('{"exclusiveMaximum": 9007199254740992}', "exclusiveMaximum of a JSON schema cannot be 9007199254740992"),
        ('{"exclusiveMinimum": true}', "exclusiveMinimum of a JSON schema is not supported in this form"),
        ('{"multipleOf": 0}', "multipleOf of a JSON schema cannot be 0"),
        ('{"multipleOf": 0.07}', "multipleOf of a JSON schema cannot be 0.07"),
        ('{"multipleOf": 4294967297}', "multipleOf of a JSON schema cannot be 4294967297"),
        ('{"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}', "several that differ have too many digits"),
        (
            '{"exclusiveMinimum": 1, "maximum": 1.5}',
            "exclusiveMinimum or exclusiveMaximum of a JSON schema cannot be 1",
        ),
        ('{"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}', "of a JSON schema cannot be 0 where another bound"),
        ('{"divisibleBy": 3}', "divisibleBy of a JSON schema is not supported in this form"),
        ('{"type": "array", "x-guidance": {"lenient": true}, "uniqueItems": true}', "x-guidance of a JSON schema must"),
        ('{"items": {"x-guidance": {}}}', "x-guidance of a JSON schema must"),
        ("false", "allows nothing"),
        ("null", "a JSON schema must be a mapping"),
        ('{"type": "string", "type": "integer"}', "'type' occurs twice in one object"),
    ],
)
def test_what_would_be_ignored_is_refused(schema, why):
    with pytest.raises(RequestError, match=why):
        Guide.json(schema)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('start: A %json {"const": 9007199254740993}\nA: /a/', "const of a JSON schema cannot be 9007199254740993"),
        ('start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "x-guidance of a JSON schema must"),
        ('{"grammars": [{"json_schema": {"const": 9007199254740993}}]}', "must be in Lark, not JSON"),
        ('start: "a" <end>', "special tokens by id, like <.5.>, not <end>"),
        ('start[temperature=2]: "a"', "cannot set the temperature"),
    ],
)
def test_what_would_be_changed_in_a_grammar_is_refused(text, why):
    with pytest.raises(RequestError, match=why):
        make_matcher(TOKENIZER, Guide.grammar(text))


def test_the_rest_of_a_grammar_is_as_it_was_written():
    text = 'start: "%json {1} <a>" /<b> temperature=/ %json {"const": 5, "title": "x"} last // <c>\nlast: /y\n"/ # <d>'
    assert allows(make_matcher(TOKENIZER, Guide.grammar(text)), '%json {1} <a><b> temperature=5y\n"')


def test_quotes_that_nothing_closes_are_read_once():
    text = '"\\' * 20_000
    begin = time.perf_counter()
    assert served_lark(text) == text
    assert time.perf_counter() - begin < 5  # not once for each quote


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ('{"const": 9007199254740992}', "9007199254740992"),
        ('{"const": -9007199254740992}', "-9007199254740992"),
        ('{"const": 1.0}', "1"),
        ('{"type": "integer", "const": 1e2}', "100"),
        ('{"const": -0.0}', "-0"),
        ('{"const": 0.1}', "0.1"),
        ('{"enum": ["a", 1e-7]}', "0.0000001"),
        ('{"minLength": 2.0, "maxLength": 2.0, "type": "string"}', '"ab"'),
        ('{"exclusiveMinimum": 0, "maximum": 1}', "0.5"),
        ('{"exclusiveMinimum": 0.5, "maximum": 0.75}', "0.6"),
    ],
)
def test_a_number_that_is_kept_is_what_is_written(schema, text):
    assert allows(make_matcher(TOKENIZER, Guide.json(schema)), text)


numbers = (
    st.integers(-20, 20).map(str)
    | st.integers(-(2**53), 2**53).map(str)
    | st.decimals(-3, 3, places=3).map(str)
    | st.floats(-1e9, 1e9).map(repr)
    | st.sampled_from(["-0.0", "1.0", "1e3", "2.50", "1e-7", "9007199254740992", "100000"])
)
steps = st.sampled_from(["2", "5", "0.5", "0.25", "0.1", "0.01", "3", "1e-3", "1.5", "1000"])
KEEPS = {
    "minimum": lambda x, bound: x >= bound,
    "maximum": lambda x, bound: x <= bound,
    "exclusiveMinimum": lambda x, bound: x > bound,
    "exclusiveMaximum": lambda x, bound: x < bound,
    "const": lambda x, bound: x == bound,
    "multipleOf": lambda x, step: (x / step).denominator == 1,
}


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["integer", "number"]),
    bounds=st.dictionaries(st.sampled_from(PLACES[:5]), numbers, min_size=1, max_size=2),
    step=st.none() | steps,
)
def test_numbers_are_within_their_bounds(kind, bounds, step):
    asked = bounds | ({} if step is None else {"multipleOf": step})
    fields = ", ".join(f'"{name}": {number}' for name, number in asked.items())
    try:
        matcher = make_matcher(TOKENIZER, Guide.json(f'{{"type": "{kind}", {fields}}}'))
    except RequestError:
        assume(False)
    near = [Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 10), Fraction(1, 1000), Fraction(-1, 1000)]
    for x in {Fraction(number) + d for number in asked.values() for d in near}:
        text = f"{Decimal(x.numerator) / Decimal(x.denominator):f}"
        if allows(matcher, text):
            assert all(KEEPS[name](Fraction(text), Fraction(number)) for name, number in asked.items())
            assert kind == "number" or Fraction(text).denominator == 1


def simple(depth: int = 0):
    """A strategy of schemas of all keywords, those that are not served too."""
    inner = st.deferred(lambda: simple(depth + 1)) if depth < 2 else st.sampled_from([True, {"type": "integer"}])
    some = st.sampled_from([0, 1, 1.5, -2, "a", "ab", None, True, [], [1], {"a": 1}])
    names = st.dictionaries(st.sampled_from(["a", "b", "const", "default"]), inner, min_size=1, max_size=2)
    drafts = ["http://json-schema.org/draft-04/schema#", "https://json-schema.org/draft/2019-09/schema"]
    optional = {
        "type": st.sampled_from(["integer", "number", "string", "array", "object", ["integer", "array"]]),
        **dict.fromkeys(["minimum", "maximum"], st.integers(-3, 9)),
        "exclusiveMinimum": st.sampled_from([0, 1.5, True]),
        **dict.fromkeys(["minLength", "minItems", "maxItems", "minContains", "maxProperties"], st.integers(0, 2)),
        "pattern": st.sampled_from(["^a", "b$", "[0-9]"]),
        "format": st.sampled_from(["date", "ipv4", "foo"]),
        "uniqueItems": st.booleans(),
        "items": inner | st.lists(inner, min_size=1, max_size=2),
        **dict.fromkeys(["prefixItems", "anyOf", "oneOf", "allOf"], st.lists(inner, min_size=1, max_size=2)),
        **dict.fromkeys(["additionalItems", "additionalProperties", "contains", "not", "if", "then"], inner),
        **dict.fromkeys(["propertyNames", "unevaluatedItems", "unevaluatedProperties"], inner),
        **dict.fromkeys(["properties", "patternProperties", "dependentSchemas"], names),
        **dict.fromkeys(["dependentRequired", "dependencies"], st.just({"a": ["b"]})),
        "required": st.sampled_from([["a"], ["c"]]),
        "const": some,
        "enum": st.lists(some, min_size=1, max_size=2),
        "$schema": st.sampled_from(drafts),
        "$ref": st.sampled_from(["#", "#/properties/a"]),
    }
    keywords = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
    return keywords.flatmap(lambda found: st.fixed_dictionaries({name: optional[name] for name in found}))


@settings(max_examples=250, deadline=None)
@example(schema={"items": [{}]}, seed=1)
@given(schema=simple(), seed=st.integers(0, 1 << 30))
def test_texts_are_as_their_schema_says_or_it_is_refused(schema, seed):
    jsonschema = pytest.importorskip("jsonschema")
    try:
        state = make_matcher(TOKENIZER, Guide.json(schema))
    except RequestError:
        return
    rng, text = random.Random(seed), []
    for _ in range(60):
        mask = state.compute_bitmask()
        if state.is_error() or (state.is_accepting() and (state.is_stopped() or rng.random() < 0.4)):
            break
        token = guide_trials._one_of(mask, [0], rng)
        if token is None or not state.consume_token(token):
            break
        text.append(token - 1)
    if state.is_error() or not state.is_accepting():
        return
    tuples = '"items": [' in json.dumps(schema)  # of older drafts: the newest one has prefixItems, and fails with these
    assume(not (tuples and "prefixItems" in json.dumps(schema)))
    usual = jsonschema.Draft201909Validator if tuples else jsonschema.Draft202012Validator
    draft = jsonschema.validators.validator_for(schema, usual)
    draft(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(bytes(text)))
