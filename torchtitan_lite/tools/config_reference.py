"""Generates docs/config.md: `python -m torchtitan_lite.tools.config_reference > docs/config.md`."""

from torchtitan_lite.config import cli, schema, toml
from torchtitan_lite.config.schema import Config

_HEAD = """# Every key of the config

Made by `python -m torchtitan_lite.tools.config_reference` from [schema.py](../torchtitan_lite/config/schema.py); a test
compares. A key is `key = value` under its `[section]` in a TOML file, or `--section.key=value` on the command line,
which wins. A file can build on another by `base = "other.toml"`. `train.py --print-config` prints every value with
its origin.
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
                kind = schema.type_name(key).replace("|", ", ").lower()
                text = str(field.description).replace("<", "&lt;").replace("|", "\\|")
                page.append(f"| `{key.split('.', 1)[1]}` | {kind} | `{default}` | {text} |")
    page += ["", "## Shorthands", "", "| flag | stands for |", "|---|---|"]
    for flag, keys in cli.SHORTHANDS.items():
        values = " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
        page.append(f"| `{flag}` | `{values}` |")
    return page


if __name__ == "__main__":
    print("\n".join(lines()))
