"""Plants outliers like those of large models into a model, by a name in options: KIND[:STRENGTH[:SEED]][+rotate-WHICH].

Planted outliers keep the model's function (jllm.analysis.outliers). So quantization causes all of the loss. The seed
draws their channels. A rotation (QuaRot, arXiv 2404.00456) of the model also keeps its function.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jllm.analysis.outliers import check_strength, plant
from jllm.analysis.own_tokens import own_tokens
from jllm.errors import ConfigError
from jllm.model.model import Model
from jllm.quant.rotation import rotate
from jllm.quant.schemes import ROTATIONS


def _stream(model: Model, strength: float, seed: int) -> Model:
    """Turns the residual stream so that its main directions are four channels."""
    tokens = own_tokens(model, rows=4, length=256, seed=0)
    return plant(model, gated=0, massive=False, strength=1.0, stream=tokens, seed=seed)


KINDS: dict[str, Callable[[Model, float, int], Model]] = {
    "plain": lambda model, strength, seed: model,
    "planted": lambda model, strength, seed: plant(model, strength=strength, seed=seed),
    "norms": lambda model, strength, seed: plant(model, gated=0, massive=False, strength=strength, seed=seed),
    "massive": lambda model, strength, seed: plant(model, channels=0, gated=0, seed=seed),
    "stream": _stream,
    "kv": lambda model, strength, seed: plant(
        model, channels=0, gated=0, kv=2, massive=False, strength=strength, seed=seed
    ),
}
ABOUT = (
    "plain: as it is; planted: outliers in the inputs of linear layers, and a massive first token; norms: in the"
    " norms' outputs alone; massive: the first token alone; stream: in the residual stream; kv: in K and V"
)


@dataclass(frozen=True)
class Planted:
    """The parts of a name."""

    kind: str
    strength: float = 32.0  # a power of two
    seed: int = 0
    rotation: str | None = None

    def of(self, model: Model) -> Model:
        """Returns the model with these outliers."""
        found = KINDS[self.kind](model, self.strength, self.seed)
        return found if self.rotation is None else rotate(found, self.rotation)


def parse_planted(text: str) -> Planted:
    """Returns the parts of a name. Raises ConfigError, or QuantizationError for a strength that is no power of two."""
    base, plus, which = text.partition("+rotate-")
    kind, *numbers = base.split(":")
    if kind not in KINDS or len(numbers) > 2 or not all(map(str.isdecimal, numbers)):
        raise ConfigError(f"{text!r} is not KIND[:STRENGTH[:SEED]][+rotate-WHICH], of {', '.join(KINDS)}")
    if plus and which not in ROTATIONS:
        raise ConfigError(f"{text!r}: a rotation must be one of {', '.join(ROTATIONS)}, not {which!r}")
    strength, seed = (int(n) for n in (*numbers, *("32", "0")[len(numbers) :]))
    check_strength(strength)
    return Planted(kind, strength, seed, which or None)
