"""Steps of many kinds, traced with the shapes of signatures checked: a program for test_shapes.py."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import TypeCheckError

from jllm.model.backbone import head, packed_logits
from jllm.model.cache import COPIES, copy_pages
from jllm.model.hooks import Hooks
from jllm.model.norms import norm_rows
from jllm.model.paged import Packed
from jllm.model.rope import angles
from jllm.model.sampling import Draws, make_counts
from jllm.model.shapes import CHECKED
from jllm.model.shards import share_params
from jllm.model.taps import LAYER, TOP
from jllm.parallel.mesh import make_mesh, spread
from jllm.quant.quantize import quantize
from jllm.speculative.ngram import NGram
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.merge import eager_step
from jllm.step.state import Guidance, Variant, init_state
from tests.tiny import tiny_model

EVERYTHING = (*(f"layers.0.{name}" for name in LAYER), *TOP)
CHUNK = PromptChunk(1, range(7, 18), pages=[2, 3], targets=range(8, 19), sampling={"repetition_penalty": 1.5})


def trace(model, *, hooks=None, variant=Variant(), backend=None, drafter=None, **options):
    """Traces a step with a prompt, and with a sequence that decodes."""
    state = init_state(model.config, slots=2, num_pages=4, page_size=32, max_pages=2, drafter=drafter, **options)
    V, nodes = model.config.vocab_size, 1 if drafter is None else drafter.tree.size
    if variant.guided:
        words = jnp.zeros((2, nodes, -(-V // 32)), jnp.uint32)
        state = replace(state, guidance=Guidance(words, jnp.zeros((2, 4), jnp.int32)))
    if variant.penalties:
        state = replace(state, counts=make_counts(2, V))
        penalties = init_state(model.config, slots=2, num_pages=4, page_size=32).slots.sampling
        state = replace(state, slots=replace(state.slots, sampling=penalties))
    batch = ragged_batch([CHUNK] if nodes == 1 else [], [0], rows=nodes)
    if not variant.penalties:
        batch = replace(batch, sampling=replace(batch.sampling, penalties=None))
    run = partial(eager_step, config=model.config, variant=variant, backend=backend)
    jax.eval_shape(run, model.params, state, batch, drafter, hooks)


def refused(function, *args, **options) -> None:
    try:
        function(*args, **options)
    except TypeCheckError:
        return
    raise AssertionError(f"{function.__name__} takes arrays of other shapes")


def main() -> None:
    assert CHECKED
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_layers": 1}
    model = tiny_model("bfloat16", **sizes)
    hooks = Hooks(edit={"layers.*.q": lambda x, rows: x, "logits": lambda x, rows: x})
    trace(model)
    trace(model, backend="deterministic")
    trace(model, variant=Variant(logprobs=True, prompt_logprobs=True, guided=True, taps=EVERYTHING))
    trace(model, hooks=hooks, variant=Variant(prompt_logprobs=True))
    trace(model, drafter=NGram(3))
    trace(tiny_model(num_layers=1, windows=(4,), tie_embeddings=True), kv_cache="kivi2-g8-r64")
    for scheme in ("w8a8-groups", "w8a8-tensor", "w4a16-g32-zp", "llm-int8", "fp8"):
        quantized = replace(model, params=quantize(jax.eval_shape(lambda params: params, model.params), scheme))
        trace(quantized, kv_cache="int8-g8")
        trace(quantized, hooks=hooks)
    config = spread(model.config, make_mesh(2))
    many = replace(model, config=config, params=share_params(model.params, config))
    trace(many, variant=Variant(draws=Draws.GREEDY))
    trace(many, variant=Variant(taps=EVERYTHING[:3]), hooks=hooks)
    ids = jnp.arange(9, dtype=jnp.int32)
    for m in (model, many):
        jax.eval_shape(lambda params, m=m: packed_logits(params, m.config, Packed(ids, ids, 0 * ids)), m.params)
    pages = jnp.zeros((COPIES, 2), jnp.int32)
    state = init_state(model.config, slots=2, num_pages=4)
    jax.eval_shape(copy_pages, (state.cache,), pages)

    x = jnp.zeros((3, 64))
    refused(norm_rows, x, x[0, :5], model.config, None)
    refused(head, model.params, model.config, x[0])
    refused(angles, model.config, x[0], "float32")
    refused(copy_pages, (state.cache,), pages[:, 0])


if __name__ == "__main__":
    main()
