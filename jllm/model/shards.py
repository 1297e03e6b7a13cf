"""Cuts each weight into the ranks' shares, by the table of weights (params.py).

Rows are sharded by the first axis of their dimension, and so are columns. "heads head_dim" is sharded by heads, "ffn"
and "vocab" by themselves. Each part of a merged weight is sharded separately. So a rank has its query rows, its key
rows and its value rows, in this order. Where ranks have whole experts, these keep all their rows and columns. Codes,
scales and zeros of a quantized weight go with their rows and columns: a share has the same values as the whole weight.
The vocabulary is padded to a multiple of the ranks by rows that are never read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError
from jllm.model.param_specs import LeafSpec, draw_params, param_specs
from jllm.model.params import Params, WeightEntry
from jllm.parallel.mesh import COPIED, SHARED, has_whole_experts
from jllm.parallel.ranks import REPLICATED, STACKED
from pallas_kernels.formats.quantized_weights import QuantizedWeight, group_scales, unpacked
from pallas_kernels.formats.weight_codes import pack4, unpack4
from pallas_kernels.formats.weight_formats import MULTIPLE, WeightFormat, padded


def share_params(params: Params, config: LlamaConfig) -> Params:
    """Returns Params for the config's mesh from those of one device. Each leaf becomes a stack of the ranks' shares
    [ranks, ...]. Without a mesh the params are unchanged. Raises QuantizationError for a format that the mesh or the
    config's activation_parts would cut within a group."""
    specs = param_specs(replace(config, tie_embeddings=params.head is None))
    return jax.tree.map(lambda spec, leaf: share(leaf, spec.entry, config, spec.weight or ""), specs, params)


def share(leaf: Any, entry: WeightEntry, config: LlamaConfig, name: str = "") -> Any:
    """Returns one leaf of Params as a stack of the ranks' shares, each on its device. The leaf is an array of the host
    or a device. Abstract leaves give abstract shares. Without a mesh the leaf is unchanged, but checked for the
    config's activation_parts. `name` is for errors."""
    if config.mesh is None:
        parts = config.activation_parts
        if isinstance(leaf, QuantizedWeight) and not fits(leaf.format, entry, config):
            raise _cuts_groups(leaf.format, leaf.shape[1] // parts, name, f"each of {parts} activation_parts")
        return leaf
    ranks = range(config.mesh.size)
    shares = (partial(_cut, rows=_rows(entry, config, r), columns=_columns(entry, config, r), name=name) for r in ranks)
    if not _is_abstract(leaf):
        return stack((cut(leaf) for cut in shares), config.mesh)
    n, on = config.mesh.size, NamedSharding(config.mesh, STACKED)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype, sharding=on), jax.eval_shape(next(shares), leaf)
    )


def share_changed(change: Callable[[jax.Array], Any], leaf: np.ndarray, spec: LeafSpec, config: LlamaConfig) -> Any:
    """Returns change(share) of each rank's share of a leaf on the host, as a stack. Each device has its share alone."""
    assert config.mesh is not None, "devices of a mesh have shares"
    assert _columns(spec.entry, config, 0) is None, "a share has whole rows"

    def one(rank: int, device: jax.Device) -> Any:
        if device.process_index != jax.process_index():  # which makes its own
            return None
        return change(jax.device_put(leaf[_rows(spec.entry, config, rank)], device))

    return stack((one(*rank) for rank in enumerate(config.mesh.devices.flat)), config.mesh)


def whole(leaf: Any, entry: WeightEntry, config: LlamaConfig, shape: tuple[int, ...]) -> Any:
    """Returns a whole leaf from its shares, on a device of this process, or of each process: the inverse of share.
    `shape` is the leaf's whole shape. Scales that were quantized themselves stay the float16 that they stand for.
    Abstract leaves give abstract ones. Without a mesh the leaf is unchanged."""
    if config.mesh is None:
        return leaf
    join = _join_codes if isinstance(leaf, QuantizedWeight) else _join
    run = partial(join, rows=share_indices(entry, config).rows, cut=_columns(entry, config, 0) is not None, shape=shape)
    if _is_abstract(leaf):
        return jax.eval_shape(run, leaf)
    joined = jax.jit(run, out_shardings=NamedSharding(config.mesh, REPLICATED))(leaf)
    return jax.tree.map(lambda x: x.addressable_data(0), joined)


def whole_params(params: Params, config: LlamaConfig) -> Params:
    """Returns whole Params from those of a mesh: the inverse of share_params."""
    specs = param_specs(replace(config, tie_embeddings=params.head is None))
    return jax.tree.map(lambda spec, leaf: whole(leaf, spec.entry, config, spec.shape), specs, params)


def share_shape(spec: LeafSpec, config: LlamaConfig) -> tuple[int, ...]:
    """Returns the shape of a leaf's shares, before padding if it is quantized. Without a mesh it is the leaf's
    shape."""
    if config.mesh is None:
        return spec.shape
    columns = _columns(spec.entry, config, 0)
    return *share_indices(spec.entry, config).rows.shape, *(spec.shape[1:] if columns is None else columns[1:])


def on_whole(change: Callable[[Any], Any], leaf: Any, spec: LeafSpec, config: LlamaConfig) -> Any:
    """Returns change(leaf) of a whole leaf, in shares again."""
    return share(change(whole(leaf, spec.entry, config, spec.shape)), spec.entry, config, spec.weight or "")


def fits(fmt: WeightFormat, entry: WeightEntry, config: LlamaConfig) -> bool:
    """Returns whether a format's groups stay whole: no device of the mesh, and none of activation_parts, cuts one."""
    size = _shared_columns(entry, config)
    parts = config.mesh.size if config.mesh else 1 if fmt.activations is None else config.activation_parts
    group = fmt.group or fmt.row_group
    return size is None or parts == 1 or group is None or size // parts % math.lcm(group, MULTIPLE) == 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShareIndices:
    """Holds the places of a leaf's shares in the whole leaf."""

    rows: np.ndarray  # i32[ranks, n]
    first: np.ndarray  # bool[ranks, n]: no earlier rank has the row, since ranks may share one
    column: np.ndarray  # i32[ranks], the first column


def share_indices(entry: WeightEntry, config: LlamaConfig) -> ShareIndices:
    """Returns the places of a leaf's shares on the config's mesh."""
    assert config.mesh is not None
    ranks = range(config.mesh.size)
    rows = np.stack([_rows(entry, config, r) for r in ranks]).astype(np.int32)
    columns = [_columns(entry, config, r) for r in ranks]
    first = np.ones(rows.shape, bool)  # ranks have different columns of the same rows
    if columns[0] is None:
        first = np.zeros(rows.shape, bool)
        first.flat[np.unique(rows, return_index=True)[1]] = True
    return ShareIndices(rows, first, np.asarray([0 if c is None else c[0] for c in columns], np.int32))


def _is_abstract(leaf: object) -> bool:
    return isinstance(jax.tree.leaves(leaf)[0], jax.ShapeDtypeStruct)


def _rows(entry: WeightEntry, config: LlamaConfig, rank: int) -> np.ndarray:
    """Returns the indices of the rows of a weight that a rank has."""
    modules, found, start = [each for _, each in entry.modules_of(config.axes)], [], 0
    sizes = [(each.partition(" ")[0], math.prod(config.axes[a] for a in each.split())) for each in modules]
    if _has_whole(entry, config):
        assert config.mesh is not None, "devices of a mesh have shares"
        return np.arange(sum(size for _, size in sizes)).reshape(config.mesh.size, -1)[rank]
    for axis, size in sizes:
        first, count = _span(axis, size, config, rank)
        found.append(start + np.minimum(np.arange(first, first + count), size - 1))
        start += size
    return np.concatenate(found)


def _columns(entry: WeightEntry, config: LlamaConfig, rank: int) -> tuple[int, int] | None:
    """Returns the first column that a rank has, and the number of its columns, or None if it has all."""
    size = _shared_columns(entry, config)
    return None if size is None or entry.columns is None else _span(entry.columns.split()[0], size, config, rank)


def _shared_columns(entry: WeightEntry, config: LlamaConfig) -> int | None:
    """Returns the number of columns that ranks share, or None if each rank has all."""
    if entry.columns is None or entry.columns.split()[0] not in SHARED or _has_whole(entry, config):
        return None
    return math.prod(config.axes[a] for a in entry.columns.split())


def _has_whole(entry: WeightEntry, config: LlamaConfig) -> bool:
    """Returns whether ranks share out the experts of this weight."""
    return entry.over is not None and has_whole_experts(config)


def _span(axis: str, size: int, config: LlamaConfig, rank: int) -> tuple[int, int]:
    """Returns the start and the length of a rank's share of a dimension."""
    assert config.mesh is not None
    if axis not in SHARED:
        return 0, size
    n, units = config.mesh.size, config.axes[axis]
    if units < n and axis in COPIED:
        return rank * units // n * (size // units), size // units
    count = -(-units // n) * (size // units)
    return rank * count, count


def _cut(leaf: Any, rows: np.ndarray, columns: tuple[int, int] | None, name: str) -> Any:
    if isinstance(leaf, QuantizedWeight):
        return _cut_codes(leaf, rows, columns, name)
    taken = leaf if len(rows) == leaf.shape[0] else leaf[rows]
    return taken if columns is None else taken[:, columns[0] : sum(columns)]


def _cut_codes(w: QuantizedWeight, rows: np.ndarray, columns: tuple[int, int] | None, name: str) -> QuantizedWeight:
    N, K = len(rows), w.shape[1] if columns is None else columns[1]
    stored = np.pad(rows, (0, padded(N) - N), mode="edge")
    small = w.format.scale_codes is not None  # kept as they are, since their unit is a row's
    values, scales = w.values[stored], (w.scales if small else group_scales(w))[..., stored]
    steps = w.scale_steps[stored] if small and w.scale_steps is not None else None
    zeros = None if w.zeros is None else w.zeros[..., stored]
    order = w.columns
    if columns is not None:
        first, group = columns[0], w.format.group or w.format.row_group
        if group is not None and K % math.lcm(group, MULTIPLE):
            raise _cuts_groups(w.format, K, name, "a device")
        codes = unpack4(values, signed=False) if w.format.packed else values
        codes = jnp.pad(codes[:, first : first + K], ((0, 0), (0, w.format.columns(K) - K)))
        values = pack4(codes) if w.format.packed else codes
        order = None if order is None else order[first : first + K]  # indices into whole rows
        if w.format.group is not None:
            groups = slice(first // w.format.group, (first + K) // w.format.group)
            scales, zeros = scales[groups], None if zeros is None else zeros[groups]
    plain = replace(w.format, double_quant=False)
    more: dict[str, Any] = {"zeros": zeros, "scale_steps": steps, "columns": order, "shape": (N, K), "format": plain}
    return replace(w, values=values, scales=scales, **more)


def _join(x: jax.Array, rows: np.ndarray, cut: bool, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of this shape from parts [ranks, ...]: of its columns, or of its `rows` i32[ranks, n]."""
    if cut:
        return x.swapaxes(0, 1).reshape(shape)
    return jnp.zeros(shape, x.dtype).at[rows.reshape(-1)].set(x.reshape(-1, *shape[1:]))


def _join_codes(w: QuantizedWeight, rows: np.ndarray, cut: bool, shape: tuple[int, ...]) -> QuantizedWeight:
    (N, K), own = shape, jax.vmap(unpacked)(w)
    stored = np.minimum(np.arange(padded(N)), N - 1)

    def join(x: jax.Array) -> jax.Array:
        """Returns [N', ...] from [ranks, n, k]."""
        return _join(x, rows, cut, (N, x.shape[2] * (len(rows) if cut else 1)))[stored]

    def of_rows(x: jax.Array | None) -> jax.Array | None:
        """Returns [N'] from [ranks, n]; with groups, [.., N'] from [ranks, G, n]."""
        if x is None or x.ndim == 3:
            return None if x is None else join(x.swapaxes(1, 2)).T
        return (x[0] if cut else _join(x, rows, cut, (N,)))[stored]

    codes = jnp.pad(join(own.values), ((0, 0), (0, w.format.columns(K) - K)))
    order = own.columns  # indices into whole rows on each device, or into its own part
    return QuantizedWeight(
        values=pack4(codes) if w.format.packed else codes,
        scales=of_rows(own.scales),  # type: ignore[arg-type]
        zeros=of_rows(own.zeros),
        scale_steps=of_rows(own.scale_steps),
        columns=None if order is None else order[0] if order.shape[1] == K else order.reshape(-1),
        input_scale=None if own.input_scale is None else own.input_scale[0],
        shape=(N, K),
        format=w.format,
        origin=w.origin,
    )


def _cuts_groups(fmt: WeightFormat, columns: int, name: str, who: str) -> QuantizationError:
    """Returns the error for a weight whose groups would be cut. `who` has this number of columns."""
    least = 8 if fmt.group else MULTIPLE
    found = [g for g in range(least, columns + 1, least) if columns % math.lcm(g, MULTIPLE) == 0]
    why = f"groups of {', '.join(map(str, found))} would fit" if found else "a format with a scale a row would fit"
    group = fmt.group or fmt.row_group
    return QuantizationError(f"{name}: {fmt.name} has groups of {group}, and {who} {columns} inputs; {why}")


def random_share(
    config: LlamaConfig, key: jax.Array, dtype: DTypeLike, make: Callable[[int, Params], Params]
) -> Params:
    """Returns random Params on the config's mesh, as share_params returns them. Each rank's share is made on its
    device, one layer at a time. make(i, params) may quantize layer i, which is a model of its own."""
    assert config.mesh is not None
    n = config.mesh.size

    def layer(i: int, rank: int, device: jax.Device) -> Params:
        one = replace(config.one_layer(i), vocab_size=1 if i else config.vocab_size)
        specs = param_specs(one)

        def draw(of: int, *, cut: bool) -> Params:
            """Returns the leaves that ranks cut, or those that they have alike, by the key of a rank."""

            def some(spec: LeafSpec) -> LeafSpec | None:
                own = share_shape(spec, one)[1:]
                return replace(spec, shape=own) if cut == (own != spec.shape) else None

            by = jax.device_put(jax.random.fold_in(key, i * n + of), device)
            return draw_params(jax.tree.map(some, specs), by, jnp.dtype(dtype))

        own, alike = draw(rank, cut=True), draw(0, cut=False)
        both = jax.tree.map(lambda x, y: y if x is None else x, own, alike, is_leaf=lambda leaf: leaf is None)
        return make(i, both)

    ranks = list(enumerate(config.mesh.devices.flat))
    found = [stack((layer(i, *rank) for rank in ranks), config.mesh) for i in range(config.num_layers)]
    return replace(found[0], layers=tuple(each.layers[0] for each in found))


def stack(shares: Any, mesh: Mesh) -> Any:
    """Returns the ranks' shares, each put on its device, as arrays [ranks, ...]. Each process puts the shares of its
    own devices there. All processes read the same weight."""
    own = [
        (part, device) for part, device in zip(shares, mesh.devices.flat) if device.process_index == jax.process_index()
    ]
    placed = [jax.device_put(part, device) for part, device in own]

    def stacked(*parts: jax.Array) -> jax.Array:
        shape = (mesh.size, *parts[0].shape)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, STACKED), [p[None] for p in parts])

    return jax.tree.map(stacked, *placed)
