"""Runs the real training step on a CUDA device that does not exist, as rank 0 of a world without peers.

    python -m tests.fake_cuda MODULE ARGUMENTS     runs MODULE.main(ARGUMENTS) with the device

device.cpp, a library of a hundred lines, tells torch's CPU build that there is a device cuda: FakeTensors can live on
it, autograd can go backward on it, FSDP2 can shard on it. stand_ins.py replaces the streams and events of torch.cuda.
operators.py logs every operator: its bytes, the line of ours that called it, and whether the host waits for the
device. step.py builds a session and makes steps of train.py.

This shows the order of operators, their devices, copies, bytes and waits. It does not show what kernels compute, races
between streams, NCCL, or time.

The library has to be loaded before torch, and it stays in the process: hence a process of its own. operators.py alone
needs none of this, and logs the operators of any device.
"""
