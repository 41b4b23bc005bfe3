"""Generates docs/config.md: `python -m torchtitan_lite.tools.config_reference > docs/config.md`."""

from torchtitan_lite.config import cli, schema, toml
from torchtitan_lite.config.schema import Config

_HEAD = """# Every key of the config

Made by `python -m torchtitan_lite.tools.config_reference` from [schema.py](../torchtitan_lite/config/schema.py); a test
compares. A key is `key = value` under its `[section]` in a TOML file, or `--section.key=value` on the command line,
which wins. `train.py --print-config` prints every value with its origin.

A file can build on another by `base = "other.toml"`. All paths in a file are relative to the working directory, as on
the command line; `base` is looked for next to the file that names it first. Choices may be in upper or lower case, and
`bf16`, `fp16` and `fp32` are dtypes too.

A list may be written without brackets: `--log.trackers=tensorboard,wandb`, `--optim.betas=0.9,0.95`, or a single value.
A comma inside brackets belongs to a pattern (`layers.[0,1].*`). `sample.prompts` is not split, since text has commas:
`--sample.prompts='["one, two", "three"]'` works. A `data.path` of which nothing exists as it stands is split too.
"""


def lines() -> list[str]:
    """The lines of the page."""
    page = _HEAD.splitlines()
    known = schema.known_keys()
    for section in Config.model_fields:
        page += ["", f"## [{section}]", "", "| key | | default | |", "|---|---|---|---|"]
        for key, field in known.items():
            if key.startswith(f"{section}."):
                default = toml.format_value(schema.default_of(key))
                kind = schema.type_name(key).removeprefix("|").replace("|", ", ")
                kind = kind.lower() if kind in ("INT", "STR", "FLOAT", "BOOL", "VALUE") else kind
                text = str(field.description).replace("<", "&lt;").replace("|", "\\|")
                page.append(f"| `{key.split('.', 1)[1]}` | {kind} | `{default}` | {text} |")
    page += ["", "## Shorthands", "", "| flag | stands for |", "|---|---|"]
    for flag, keys in cli.SHORTHANDS.items():
        values = " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
        page.append(f"| `{flag}` | `{values}` |")
    return page


if __name__ == "__main__":
    print("\n".join(lines()))
