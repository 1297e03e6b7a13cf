"""What quantization costs, and the training of models."""

from experiments.report.answers import lowest, of_bars
from experiments.report.sections.section import Section, Table, having, of

ACCURACY = (
    Section(
        "quant_accuracy.*",
        "What quantized weights and KV formats cost in accuracy",
        "Perplexity by a named protocol, divergence from the unquantized model in nats a token, agreement of the most "
        "likely tokens, with 95 % intervals (bootstrap); bytes of a weight and of a value of K or V.",
        (
            Table(
                (
                    "part", "scheme", "kv", "protocol", "tokens", "perplexity", "added", "added_95", "kl", "kl_95",
                    "top1", "bytes_per_weight", "bytes_per_kv",
                ),
                "by scheme and KV format",
                having("scheme", "perplexity"),
            ),
        ),
    ),
    Section(
        "ptq_methods.*",
        "What calibration gains over plain rounding at equal bits",
        "Divergence from the unquantized model in nats a token, and over that of rounding (`ratio`), with 95 % "
        "intervals (bootstrap over documents or windows); of the model as it is, and with planted outliers.",
        (
            Table(
                (
                    "model", "scheme", "method", "seed", "protocol", "kl", "kl_95", "ratio", "ratio_95", "added",
                    "seconds",
                ),
                "by method",
            ),
        ),
        of_bars("{:.2g} to {:.2g} of rounding's divergence, by the upper ends of intervals"),
    ),
    Section(
        "mixed_precision.*",
        "Mixed precision: the format of each layer by its sensitivity, under a budget of bytes",
        "Divergence from the unquantized model in nats a token, and over that of the best uniform format that fits "
        "(`ratio`), with 95 % intervals by bootstrap over documents. Shuffled: the same formats in other layers.",
        (
            Table(("formats", "bytes_per_weight", "kl", "kl_95"), "all layers alike", of(part="uniform")),
            Table(
                ("part", "budget", "seed", "formats", "bytes_per_weight", "kl", "kl_95", "over", "ratio", "ratio_95"),
                "by layer",
            ),
        ),
        of_bars("{:.2g} to {:.2g} of the divergence left"),
    ),
    Section(
        "long_context",
        "Long contexts by position: needles, perplexity, and a cache that forgets",
        "Needles: the share of questions that a small model trained for it answers, with 95 % intervals by Wilson, by "
        "depth of what is asked for. Outliers: the same beside outliers planted into two channels of each head's K and "
        "V. Position: nats a token of the bundled model, whose context is 1,024, with 95 % intervals by bootstrap over "
        "windows. `policy`: all tokens are kept, or the first and the last ones.",
        (
            Table(
                ("tokens", "kv", "policy", "kept", "depth", "accuracy", "accuracy_95", "nats"),
                "needles",
                of(part="needle"),
            ),
            Table(("strength", "kv", "accuracy", "accuracy_95", "nats"), "outliers", of(part="outlier")),
            Table(("kv", "policy", "upto", "nats", "nats_95"), "position", of(part="position")),
        ),
    ),
    Section("train_needle", "Training of the model that finds needles"),
    Section(
        "continuations.*",
        "What quantization does to texts that are generated, and serving beside the forward pass",
        "Greedy continuations against those of the unquantized model: after how many tokens they become others "
        "(`agreed`, 95 % intervals by bootstrap over prompts), the share that is the same after N tokens (`same_N`), "
        "and what teacher forcing would make of it (`expected_N`). `gap`: log-probabilities as served and by the "
        "forward pass without a cache, in nats. A label names the backend that served, in bfloat16.",
        (
            Table(
                (
                    "scheme", "forced_kl", "forced_top1", "agreed", "agreed_95", "same_8", "expected_8", "same_32",
                    "expected_32", "same_64", "expected_64", "activations", "gap", "gap_mean",
                ),
                "schemes",
                of(kv="model"),
            ),
            Table(("kv", "agreed", "agreed_95", "same_8", "same_32", "same_64"), "KV formats", of(scheme="bf16")),
        ),
    ),
    Section(
        "outliers.*",
        "What outliers of activations do to quantization, and what SmoothQuant mends",
        "Divergence from the unquantized model in nats a token, by how much larger planted outlier channels are than "
        "others; `massive` is the first token's massive activation alone.",
        (
            Table(("strength", "scale", "smooth", "kl", "kl_95"), "int8 weights and activations", of(part="strength")),
            Table(("strength", "group", "kl", "kl_95"), "int4 weights alone, rounded", of(part="group")),
            Table((), "largest activations", of(part="channel"), hidden=True),
        ),
    ),
    Section(
        "rotations.*",
        "What rotations and scales of channels gain beside outliers of K and V, and of what linear layers read",
        "Divergence from the unquantized model in nats a token, by how much larger planted outlier channels are than "
        "others, or by how many channels most of the residual stream lies in; a seed draws the channels. `alpha`: "
        "SmoothAttention's, 0 is without.",
        (
            Table(("strength", "kv", "seed", "kl", "kl_95"), "K and V in 4 bits", of(part="kv")),
            Table(("strength", "scheme", "method", "seed"), "weights", of(part="weights"), pivot=("rotate", "kl")),
            Table(("channels", "scheme", "seed"), "the stream", of(part="stream"), pivot=("rotate", "kl")),
            Table(("strength", "kv", "seed"), "channels scaled ahead", of(part="smooth"), pivot=("alpha", "kl")),
            Table(("strength", "kv", "seed", "kl", "kl_95"), "K per channel and per token", of(part="channel")),
        ),
        of_bars("{:.2g} to {:.2g} of the divergence left"),
    ),
    Section(
        "train_small.*",
        "Training of the bundled model, and of the larger subject",
        answer=lowest("validation loss {:.3f}", "valid_loss"),
    ),
    Section(
        "train_heads.*",
        "Training of models that differ in KV heads alone, for claim C29",
        "Nats a token and bits a byte of a held-out text, by step.",
        (Table(("heads", "kv_heads", "seed", "step", "nats", "bits_per_byte"), "by KV heads, seed and step"),),
    ),
    Section("train_drafters.*", "Training of drafters", "How often drafts are what the target draws, by depth."),
)  # fmt: skip
