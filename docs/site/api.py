# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the API page, from the docstrings of every public name; search without a
server."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

MARKER = "<!-- api -->"
_PARAMETER = re.compile(r"([\w*][\w*, ./]*): {2,}(\S.*)|(returns): (\S.*)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """reference/api.md with the docstrings in place of its marker."""
    return markdown.replace(MARKER, text()) if page.file.src_uri == "reference/api.md" else markdown


def on_post_page(output: str, **_) -> str:
    """A page with worker.js in place of the script that the offline plugin loads from a network."""
    script = Path(__file__).with_name("worker.js").read_text()
    return re.sub(
        r'<script src="[^"]*/iframe-worker/shim"></script>',
        lambda _: f"<script>{script}</script>",
        output,
    )


def text() -> str:
    """Markdown of everything in `fsdp_quant.__all__`: classes and functions, then modules."""
    import fsdp_quant as fq

    public = {name: getattr(fq, name) for name in fq.__all__}
    modules = {name: value for name, value in public.items() if isinstance(value, types.ModuleType)}
    callables = {
        name: value
        for name, value in public.items()
        if inspect.isroutine(value) or inspect.isclass(value)
    }
    parts = ["## Functions and classes\n"]
    parts += [entry(name, callables[name]) for name in sorted(callables, key=str.lower)]
    parts += ["## Modules\n", *(module_entry(name, modules[name]) for name in sorted(modules))]
    return "\n".join(parts)


def entry(name: str, value: object, level: str = "###") -> str:
    """A heading, the signature, the first sentence, and the rest of the docstring."""
    first, _, rest = (inspect.getdoc(value) or "").partition("\n\n")
    # a dataclass without one shows its signature
    if value.__doc__ is None or first.startswith(f"{name.rpartition('.')[2]}("):
        first = ""
    lines = [
        f"{level} `fq.{name}`\n",
        f"```python\n{signature(name, value)}\n```\n",
        f"{' '.join(first.split())}\n",
    ]
    return "\n".join([*lines, body(rest)])


def body(docstring: str) -> str:
    """Markdown of paragraphs: parameters as lists, examples and what is indented as they stand."""
    return "".join(f"{_paragraph(p)}\n\n" for p in docstring.split("\n\n") if p.strip())


def _paragraph(text: str) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith(" "):
        return f"```text\n{text}\n```"
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        match = _PARAMETER.fullmatch(line)
        if (match or not line.startswith(" ")) and bool(match) != in_list:
            lines.append("")  # Markdown divides a list from prose by an empty line
            in_list = bool(match)
        if match:
            name, meaning = (group for group in match.groups() if group)
            line = f"- `{name}`: {meaning}"
        lines.append(line)
    return _escaped("\n".join(lines))


def _escaped(text: str) -> str:
    """Text in which Markdown marks code alone."""
    return re.sub(r"(`[^`]*`)|([*_<])", lambda m: m[1] or f"\\{m[2]}", text)


class _Annotation(str):
    """Text of an annotation, which a signature shows without quotes."""

    __repr__ = str.__str__


def _plain(annotation: object) -> object:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def signature(name: str, value: object) -> str:
    """`fq.name(parameters)`, a line per parameter if it is long."""
    try:
        whole = inspect.signature(value)
    except (TypeError, ValueError):
        return f"fq.{name}"
    parameters = [p.replace(annotation=_plain(p.annotation)) for p in whole.parameters.values()]
    whole = whole.replace(parameters=parameters, return_annotation=_plain(whole.return_annotation))
    if len(f"fq.{name}{whole}") <= 100:
        return f"fq.{name}{whole}"
    return f"fq.{name}(\n" + "".join(f"    {p},\n" for p in parameters) + ")"


def module_entry(name: str, module: types.ModuleType) -> str:
    """The docstring of a module, and an entry per name of its `__all__`."""
    lines = [f"### `fq.{name}`\n", body(inspect.getdoc(module) or "")]
    for member in getattr(module, "__all__", ()):
        try:
            value = getattr(module, member)
        except ImportError as error:  # an integration whose tool is not installed
            lines.append(f"- `fq.{name}.{member}` needs `{error.name}`\n")
            continue
        if inspect.isroutine(value) or inspect.isclass(value):
            lines.append(entry(f"{name}.{member}", value, "####"))
        else:
            lines.append(f"- `fq.{name}.{member}`: `{short(value)}`\n")
    return "\n".join(lines) + "\n"


def short(value: object) -> str:
    """A value on one line."""
    text = ", ".join(value) if isinstance(value, dict) else repr(value)
    return text if len(text) < 200 else text[:200] + " ..."
