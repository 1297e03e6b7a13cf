"""Finds a checkpoint's chat template, and renders it as transformers does (sandboxed jinja2)."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jllm.errors import TokenizerError
from jllm.files.messages import Message, check_messages


def read_json(path: Path) -> dict:
    """Returns the object in a JSON file; {} if there is no such file. Raises TokenizerError for any other content."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"cannot read {path}: expected a JSON object, found {type(value).__name__}")
    return value


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def find_chat_template(directory: Path, config: Mapping[str, object], name: str = "default") -> str | None:
    """Returns the chat template of a checkpoint directory by its name; None if it has none.

    chat_template.jinja wins over chat_template.json, and both win over `chat_template` in tokenizer_config.json
    (`config`). The latter two hold a string, which is "default", or a list of {"name", "template"}. For other names,
    additional_chat_templates/NAME.jinja wins over all of them.
    """
    file = directory / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"cannot read {file}: {one_line(error)}") from error
    found = read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, str):
        found = {"default": found}
    if isinstance(found, dict):
        found = found.get(name)
    if found is not None and not isinstance(found, str):
        raise TokenizerError(f"chat_template in {directory} must be a string or a list of {{name, template}}")
    return found


def variables_of(template: str) -> set[str]:
    """Returns the names of the variables that a template reads. Raises TokenizerError for a broken template."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template is broken at line {error.lineno}: {one_line(error)}") from error


def render_chat(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Returns the text of a conversation, up to where the assistant's answer begins (add_generation_prompt).

    The template sees special_tokens by name ("bos_token", "eos_token", ...). If it does not support the role developer,
    it gets such a message with the role system. `tools` are functions that the model may call. Each is {"type":
    "function", "function": {"name", "description", "parameters"}}, of JSON values. Raises TokenizerError for messages
    that check_messages or the template refuses.
    """
    import jinja2

    # Only plain values: templates (downloaded code) must not see the caller's objects.
    plain = check_messages(messages)
    if "developer" not in template:
        plain = [m | {"role": "system"} if m["role"] == "developer" else m for m in plain]
    variables = {"messages": plain, "tools": tools or None, "documents": None, "add_generation_prompt": True}
    try:
        return _environment().from_string(template).render(**special_tokens, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template is broken at line {error.lineno}: {one_line(error)}") from error
    except Exception as error:  # templates run arbitrary expressions: any type of error may come out
        raise TokenizerError(f"the chat template refuses these messages: {one_line(error)}") from error


def _environment():
    """Returns the jinja2 environment that transformers' apply_chat_template has."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Renders {% generation %}...{% endgeneration %} as its body: the tag only marks the assistant's text for
        training."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
