"""The command line's arguments. Parsing them imports no JAX, so that --help is quick."""

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
Continue text with a LLaMA-like language model: prompts in, text out, as it is generated. Without a
prompt, one is read from standard input. Without --model, a small bundled one tells fairy tales."""

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

input file: each line is a JSON object with "prompt" (text, or a list of token ids) or "messages" (a list of
  {"role", "content"} as the server takes them, for the chat template), perhaps an "id" (any value, repeated in its
  results), and perhaps sampling parameters of its own, which win over the flags:
  %(fields)s.
  Any other key is an error, like every broken line, and is reported with the line's number before anything runs.

output file: one JSON object a completion, written as it finishes: index (of the input line, from 0), id, prompt
  or messages, text, token_ids, finish_reason, seed, settings (what else was asked for: the model, its numbers,
  sampling parameters that are not the default), run (what that was: digests of config, weights, tokenizer and rules of
  the scheme; device and versions), timings; sample where n > 1; logprobs where asked for (null: not a
  finite number). Running the same command again resumes: what is there is kept, what is missing is added. Results of
  other settings, seeds or runs are not mixed, and a second command that writes to the file is refused: errors.

seeds: with --seed S, prompt number i (from 0) uses S + i, unless its line has a seed. Without, each prompt draws one,
  which its result reports. Equal seeds give equal text, whatever else runs at the same time.

speculation: a drafter guesses the next tokens of each sequence, and one step of the model checks them all. Only a token
  that the model draws itself is kept, so the text is that of a run without, only sooner where guesses are good; a file
  of results may be resumed with another drafter, or none. NAME is ngram (what followed before in the same text; needs
  no file), draft:DIR (a smaller model of the same vocabulary), medusa:FILE or eagle:FILE (heads made for the model),
  copy:SCHEME (the model itself, quantized as --quantize does); plain draft, medusa and eagle are those of the bundled
  model. The last line says how many tokens a step made of each sequence that had drafts, and the share of drafts
  accepted at each depth.

exit status: 0; 2 after an error; 130 after Ctrl-C, with what was finished kept."""

KV_FORMATS = (
    "bf16, f16, f32, fp8, int8-gN, int4-gN (N = 8, 16, 32, ..: a divisor of the head dimension), these two also with "
    "zero points (-zp), int2-gN-zp, all also rotated (-h); kivi4-gN, kivi2-gN (K per channel, V per token; page_size a "
    "multiple of N)"
)
SCHEMES = (
    "bf16, w8a16, w8a8 (all but the O projection; w8a8-all: every linear layer; w8a8-head: and the output head; "
    "w8a8-groups: every linear layer, inputs of O and down in groups of 128), w4a16-g128, w4a16-g64, w4a16-g32 (each "
    "also with -zp: zero points), nf4, nf4-dq, fp4, fp4-dq, fp8, fp8-weight, uint8-zp; mxfp4, mxfp8, mxfp8-e5m2, nvfp4 "
    "(each also with -h: rotated blocks, and -weight); llm-int8 (-tX: its threshold); w8a8-tensor, for experiments: "
    "not batch-invariant; or a .toml or .json file of rules (docs/quantization.md); each also with +rotate-kv or "
    "+rotate-all"
)
DTYPES = "bf16, f16, f32"
NOT_FIELDS = ("prompt", "messages", "id")  # keys of an input line beside the sampling parameters


class Parser(argparse.ArgumentParser):
    """Of a command that is a module: `python -m MODULE`, or `jllm COMMAND` where it was started so."""

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
        """Returns one line, as for every other error."""
        print(f"error: {one_line(message)} (see --help)", file=sys.stderr)
        sys.exit(2)


class Gone(argparse.Action):
    """A flag that was there before. It is an error, whose text is in `const`, and help does not show it."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, help=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is gone: {self.const}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the process with status 2 and one line for a wrong one."""
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
    problem = problem or check_drafts(args)
    if problem:
        make_parser().error(problem)
    return args


def sampling_params(args: argparse.Namespace, max_new_tokens: int = SamplingParams.max_new_tokens) -> SamplingParams:
    """Returns the flags' sampling parameters, with max_new_tokens where no flag says how many. Raises RequestError,
    naming the field, for a bad value."""
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if hasattr(args, name)}
    if given["max_new_tokens"] is None:
        given["max_new_tokens"] = max_new_tokens
    return SamplingParams(**given, guide=guide_of(args))


def guide_of(args: argparse.Namespace) -> Guide | None:
    """Returns what --json-schema, --regex, --choice or --grammar ask for. RequestError for more than one, or one in
    vain."""
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
    """Returns what is wrong with the flags of speculation, if anything."""
    return "--drafts needs --speculate NAME" if args.drafts is not None and args.speculate is None else None


def make_parser() -> Parser:
    epilog = EPILOG % {"fields": _wrapped(sampling_fields())}
    parser = Parser("jllm.generate", epilog, usage="%(prog)s [PROMPT ...] [options]", description=DESCRIPTION)
    _add_what(parser.add_argument_group("what to run"))
    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling)
    _add_samples(sampling)
    add_guide(parser.add_argument_group("structured output (needs the extra `guided`)"))
    add_numbers(parser.add_argument_group("numbers"))
    engine = parser.add_argument_group("engine")
    add_engine(engine)
    add_replicas(engine)
    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this text")
    other.add_argument("--version", action="store_true", help="show the versions of jllm and JAX")
    return parser


def sampling_fields() -> list[str]:
    """Returns names of the sampling parameters that an input line may have."""
    return list(SamplingParams.__dataclass_fields__)


def _wrapped(names: list[str]) -> str:
    return textwrap.fill(", ".join(names), 100, subsequent_indent="  ")


Group = argparse._ArgumentGroup


def add_model(group: Group) -> None:
    group.add_argument(
        "--model", metavar="DIR|ID", help="Hugging Face model directory, or Hub id (default: the bundled model)"
    )
    ends = "token id that ends an answer, in the place of those that the model's files name; may be repeated"
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
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; several run side by side")
    add_model(group)
    ids = 'token ids to continue instead of text, as "1 763 912" or 1,763,912; may be given several times'
    group.add_argument("--prompt-ids", type=_token_ids, action="append", default=[], metavar="IDS", help=ids)
    group.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, put through the model's chat template"
    )
    lines = "take prompts from a file, one a line (see below); - is standard input"
    group.add_argument("--input", type=Path, metavar="F.jsonl", help=lines)
    group.add_argument("--output", type=Path, metavar="F.jsonl", help="write results of --input there, or resume it")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object a completion on standard output, and nothing else"
    )


SAMPLING_FLAGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def _add_field(group: Group, flag: str, kind: type, metavar: str, text: str, *names: str, **more: Any) -> None:
    """A flag of a sampling parameter, whose default it has unless `more` gives another."""
    default = more.setdefault("default", getattr(SamplingParams, more.get("dest", flag[2:].replace("-", "_"))))
    shown = "" if default is None else f" (default: {default})"
    group.add_argument(*names, flag, type=kind, metavar=metavar, help=text + shown, **more)


def add_sampling(group: Group, max_new_tokens: int = SamplingParams.max_new_tokens) -> None:
    """The flags that say how one text goes on."""
    add = partial(_add_field, group)
    most = f"most tokens to generate (default: {max_new_tokens}, or what the context and --num-pages leave room for)"
    group.add_argument("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", float, "T", "0 always takes the most likely token; below 1 is tamer, above 1 wilder")
    add("--top-k", int, "K", "draw from the K most likely tokens only; 0 is off")
    add("--top-p", float, "P", "draw from the most likely tokens that together reach probability P; 1 is off")
    add("--min-p", float, "P", "leave out tokens less than P times as likely as the most likely one; 0 is off")
    add("--seed", int, "S", "makes the run repeatable (see below; default: drawn anew)")
    stop = "end where the text would contain STR, or at the special token STR; it is left out; may be repeated"
    group.add_argument("--stop", action="append", default=[], metavar="STR", help=stop)
    ids = "end at this token id, too, whatever its text is; may be repeated"
    stop_ids: dict[str, Any] = {"dest": "stop_token_ids", "type": _some_ids, "action": "extend", "default": []}
    group.add_argument("--stop-token-id", metavar="ID", help=ids, **stop_ids)
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    add("--repetition-penalty", float, "X", "above 1 makes tokens of the prompt and the output less likely")
    add("--presence-penalty", float, "X", "subtracted from the logits of tokens in the output")
    add("--frequency-penalty", float, "X", "subtracted from them once for each time they occur")


def add_guide(group: Group) -> None:
    """The flags that say what the text must look like."""
    group.add_argument("--json-schema", type=Path, metavar="F", help="the text is JSON that this JSON schema accepts")
    group.add_argument("--regex", metavar="RE", help="the text matches this regular expression as a whole")
    choice = "the text is STR, or another one of those that are given"
    group.add_argument("--choice", action="append", metavar="STR", help=choice)
    group.add_argument("--grammar", type=Path, metavar="F", help="the text is of this grammar (Lark; docs/sampling.md)")


def _add_samples(group: Group) -> None:
    _add_field(group, "--samples", int, "N", "completions of each prompt", "-n", dest="n")
    top = "log-probability of each token and of the N most likely ones (0 to 20); they appear in JSON only"
    _add_field(group, "--logprobs", int, "N", top)


def add_numbers(group: Group) -> None:
    group.add_argument(
        "--dtype", help=f"dtype of weights and arithmetic: {DTYPES} (default: as stored; on a CPU at least f32)"
    )
    group.add_argument("--quantize", metavar="SCHEME", help=f"quantize the weights: {SCHEMES} (default: none)")
    group.add_argument(
        "--devices", type=int, metavar="N", help="spread the model over N devices, each with a share of every layer"
    )
    group.add_argument(
        "--kv-cache",
        metavar="FORMAT",
        help=f"how keys and values are kept: {KV_FORMATS}; or k=FORMAT,v=FORMAT (default: the weights' dtype)",
    )


# Engine options by the names of their flags.
ENGINE_FLAGS = (
    *("max_slots", "page_size", "num_pages", "max_step_tokens", "kv_cache"),
    *("speculate", "drafts", "deterministic", "progress", "compile_processes"),
)


def add_replicas(group: Group) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="N engines with requests spread over them, each on a device, or on as many as --devices says",
    )


def add_engine(group: Group) -> None:
    group.add_argument("--max-slots", type=int, metavar="N", help="most sequences that run at once (default: 16)")
    group.add_argument("--page-size", type=int, metavar="N", help="tokens a KV page: 8, 16, 32, 64, 128 (default: 16)")
    group.add_argument("--num-pages", type=int, metavar="N", help="KV pages in all (default: as memory allows)")
    group.add_argument(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="most tokens computed in one step (default: 256, or twice max-slots)",
    )
    group.add_argument(
        "--speculate",
        metavar="NAME",
        help="check drafts of this drafter, for speed: ngram, draft[:DIR], medusa[:FILE], eagle[:FILE], "
        "copy:SCHEME; changes no token (docs/speculation.md; default: none)",
    )
    group.add_argument(
        "--drafts", type=int, metavar="K", help="drafts a step checks of each sequence (default: some, where they pay)"
    )
    equal = "drafts are accepted only where they equal what the model draws, so leave it out"
    group.add_argument("--acceptance", nargs="?", action=Gone, const=equal, default=argparse.SUPPRESS)
    one_order = "a sequence's numbers are to the bit what they are alone (docs/sampling.md says when); slower"
    group.add_argument("--deterministic", action="store_const", const=True, help=one_order)
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--compile-cache", type=Path, metavar="DIR", help="keep compiled code there (default: the user's cache folder)"
    )
    cache.add_argument("--no-compile-cache", action="store_true", help="compile anew, and keep nothing")
    processes = "trace steps in N more processes: a cold start takes less where there are processors (default: 0)"
    group.add_argument("--compile-processes", type=int, metavar="N", help=processes)
    progress = "say what is being compiled where standard error is no terminal, too"
    group.add_argument("--progress", action="store_const", const=True, help=progress)
