# The types of the API, for mypy and editors: __init__.py imports it when a name is first used.

from torchtitan_lite.api import build_model as build_model
from torchtitan_lite.api import build_optimizer as build_optimizer
from torchtitan_lite.api import clip_grad_norm as clip_grad_norm
from torchtitan_lite.api import evaluate as evaluate
from torchtitan_lite.api import generate as generate
from torchtitan_lite.api import load_config as load_config
from torchtitan_lite.api import load_model as load_model
from torchtitan_lite.api import open_data as open_data
from torchtitan_lite.api import set_learning_rate as set_learning_rate
from torchtitan_lite.errors import UserError as UserError

__version__: str
LAUNCHED: float
__all__: tuple[str, ...]
