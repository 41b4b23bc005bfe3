"""What benchmarks/learning_peer.py takes from a peer's script, and that it scores a peer's model as one of ours."""

from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.learning_peer import Scored, of_script
from torchtitan_lite.models.loss import IGNORE

SCRIPT = """
import missing_package
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.5)
args = parser.parse_args()
weight_decay = 0.1
os.environ["KEY"] = "1"
def get_rate(step):
    return args.rate * step / steps
train(args)
"""


def test_a_script_gives_its_functions_constants_and_options_without_being_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    names = of_script(tmp_path / "train.py", ("get_rate",), {"steps": 10})
    names["args"] = names["parser"].parse_args([])
    assert (names["weight_decay"], names["get_rate"](4)) == (0.1, 0.2)


def test_windows_of_any_length_are_scored_and_padding_is_not() -> None:
    torch.manual_seed(0)
    table = torch.randn(8, 8)
    asked = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        asked.append(rows.shape[1])
        return table[rows]

    scored = Scored(logits, 8)
    for length in (1, 5, 256):
        tokens, targets = torch.randint(8, (3, length)), torch.randint(8, (3, length))
        targets[1, length // 2 :] = IGNORE
        nats = scored(tokens, targets, per_sequence=True)
        known = targets != IGNORE
        chosen = F.log_softmax(table, 1)[tokens, targets.clamp(min=0)]
        torch.testing.assert_close(nats, -(chosen * known).sum(1))
    assert asked == [2, 6, 256]
