"""Text from a trained model: `python -m torchtitan_lite.generate RUN --prompt "def "`.

RUN is a run (its newest complete checkpoint), a checkpoint, or a Hugging Face folder such as an export. Generated text
is streamed to stdout; everything else goes to stderr.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from torchtitan_lite.config import paths
from torchtitan_lite.config.schema import MIN_TEMPERATURE
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import ConfigError, OutputError, run_cli
from torchtitan_lite.models.generation import Sampler, new_tokens, pieces
from torchtitan_lite.terminal import encodable, prepare_streams
from torchtitan_lite.tools.opening import Opened, open_model


def encode(opened: Opened, prompt: str) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ConfigError: it is empty, is not valid UTF-8, can't be encoded, or is too long for the model.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the command line holds bytes that are not UTF-8
        raise ConfigError(f"the prompt is not valid UTF-8: {prompt[:40]!a}") from None
    try:
        ids = [int(i) for i in opened.tokenizer.encode(prompt, add_special_tokens=False).ids]
    except BaseException as error:  # e.g. a word without an entry; the library's panics are no Exception
        raise ConfigError(f"the tokenizer can't encode the prompt {prompt[:40]!a}: {bpe.reason(error)}") from None
    limit = opened.model.config.max_seq_len
    if not ids:
        raise ConfigError('the prompt is empty; give the model a beginning, e.g. --prompt "def "')
    if len(ids) >= limit:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens; prompt and answer together have at most {limit} (max_seq_len): "
            f"a prompt of at most {limit - 1} works"
        )
    return ids


def answer(opened: Opened, prompt: str, max_tokens: int, sampler: Sampler) -> str:
    """Print the prompt and stream the model's continuation. Returns a line with token rates.

    Raises:
        ConfigError: see `encode`.
    """
    ids = encode(opened, prompt)
    _write(prompt)
    times: list[float] = []

    def timed() -> Iterator[int]:
        for token in new_tokens(opened.model, ids, max_tokens, sampler, opened.ends):
            times.append(time.perf_counter())
            yield token

    started = time.perf_counter()
    for text in pieces(opened.tokenizer, ids, timed()):
        _write(text)
    _write("\n")
    if not times:
        return "the model ended the text at once"
    first = f"{len(ids)} tokens of prompt in {times[0] - started:.2f} s"
    if len(times) == 1:
        return f"1 token; {first}"
    return f"{len(times)} tokens, {(len(times) - 1) / (times[-1] - times[0]):,.1f} tokens/s; {first}"


def _line() -> str:
    try:
        return input("prompt> " if sys.stdin.isatty() else "")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the input is not {error.encoding} text: {error}") from None


def _write(text: str) -> None:
    """Print without a newline.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        OutputError: stdout can't be written for another reason.
    """
    try:
        print(encodable(text, sys.stdout), end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise OutputError(f"stdout can't be written: {error.strerror or error}") from None


def _drop_output() -> None:
    """Discard buffered output, which Python would otherwise try to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def converse(opened: Opened, max_tokens: int, sampler: Sampler) -> None:
    """Answer each line of input independently, until an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        while prompt := _line():
            try:
                print(answer(opened, prompt, max_tokens, sampler), file=sys.stderr)
            except ConfigError as error:  # too long: the next may be shorter
                print(f"generate: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.generate",
        description="Text from a trained model, streamed to the terminal.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", type=paths.argument, metavar="RUN", help="a run, one of its checkpoints, or a Hugging Face folder"
    )
    parser.add_argument("--prompt", default=None, help="the beginning of the text")
    parser.add_argument("--interactive", action="store_true", help="ask for prompts, until an empty line")
    parser.add_argument("--max-tokens", type=int, default=200, help="how many tokens to add at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many of the likeliest; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that together have this much")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    parser.add_argument("--tokenizer", type=paths.argument, default=None, help="a tokenizer.json, where RUN has none")
    return parser


def _problems(given: argparse.Namespace) -> list[str]:
    found = []
    if given.prompt is None and not given.interactive:
        found.append('nothing to continue; e.g. --prompt "def ", or --interactive')
    if given.max_tokens < 1:
        found.append(f"--max-tokens={given.max_tokens} should be at least 1")
    if given.temperature != 0 and not MIN_TEMPERATURE <= given.temperature < float("inf"):
        found.append(
            f"--temperature={given.temperature} should be 0 (always the likeliest token) or at least "
            f"{MIN_TEMPERATURE}, e.g. 0.8"
        )
    if given.top_k < 0:
        found.append(f"--top-k={given.top_k} should be 0 (all) or more, e.g. 50")
    if not 0 < given.top_p <= 1:
        found.append(f"--top-p={given.top_p} should be above 0 and at most 1, e.g. 0.95")
    if not 0 <= given.seed < 2**63:
        found.append(f"--seed={given.seed} should be 0 or more and have at most 63 bits, e.g. 0")
    if given.device not in ("auto", "cpu", "cuda"):
        found.append(f"--device={given.device} should be auto, cpu or cuda")
    elif given.device == "cuda" and not torch.cuda.is_available():
        found.append("--device=cuda, but torch sees no GPU here; --device=cpu works")
    return found


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    given = _parser().parse_args(argv)
    prepare_streams()
    return run_cli("generate", lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    if problems := _problems(given):
        raise ConfigError("\n  ".join(problems))
    try:
        cuda = given.device != "cpu" and torch.cuda.is_available()
        opened = open_model(
            given.run, torch.device("cuda" if cuda else "cpu"), getattr(torch, given.dtype), given.tokenizer
        )
        for note in [*opened.notes, opened.source]:
            print(note, file=sys.stderr)
        sampler = Sampler(given.temperature, given.top_k, given.top_p, given.seed)
        if given.prompt is not None:
            print(answer(opened, given.prompt, given.max_tokens, sampler), file=sys.stderr)
        if given.interactive:
            converse(opened, given.max_tokens, sampler)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # e.g. `| head`
        _drop_output()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
