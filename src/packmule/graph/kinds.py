"""The vocabulary of training and evaluation graphs. Numbers are columns of a StepGraph."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where a buffer lies: the arena; work.bin, state.bin, a snapshot's state.bin; a device's memory."""

    RAM = 0
    DISK = 1
    SLOTS = 2
    SNAPSHOT = 3
    DEVICE = 4


class TaskKind(IntEnum):
    """What a task does; the engine holds one body per kind."""

    READ_STATE = 0  # verified by the task that takes it
    READ_WEIGHTS = 1
    READ_GRADIENT = 2
    READ_INPUT = 3
    WRITE_STATE = 4
    WRITE_WEIGHTS = 5
    WRITE_GRADIENT = 6
    WRITE_INPUT = 7
    CAST = 8
    EMBED_FORWARD = 9
    LAYER_FORWARD = 10
    HEAD_LOSS = 11
    HEAD_EVALUATE = 12
    LAYER_BACKWARD = 13
    EMBED_BACKWARD = 14
    NORM = 15
    CLIP = 16
    UPDATE = 17
    COMMIT = 18
    EMBED_DECODE = 19
    LAYER_DECODE = 20
    HEAD_DECODE = 21
    ROUTE_FORWARD = 22  # attention and router of a layer with experts
    ROUTE_BACKWARD = 23
    ROUTE_DECODE = 24
    EXPERTS_FORWARD = 25  # a group of experts
    EXPERTS_BACKWARD = 26
    READ_ROUTED = 27
    WRITE_ROUTED = 28
    WRITE_SNAPSHOT = 29
    SNAPSHOT = 30  # make a snapshot whole, under its name
    PART_SCORE = 31  # a part of the head's matrix, where the vocabulary is cut
    PART_GRADIENT = 32
    HEAD_CLOSE = 33  # what comes after all parts
    HEAD_TALLY = 34
    SEND_WEIGHTS = 35  # from RAM to the device
    SEND_GRADIENT = 36
    SEND_INPUT = 37
    SEND_ROUTED = 38
    RECEIVE_GRADIENT = 39  # from the device to RAM
    RECEIVE_INPUT = 40
    RECEIVE_ROUTED = 41
    UPDATE_AHEAD = 42  # before the clip factor is known, as if nothing were clipped
    VALIDATE = 43  # commit what was updated ahead, or drop it
    READ_VERIFIED = 44  # state that no task of the cores takes next
    SEND_STATE = 45  # to an update on the device, and back
    RECEIVE_STATE = 46
    RECEIVE_WEIGHTS = 47  # that an update on the device has made


COMPUTE = frozenset(
    {
        TaskKind.EMBED_FORWARD,
        TaskKind.LAYER_FORWARD,
        TaskKind.HEAD_LOSS,
        TaskKind.HEAD_EVALUATE,
        TaskKind.LAYER_BACKWARD,
        TaskKind.EMBED_BACKWARD,
        TaskKind.EMBED_DECODE,
        TaskKind.LAYER_DECODE,
        TaskKind.HEAD_DECODE,
        TaskKind.ROUTE_FORWARD,
        TaskKind.ROUTE_BACKWARD,
        TaskKind.ROUTE_DECODE,
        TaskKind.EXPERTS_FORWARD,
        TaskKind.EXPERTS_BACKWARD,
        TaskKind.PART_SCORE,
        TaskKind.PART_GRADIENT,
        TaskKind.HEAD_CLOSE,
        TaskKind.HEAD_TALLY,
    }
)


UPDATES = frozenset({TaskKind.UPDATE, TaskKind.UPDATE_AHEAD})

SECOND = 1
"""The part of a compute task that belongs to the second backward of a step that has two."""


class BufferKind(IntEnum):
    """What a buffer holds."""

    STATE = 0  # all planes of a block, resident
    STATE_CHUNK = 1  # the same element range of every plane, on its way
    MASTER_CHUNK = 2  # an element range of the master plane alone, on its way
    SLOT = 3  # a chunk of a block's planes in state.bin
    WEIGHTS = 4  # a block's parameters in the compute dtype
    GRADIENT = 5  # a block's gradients
    GRADIENT_CHUNK = 6
    INPUT = 7  # a block's input, one micro-batch
    SAVED = 8  # what a layer's backward needs from its forward
    DY = 9  # gradient of a block's output, one micro-batch
    SCRATCH = 10  # one task's temporaries
    NORMS = 11  # a block's sums of squares
    SCALE = 12  # the clip factor
    KV = 13  # a layer's keys and values, when generating
    LOGITS = 14  # of the last token, when generating
    ROUTED = 15  # which experts a layer's tokens go to, one micro-batch
    MIXED = 16  # the residual stream while experts add to it
    DISPATCHED = 17  # gradients that experts hand on to their router
    BALANCE = 18  # how much work each expert got in a step
    COPY = 19  # a chunk of a block's planes in a snapshot's state.bin
    SCORES = 20  # what parts of the head have found of a micro-batch's tokens
    GATHERED = 21  # gradients that parts of the head hand on to its norm
    WEIGHTS_CHUNK = 22  # the parameters of an element range in the compute dtype, on their way
