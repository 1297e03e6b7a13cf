"""Make tests/data/lm_eval.json: what lm-eval's class for transformers ("hf") says of the tests' checkpoint and tasks.

    pip install lm-eval==0.4.13 torch transformers accelerate && python -m tests.data.make_lm_eval

The tests read its result and need neither torch nor transformers.
"""

import importlib.metadata
import json
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

from tests.lm_eval_cases import EXPECTED, kept, write_checkpoint, write_tasks


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        digest = write_checkpoint(directory)
        tasks = write_tasks(directory)
        arguments = {"pretrained": name, "dtype": "float32", "device": "cpu", "attn_implementation": "eager"}
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=tasks,
            task_manager=TaskManager(include_path=name, include_defaults=False),
            batch_size=1,
            log_samples=True,
            bootstrap_iters=0,
        )
    versions = {name: importlib.metadata.version(name) for name in ("lm-eval", "torch", "transformers", "numpy")}
    document = {"versions": versions, "weights": digest, **kept(results)}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    EXPECTED.write_text(f"{{\n{lines}\n}}\n")
    print(EXPECTED.read_text())


if __name__ == "__main__":
    main()
