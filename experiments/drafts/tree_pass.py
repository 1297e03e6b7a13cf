"""The claim that one pass over a tree of drafts gives what separate passes over each of its paths do."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.drafts.workloads import read_stories
from jllm.batch import Packed, PromptChunk, ragged_batch
from jllm.merge_step import step
from jllm.model import packed_logits
from jllm.pretrained import Model, load
from jllm.speculative.drafter import Drafts
from jllm.speculative.tree import Tree, chain
from jllm.state import init_state
from jllm.step_forward import forward

Row = dict[str, Any]
EXACT = 1e-10  # relative to the logits' norm, in float64
PAGE = 16


def binary(nodes: int) -> Tree:
    """Two children a node, level by level."""
    return Tree(tuple((node - 1) // 2 for node in range(1, nodes)))


def trees(args: argparse.Namespace) -> Iterator[Row]:
    """The largest difference of a node's logits, in float64, between one pass over a tree and a pass over the node's
    own path; and what it is when nodes see all that come before them, as in a chain."""
    with jax.enable_x64(True):
        model = load(args.model, dtype="float64")
        (prompt,) = read_stories(model, 1)
        tree = binary(args.nodes[-1])
        drafts = np.random.default_rng(0).integers(model.config.vocab_size, size=tree.size - 1).astype(np.int32)
        found, root = tree_logits(model, prompt, drafts, tree)
        wrong, _ = tree_logits(model, prompt, drafts, chain(tree.size - 1))
        wanted = path_logits(model, [*prompt, root], drafts, tree)
        norms = np.linalg.norm(wanted, axis=1)
        errors = [float((np.linalg.norm(each - wanted, axis=1) / norms).max()) for each in (found, wrong)]
    for mask, error in zip(("of ancestors", "of a chain"), errors):
        yield {"nodes": tree.size, "depth": tree.depth, "mask": mask, "difference": float(f"{error:.3g}")}


def tree_logits(model: Model, prompt: Sequence[int], drafts: np.ndarray, tree: Tree) -> tuple[np.ndarray, int]:
    """Logits [Q, V] of the nodes of a tree behind the token that is drawn after a prompt, and that token."""
    params, config = model.params, model.config
    pages = range(-(-(len(prompt) + tree.size) // PAGE))
    state = init_state(config, slots=1, num_pages=len(pages), page_size=PAGE, dtype=params.dtype)
    state, outputs = step(params, state, ragged_batch([PromptChunk(0, prompt, pages=pages)]), config=config)
    count = jnp.full(1, tree.size - 1, jnp.int32)
    state = replace(state, drafts=Drafts(jnp.asarray(drafts)[None], count, (), (), tree))
    _, logits = jax.jit(partial(forward, config=config))(params, state, ragged_batch(decodes=[0], rows=tree.size))
    return np.asarray(logits.values), int(outputs.tokens[0])


def path_logits(model: Model, tokens: Sequence[int], drafts: np.ndarray, tree: Tree) -> np.ndarray:
    """The same of one pass for each node, over the tokens and its path; the tree's root is the last of them."""
    texts = [[*tokens, *(int(drafts[node - 1]) for node in path[1:])] for path in tree.paths]
    return np.stack([logits_of(model, text, len(tokens) + tree.depth)[len(text) - 1] for text in texts])


def logits_of(model: Model, tokens: Sequence[int], length: int) -> np.ndarray:
    """Logits [length, V] of a text and zeros behind it."""
    padded, row = jnp.asarray([*tokens, *[0] * (length - len(tokens))], jnp.int32), jnp.arange(length, dtype=jnp.int32)
    return np.asarray(_logits(model.params, Packed(padded, row, jnp.zeros_like(row)), config=model.config))


_logits = jax.jit(lambda params, batch, config: packed_logits(params, config, batch), static_argnames="config")


def judge_trees(rows: list[Row]) -> tuple[str, str]:
    right, wrong = (row["difference"] for row in rows)
    said = f"logits differ by {right:.1e} of their norm (with a chain's mask by {wrong:.1e})"
    return ("yes" if right < EXACT < wrong else "no"), said
