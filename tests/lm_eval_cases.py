"""A small checkpoint and tasks for lm-eval, the same bytes on every machine; shared with data/make_lm_eval.py."""

import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

EXPECTED = Path(__file__).parent / "data" / "lm_eval.json"
VOCAB, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, MLP, CONTEXT = 128, 2, 4, 2, 16, 64, 96, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,  # documents are longer
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MERGES = ["t h", "th e", "i n", "a n", "an d", "e r", "o u", "o n", "i t", "Ġ the", "Ġ and", "Ġ a", "e d", "l l", "Ġ w"]
WORDS = ["the", "a", "wolf", "and", "girl", "ran", "in", "with", "her", "small", "house", "near", "that", "rained"]


def write_checkpoint(directory: Path) -> str:
    """LLaMA with random float32 weights and a tokenizer of ASCII; returns the SHA-256 of the weights."""
    rng = np.random.default_rng(5)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, scale=0.5)}
    sizes = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP),
    }  # fmt: skip
    for i in range(LAYERS):
        for name, shape in sizes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = normal(*shape, scale=0.15)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = normal(HIDDEN, scale=0.2, mean=1.0)
    tensors["model.norm.weight"] = normal(HIDDEN, scale=0.2, mean=1.0)
    tensors["lm_head.weight"] = normal(VOCAB, HIDDEN, scale=0.3)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(directory)
    return hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE over printable ASCII; a text begins with <s>."""
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    pieces = ["<s>", "</s>", *letters, *("".join(merge.split()) for merge in MERGES)]
    pieces += [f"<{i}>" for i in range(len(pieces), VOCAB)]
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def write_tasks(directory: Path) -> list[str]:
    """A task of each kind, with its documents, for lm-eval's include_path; returns their names."""
    rng = np.random.default_rng(6)

    def words(n: int) -> str:
        return " ".join(rng.choice(WORDS, n))

    tasks = {
        "small_choice": {
            "output_type": "multiple_choice", "doc_to_text": "Q: {{text}}\nA:", "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "small_last": {
            "output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        "small_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "small_answer": {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}",
            "generation_kwargs": {"until": ["Q", "\n\n"], "max_gen_toks": 14, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    documents: dict[str, list[dict]] = {
        "small_choice": [
            {"text": words(5), "choices": [words(n) for n in (1, 2, 4)], "answer": i % 3} for i in range(6)
        ],
        "small_last": [{"text": text, "target": " " + words(2)} for text in ("", words(40), words(6))],  # 40: too long
        "small_rolling": [{"text": words(n)} for n in (3, 20, 60)],
        "small_answer": [{"text": words(n), "target": words(1)} for n in (2, 5, 9, 40)],
    }
    said = documents["small_answer"][2]
    said["target"] = 'uAwTuAJ",'  # as greedy decoding says it
    documents["small_last"].append({"text": said["text"], "target": said["target"][:2]})
    for name, task in tasks.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(directory / "cache")}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **task}
        (directory / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML
    return list(tasks)


def kept(results: dict) -> dict:
    """Of simple_evaluate's results: metrics by task, and what was answered to each request, in order."""
    found = {}
    for task, samples in results["samples"].items():
        metrics = {k: v for k, v in results["results"][task].items() if isinstance(v, float) and "stderr" not in k}
        answers = [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        found[task] = {"metrics": metrics, "answers": answers}
    return json.loads(json.dumps(found))
