"""Instructions: the lines of a schedule, one class for each kind of line; see `Instruction` in `ir`."""

from fnshard.compiler.schedule.instructions.buffers import AggregateBuffers, StoreBuffers
from fnshard.compiler.schedule.instructions.exchange import Exchange
from fnshard.compiler.schedule.instructions.gradients import (
    Accumulate,
    AllReduce,
    Local,
    Reduced,
    ReduceScatter,
)
from fnshard.compiler.schedule.instructions.kernels import Add, Free, Run, Zeros
from fnshard.compiler.schedule.instructions.leaves import Cast, Gather, Publish, Scales
from fnshard.compiler.schedule.instructions.messages import Recv, Send
from fnshard.compiler.schedule.instructions.transfers import ToDevice, ToHost
from fnshard.compiler.schedule.instructions.updates import (
    ComputeStack,
    Norms,
    OverlappedUpdate,
    Parts,
    ReduceScalars,
    ReduceUpdate,
    StackUpdate,
    Update,
)
from fnshard.compiler.schedule.ir import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    LANES,
    OPTIMIZER,
    TRANSFER,
    Action,
    Env,
    Instruction,
    Names,
    OfBucket,
    Wait,
)

__all__ = [
    "COMMUNICATION", "COMPUTE", "HOST", "LANES", "OPTIMIZER", "TRANSFER", "Accumulate", "Action", "Add",
    "AggregateBuffers", "AllReduce", "Cast", "ComputeStack", "Env", "Exchange", "Free", "Gather",
    "Instruction", "Local", "Names", "Norms", "OfBucket", "OverlappedUpdate", "Parts", "Publish", "Recv",
    "ReduceScalars", "ReduceScatter", "ReduceUpdate", "Reduced", "Run", "Scales", "Send", "StackUpdate",
    "StoreBuffers", "ToDevice", "ToHost", "Update", "Wait", "Zeros",
]  # fmt: skip
