"""What drafters with weights propose, from the formulas: numpy in float64, no cache, each path of a tree for itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import LlamaConfig
from jllm.model.params import LayerParams, Params
from jllm.model.sampling import Sampling, perturbed
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.eagle import Eagle
from jllm.speculative.medusa import Medusa

_perturbed = jax.jit(perturbed)

Logits = Callable[[list[int], int], np.ndarray]  # of a path's drafts and their number + 1 -> [V]


def norm(x: np.ndarray, weight: jax.Array, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def decoder_layer(p: LayerParams, c: LlamaConfig, x: np.ndarray) -> np.ndarray:
    """One layer of LLaMA over a whole sequence [n, E]."""
    n, H, K, D = len(x), c.num_heads, c.num_kv_heads, c.head_dim
    qkv = (norm(x, p.attention.norm, c.norm_eps) @ np.asarray(p.attention.qkv).T).reshape(n, H + 2 * K, D)
    angle = np.arange(n)[:, None] * c.rope_theta ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    one, two = qkv[:, : H + K, : D // 2], qkv[:, : H + K, D // 2 :]
    qk = np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=2)
    out = np.zeros((n, H, D))
    for i in range(n):
        for h in range(H):
            k, v = qk[: i + 1, H + h // (H // K)], qkv[: i + 1, H + K + h // (H // K)]
            scores = k @ qk[i, h] / np.sqrt(D)
            shares = np.exp(scores - scores.max())
            out[i, h] = shares / shares.sum() @ v
    x = x + out.reshape(n, H * D) @ np.asarray(p.attention.o).T
    gate, up = np.split(norm(x, p.mlp.norm, c.norm_eps) @ np.asarray(p.mlp.gate_up).T, 2, axis=1)
    return x + (silu(gate) * up) @ np.asarray(p.mlp.down).T


def hidden_states(params: Params, c: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """Of a whole sequence before the final norm: [n, E]."""
    x = np.asarray(params.embed)[tokens]
    for layer in params.layers:
        x = decoder_layer(layer, c, x)
    return x


def logits_of(params: Params, c: LlamaConfig, hidden: np.ndarray) -> np.ndarray:
    return norm(hidden, params.norm, c.norm_eps) @ np.asarray(params.embed if params.head is None else params.head).T


def draft_logits(drafter: DraftModel, vocabulary: int, tokens: list[int]) -> Logits:
    ids = np.arange(vocabulary) if drafter.target_ids is None else np.asarray(drafter.target_ids)
    own = {int(target): i for i, target in enumerate(ids)}

    def logits(path: list[int], depth: int) -> np.ndarray:
        known = [own.get(token, 0) for token in [*tokens, *path]]
        full = np.full(vocabulary, -np.inf)
        full[ids] = logits_of(drafter.params, drafter.config, hidden_states(drafter.params, drafter.config, known)[-1])
        return full

    return logits


def eagle_logits(drafter: Eagle, params: Params, c: LlamaConfig, tokens: list[int], hidden: np.ndarray) -> Logits:
    """hidden [n - 1, E]: the target's, of all tokens but the newest one."""
    fc, table = np.asarray(drafter.head.fc), np.asarray(params.embed)

    def row(token: int, before: np.ndarray) -> np.ndarray:
        return fc @ np.concatenate([table[token], before])

    def logits(path: list[int], depth: int) -> np.ndarray:
        before = [np.zeros(c.hidden_size), *hidden]
        rows = [row(token, h) for token, h in zip(tokens, before, strict=True)]
        for token in path:
            rows.append(row(token, decoder_layer(drafter.head.layer, c, np.stack(rows))[-1]))
        return logits_of(params, c, decoder_layer(drafter.head.layer, c, np.stack(rows))[-1])

    return logits


def medusa_logits(drafter: Medusa, params: Params, c: LlamaConfig, hidden: np.ndarray) -> Logits:
    x = norm(hidden[-1], params.norm, c.norm_eps)

    def logits(path: list[int], depth: int) -> np.ndarray:
        head = drafter.heads[depth - 1]
        y = x + silu(np.asarray(head.linear) @ x + np.asarray(head.bias))
        target = params.embed if params.head is None else params.head
        return np.asarray(target if head.head is None else head.head) @ y

    return logits


def tree_of_drafts(tree, logits: Logits, sampling: Sampling, newest: int) -> list[int]:
    """The drafts after a token of index `newest`; sampling has one row."""
    found: list[int] = []
    for node in range(1, tree.size):
        parent = tree.parents[node - 1]
        depth = tree.depths[node]
        path = [found[n - 1] for n in tree.paths[parent][1:]]
        position = jnp.asarray([newest + depth], jnp.int32)
        scores = np.asarray(_perturbed(jnp.asarray(logits(path, depth))[None], sampling, position))[0]
        found.append(int(np.argsort(-scores, kind="stable")[tree.ranks[node]]))
    return found
