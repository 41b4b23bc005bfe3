"""The trackers under the name that version 1.0 had, for trackers of your own. See log.py."""

from torchtitan_lite.config.sections.log import TRACKERS as TRACKERS
from torchtitan_lite.config.sections.log import Tracker as Tracker
