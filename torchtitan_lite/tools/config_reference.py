"""Generates docs/config.md: `python -m torchtitan_lite.tools.config_reference > docs/config.md`.

With the argument `resume` it prints the table of docs/resume.md.
"""

import sys

from torchtitan_lite.config import cli, load, schema, toml
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.section import Resume

_HEAD = """# Every key of the config

Made by `python -m torchtitan_lite.tools.config_reference` from [config/sections/](../torchtitan_lite/config/sections).
A key is `key = value` under its `[section]` in a TOML file, or `--section.key=value` on the command line, which wins.
`train.py --print-config` prints every value with its origin.

`base = "other.toml"` builds on another file, which is looked for next to this one first. Other paths are relative to
the working directory. Choices may be in any case, and `bf16`, `fp16` and `fp32` are dtypes too.

Lists need no brackets: `--log.trackers=tensorboard,wandb`. A comma inside brackets belongs to a pattern
(`layers.[0,1].*`). `sample.prompts` is not split: `--sample.prompts='["one, two", "three"]'`. A name with a comma is
quoted: `--data.path='"a,b.txt"'`.
"""


def lines() -> list[str]:
    page = _HEAD.splitlines()
    known, defaults = schema.known_keys(), load.defaults()
    for section in Config.model_fields:
        page += ["", f"## [{section}]", "", "| key | default | |", "|---|---|---|"]
        for key, field in known.items():
            if key.startswith(f"{section}."):
                default = toml.format_value(defaults[key])
                text = str(field.description).replace("<", "&lt;").replace("|", "\\|")
                choices = schema.type_name(key).removeprefix("|").split("|")
                if len(choices) > 1 and not all(choice in text for choice in choices):
                    text = f"({', '.join(choices)}) {text}"
                page.append(f"| `{key.split('.', 1)[1]}` | `{default}` | {text} |")
    page += ["", "## Shorthands", "", "| flag | stands for |", "|---|---|"]
    for flag, keys in cli.SHORTHANDS.items():
        values = " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
        page.append(f"| `{flag}` | `{values}` |")
    return page


def resume_table() -> list[str]:
    """Return the lines of the table in docs/resume.md. The first row that matches a key applies."""
    own: dict[tuple[str, str], list[str]] = {}  # by section and rule
    others: dict[tuple[str, str], list[str]] = {}
    for name, section in schema.sections().items():
        default = _on_resume(section.on_resume)
        others.setdefault(("", default), []).append(f"`{name}.*`")
        for key in section.model_fields:
            text = _on_resume(schema.resume_rule(f"{name}.{key}"))
            if text != default:
                own.setdefault((name, text), []).append(f"`{name}.{key}`")
    rows = [f"| {', '.join(keys)} | {text} |" for table in (own, others) for (_, text), keys in table.items()]
    return ["| keys | on a resume |", "|---|---|", *rows]


def _on_resume(resume: Resume) -> str:
    separator = ", " if resume.changes == "content" else ": "
    return resume.rule + (separator + resume.note if resume.note else "")


if __name__ == "__main__":
    print("\n".join(resume_table() if sys.argv[1:] == ["resume"] else lines()))
