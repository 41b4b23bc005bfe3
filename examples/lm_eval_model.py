"""Scores a run on the tasks of lm-evaluation-harness (extra `eval`).

    python examples/lm_eval_model.py runs/default --tasks my_task --include-path my_tasks

A task downloads its data on first use, unless its YAML file names local files (docs/tasks.md). Texts become tokens,
windows and likelihoods as in `evaluate --tasks`, so equal questions get equal scores.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.scoring.questions import Question, Task
from torchtitan_lite.scoring.task_scores import score
from torchtitan_lite.scoring.task_tokens import Inputs, encode_task, text_encoder
from torchtitan_lite.tools.generate import Options, tokens_of
from torchtitan_lite.tools.load_model import device_of, open_model


class Model(LM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's interface to a run, a checkpoint or a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._world = Process(0, 1, device_of("auto"), 1)
        opened = open_model(path, self._world.device, torch.float32)
        self._opened, self._window = opened, opened.window()
        self._inputs = Inputs(opened.first_token(), opened.beginning(), self._window)
        self._encode = text_encoder(self._opened.tokenizer, self._opened.ends, "a text")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) the log-likelihood, and whether each token is the likeliest."""
        questions = [Question(r.args[:1], r.args[1:]) for r in requests]
        task = encode_task(Task("lm-eval", "last word", questions), self._encode, self._inputs)
        scores = score(self._opened.model, task, self._world)
        return [
            (-float(nats), bool(right == 1))
            for nats, right in zip(scores.nats, scores.correct["accuracy"], strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return each text's log-likelihood. A text longer than the window is predicted in pieces."""
        whole = [Instance("loglikelihood", r.doc, ("", *r.args), r.idx) for r in requests]
        return [likelihood for likelihood, _ in self.loglikelihood(whole)]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return for each (context, options) the likeliest continuation, up to a stop text."""
        found = []
        for context, options in (r.args for r in requests):
            most = min(int(options.get("max_gen_toks", 256)), self._window - 1)
            prompt = [*self._inputs.prefix, *self._encode([context])[0]][most - self._window :]
            tokens = tokens_of(self._opened, prompt, Options(max_tokens=most, temperature=0.0))
            text = self._opened.tokenizer.decode(list(tokens))
            for stop in options.get("until", ()):
                text = text.split(stop)[0]
            found.append(text)
        return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Score a run on tasks of lm-evaluation-harness.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run, a checkpoint or a Hugging Face folder")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of lm-eval, or of your YAML files")
    parser.add_argument("--include-path", default=None, help="a folder with YAML files of tasks")
    args = parser.parse_args(argv)
    manager = TaskManager(include_path=args.include_path)
    results: dict[str, Any] = simple_evaluate(Model(args.run), tasks=args.tasks, task_manager=manager)
    print(make_table(results))
    return results


if __name__ == "__main__":
    main()
