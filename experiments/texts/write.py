"""Writes the bundled evaluation text: passages that the bundled model generated.

    python -m experiments.texts.write [--documents N] [--out FILE.jsonl]

Each document is one sample of the model in float32 (temperature 1, no filter), from BOS to the model's end token, or
for LENGTH tokens. Seeds are 0, 1, ... in order, without omissions. So the text has no foreign copyright, and fits the
vocabulary. Its perplexity is the exponential of the model's own entropy: on average, quantization adds exactly its
divergence to the loss. The same machine writes the same bytes again. Another machine's rounding may change a sample
where two tokens were almost equally likely.
"""

import json
import sys
from pathlib import Path

import jllm
from experiments.result_file import refusing
from experiments.texts.read import BUNDLED_TEXT
from jllm.errors import OutputError
from jllm.model.model import Model
from pallas_kernels.bench.command import Parser
from pallas_kernels.bench.numbers import positive

DOCUMENTS = 40
LENGTH = 600  # tokens; BOS and the context of 1024 leave room


def documents(model: Model, count: int, length: int = LENGTH) -> list[dict[str, int | str | None]]:
    """Returns {"seed", "text"} of each document."""
    assert model.config.bos_id is not None, "the bundled model has a BOS token"
    sampling = [jllm.SamplingParams(temperature=1.0, max_new_tokens=length, seed=seed) for seed in range(count)]
    told = jllm.generate(model, [[model.config.bos_id]] * count, sampling)
    return [{"seed": seed, "text": done.text} for seed, done in enumerate(told)]


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--documents", type=positive, default=DOCUMENTS, help="number of documents (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=BUNDLED_TEXT, help="file to write (default: the bundled text itself)"
    )
    args = parser.parse_args(argv)
    lines = [json.dumps(document, ensure_ascii=False) for document in documents(jllm.load(), args.documents)]
    try:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{args.out}: cannot be written: {error.strerror}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
