"""Estimates memory and time of a run, without a GPU: `python -m torchtitan_lite.plan` (command.py).

simulate.py simulates a step; work.py counts its computation and communication; planned_run.py makes a plan and
estimates the time. A device is a table of run/devices.toml.
"""
