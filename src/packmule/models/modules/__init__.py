"""A user's own PyTorch modules as task bodies: built by name, run under autograd inside one task.

build     the blocks that a user's function makes, without their parameters
bodies    forward, backward and loss of a block over the engine's buffers
samples   micro-batches from a user's data set
"""
