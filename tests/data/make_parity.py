"""Make tests/data/parity: tiny random checkpoints and what Hugging Face transformers computes from them.

    pip install torch transformers && python -m tests.data.make_parity [FAMILY ...]

The tests read its results and need neither torch nor transformers. Each parity/<family>/ holds config.json, float32
safetensors (one file, or shards with their index) and expected.npz with, for prompts i = 0, 1, 2 of different lengths:

    prompt_i  int32 [T]                 token ids
    logits_i  float32 or 64 [T, V]            logits at every prompt position
    greedy_i  int32 [GREEDY]            the greedy continuation (no end token)
    gap_i     float32 [GREEDY]          how far the best logit is above the second, at each of its steps

ropes.json beside it has rotary frequencies of many configs, in float64.

Weights are large and everything is random, biases and norm weights too, so that no mistake hides behind a zero or a
one; seeds are tried until every greedy step is decided by a clear gap.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.data.widened import widened

OUT = Path(__file__).parent / "parity"
GREEDY = 24
LENGTHS = (3, 17, 40)
LENGTHS_OF = {
    "llama-longrope": (18, 25, 40),
    "phi4": (18, 25, 40),
}  # up to the original length transformers takes the other frequencies
CLEAR_GAP, CLEAR_GAP_WIDE = 0.02, 1e-3
STORED = torch.float32  # before torch's names are patched

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # small enough for the scaling to bite at these lengths
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.7, 1.9, 2.0],
    "long_factor": [1.0, 1.5, 2.2, 3.0, 4.1, 5.5, 7.0, 8.0],
}
OLDER = {"torch_dtype": "float32"}
NEWER = {"dtype": "float32"}


def base(family: str, model_type: str, **fields: object) -> dict:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | fields


def llama(**fields: object) -> dict:
    return base("Llama", "llama", **fields)


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
SMALLER = {"intermediate_size": 40}  # for three layers

FAMILIES = {
    "llama1": llama(num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None, **OLDER),
    "llama2": llama(num_key_value_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **NEWER),
    "llama3": llama(rope_theta=500000.0, **OLDER),
    "llama3.1": llama(rope_theta=10000.0, rope_scaling=LLAMA3, **OLDER),
    "llama3.2": llama(
        rope_parameters=LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0},
        tie_word_embeddings=True,
        head_dim=16,
        **NEWER,
    ),
    "llama-longrope": llama(rope_theta=10000.0, rope_scaling=LONGROPE, head_dim=16, **OLDER),
    "llama-mqa": llama(num_key_value_heads=1, num_hidden_layers=3, **SMALLER, **OLDER),
    "llama-bias": llama(attention_bias=True, mlp_bias=True, **OLDER),
    "mistral": base("Mistral", "mistral", sliding_window=8, rope_theta=10000.0, **OLDER),
    "qwen2": base("Qwen2", "qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6, **OLDER),
    "qwen2-window": base("Qwen2", "qwen2", rope_parameters={"rope_theta": 1e6}, **QWEN_WINDOW, **SMALLER, **NEWER),
    "mixtral": base(
        "Mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=24, rope_theta=1e6, **OLDER
    ),
    "qwen3-moe": base(
        "Qwen3Moe",
        "qwen3_moe",
        head_dim=16,
        rope_parameters={"rope_theta": 1e6},
        num_hidden_layers=3,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        **SMALLER,
        **NEWER,
    ),
    "qwen3": base("Qwen3", "qwen3", head_dim=32, rope_parameters={"rope_theta": 1e6}, intermediate_size=32, **NEWER),
    "qwen3-yarn": base(
        "Qwen3", "qwen3", head_dim=16, rope_parameters=YARN | {"rope_theta": 1e4}, intermediate_size=32, **NEWER
    ),
}
# Newer families: one or two layers of smaller sizes, and logits in float64.
TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
PATTERN = ["sliding_attention", "full_attention"]
FAMILIES |= {
    "olmo2": base("Olmo2", "olmo2", **TINY, rope_theta=500000.0, rope_scaling=None, **OLDER),
    "olmo3": base(
        "Olmo3",
        "olmo3",
        **TINY,
        rope_theta=500000.0,
        rope_scaling=YARN | {"attention_factor": 1.2},
        sliding_window=8,
        layer_types=PATTERN,
        **OLDER,
    ),
    "smollm3": base(
        "SmolLM3",
        "smollm3",
        **TINY,
        tie_word_embeddings=False,
        rope_theta=5e6,
        no_rope_layers=[1, 0],
        no_rope_layer_interval=2,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=28,
        layer_types=["full_attention"] * 2,
        **OLDER,
    ),
    "phi4": base(
        "Phi3",
        "phi3",
        **TINY | {"num_attention_heads": 2},
        partial_rotary_factor=0.75,
        rope_theta=10000.0,
        original_max_position_embeddings=16,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
            "long_factor": [1.0, 1.5, 2.2, 3.0, 5.0, 8.0],
        },
        sliding_window=None,
        **OLDER,
    ),
    "granite": base(
        "Granite",
        "granite",
        **TINY,
        embedding_multiplier=12.0,
        attention_multiplier=0.15625,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        rope_theta=10000.0,
        **OLDER,
    ),
    "gemma2": base(
        "Gemma2",
        "gemma2",
        **TINY,
        head_dim=16,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=12,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        sliding_window=8,
        tie_word_embeddings=True,
        cache_implementation="hybrid",
        rope_theta=10000.0,
        **OLDER,
    ),
    "gemma3": base(
        "Gemma3",
        "gemma3_text",
        **TINY,
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=12,
        sliding_window=8,
        layer_types=PATTERN,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **NEWER,
    ),
    "olmoe": base(
        "Olmoe",
        "olmoe",
        **TINY,
        num_hidden_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        rope_theta=10000.0,
        **OLDER,
    ),
    "qwen2-moe": base(
        "Qwen2Moe",
        "qwen2_moe",
        **TINY,
        rope_theta=1e6,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        **OLDER,
    ),
    "gpt-oss": base(
        "GptOss",
        "gpt_oss",
        **TINY,
        head_dim=16,
        rope_theta=150000.0,
        rope_scaling=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=PATTERN,
        attention_bias=True,
        **OLDER,
    ),
}
WIDE = tuple(FAMILIES)[tuple(FAMILIES).index("olmo2") :]  # in float64
ROPES_BASE = {"head_dim": 16, "max_position_embeddings": 128, "torch_dtype": "float32"}
ROPES = {  # by name: fields beside ROPES_BASE, and the length of the sequence that transformers is shown
    "default": ({"rope_theta": 5e5}, 128),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    "llama3": ({"rope_scaling": LLAMA3}, 128),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 320),
    "dynamic-newer": ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}}, 512),
    "yarn": ({"rope_scaling": YARN}, 128),
    "yarn-newer": ({"rope_parameters": YARN | {"rope_theta": 1e6, "truncate": False}}, 128),
    "yarn-given": ({"rope_scaling": YARN | {"attention_factor": 0.9, "beta_fast": 8.0, "beta_slow": 2.0}}, 128),
    "yarn-mscale": ({"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}, 128),
    "yarn-factorless": ({"rope_scaling": YARN | {"factor": None}}, 128),
    "yarn-step": ({"rope_scaling": YARN | {"beta_fast": 1e3, "beta_slow": 1e3}}, 128),
    "longrope": ({"rope_scaling": LONGROPE}, 128),
    "longrope-beside": (
        {
            "rope_scaling": {key: LONGROPE[key] for key in ("type", "short_factor", "long_factor")},
            "original_max_position_embeddings": 32,
        },
        128,
    ),
    "longrope-short": ({"rope_scaling": LONGROPE | {"original_max_position_embeddings": 128}}, 128),
}
SHARDED = ("llama2", "qwen2-window")


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=STORED)
        if "norm" in name:
            parameter.data = float("Gemma" not in type(model).__name__) + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        else:
            parameter.data = (0.5 if "embed" in name else 0.15) * noise


@torch.no_grad()
def run(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of the prompt, greedy continuation, top-two gaps; each step recomputed from the start, without a cache."""
    ids, gaps = prompt, []
    prompt_logits = model(prompt[None], use_cache=False).logits[0]
    for _ in range(GREEDY if prompt_logits.dtype == STORED else GREEDY // 2):
        best = torch.topk(model(ids[None], use_cache=False).logits[0, -1], 2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[:1]])
    return prompt_logits.numpy(), ids[len(prompt) :].numpy().astype(np.int32), np.array(gaps, np.float32)


def expected(model: torch.nn.Module, directory: Path, seed: int) -> dict[str, np.ndarray] | None:
    """What the saved checkpoint computes; None when some greedy step is a near tie."""
    if directory.name not in WIDE:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model.eval().to(torch.float64 if directory.name in WIDE else torch.float32)
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for i, length in enumerate(LENGTHS_OF.get(directory.name, LENGTHS)):
        prompt = torch.randint(0, model.config.vocab_size, (length,), generator=generator)
        logits, greedy, gaps = run(model, prompt)
        clear = CLEAR_GAP_WIDE if directory.name in WIDE else CLEAR_GAP
        distinct = 6 if directory.name not in WIDE else 3 if not model.config.tie_word_embeddings else 1
        if gaps.min() < clear or len(set(greedy.tolist())) < distinct:  # nor one that repeats itself at once
            return None
        arrays |= {f"prompt_{i}": prompt.numpy().astype(np.int32), f"logits_{i}": logits}
        arrays |= {f"greedy_{i}": greedy, f"gap_{i}": gaps}
    return arrays


def make(family: str, raw: dict) -> None:
    directory = OUT / family
    for seed in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        config = directory / "config.json"
        config.write_text(json.dumps(raw, indent=2) + "\n")
        loaded = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(
            loaded, attn_implementation="eager", experts_implementation="eager"
        )
        randomize(model, torch.Generator().manual_seed(seed))
        model.save_pretrained(directory, max_shard_size="100KB" if family in SHARDED else "1GB")
        (directory / "generation_config.json").unlink(missing_ok=True)
        config.write_text(json.dumps(raw, indent=2) + "\n")  # in the layout that this family is about
        arrays = expected(model, directory, seed)
        if arrays is not None:
            break
    np.savez_compressed(directory / "expected.npz", **arrays)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    gap = min(float(arrays[f"gap_{i}"].min()) for i in range(len(LENGTHS)))
    norm = float(np.std(arrays["logits_2"]))
    print(f"{family:16} {size / 1000:6.1f} kB, seed {seed}, least gap {gap:.3f}, logits' deviation {norm:.2f}")


def ropes() -> dict[str, dict]:
    """The frequencies and the attention factor of each of ROPES."""
    found = {}
    for name, (fields, length) in ROPES.items():
        config = transformers.LlamaConfig(**llama(**copy.deepcopy(fields), **ROPES_BASE))  # it writes into its dicts
        kind = config.rope_parameters["rope_type"]
        default = LlamaRotaryEmbedding.compute_default_rope_parameters
        frequencies, factor = (default if kind == "default" else ROPE_INIT_FUNCTIONS[kind])(config, seq_len=length)
        assert frequencies.dtype == torch.float64
        found[name] = {"fields": fields, "frequencies": frequencies.tolist(), "attention_factor": factor}
    return found


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for family, raw in FAMILIES.items():
        if family not in WIDE and (not sys.argv[1:] or family in sys.argv[1:]):
            make(family, raw)
    with widened():
        for family in WIDE:
            if not sys.argv[1:] or family in sys.argv[1:]:
                make(family, FAMILIES[family])
        (OUT.parent / "ropes.json").write_text(json.dumps(ropes(), indent=1) + "\n")
