"""The op dialect: one file per family of ops holds all that the compiler knows of them.

A family states for each op its sharding rule, work, local block and facts (`autopar.ops.registry`), for an op of
autopar's own also its schema, shape and gradient, and what ATen's ops become (`autopar.ops.dialect`). Importing this
package imports every family, which fills the table.
"""

from autopar.ops import (  # noqa: F401  each is imported for the ops that it registers
    attention,
    batch_norm,
    chosen,
    contraction,
    convolution,
    creation,
    ctc,
    embedding,
    embedding_bag,
    experts,
    finite,
    grouped,
    head_loss,
    indexing,
    integers,
    loss,
    normalization,
    order,
    pieces,
    pointwise,
    pooling,
    random,
    recurrence,
    reduction,
    resampling,
    scaling,
    scan,
    selection,
    spatial,
    transform,
    unordered,
    view,
)
