"""What a machine, and each rank of a launch, has and lacks for hethub.

Start reading: machine.py.
May import: spec, kernels, communicator, runtime.launch.
"""
