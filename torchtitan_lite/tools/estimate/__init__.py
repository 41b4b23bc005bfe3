"""What a run takes, without a GPU: `python -m torchtitan_lite.plan` (command.py).

`planned_run.make_plan` simulates a step; step_time.py says how long it takes. A device is a table of
run/devices.toml.
"""
