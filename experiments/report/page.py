"""Writes the text of RESULTS.md, with values from the newest files, and claims with their files' verdicts."""

from collections.abc import Iterator
from itertools import pairwise

from experiments.accuracy.rows import difference
from experiments.report.claims import claims_table
from experiments.report.costs import BITS, costs
from experiments.report.documents import Row, short
from experiments.report.figures import (
    H200,
    SERVED,
    Results,
    Series,
    accuracy_rows,
    decode_series,
    floor_shares,
    of_engines,
    of_steps,
    over,
    requests_rows,
    steady_rows,
    times_as_many,
)
from experiments.report.markdown import markdown
from experiments.report.strips import strips
from experiments.steps.devices import ceilings_of

BATCHES = (1, 16, 64, 128, 256)  # of the table of decode steps
# of the table of accuracy, the best first; that of methods has more
SCHEMES = ("w8a8", "q6_k", "fp8", "q4_k", "nf4", "w4a16-g128")
FORMATS = ("int8-g8", "fp8", "int4-g32")
TEXTS = {"quant_accuracy": "its own text", "quant_accuracy_oz": "a book"}  # labels of files
BF16, CODES = "bf16", "w8a8, int8-g8 KV"  # formats of decode steps
SYSTEMS = {"jllm bf16": "jllm bf16, KV bf16", "vLLM": "vLLM bf16, KV bf16"}
SYSTEMS |= {"jllm w8a8": "jllm w8a8, KV int8-g8", "vLLM fp8": "vLLM fp8, KV fp8"}
BEHIND = 1.1  # times a peer's time from which a kernel is told among what is behind
PAIRS = (("jllm bf16", "vLLM"), ("jllm w8a8", "vLLM fp8"))  # that have as many bits


def page(results: Results) -> str:
    """Returns the page's text. A section without results is left out."""
    last = max((entry.date for entry in results.entries), default="never")
    parts = [
        "# Results",
        f"Last run {last}. `python -m experiments.results_page` writes this page from [the files of results](results). "
        "[Experiments](../docs/experiments.md) shows how to measure. [LOG.md](LOG.md) has what was expected and "
        "learned. [Quantization](../docs/quantization.md) and [KV cache](../docs/kv-cache.md) explain names like "
        "`w8a8` and `int8-g8`.",
    ]
    sections = (
        ("In short", summary(results)),
        (f"Decode steps, {short(of_steps(results).device)}", decode(results)),
        ("Requests a second", requests(results)),
        ("What promises cost", costs(results)),
        ("Kernels against peers", kernels(results)),
        ("Accuracy against bytes", (*accuracy(results), *methods(results), *mixture(results))),
        ("Claims of PPL.LLM, the original system", claims_table(results.entries)),
        ("Where we are behind", behind(results)),
    )
    for title, section in sections:
        if found := list(section):
            parts += [f"## {title}", *found]
    return "\n\n".join(parts) + "\n"


# Sentences


def summary(results: Results) -> Iterator[str]:
    """Yields the sentences of the summary."""
    decode, lines = decode_series(of_steps(results)), []
    theirs, limits = [], []
    for formats, peer, said in ((BF16, "vLLM", "in bf16"), (CODES, "vLLM fp8", "in 8 bits")):
        found, ours, floor = (_of(decode, formats, name) for name in (peer, f"jllm {formats}", f"floor, {formats}"))
        if found and found.ours:
            low, high = over(found, found.ours)
            theirs.append(f"{said} {low:.2f} to {high:.2f} times")
        if ours and floor:
            limits.append(f"{_range(over(floor, ours.ms))} {said}")
    gpu = short(of_steps(results).device).split()[0]
    first = [f"LLaMA-2-7B's decode steps on one {gpu} are {', '.join(theirs)} as fast as vLLM's."] if theirs else []
    first += [f"LLaMA-2-7B's decode steps reach {', '.join(limits)} of the hardware's limit."] if limits else []
    if first:
        lines.append(" ".join(first))
    for on, (model, named) in _compared(results):
        parts = [
            f"{one} {row['qps']:.1f} vs. {other} {vllm['qps']:.1f} ({_more(row, vllm)})"
            for one, row, other, vllm in _pairs(on, model)
            if vllm is not None
        ]
        if parts:
            lines.append(f"{named}, requests a second on one {on.device.split()[1]}: {', '.join(parts)}.")
    lines += steady_loads(results)
    cost = {name: round(100 * row["added"], 2) + 0.0 for name, row in _accuracy_rows(results).items()}
    shown = {"KV int8-g8": "K and V in `int8-g8`", "weights w8a8": "`w8a8`"}
    shown |= {"weights w4a16-g128": "`w4a16-g128`"}
    if parts := [f"{cost[name]:+.2f} % with {what}" for name, what in shown.items() if name in cost]:
        lines.append(f"Perplexity changes by {', '.join(parts)}.")
    lines += rewards(results)
    if lines:
        yield "\n".join(f"- {line}" for line in lines)


def steady_loads(results: Results) -> Iterator[str]:
    """Yields a sentence for each pair of ours and vLLM's in one job at a steady load."""
    for on, (model, named) in _served(results):
        rows = {(row["file"], row["name"]): row for row in steady_rows(on, model)}
        for (file, name), row in rows.items():
            other = next((SYSTEMS[vllm] for one, vllm in PAIRS if SYSTEMS[one] == name), None)
            if (vllm := rows.get((file, other))) is not None:
                first, between = (f"{row[key]:.0f} ms vs. {vllm[key]:.0f}" for key in ("ttft_ms_p50", "itl_ms_p99"))
                yield (
                    f"{named} at {row['rate']:g} requests a second on one {_gpu(row)}, jllm vs. vLLM, one run: the "
                    f"median first token comes after {first}. 99 % of the times between tokens are below {between}."
                )


def rewards(results: Results) -> Iterator[str]:
    """Yields a sentence of GRPO's rewards, means of five steps, and of the same with shuffled rewards."""
    runs = [entry for name in ("grpo", "grpo-control") if (entry := results.entry(name, "cpu"))]
    if len(runs) == 2:
        gained = [
            " to ".join(
                f"{sum(row['reward'] for row in rows) / len(rows):.2f}" for rows in (run.rows[:5], run.rows[-5:])
            )
            for run in runs
        ]
        own, control = (f"results/{run.path.name}" for run in runs)
        gap = max(row["gap"] for run in runs for row in run.rows)
        yield (
            f"[GRPO](../docs/rollouts.md#grpo) takes the bundled model's reward (mean of five steps) from "
            f"{gained[0]} in [{len(runs[0].rows)} steps]({own}), and from {gained[1]} with "
            f"[shuffled rewards]({control}). Log-probabilities of trainer and sampler differ by {gap:g}."
        )


def behind(results: Results) -> Iterator[str]:
    """Yields sentences about peers or hardware limits that are ahead."""
    lines, decode = [], decode_series(of_steps(results))
    for kind in ("decode attention", "prefill attention"):
        worst: dict[str, tuple[float, str]] = {}
        for strip in (strip for strip in strips(results) if strip.kernel.startswith(kind)):
            times = max(1 / each for cell in strip.cells.values() for each in cell)
            if times >= max(BEHIND, worst.get(strip.peer, (0.0, ""))[0]):
                worst[strip.peer] = times, short(strip.device).split()[0]
        said = [
            f"Our {kind} takes up to {x:.2f} times the time of {peer} (one {gpu})." for peer, (x, gpu) in worst.items()
        ]
        lines += [" ".join(said)] if said else []
    ours, floor = _of(decode, BF16, f"jllm {BF16}"), _of(decode, BF16, f"floor, {BF16}")
    reached = []
    shares = (
        {batch: floor.ms[batch] / ours.ms[batch] for batch in BATCHES if batch in ours.ms} if ours and floor else {}
    )
    if shares:
        batch = min(shares, key=lambda batch: shares[batch])
        reached.append(f"LLaMA-2-7B's bf16 step reaches {shares[batch]:.0%} of the limit at batch {batch}.")
    if prefill := [row["prefill"] for row in floor_shares(results) if "prefill" in row]:
        low, high = min(low for low, _ in prefill), max(high for _, high in prefill)
        reached.append(f"Prefill of 1,024 tokens or more reaches {low:.0%} to {high:.0%} of it.")
    if reached:
        lines.append(" ".join(reached))
    if least := sorted((row["short"], row["name"]) for row in floor_shares(results) if "short" in row)[:2]:
        lines.append(f"Farthest from it are {', '.join(f'{name} ({_range(ends)})' for ends, name in least)}.")
    lines += dearest_bits(results)
    one = SYSTEMS["jllm bf16"]
    if more := times_as_many(results.on(H200), f"{one}, 4 replicas", one):
        lines.append(f"Four engines in one process serve {more:.2f} times the requests of one, not 4 times, on H200s.")
    if part := times_as_many(results, f"{one}, triton", one):
        lines.append(
            f"Triton's kernels serve {part:.0%} of the requests that Mosaic's do. They have run on no GPU older than "
            "Hopper."
        )
    if lines:
        yield "\n".join(f"- {line}" for line in lines)


def dearest_bits(results: Results) -> Iterator[str]:
    """Yields a sentence of the step that one order of sums makes longest."""
    rows = [row for name in BITS for row in results.on(H200).rows(name, cost="determinism") if row["kind"] != "scored"]
    if rows and (most := max(rows, key=lambda row: row["added"]))["added"] > 0:
        of = f"{most['batch']} rows of {most['model']} at {most['context']:,} tokens"
        kv = "" if most["kv"] == "model" else f" over K and V in {most['kv']}"
        yield f"`deterministic=True` makes steps up to {most['added']:.0%} longer: {of}{kv}."


def _of(decode: dict[str, list[Series]], formats: str, name: str) -> Series | None:
    return next((each for each in decode.get(formats, ()) if each.name == name), None)


def _served(results: Results) -> Iterator[tuple[Results, tuple[str, str]]]:
    """Yields the devices that served requests, and with each the name of a model in files and in words. A model's first
    device is that of the steps."""
    for model in SERVED.items():
        for device in dict.fromkeys((of_steps(results).device, results.device, H200)):
            yield results.on(device), model


def _compared(results: Results) -> Iterator[tuple[Results, tuple[str, str]]]:
    """Yields each model's first device that served its requests by both systems, or else by jllm."""
    for model in SERVED.items():
        served = [(on, [*_pairs(on, model[0])]) for on, each in _served(results) if each == model]
        both = [on for on, pairs in served if any(vllm for *_, vllm in pairs)]
        if found := both or [on for on, pairs in served if pairs]:
            yield found[0], model


def _pairs(results: Results, model: str) -> Iterator[tuple[str, Row, str, Row | None]]:
    """Yields jllm's rows, each with that of vLLM in as many bits, or None if no job served both."""
    rows = {row["name"]: row for row in requests_rows(results, model)}
    for one, other in PAIRS:
        if (row := rows.get(SYSTEMS[one])) is not None:
            vllm = rows.get(SYSTEMS[other])
            yield one, row, other, vllm if vllm is not None and vllm["file"] == row["file"] else None


def _more(row: Row, other: Row) -> str:
    """Returns how many more requests a second are served. Overlapping intervals count as equal within noise."""
    more = row["qps"] / other["qps"] - 1
    apart = abs(row["qps"] - other["qps"]) > (row["ci"] or 0) + (other["ci"] or 0)
    return f"{more:+.0%}" if apart else "equal within noise"


# Tables and pictures


def decode(results: Results) -> Iterator[str]:
    on = of_steps(results)
    columns = [each for series in decode_series(on).values() for each in series]
    if not any(each.kind == "jllm" for each in columns):
        return
    rates, held = ceilings_of(on.device), ""
    if rates.sustained is not None:
        held = f" {rates.sustained.bandwidth / 1e12:.2f} TB/s and {rates.sustained.peaks[None] / 1e12:.0f} TFLOP/s"
        held = f" Brackets have shares of the rates that it holds for seconds:{held}."
        best = [kind for kind, peak in rates.sustained.peaks.items() if kind and peak == rates.peaks[kind]]
        held += f" {'8 bits and attention have' if best else 'Attention has'} its best rate."
    sources = [f"[{each.name}](results/{each.source.name})" for each in columns if each.source]
    alone = [] if of_engines(on) else ["jllm's"]
    alone += ["PyTorch's"] if any(each.name == "PyTorch" for each in columns) else []
    apart = f"{' and '.join(alone)} steps follow each other without an engine. " if alone else ""
    apart += f"Steps of {'jllm and vLLM' if of_engines(on) else 'vLLM'} were timed in running engines"
    shown, gpu = {each.name for each in columns}, short(results.device).split()[0]
    for each in (each for series in decode_series(results).values() for each in series):
        if each.source and each.ours and each.name not in shown:
            low, high = over(each, each.ours)
            apart += f". On one {gpu} {each.name}'s steps take {low:.2f} to {high:.2f} times as long as ours"
            apart += f" ([file](results/{each.source.name}))"
    yield (
        "LLaMA-2-7B has 8 tokens in and 256 out. The floor is the time of its bytes and operations at the device's "
        f"best rates: {rates.bandwidth / 1e12:.2f} TB/s and {rates.peaks[None] / 1e12:.0f} TFLOP/s in 16 bits. "
        f"[Devices](../configs/devices) have the rest.{held} Files of peers: {', '.join(sources)}. [Their "
        f"scripts](peers/README.md) say how they run. Of each peer the fastest variant counts. {apart}. PPL.LLM "
        "published its steps on an H800. They are scaled by the bandwidths of both data sheets.\n"
        "![Decode steps by batch, against floors and peers](results/summary-decode.svg)"
    )
    cells = [[str(b), *(f"{each.ms[b]:.2f}" if b in each.ms else "" for each in columns)] for b in BATCHES]
    yield markdown(["ms at batch", *(each.name for each in columns)], [row for row in cells if any(row[1:])])
    shares = [
        [
            f"[{row['name']}](results/{row['file'].name})",
            *(_both(row.get(what), row["sustained"].get(what)) for what in ("short", "long", "prefill")),
        ]
        for row in floor_shares(results)
    ]
    yield markdown(["share of the floor", "decode, 8 in", "decode, 1,024 in", "prefill of 1,024 or more"], shares)


def _range(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.0%}" if ends[0] == ends[1] else f"{ends[0]:.0%} to {ends[1]:.0%}"


def _both(share: tuple[float, float] | None, sustained: tuple[float, float] | None) -> str:
    return " ".join(filter(None, (_range(share), sustained and f"({_range(sustained)})")))


def requests(results: Results) -> Iterator[str]:
    """Yields requests per second on the QPS workload beside vLLM's, those of other systems, and a steady load."""
    cells, steady = [], []
    others: dict[str, list[str]] = {}
    compared = [(on.device, model) for on, (model, _) in _compared(results)]
    for on, (model, named) in _served(results):
        told = {f"{SYSTEMS['jllm bf16']}, triton"}  # among what is behind
        for one, row, _, vllm in _pairs(on, model) if (on.device, model) in compared else ():
            cells.append([f"{named}, {_gpu(row)}", one.removeprefix("jllm "), *_beside(row, vllm)])
            told |= {each["name"] for each in (row, vllm) if each is not None}
        for row in requests_rows(on, model):
            if row["name"] not in told and "guided" not in row["name"]:
                few = {1: ", one run", 2: ", two runs"}.get(row["runs"], "")
                said = f"[{row['name']}](results/{row['file'].name}): {_rate(row)} ({_gpu(row)}{few})."
                others.setdefault(named, []).append(said)
        steady += [_steady(row, named) for row in steady_rows(on, model)]
    if not (cells or others or steady):
        return
    pictured = requests_rows(of_steps(results))
    yield (
        "1,024 conversations arrive at once at one GPU. A figure is the mean of one job's runs, with its 95 % interval "
        "by Student's t. Both systems ran in one job, vLLM near its defaults. Its 8 bits are fp8 weights, K and V. A "
        "start lasts until all sizes of steps are compiled, without a cache. vLLM's also includes its imports and "
        "making weights." + ("\n![Requests a second](results/summary-requests.svg)" if pictured else "")
    )
    heads = ["model", "jllm's weights", "jllm, requests a second", "vLLM", "jllm over vLLM", "jllm's start, s"]
    if cells:
        yield markdown([*heads, "vLLM's", "from"], cells)
    if others:
        ways = "\n".join(f"{named}: {' '.join(each)}" for named, each in others.items())
        each = "A replica has a GPU and 1,024 conversations of its own."
        yield f"Requests a second of other settings and systems. {each}\n{ways}"
    if steady:
        heads = [
            "at a steady load, one run each",
            "arrivals a second",
            "first token, ms p50, p99",
            "between tokens, ms p50, p99",
        ]
        yield markdown([*heads, "first token in 2 s, then 50 ms a token", "from"], steady)


def _gpu(row: Row) -> str:
    return row["device"].partition(" ")[0]


def _rate(row: Row) -> str:
    """Returns requests per second, with the interval of three runs or more."""
    return f"{row['qps']:.1f}" + (f" ± {row['ci']:.1f}" if row["ci"] and row["runs"] > 2 else "")


def _beside(row: Row, other: Row | None) -> list[str]:
    theirs = ["", ""] if other is None else [_rate(other), _more(row, other)]
    starts = ["" if each is None or each["start_s"] is None else f"{each['start_s']:.0f}" for each in (row, other)]
    source = f"[{row['runs']} run{'s' * (row['runs'] > 1)}](results/{row['file'].name})"
    return [_rate(row), *theirs, *starts, source]


def _steady(row: Row, named: str) -> list[str]:
    times = [f"{row[f'{what}_ms_p50']:.0f}, {row[f'{what}_ms_p99']:.0f}" for what in ("ttft", "itl")]
    share = f"{row['good_share']:.0%}"
    return [
        f"{row['name']}, {named}, {_gpu(row)}",
        f"{row['rate']:g}",
        *times,
        share,
        f"[file](results/{row['file'].name})",
    ]


def kernels(results: Results) -> Iterator[str]:
    if strips(results):
        yield (
            "Each cell says how many times as fast as the peer a case is. Green is faster, red is slower. Two "
            "figures are the range over shapes.\n"
            "![Kernels against peers](results/summary-kernels.svg)"
        )


def accuracy(results: Results) -> Iterator[str]:
    """Yields a table with a row for each scheme and KV format, and columns for each text."""
    found = {label: _accuracy_rows(results, label) for label in TEXTS}
    first, *others = found.values()
    if not first:
        return
    yield (
        "![Divergence by bytes](results/summary-accuracy.svg)\n"
        "Names like q4_k are llama.cpp's [types](gguf_types.py). Texts are [the model's own](texts) and "
        "*The Wonderful Wizard of Oz*. Brackets have 95 % intervals. Rows are compared on the same parts of a text."
    )
    cells = []
    for name, row in first.items():
        size = row["bytes_per_kv" if row["scheme"] == "bf16" else "bytes_per_weight"]
        texts = [_costs(rows[name]) if name in rows else ["", "", ""] for rows in (first, *others)]
        cells.append([name, f"{size:.3f}", *(cell for text in texts for cell in text)])
    heads = [
        (f"{said}: KL, nats a token", "perplexity, %", "change of KL from the row above") for said in TEXTS.values()
    ]
    yield markdown(["of the bundled model", "bytes a value", *(head for text in heads for head in text)], cells)


def _costs(row: Row) -> list[str]:
    over = "" if "over" not in row else _within(row["over"]["kl"], row["over"]["kl_95"], "{:+.2g}")
    added = [100 * x for x in row["added_95"]]
    return [f"{row['kl']:.2g}", _within(100 * row["added"], added, "{:+.2f}"), over]


def _within(value: float, ends: list[float], form: str) -> str:
    low, high = map(form.format, ends)
    return f"{form.format(value)} [{low}, {high}]"


def methods(results: Results) -> Iterator[str]:
    """Yields a table with a column a format of weights, by bits, and a row a method."""
    entry = results.entry("ptq_methods", "cpu")
    rows = [] if entry is None else [row for row in entry.rows if row["model"] == "plain" and "bytes_per_weight" in row]
    if not rows:
        return
    kl = {(row["scheme"], row["method"]): f"{row['kl']:.2g}" for row in rows}
    bits = {row["scheme"]: 8 * row["bytes_per_weight"] for row in sorted(rows, key=lambda row: row["bytes_per_weight"])}
    cells = [[name, *(kl.get((scheme, name), "") for scheme in bits)] for name in dict.fromkeys(x for _, x in kl)]
    heads = (f"{name.rpartition(':')[2]}, {size:.2f} bits" for name, size in bits.items())
    text = f"its own first {rows[0]['parts']} texts"
    yield markdown([f"KL of the bundled model, {text}", *heads], cells)


def mixture(results: Results) -> Iterator[str]:
    """Yields a sentence of what 4 and 2 bits cost in each part of a mixture."""
    entries = [entry for entry in results.entries if entry.label.startswith("quant_accuracy") and entry.device == "cpu"]
    of = {(x["module"], x["bits"]): x for entry in entries for x in entry.rows if x.get("part") == "mixture"}
    if not of:
        return
    source = next(entry for entry in entries if any(row.get("part") == "mixture" for row in entry.rows))
    cells = []
    for module in dict.fromkeys(name for name, _ in of):
        rows = [of[module, bits] for bits in (4, 2) if (module, bits) in of]
        kl = " and ".join(_within(row["kl"], row["kl_95"], "{:.2g}") for row in rows)
        routes = " and ".join(f"{100 * row['routes']:.1f} %" for row in rows)
        cells.append(f"{module.capitalize()}: KL {kl}, changed routes {routes}.")
    yield (
        f"Of a small mixture one part alone has 4 and then 2 bits ([all bits](results/{source.path.name})). "
        f"{' '.join(cells)}"
    )


def _accuracy_rows(results: Results, label: str = "quant_accuracy") -> dict[str, Row]:
    """Returns the rows of the table of accuracy, by name. `over` is a row's difference from the row above."""
    rows = accuracy_rows(results, label)
    chosen = [row for name in SCHEMES for row in rows if row["scheme"] == name]
    chosen += [row for name in FORMATS for row in rows if row["scheme"] == "bf16" and row["kv"] == name]
    kinds = [row["scheme"] == "bf16" for row in chosen]
    found = {}
    for row, above, same in zip(chosen, [None, *chosen], [False, *(a == b for a, b in pairwise(kinds))]):
        over = difference(row, above) if same and above and "part_tokens" in row else None
        found[_name(row)] = row | ({"over": over} if over else {})
    return found


def _name(row: Row) -> str:
    return f"KV {row['kv']}" if row["scheme"] == "bf16" else f"weights {row['scheme']}"
