"""Trains drafters of speculative decoding as plain functions: their logits over whole texts, losses, and acceptance.

A drafter of any kind is a function `Passes` here. It returns the logits of the first draft, the second and so on, as if
each token of a text in turn were the newest one. Draft m only matters if all before it were accepted. So drafts are
followed along the text itself, and one pass shows how far they hold from every beginning.

Letters: B rows of L tokens, V vocabulary, E the target's model dim, D drafts in a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.training.data import Rows
from jllm.config import LlamaConfig
from jllm.model.backbone import backbone, head, packed_logits
from jllm.model.fused_linear import norm_linear
from jllm.model.linear import embed, linear
from jllm.model.mlp import mlp_block
from jllm.model.norms import rms_norm
from jllm.model.paged import Packed
from jllm.model.params import Params
from jllm.model.rope import angles
from jllm.model.sampling import Sampling, sample
from jllm.model.taps import Tap
from jllm.speculative.eagle import EagleHead
from jllm.speculative.medusa import MedusaHead, head_logits
from pallas_kernels.backends import DIFFERENTIABLE
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.rotary import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Known:
    """Text with the target's hidden states. Leading axes may be added: [B, L]."""

    rows: Rows
    hidden: Any  # [L, E], the target's hidden state of each token, before the final norm


@dataclass(frozen=True)
class Pass:
    """The logits of drafts of one depth. Row i is about the token after it, like the target's own logits."""

    logits: jax.Array  # [L, V]
    valid: jax.Array  # bool[L]; false if a draft of this depth began before the text
    hidden: jax.Array | None = None  # [L, E], if drafters also predict the target's hidden state


# Takes a drafter's weights, the target's and text [L]; returns a Pass for each depth.
Passes = Callable[[Any, Params, Known], list[Pass]]


def know(params: Params, rows: Rows, *, config: LlamaConfig) -> jax.Array:
    """Returns the target's hidden states [L, E] of a row of packed texts [L]."""
    return backbone(params, config, Packed(rows.tokens, rows.positions, rows.segments), None)[0]


def draft_passes(weights: Params, params: Params, known: Known, *, config: LlamaConfig, depth: int = 1) -> list[Pass]:
    """Returns the passes of a draft model with this config. Accepted drafts are text like any other, so all depths are
    one."""
    rows = known.rows
    logits = packed_logits(weights, config, Packed(rows.tokens, rows.positions, rows.segments))
    return [Pass(logits, follows(rows, m)) for m in range(depth)]


def medusa_passes(heads: tuple[MedusaHead, ...], params: Params, known: Known, *, config: LlamaConfig) -> list[Pass]:
    """Returns the passes of Medusa heads. Draft m is head m's, on the hidden state that gave the newest token."""
    normed = norm_quant(known.hidden, params.norm, eps=config.norm_eps, backend=DIFFERENTIABLE)[0]
    states = [shifted(normed, m) for m in range(1, len(heads) + 1)]
    logits = [head_logits(p, x, params, backend=DIFFERENTIABLE) for p, x in zip(heads, states)]
    return [Pass(found, follows(known.rows, m)) for m, found in enumerate(logits, 1)]


def eagle_passes(p: EagleHead, params: Params, known: Known, *, config: LlamaConfig, depth: int) -> list[Pass]:
    """Returns the passes of an EAGLE head, which continues from its own hidden states as in drafting. Pass m computes
    draft m of all beginnings at once (training-time test of EAGLE-3, arXiv 2503.01840). A row sees keys from the
    target's hidden states up to its beginning. Of each later pass it sees the one key of its own beginning."""
    rows, a = known.rows, p.layer.attention
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    cos, sin = angles(config, rows.positions, known.hidden.dtype)
    row = jnp.arange(rows.tokens.shape[0])
    apart = jnp.where(rows.segments[:, None] == rows.segments[None], row[:, None] - row[None], -1)
    embedded, hidden, passes = embed(params.embed, rows.tokens, params.dtype), known.hidden, []
    keys: list[tuple[jax.Array, jax.Array]] = []  # k and v [L, K, D] of each pass
    for m in range(depth):
        before = jnp.where(follows(rows, 1)[:, None], shifted(hidden, 1), 0)
        x = linear(jnp.concatenate([embedded, before], axis=1), p.fc, backend=DIFFERENTIABLE)
        qkv = norm_linear(x, a.norm, a.qkv, a.qkv_bias, eps=config.norm_eps, backend=DIFFERENTIABLE)
        q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
        if a.q_norm is not None and a.k_norm is not None:
            q, k = rms_norm(q, a.q_norm, config.norm_eps), rms_norm(k, a.k_norm, config.norm_eps)
        keys.append((rotate(k, cos, sin), v))
        q = rotate(q, cos, sin).reshape(-1, K, H // K, D) * D**-0.5
        own = [tuple(shifted(x, m - r) for x in keys[r]) for r in range(1, m + 1)]  # of pass r, at its place then
        scores = jnp.einsum("ikgd,jkd->ikgj", q, keys[0][0])
        scores = jnp.where((apart >= m)[:, None, None], scores, -jnp.inf)
        scores = jnp.concatenate([scores, *(jnp.einsum("ikgd,ikd->ikg", q, k)[..., None] for k, _ in own)], axis=-1)
        share = jax.nn.softmax(jnp.where(follows(rows, m)[:, None, None, None], scores, 0), axis=-1)
        out = jnp.einsum("ikgj,jkd->ikgd", share[..., : len(row)], keys[0][1])
        for r, (_, v) in enumerate(own):
            out += share[..., len(row) + r, None] * v[:, :, None]
        x = linear(out.reshape(len(row), -1), a.o, a.o_bias, residual=x, backend=DIFFERENTIABLE)
        hidden = mlp_block(p.layer.mlp, x, config=config, backend=DIFFERENTIABLE, tap=Tap(()))
        logits = head(params, config, hidden, backend=DIFFERENTIABLE)
        passes.append(Pass(logits, follows(rows, m), hidden))
    return passes


def follows(rows: Rows, distance: int) -> jax.Array:
    """Returns bool[L]: whether the row `distance` before is of the same text."""
    return (rows.segments >= 0) & (rows.positions >= distance)


def shifted(x: jax.Array, rows: int) -> jax.Array:
    """Returns x [L, ...] moved down by `rows` rows; zeros come in."""
    return jnp.pad(x, ((rows, 0), *((0, 0) for _ in x.shape[1:])))[: x.shape[0]]


def teach(
    weights: Any, params: Params, known: Known, *, passes: Passes, config: LlamaConfig, decay: float, regression: float
) -> jax.Array:
    """Returns a drafter's loss over texts [B, L], in nats. It is the cross entropy from the target's distribution of
    each next token, averaged over depths. Each depth counts `decay` times the previous one (Medusa's 0.8, arXiv
    2401.10774).

    A drafter of hidden states learns these too, by `regression` times their smooth L1 distance, a mean over E. EAGLE
    (arXiv 2401.15077) uses 10; a larger value gives tokens less weight.
    """

    known = replace(known, hidden=known.hidden.astype(params.dtype))

    def one(known: Known) -> tuple[jax.Array, jax.Array]:
        target = jax.nn.softmax(head(params, config, known.hidden, backend=DIFFERENTIABLE))
        losses = []
        for found in passes(weights, params, known):
            loss = -jnp.sum(target * jax.nn.log_softmax(found.logits), axis=1)
            if found.hidden is not None:
                loss += regression * jnp.mean(smooth_l1(found.hidden - known.hidden), axis=1)
            losses.append((jnp.sum(jnp.where(found.valid, loss, 0)), jnp.sum(found.valid)))
        sums, counts = zip(*losses)
        return jnp.stack(sums), jnp.stack(counts)

    sums, counts = (jnp.sum(x, axis=0) for x in jax.vmap(one)(known))
    share = decay ** np.arange(len(sums))
    return jnp.sum(sums / counts.astype(sums.dtype) * jnp.asarray(share / share.sum(), sums.dtype))


def smooth_l1(x: jax.Array) -> jax.Array:
    """Returns x^2 / 2 within 1 of zero, |x| - 1/2 outside."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * size * size, size - 0.5)


@partial(jax.jit, static_argnames=("passes", "config", "drafts"))
def accepted(
    weights: Any,
    params: Params,
    texts: Known,
    sampling: Sampling,
    first: jax.Array,
    *,
    passes: Passes,
    config: LlamaConfig,
    drafts: int,
) -> jax.Array:
    """Returns i32[B, 1 + D]: the number of beginnings, then of those whose first 1 .. D drafts all equal the target's
    draws. Texts [B, L] must be drawn by the target itself.

    A row has one text; `sampling` [B] is what it was drawn with, and drafts use the same noise. A beginning is a token
    of index first [B] or later that D tokens follow. It counts as the newest one.
    """

    def one(text: tuple[Known, Sampling, jax.Array]) -> jax.Array:
        known, sampling, first = text
        rows = known.rows
        L = rows.tokens.shape[0]
        asked = jax.tree.map(lambda x: jnp.broadcast_to(x, (L, *x.shape)), sampling)
        starts = (rows.positions >= first) & (rows.segments >= 0)
        starts &= jnp.arange(L) + drafts <= jnp.sum(rows.segments >= 0)
        reached, counts = starts, [jnp.sum(starts)]
        for m, found in enumerate(passes(weights, params, known)[:drafts]):
            reached = shifted(reached, 1) if m else reached  # at the row from which draft m is drawn
            drawn = sample(found.logits, asked, rows.positions + 1, backend=DIFFERENTIABLE)[0]
            reached &= found.valid & (drawn == rows.targets)
            counts.append(jnp.sum(reached))
        return jnp.stack(counts)

    return lax.map(one, (texts, sampling, first))


def by_depth(counts: np.ndarray, *, samples: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Returns a row for each depth m, from `accepted`'s counts of texts [B, 1 + D]. It has the share of drafts m
    accepted after all before them. A 95 % interval is by bootstrap over texts (Efron, 1979). It also has the tokens per
    step with m drafts, as a mean over beginnings."""
    drawn = np.random.default_rng(seed).integers(len(counts), size=(samples, len(counts)))

    def figures(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.cumsum(sums / np.maximum(sums[..., :1], 1), axis=-1)
        return sums[..., 1:] / np.maximum(sums[..., :-1], 1), tokens[..., 1:]

    acceptance, tokens = figures(counts.sum(axis=0))
    low, high = np.quantile(figures(counts[drawn].sum(axis=1))[0], [0.025, 0.975], axis=0)
    names = ("acceptance", "low", "high", "tokens_a_step")
    columns: Sequence[np.ndarray] = (acceptance, low, high, tokens)
    return [
        {"depth": m + 1, "texts": len(counts), **{name: round(float(x[m]), 4) for name, x in zip(names, columns)}}
        for m in range(counts.shape[1] - 1)
    ]
