"""Defines the command line's arguments. Parsing them imports no JAX, so that --help is fast."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jllm.cli.display import one_line
from jllm.engine.request import SamplingParams
from jllm.errors import RequestError
from jllm.guides.guide import Guide

DESCRIPTION = """\
Continue text with a LLaMA-like language model, and print it while it is generated. Without a prompt, one is
read from standard input. Without --model, a small bundled model tells fairy tales."""

EPILOG = """\
examples:
  python -m jllm.generate "Once upon a time"
  python -m jllm.generate --model ~/models/Llama-3.2-1B-Instruct --chat "Why is the sky blue?"
  python -m jllm.generate --temperature 0.8 --top-p 0.95 --seed 7 -n 3 "The old king"
  echo "Once upon a time" | python -m jllm.generate --json > story.json
  python -m jllm.generate --input prompts.jsonl --output results.jsonl --max-new-tokens 256
  make-prompts | python -m jllm.generate --input - --output results.jsonl
  python -m jllm.generate --prompt-ids "1 763 912" --json
  python -m jllm.generate --speculate draft "Once upon a time"

input file: each line is a JSON object. It has "prompt" (text, or a list of token ids) or "messages" (a list of
  {"role", "content"} for the chat template, as the server takes it). It may have an "id" (any value, repeated in its
  results), "inputs" (the name of a file in --inputs), and sampling parameters of its own, which override the flags:
  %(fields)s.
  Any other key and any broken line is an error, reported with the line's number before anything runs.

output file: one JSON object per completion, written when it ends. It has index (of the input line, from 0), id, prompt
  or messages, text, token_ids, finish_reason, seed, settings, run and timings. It has sample if n > 1, and logprobs on
  request (null: not finite). settings has the model, its options, and sampling parameters that are not the default.
  run has digests of config, weights, tokenizer, the scheme's rules, adapters and inputs, and the device and versions.
  The same command resumes: it keeps the file's results and adds the missing ones. Results of other settings, seeds or
  runs are an error. So is a second command that writes to the same file.

seeds: with --seed S, prompt number i (from 0) uses S + i, unless its line has a seed. Without --seed, each prompt draws
  a random seed, which its result reports. Equal seeds give equal text, whatever else runs at the same time.

models: LLaMA, Mistral, Qwen2 and 3, Gemma 2 and 3, OLMo 2 and 3, SmolLM3, Phi-3 and 4, Granite 3, and the mixtures
  Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and gpt-oss. Attention with softcaps or sinks (Gemma 2, gpt-oss) runs as plain
  jnp, or on kernels by --backend mosaic or triton.

speculation: a drafter guesses the next tokens of each sequence, and one step of the model checks them all. Only tokens
  that the model itself draws are kept, so the text is the same as without a drafter. Good guesses make it faster. A
  file of results may be resumed with another drafter, or none. NAME is one of
    ngram         repeats what followed before in the same text; needs no file
    draft:DIR     a smaller model with the same vocabulary
    medusa:FILE, eagle:FILE   heads trained for the model
    copy:SCHEME   the model itself, quantized as by --quantize
  Plain draft, medusa and eagle are those of the bundled model. The last line shows the tokens per step of sequences
  with drafts, and the share of drafts accepted at each depth.

exit status: 0; 2 after an error; 130 after Ctrl-C, which keeps finished results."""

KV_FORMATS = (
    "bf16, f16, f32, fp8, int8-gN, int4-gN (groups of N = 8, 16, 32, ..: a divisor of the head dimension), both also "
    "with zero points (-zp), int2-gN-zp; each also rotated (-h); kivi4-gN, kivi2-gN (K per channel, V per token; "
    "page_size must be a multiple of N)"
)
SCHEMES = (
    "bf16, w8a16, w8a8 (all linear layers except O; w8a8-all: with O; w8a8-head: with O and the output head; "
    "w8a8-groups: with O, and inputs of O and down in groups of 128), w4a16-g128, w4a16-g64, w4a16-g32 (each "
    "also with -zp: zero points), nf4, nf4-dq, fp4, fp4-dq, fp8, fp8-weight, fp8-b128 (blocks of 128 x 128), uint8-zp; "
    "mxfp4, mxfp8, mxfp8-e5m2, nvfp4 (each also with -h: rotated blocks, and -weight: only weights); llm-int8 (-tX: "
    "threshold X); w8a8-tensor (for experiments: not batch-invariant); or a .toml or .json file of rules "
    "(docs/quantization.md); each also with +rotate-kv or +rotate-all"
)
DTYPES = "bf16, f16, f32"
START = """

start: answers begin once the step that holds any request is compiled. Smaller and faster steps are compiled
  meanwhile."""


class Parser(argparse.ArgumentParser):
    """Parses the command line of a module. It shows `python -m MODULE`, or `jllm COMMAND` if that was typed."""

    def __init__(self, module: str, epilog: str, **options: Any):
        command = f"python -m {module}"
        prog = sys.argv[0] if sys.argv[0].startswith("jllm ") else command
        width = {"width": 104, "max_help_position": 34}
        super().__init__(
            prog=prog,
            epilog=epilog.replace(command, prog),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, **width),
            allow_abbrev=False,
            add_help=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Prints one line, like every other error, and ends the process with status 2."""
        print(f"error: {one_line(message)} (see --help)", file=sys.stderr)
        sys.exit(2)


class Gone(argparse.Action):
    """Is a removed flag. Using it is an error with the text in `const`; --help hides it."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, help=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is gone: {self.const}")


class _Named(argparse.Action):
    """Collects NAME=DIR in a dict."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        name, path = values
        given = getattr(namespace, self.dest) or {}
        if name in given:
            raise argparse.ArgumentError(self, f"two adapters have the name {name}")
        setattr(namespace, self.dest, given | {name: path})


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"must be NAME=DIR, not {text!r}")
    return name, Path(path).expanduser()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Ends the process with status 2 and one line if it is wrong."""
    args = make_parser().parse_args(argv)
    problem = None
    if args.prompts and args.prompt_ids:
        problem = "give prompts or --prompt-ids, not both"
    elif args.input is not None:
        if args.prompts or args.prompt_ids:
            problem = "give prompts or --input, not both"
        elif args.output is None and not args.json:
            problem = "--input needs --output FILE (or --json, for results on standard output)"
        elif args.output is not None and args.input.resolve() == args.output.resolve():
            problem = "--input and --output are the same file"
    elif args.output is not None:
        problem = "--output needs --input"
    if args.logprobs is not None and args.output is None and not args.json:
        problem = "--logprobs needs --json or --output: text has no place for them"
    if args.inputs is not None and args.input is None:
        problem = "--inputs needs --input, whose lines name them"
    problem = problem or check_drafts(args) or check_inputs(args)
    if problem:
        make_parser().error(problem)
    return args


def sampling_params(args: argparse.Namespace, max_new_tokens: int = SamplingParams.max_new_tokens) -> SamplingParams:
    """Returns the flags' sampling parameters. `max_new_tokens` is the default of its flag. Raises RequestError, with
    the field's name, for a bad value."""
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if hasattr(args, name)}
    given["adapter"] = next(iter(args.adapters or ()), None)
    if given["max_new_tokens"] is None:
        given["max_new_tokens"] = max_new_tokens
    return SamplingParams(**given, guide=guide_of(args))


def guide_of(args: argparse.Namespace) -> Guide | None:
    """Returns the guide of --json-schema, --regex, --choice or --grammar, or None. Raises RequestError for more than
    one, or a bad one."""
    flags = {"--json-schema": "json_schema", "--regex": "regex", "--choice": "choice", "--grammar": "grammar"}
    given = {flag: value for flag, name in flags.items() if (value := getattr(args, name, None)) is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} cannot go together: give one")
    for flag, value in given.items():
        if flag == "--json-schema":
            return Guide.json(_text_of(value, flag))
        if flag == "--grammar":
            return Guide.grammar(_text_of(value, flag))
        return Guide.regex(value) if flag == "--regex" else Guide.choice(value)
    return None


def _text_of(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{flag}: cannot read {path}: {getattr(error, 'strerror', 'it is not UTF-8')}") from None


def check_drafts(args: argparse.Namespace) -> str | None:
    """Returns the error in the flags of speculation, or None."""
    return "--drafts needs --speculate NAME" if args.drafts is not None and args.speculate is None else None


def check_inputs(args: argparse.Namespace) -> str | None:
    """Returns the error in the flags of requests' own arrays, or None."""
    if args.inputs is None:
        return None
    if args.hooks is None:
        return "--inputs needs --hooks MODULE:NAME, which declare the arrays"
    return None if args.inputs.is_dir() else f"--inputs must be a directory, not {args.inputs}"


def make_parser() -> Parser:
    epilog = EPILOG % {"fields": _wrapped(sampling_fields())}
    parser = Parser("jllm.generate", epilog, usage="%(prog)s [PROMPT ...] [options]", description=DESCRIPTION)
    _add_what(parser.add_argument_group("what to run"))
    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling)
    _add_samples(sampling)
    add_guide(parser.add_argument_group("structured output (needs the extra `guided`)"))
    add_numbers(parser.add_argument_group("precision and devices"))
    engine = parser.add_argument_group("engine")
    add_engine(engine)
    add_replicas(engine)
    add_hooks(engine)
    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this text")
    other.add_argument("--version", action="store_true", help="show the versions of jllm and JAX")
    return parser


def sampling_fields() -> list[str]:
    """Returns the names of the sampling parameters that an input line may have."""
    return list(SamplingParams.__dataclass_fields__)


def _wrapped(names: list[str]) -> str:
    return textwrap.fill(", ".join(names), 100, subsequent_indent="  ")


Group = argparse._ArgumentGroup


def add_model(group: Group) -> None:
    group.add_argument(
        "--model",
        metavar="DIR|ID|GGUF",
        help="Hugging Face directory, Hub id or .gguf file (default: the bundled model)",
    )
    ends = "token id that ends an answer, instead of the ids in the model's files; may be repeated"
    group.add_argument("--eos-token-id", type=_some_ids, action="extend", metavar="ID", help=ends)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be token ids like 1 763 912, not {text!r}") from None


def _some_ids(text: str) -> list[int]:
    if not (ids := _token_ids(text)):
        raise argparse.ArgumentTypeError("must be a token id, or several like 2,7")
    return ids


def _add_what(group: Group) -> None:
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; several prompts run at once")
    add_model(group)
    ids = 'token ids to continue instead of text, as "1 763 912" or 1,763,912; may be repeated'
    group.add_argument("--prompt-ids", type=_token_ids, action="append", default=[], metavar="IDS", help=ids)
    group.add_argument(
        "--chat", action="store_true", help="treat each prompt as a user's message, and apply the chat template"
    )
    lines = "read prompts from a file, one per line (see below); - is standard input"
    group.add_argument("--input", type=Path, metavar="F.jsonl", help=lines)
    group.add_argument("--output", type=Path, metavar="F.jsonl", help="file of --input's results, new or to resume")
    group.add_argument("--json", action="store_true", help="print one JSON object per completion, and nothing else")


SAMPLING_FLAGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def _add_field(group: Group, flag: str, kind: type, metavar: str, text: str, *names: str, **more: Any) -> None:
    """Adds the flag of a sampling parameter. Its default is the parameter's own, or `more`'s."""
    default = more.setdefault("default", getattr(SamplingParams, more.get("dest", flag[2:].replace("-", "_"))))
    shown = "" if default is None else f" (default: {default})"
    group.add_argument(*names, flag, type=kind, metavar=metavar, help=text + shown, **more)


def add_sampling(group: Group, max_new_tokens: int = SamplingParams.max_new_tokens) -> None:
    """Adds the sampling flags of one text."""
    add = partial(_add_field, group)
    most = f"most tokens to generate (default: {max_new_tokens}, or fewer if the context or --num-pages is smaller)"
    group.add_argument("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", float, "T", "temperature; 0 always takes the most likely token")
    add("--top-k", int, "K", "draw only from the K most likely tokens; 0 is off")
    add("--top-p", float, "P", "draw from the most likely tokens that together reach probability P; 1 is off")
    add("--min-p", float, "P", "drop tokens less than P times as likely as the most likely one; 0 is off")
    add("--seed", int, "S", "seed of a repeatable run (see below; default: random)")
    stop = "stop before the text STR or the special token STR; may be repeated"
    group.add_argument("--stop", action="append", default=[], metavar="STR", help=stop)
    ids = "stop at this token id too; may be repeated"
    stop_ids: dict[str, Any] = {"dest": "stop_token_ids", "type": _some_ids, "action": "extend", "default": []}
    group.add_argument("--stop-token-id", metavar="ID", help=ids, **stop_ids)
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's end token")
    add("--repetition-penalty", float, "X", "values above 1 make tokens of the prompt and output less likely")
    add("--presence-penalty", float, "X", "value subtracted from the logits of tokens in the output")
    add("--frequency-penalty", float, "X", "value subtracted once for each time a token occurs in the output")


def add_guide(group: Group) -> None:
    """Adds the flags that constrain the text."""
    group.add_argument("--json-schema", type=Path, metavar="F", help="generate JSON that fits this JSON schema")
    group.add_argument("--regex", metavar="RE", help="generate text that matches this whole regular expression")
    choice = "generate STR, or another --choice; may be repeated"
    group.add_argument("--choice", action="append", metavar="STR", help=choice)
    group.add_argument("--grammar", type=Path, metavar="F", help="generate text of a grammar (Lark; docs/sampling.md)")


def _add_samples(group: Group) -> None:
    _add_field(group, "--samples", int, "N", "completions per prompt", "-n", dest="n")
    top = "report log-probabilities of each token and the N most likely ones (0 to 20; JSON only)"
    _add_field(group, "--logprobs", int, "N", top)


def add_numbers(group: Group) -> None:
    group.add_argument(
        "--dtype", help=f"dtype of weights and arithmetic: {DTYPES} (default: as stored; on a CPU at least f32)"
    )
    group.add_argument("--quantize", metavar="SCHEME", help=f"quantize the weights: {SCHEMES} (default: none)")
    group.add_argument("--devices", type=int, metavar="N", help="shard every layer of the model over N devices")
    group.add_argument(
        "--expert-parallel",
        action=argparse.BooleanOptionalAction,
        help="give each of --devices whole experts, or columns of all (default: whole ones if their number divides)",
    )
    group.add_argument(
        "--kv-cache",
        metavar="FORMAT",
        help=f"format of the KV cache: {KV_FORMATS}; or k=FORMAT,v=FORMAT (default: the weights' dtype)",
    )


# Engine options, by the names of their flags.
ENGINE_FLAGS = (
    *("max_slots", "page_size", "num_pages", "max_step_tokens", "kv_cache"),
    *("adapters", "max_adapters", "speculate", "drafts", "deterministic", "progress", "compile_processes"),
)


def add_replicas(group: Group) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="run N engines that share the requests, each in a process with one GPU or --devices of them",
    )


def add_hooks(group: Group) -> None:
    """Adds the flags of functions inside the steps, and of the arrays that requests bring for them."""
    functions = "run functions of your own inside the steps: a jllm.Hooks (docs/extending.md)"
    group.add_argument("--hooks", metavar="MODULE:NAME", help=functions)
    arrays = "folder of .safetensors files for the hooks; a request names one as its `inputs`"
    group.add_argument("--inputs", type=Path, metavar="DIR", help=arrays)


def add_engine(group: Group) -> None:
    group.add_argument("--max-slots", type=int, metavar="N", help="most sequences that run at once (default: 16)")
    group.add_argument(
        "--page-size", type=int, metavar="N", help="tokens per KV page: 8, 16, 32, 64 or 128 (default: 16)"
    )
    group.add_argument("--num-pages", type=int, metavar="N", help="number of KV pages (default: as memory allows)")
    group.add_argument(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="most tokens of one step (default: 256, or twice max-slots)",
    )
    adapter = "low-rank adapter in a PEFT directory; prompts take the first, unless they name another; may be repeated"
    named: dict[str, Any] = {"action": _Named, "dest": "adapters", "type": _named_path}
    group.add_argument("--adapter", metavar="NAME=DIR", help=adapter, **named)
    places = "most adapters that requests use at once (default: all)"
    group.add_argument("--max-adapters", type=int, metavar="N", help=places)
    group.add_argument(
        "--speculate",
        metavar="NAME",
        help="speed up with this drafter: ngram, draft[:DIR], medusa[:FILE], eagle[:FILE], "
        "copy:SCHEME; tokens stay the same (docs/speculation.md; default: none)",
    )
    group.add_argument("--drafts", type=int, metavar="K", help="drafts per sequence and step (default: as many as pay)")
    equal = "drafts are accepted only where they equal what the model draws, so leave it out"
    group.add_argument("--acceptance", nargs="?", action=Gone, const=equal, default=argparse.SUPPRESS)
    one_order = "compute each sequence bitwise as if it ran alone (limits: docs/sampling.md); slower"
    group.add_argument("--deterministic", action="store_const", const=True, help=one_order)
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--compile-cache", type=Path, metavar="DIR", help="folder of compiled code (default: the user's cache folder)"
    )
    cache.add_argument("--no-compile-cache", action="store_true", help="always compile, and store nothing")
    processes = "trace steps in N extra processes while they compile (default: on a GPU half of the cores, at most 8)"
    group.add_argument("--compile-processes", type=int, metavar="N", help=processes)
    progress = "report compilation even if standard error is no terminal"
    group.add_argument("--progress", action="store_const", const=True, help=progress)
