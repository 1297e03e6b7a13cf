"""Warns of requests in a model's generation_config.json that jllm ignores."""

import json
import warnings
from pathlib import Path

from jllm.engine.request import SamplingParams

FLAGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Fields that change tokens in transformers but do not exist here, with the values that have no effect.
UNKNOWN: dict[str, tuple] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty",), (1,)),
    **dict.fromkeys(("diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "penalty_alpha"), (0,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "stop_strings"), ([],)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "constraints", "dola_layers", "top_h"), ()),
}


def warn_of_ignored(folder: Path, sampling: SamplingParams = SamplingParams()) -> None:
    """Warns, in one line, of settings of the model's file that differ from `sampling`. transformers uses them as
    defaults; jllm does not. load_config rejects a file that is no JSON object."""
    file = folder / "generation_config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return
    if not isinstance(raw, dict):
        return
    parts = []
    if odd := _listed(raw, [name for name, neutral in UNKNOWN.items() if raw.get(name) not in (None, *neutral)]):
        parts.append(f"{odd} (not supported)")
    names = [name for name in FLAGS if raw.get("do_sample") or name == "repetition_penalty"]
    different = [name for name in names if raw.get(name) not in (None, FLAGS[name], getattr(sampling, name))]
    if known := _listed(raw, different):
        parts.append(f"{known} (applied only where it is asked for)")
    if parts:
        warnings.warn(f"{file} asks for {' and '.join(parts)}: ignored", stacklevel=2)


def _listed(raw: dict[str, object], names: list[str]) -> str:
    return ", ".join(f"{name} = {json.dumps(raw[name])}" for name in names)
