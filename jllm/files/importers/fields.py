"""Reads fields of a checkpoint's quantization_config strictly: errors name each unsupported value."""

import json
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from jllm.errors import CheckpointError


def names(text: str) -> dict[str, Any]:
    """Returns a dict of field names whose values are not described."""
    return dict.fromkeys(text.split())


ANY = "*"  # matches any key of an object
_CODES = names("num_bits type strategy group_size symmetric dynamic actorder block_structure")
# Fields that importers read, by quant_method. An object of objects has the fields of the inner objects.
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "jllm": names("version name rules"),
    "gptq": names(
        "bits group_size desc_act sym lm_head checkpoint_format format pack_dtype is_marlin_format "
        "modules_in_block_to_quantize"
    )
    | {"dynamic": {ANY: names("bits group_size desc_act sym")}},
    "awq": names(
        "bits w_bit group_size q_group_size zero_point version checkpoint_format format modules_to_not_convert "
        "sym desc_act lm_head pack_dtype"
    ),
    "compressed-tensors": names("format ignore kv_cache_scheme sparsity_config")
    | {
        "config_groups": {
            ANY: names("targets format output_activations") | {"weights": _CODES, "input_activations": _CODES}
        }
    },
    "fp8": names(
        "activation_scheme kv_cache_scheme weight_block_size ignored_layers modules_to_not_convert fmt scale_fmt "
        "expert_dtype"
    ),
    "modelopt": names(
        "quant_algo kv_cache_quant_algo kv_cache_scheme group_size ignore exclude_modules quantization config_groups"
    ),
    "mxfp4": names("modules_to_not_convert"),
    "bitsandbytes": names(
        "load_in_4bit load_in_8bit llm_int8_skip_modules llm_int8_threshold bnb_4bit_quant_type "
        "bnb_4bit_use_double_quant bnb_4bit_quant_storage"
    ),
}
# Fields about how weights were rounded and how others run them, which do not change the weights.
_HARMLESS = names(
    "quant_method version quantization_status global_compression_ratio observer observer_kwargs "
    "scale_dtype zp_dtype producer meta provider autoround_version model_name_or_path model_file_base_name "
    "base_model_name_or_path damp_percent damp_auto_increment static_groups true_sequential act_group_aware mse "
    "dataset tokenizer nsamples seqlen iters lr minmax_lr batch_size train_bs pad_token_id amp data_type backend "
    "block_name_to_quantize to_quant_block_names module_name_preceding_first_block use_cuda_fp16 model_seqlen "
    "max_input_length cache_block_outputs use_exllama disable_exllama exllama_config enable_quanted_input "
    "enable_minmax_tuning low_gpu_mem_usage low_cpu_mem_usage gradient_accumulate_steps parallel_packing device "
    "offload_to_disk do_fuse fuse_max_seq_len modules_to_fuse dequantize bnb_4bit_compute_dtype "
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight run_compressed"
)


def unknown_fields(raw: Mapping[str, Any], known: Mapping[str, Any], before: str = "") -> list[str]:
    """Returns the unknown fields of an object and of objects within it, as paths. Leaves out empty ones."""
    found: list[str] = []
    for key, value in raw.items():
        fields = known.get(key, known.get(ANY))
        if isinstance(fields, dict) and isinstance(value, dict):
            found += unknown_fields(value, fields, f"{before}{key}.")
        elif key not in known and ANY not in known and key not in _HARMLESS and not key.startswith("_"):
            found += [] if value in (None, False, {}, []) else [f"{before}{key}"]
    return found


def refuse(raw: Mapping[str, Any], key: str, supported: str) -> CheckpointError:
    """Returns the error for a field whose value is not supported."""
    value = json.dumps(raw.get(key))
    return CheckpointError(f"quantization_config: {key} = {value} is not supported; supported: {supported}")


def read_choice(raw: Mapping[str, Any], key: str, default: Any, choices: Collection[Any]) -> Any:
    """Returns raw[key], one of `choices`; `default` if it is absent."""
    value = raw.get(key, default)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise refuse(raw, key, ", ".join(json.dumps(choice) for choice in choices))
    return value


def read_flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    return read_choice(raw, key, default, (False, True))


def read_group(raw: Mapping[str, Any], key: str, default: int | None) -> int:
    """Returns raw[key], -1 or a multiple of 8."""
    value = raw.get(key, default)
    if type(value) is not int or (value != -1 and (value < 8 or value % 8)):
        raise refuse(raw, key, "-1, or a multiple of 8")
    return value


def read_names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Returns raw[key], a list of strings; () if it is absent or null."""
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse(raw, key, "a list of names")
    return tuple(value)


def read_object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns raw[key], an object; {} if it is absent or null."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise refuse(raw, key, "an object")
    return value


def match_glob(pattern: str, text: str) -> bool:
    """Returns whether a pattern with wildcards matches this name, or a name that it is a part of."""
    return fnmatchcase(text, pattern) or text.startswith(f"{pattern}.")


def match_pattern(pattern: str, text: str) -> bool:
    """Returns re.match. Raises CheckpointError for a broken pattern."""
    try:
        return re.match(pattern, text) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r} is not a regular expression: {error}") from None
