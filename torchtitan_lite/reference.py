"""docs/config.md from the config's own classes: `python -m torchtitan_lite.reference > docs/config.md`."""

from torchtitan_lite import cli, settings
from torchtitan_lite.config import Config

_HEAD = """# Every key of the config

Made by `python -m torchtitan_lite.reference` from [config.py](../torchtitan_lite/config.py); a test compares. A key is
`key = value` under its `[section]` in a TOML file, or `--section.key=value` on the command line, which wins. A file can
build on another by `base = "other.toml"`. `train.py --print-config` prints every value with its origin.
"""


def lines() -> list[str]:
    """The page."""
    page = _HEAD.splitlines()
    known = settings.known_keys()
    for section in Config.model_fields:
        page += ["", f"## [{section}]", "", "| key | | default | |", "|---|---|---|---|"]
        for key, field in known.items():
            if key.startswith(f"{section}."):
                default = settings.show(settings.default_of(key))
                kind = settings.type_name(key).replace("|", ", ").lower()
                text = str(field.description).replace("<", "&lt;").replace("|", "\\|")
                page.append(f"| `{key.split('.', 1)[1]}` | {kind} | `{default}` | {text} |")
    page += ["", "## Shorthands", "", "| flag | stands for |", "|---|---|"]
    for flag, keys in cli.SHORTHANDS.items():
        values = " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
        page.append(f"| `{flag}` | `{values}` |")
    return page


if __name__ == "__main__":
    print("\n".join(lines()))
