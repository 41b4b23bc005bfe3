"""What a run takes, without a GPU. `planned_run.make_plan` simulates a step; each other question has its own module:

    memory.py         does it fit, and what would make it fit?
    communication.py  what does a rank send, and how long does that take?
    step_time.py      how long does a step take, at least and as expected?
    failures.py       how often should the run save, and what goodput can it expect?

command.py prints the answers: `python -m torchtitan_lite.plan`. A device is a table of monitoring/devices.toml.
"""
