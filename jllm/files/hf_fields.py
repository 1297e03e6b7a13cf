"""Classifies the fields of a Hugging Face config.json: understood, harmless, refused unless neutral, or unknown."""

# ruff: noqa: SIM905 (lists of names, one a line, would hide the rest)
import math
import warnings
from collections.abc import Mapping, Set
from typing import Any

from jllm.config import MOST
from jllm.errors import ConfigError

_UNDERSTOOD = set(
    "architectures model_type dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings "
    "rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings bos_token_id eos_token_id "
    "quantization_config compression_config".split()  # the last two describe stored weights: load_params.py reads them
)

# Training, bookkeeping, and sampling defaults of old files, which change no forward pass.
_HARMLESS = set(
    "_name_or_path name_or_path transformers_version use_cache pad_token_id unk_token_id sep_token_id "
    "attention_dropout attn_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout hidden_dropout_prob resid_dropout "
    "classifier_dropout pretraining_tp output_attentions output_hidden_states output_scores return_dict id2label "
    "label2id num_labels problem_type chunk_size_feed_forward task_specific_params tokenizer_class prefix "
    "finetuning_task torchscript use_bfloat16 pruned_heads tf_legacy_loss is_decoder cross_attention_hidden_size "
    "tie_encoder_decoder decoder_start_token_id max_length min_length max_new_tokens do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty max_sequence_length attn_implementation "
    "unsloth_fixed unsloth_version initializer_range router_aux_loss_coef output_router_logits "
    "router_jitter_noise cache_implementation auto_map initial_context_length".split()
)

# Fields of this and related architectures that would change the result. Null and these values mean "not used".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_ratio": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "position_embedding_type": ("rope", "rotary"),
    "alibi": (False,),
    "use_alibi": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_softcapping": (0,),
    "attn_temperature_tuning": (False, 0),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "clip_qkv": (),
    "interpolate_factor": (1,),
    "full_attn_mod": (1,),
    "lm_head_bias": (False,),
    "use_bidirectional_attention": (False,),
    "attention_sinks": (False, 0),
    "attention_sink": (False, 0),
    "use_attention_sinks": (False,),
    "attention_chunk_size": (),
    "parallel_attn": (False,),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
    "use_parallel_block": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "num_experts_per_tok": (0,),
    "per_layer_config": ({},),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "layer_types": (),
}


def check_fields(raw: Mapping[str, Any], architecture: str, own: Set[str], fixed: Set[str], source: str) -> None:
    """Raises ConfigError for fields that would change the result, and warns of unknown ones. A family understands its
    `own` fields, and the `fixed` ones change nothing in it."""
    understood = _UNDERSTOOD | own
    for key, value in raw.items():
        if key in understood | fixed or key not in _NEUTRAL or value is None or value in _NEUTRAL[key]:
            continue
        if key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
            continue
        wanted = " or ".join(repr(neutral) for neutral in (*_NEUTRAL[key], None))
        raise ConfigError(f"{key} = {value!r} is not supported for {architecture}; supported: {wanted}")
    known = understood | fixed | _HARMLESS | _NEUTRAL.keys()
    unknown = [key for key in raw if key not in known and not key.startswith("_")]
    if unknown:
        warnings.warn(f"{source}: unknown fields are ignored: {', '.join(sorted(unknown))}", stacklevel=5)


def read_integer(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    null: int | None = None,
    *,
    least: int = 0,
    most: int = MOST,
) -> int:
    """Returns raw[key]; `default` if it is absent, `null` if it is null. Raises ConfigError below `least` or above
    `most`."""
    value = raw.get(key, default)
    if value is None and key in raw:
        value = null
    if value is None:
        raise ConfigError(f"{key} is missing")
    if type(value) is not int or value < least:
        raise ConfigError(f"{key} = {value!r} is not an integer of at least {least}")
    if value > most:
        raise ConfigError(f"{key} = {value} is too large: at most {most} are supported")
    return value


def read_number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ConfigError(f"{key} = {value!r} is not a positive number")
    return float(value)


def read_boolean(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key, default)
    if value not in (None, False, True):
        raise ConfigError(f"{key} = {value!r} is neither true nor false")
    return bool(value)


def read_token_ids(raw: Mapping[str, Any], key: str, default: int | None) -> tuple[int, ...]:
    value = raw.get(key, default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or not 0 <= i <= MOST for i in ids):
        raise ConfigError(f"{key} = {value!r} is not a token id or a list of them")
    return tuple(ids)
