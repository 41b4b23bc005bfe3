"""What a run takes, without a GPU: `python -m torchtitan_lite.plan` (command.py).

simulate.py simulates a step and work.py counts what it computes and sends; planned_run.py makes a plan of it, with its
time. A device is a table of run/devices.toml.
"""
