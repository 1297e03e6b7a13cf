"""Finds the drafter for the engine's option `speculate`: by name, from a file, or as it is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jllm.engine.options import check_drafts
from jllm.errors import ConfigError, DrafterError, QuantizationError
from jllm.files.drafters import KINDS, load_drafter
from jllm.quant.quantize import quantize
from jllm.speculative.drafter import Drafter
from jllm.speculative.ngram import NGram
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import Tree, chain

if TYPE_CHECKING:
    from jllm.model.model import Model

SHIPPED = Path(__file__).parents[1] / "assets" / "fairytale" / "drafters"  # drafters of the bundled model
FILES = {"draft": "draft", "medusa": "medusa.safetensors", "eagle": "eagle.safetensors"}
WITHOUT_WEIGHTS: Mapping[str, Callable[..., Drafter]] = {"ngram": NGram}  # these take `drafts`, if it is given
NAMES = (*WITHOUT_WEIGHTS, *KINDS, *(f"{kind}:PATH" for kind in KINDS), "copy:SCHEME")
DRAFTS = 4  # the default of a copy


def with_drafter(options: Mapping[str, Any], model: "Model") -> dict[str, Any]:
    """Returns engine options in which a name in `speculate` is replaced by its drafter. Raises as find_drafter does."""
    name = options.get("speculate")
    if not isinstance(name, str):
        return dict(options)
    return {**options, "speculate": find_drafter(name, model, options.get("drafts"))}


def find_drafter(name: str, model: "Model", drafts: int | None = None) -> Drafter:
    """Returns the drafter of a name.

    Names are "ngram", "draft:DIRECTORY", "medusa:FILE" and "eagle:FILE". Without a path they mean the bundled model's
    drafters. "copy:SCHEME" is the model itself, quantized by a scheme. `drafts` is the length of the chain; None is the
    drafter's default. Raises ConfigError for an invalid name, number or file, or one that does not fit the model.
    """
    kind, colon, path = name.partition(":")
    if drafts is not None:
        check_drafts(drafts, name)
    tree = None if drafts is None else chain(drafts)
    if make := WITHOUT_WEIGHTS.get(name):
        return make() if drafts is None else make(drafts=drafts)
    if kind == "copy" and path:
        return copy_of(model, path, chain(DRAFTS) if tree is None else tree)
    if kind not in KINDS or (colon and not path):
        raise ConfigError(f"speculate={name!r} is not known: give one of {', '.join(NAMES)}, or a drafter")
    return load_drafter(kind, path or SHIPPED / FILES[kind], model, tree)


def copy_of(model: "Model", scheme: str, tree: Tree) -> QuantizedCopy:
    """Returns the drafter "copy:SCHEME" of a target. Raises DrafterError for an unknown scheme, one that does not fit,
    or a quantized target."""
    try:
        return QuantizedCopy(quantize(model.params, scheme, config=model.config), tree)
    except QuantizationError as error:
        raise DrafterError(f"copy:{scheme}: {error}") from None
