"""Make tests/data/peft: adapters that PEFT wrote, and what it computes with them in float64.

    pip install torch transformers peft && python -m tests.data.make_peft [DIRECTORY]

The base is parity/llama3.2, widened. Each peft/<name>/ holds PEFT's files and expected.npz: prompt int32 [T] and logits
float64 [T, V]. With a directory, it prints how far the logits with that adapter are from those of peft/patterns; tests
write such a directory from what they read.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.data.widened import widened

DATA = Path(__file__).parent
BASE, OUT = DATA / "parity" / "llama3.2", DATA / "peft"
ADAPTERS = {
    "patterns": LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        rank_pattern={"layers.0.self_attn.v_proj": 2, "down_proj": 3},
        alpha_pattern={"layers.1.self_attn.q_proj": 9},
    ),
    "dora": LoraConfig(r=2, lora_alpha=4, use_dora=True, target_modules=["k_proj", "o_proj"]),
}
PROMPT = np.arange(3, 24, dtype=np.int32)


def base() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).double()


def logits(model: torch.nn.Module) -> np.ndarray:
    llama = model.get_base_model() if isinstance(model, PeftModel) else model
    with widened(), torch.no_grad():
        llama.model.rotary_emb = LlamaRotaryEmbedding(llama.config)
        return model(torch.tensor(PROMPT[None].astype(np.int64))).logits[0].numpy()


def main() -> None:
    for name, config in ADAPTERS.items():
        shutil.rmtree(OUT / name, ignore_errors=True)
        torch.manual_seed(0)
        model = get_peft_model(base(), config)
        for key, leaf in model.named_parameters():
            if "lora_" in key:  # as a file in float32 holds it
                leaf.data = (leaf.data if "magnitude" in key else 0.3 * torch.randn_like(leaf)).to(torch.half).double()
        model.save_pretrained(OUT / name)
        (OUT / name / "README.md").unlink()
        config = OUT / name / "adapter_config.json"
        config.write_text(config.read_text().replace(str(BASE), BASE.name) + "\n")
        reread = PeftModel.from_pretrained(base(), OUT / name)
        np.savez_compressed(OUT / name / "expected.npz", prompt=PROMPT, logits=logits(reread))
        print(name, "changes logits by", np.abs(logits(reread) - logits(base())).max())
    for directory in sys.argv[1:]:
        ours = logits(PeftModel.from_pretrained(base(), directory))
        print(directory, "differs by", np.abs(ours - np.load(OUT / "patterns" / "expected.npz")["logits"]).max())


if __name__ == "__main__":
    main()
