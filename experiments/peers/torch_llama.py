"""Defines a LLaMA in plain PyTorch as a careful user writes it. It has fused matmuls, a static KV cache, compiled
layers, and one CUDA graph per decode step. Weights are random. peer_torch.py times it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

LEAST_ROWS = 32  # of torch._int_mm, which refuses 16 and fewer
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "max": {"options": {"max_autotune": True, "coordinate_descent_tuning": True}},
}


@dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    mlp: int = 11008
    layers: int = 32
    heads: int = 32
    head: int = 128
    vocab: int = 32000
    device: str = "cuda"
    dtype: Any = torch.bfloat16


@dataclass(frozen=True)
class Weights:
    """Weights of matmuls, [out, in], or int8 codes with a scale per row."""

    shape: Shape
    scheme: str  # bf16, wo8 (only weights in int8) or w8a8
    embedding: Any
    layers: list[tuple[Any, ...]]  # norm, QKV, output, norm, gate and up, down
    norm: Any
    head: Any


def random_weights(shape: Shape, scheme: str) -> Weights:
    def values(*size: int) -> Any:
        return torch.empty(size, device=shape.device, dtype=shape.dtype).normal_(0, 0.02)

    def product(rows: int, columns: int) -> Any:
        return values(rows, columns) if scheme == "bf16" else quantized(values(rows, columns))

    def ones() -> Any:
        return torch.ones(shape.hidden, device=shape.device, dtype=shape.dtype)

    e, f = shape.hidden, shape.mlp
    layers = [
        (ones(), product(3 * e, e), product(e, e), ones(), product(2 * f, e), product(e, f))
        for _ in range(shape.layers)
    ]
    return Weights(shape, scheme, values(shape.vocab, e), layers, ones(), product(shape.vocab, e))


def quantized(x: Any) -> tuple[Any, Any]:
    """Returns int8 codes and a float32 scale per row."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (wide / scale).round().to(torch.int8), scale.squeeze(-1)


def linear(x: Any, weight: Any, scheme: str) -> Any:
    if scheme == "bf16":
        return F.linear(x, weight)
    codes, scale = weight
    if scheme == "wo8":
        return F.linear(x, codes.to(x.dtype)) * scale.to(x.dtype)
    rows, of_rows = quantized(x)
    rows = F.pad(rows, (0, 0, 0, max(0, LEAST_ROWS - len(rows))))
    return (torch._int_mm(rows, codes.t())[: len(x)].float() * of_rows[:, None] * scale).to(x.dtype)


def normed(x: Any, weight: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Returns [T, heads, D] turned by angles [T, D / 2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def layer_of(shape: Shape, scheme: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer. attend(q, k, v, keys, values, positions, about) stores K and V and returns attention's
    output."""

    def layer(
        x: Any, residual: Any, weights: Any, keys: Any, values: Any, positions: Any, angles: Any, about: Any
    ) -> Any:
        first, qkv, out, second, gate_up, down = weights
        residual = residual + x
        q, k, v = linear(normed(residual, first), qkv, scheme).view(len(x), 3, shape.heads, shape.head).unbind(1)
        cos, sin = angles
        q, k = (rotated(each, cos[positions], sin[positions]) for each in (q, k))
        found = attend(q, k, v, keys, values, positions, about)
        residual = residual + linear(found.reshape(len(x), shape.hidden), out, scheme)
        gate, up = linear(normed(residual, second), gate_up, scheme).chunk(2, -1)
        return linear(F.silu(gate) * up, down, scheme), residual

    return layer


def attend_to_prompt(q: Any, k: Any, v: Any, keys: Any, values: Any, positions: Any, about: Any) -> Any:
    """Attends causally within prompts of one length, which all begin at 0."""
    batch = len(keys)
    q, k, v = (each.unflatten(0, (batch, -1)) for each in (q, k, v))
    keys[:, : k.shape[1]] = k
    values[:, : v.shape[1]] = v
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def _kept(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> None:
    rows = torch.arange(len(keys), device=keys.device)
    keys[rows, positions] = k
    values[rows, positions] = v


def attend_flex(q: Any, k: Any, v: Any, keys: Any, values: Any, positions: Any, about: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    _kept(k, v, keys, values, positions)
    return flex_attention(q.unsqueeze(2), keys.transpose(1, 2), values.transpose(1, 2), block_mask=about).squeeze(2)


def attend_fa2(q: Any, k: Any, v: Any, keys: Any, values: Any, positions: Any, about: Any) -> Any:
    _kept(k, v, keys, values, positions)
    return torch.ops.peers.fa2(q, keys, values, about)


@functools.cache
def register_fa2() -> None:
    """Registers flash-attn's decode kernel as an operation that torch.compile does not split."""
    from flash_attn import flash_attn_with_kvcache

    schema = "(Tensor q, Tensor k, Tensor v, Tensor lengths) -> Tensor"

    def decode(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return flash_attn_with_kvcache(q.unsqueeze(1), k, v, cache_seqlens=lengths).squeeze(1)

    made = torch.library.custom_op("peers::fa2", decode, mutates_args=(), schema=schema)
    made.register_fake(lambda q, k, v, lengths: torch.empty_like(q))


ATTENTION = {"flex": attend_flex, "fa2": attend_fa2}


class Steps:
    """The static buffers of some sequences, and the steps that run on them."""

    def __init__(
        self, weights: Weights, batch: int, length: int, mode: str, attention: str, compiled: bool = True
    ) -> None:
        shape = weights.shape
        self.weights, self.batch, self.length, self.attention = weights, batch, length, attention
        new = functools.partial(torch.zeros, device=shape.device)
        cache = batch, length, shape.heads, shape.head
        self.keys, self.values = ([new(cache, dtype=shape.dtype) for _ in weights.layers] for _ in range(2))
        self.tokens, self.positions = (new(batch, dtype=torch.long) for _ in range(2))
        frequencies = 1e4 ** -(torch.arange(0, shape.head, 2, device=shape.device) / shape.head)
        angles = torch.arange(length, device=shape.device)[:, None] * frequencies
        self.angles = angles.cos(), angles.sin()
        if attention == "fa2":
            register_fa2()
            self.lengths = new(batch, dtype=torch.int32)
        else:
            self._make_blocks(new)
        options = {"fullgraph": True, "dynamic": False, **MODES[mode]}
        compile_ = functools.partial(torch.compile, **options) if compiled else lambda function: function
        self.decode_layer = compile_(layer_of(shape, weights.scheme, ATTENTION[attention]))
        self.prefill_layer = compile_(layer_of(shape, weights.scheme, attend_to_prompt))
        self.head = compile_(
            lambda x, residual: linear(normed(residual + x, weights.norm), weights.head, weights.scheme)
        )

    def _make_blocks(self, new: Callable[..., Any]) -> None:
        """Makes the mask of flex_attention: whole blocks before a position, and the block that it ends in."""
        from torch.nn.attention.flex_attention import BlockMask

        self.block = 128 if self.length >= 128 else 16
        count = -(-self.length // self.block)
        self.whole = new((self.batch, 1, 1), dtype=torch.int32)
        self.last = new((self.batch, 1, 1, count), dtype=torch.int32)
        order = torch.arange(count, device=self.positions.device, dtype=torch.int32).expand(self.batch, 1, 1, count)
        positions = self.positions
        self.mask = BlockMask.from_kv_blocks(
            torch.ones_like(self.whole), self.last, self.whole, order.contiguous(), BLOCK_SIZE=(self.block, self.block),
            mask_mod=lambda b, h, q, kv: kv <= positions[b], seq_lengths=(1, self.length), compute_q_blocks=False,
        )  # fmt: skip

    def _about(self) -> Any:
        """Returns what attention needs beside K and V, at the current positions."""
        if self.attention == "fa2":
            self.lengths.copy_(self.positions + 1)
            return self.lengths
        block = (self.positions // self.block).to(torch.int32)
        self.whole.copy_(block.view(-1, 1, 1))
        self.last[:, 0, 0, 0].copy_(block)
        return self.mask

    def _layers(self, layer: Callable[..., Any], tokens: Any, positions: Any, about: Any) -> tuple[Any, Any]:
        residual = F.embedding(tokens, self.weights.embedding)
        x = torch.zeros_like(residual)
        for weights, keys, values in zip(self.weights.layers, self.keys, self.values):
            x, residual = layer(x, residual, weights, keys, values, positions, self.angles, about)
        return x, residual

    def step(self) -> Any:
        """Decodes a token of each sequence greedily. Returns the logits."""
        logits = self.head(*self._layers(self.decode_layer, self.tokens, self.positions, self._about()))
        self.tokens.copy_(logits.argmax(-1))
        self.positions.copy_(torch.clamp(self.positions + 1, max=self.length - 1))
        return logits

    def prefill(self, prompts: Any) -> Any:
        """Reads prompts [batch, length] from the beginning. Returns the logits after each."""
        batch, length = prompts.shape
        positions = torch.arange(length, device=prompts.device).repeat(batch)
        x, residual = self._layers(self.prefill_layer, prompts.flatten(), positions, None)
        logits = self.head(x.view(batch, length, -1)[:, -1], residual.view(batch, length, -1)[:, -1])
        self.tokens.copy_(logits.argmax(-1))
        self.positions.fill_(length)
        return logits


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """Returns a CUDA graph's replay of a function that runs without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forgets compiled functions, to avoid limits on recompilations."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()
