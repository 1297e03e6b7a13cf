"""The engine's option `speculate` as a drafter: by name, from a file, or as it is."""

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

SHIPPED = Path(__file__).parents[1] / "assets" / "fairytale" / "drafters"  # those of the bundled model
FILES = {"draft": "draft", "medusa": "medusa.safetensors", "eagle": "eagle.safetensors"}
WITHOUT_WEIGHTS: Mapping[str, Callable[..., Drafter]] = {"ngram": NGram}  # take `drafts`, if it is given
NAMES = (*WITHOUT_WEIGHTS, *KINDS, *(f"{kind}:PATH" for kind in KINDS), "copy:SCHEME")
DRAFTS = 4  # of a copy, by default


def with_drafter(options: Mapping[str, Any], model: "Model") -> dict[str, Any]:
    """Returns engine options whose `speculate` is a drafter, if it is a name. Raises as find_drafter does."""
    name = options.get("speculate")
    if not isinstance(name, str):
        return dict(options)
    return {**options, "speculate": find_drafter(name, model, options.get("drafts"))}


def find_drafter(name: str, model: "Model", drafts: int | None = None) -> Drafter:
    """Returns the drafter that a name stands for: "ngram", "draft:DIRECTORY", "medusa:FILE" or "eagle:FILE", without a
    path those that are shipped with the bundled model; or "copy:SCHEME", the model itself as quantized by a scheme.
    drafts: how many it makes in a chain; None leaves that to it. Raises ConfigError for a name, a number or a file that
    is none, or does not fit the model."""
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
    """Returns the drafter "copy:SCHEME" of a target. Raises DrafterError for a scheme that is not known or does not
    fit, or a target that is quantized itself."""
    try:
        return QuantizedCopy(quantize(model.params, scheme, config=model.config), tree)
    except QuantizationError as error:
        raise DrafterError(f"copy:{scheme}: {error}") from None
