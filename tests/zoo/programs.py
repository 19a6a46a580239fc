"""Zoo models compiled: all but the machine and what a test asks for is the zoo's."""

from __future__ import annotations

from typing import Any

import autopar
from tests.zoo.models import ZooModel


def compiled_zoo(zoo: ZooModel, on: int | autopar.ClusterSpec, **asked: Any) -> autopar.Program:
    """The training step of a zoo model on so many ranks of this host, or on a cluster.

    asked: what `autopar.compile` takes by name, among it another `model`, `loss_fn` or `optimizer` than the zoo's.
    """
    cluster = autopar.ClusterSpec.local(on) if isinstance(on, int) else on
    arguments = {"model": zoo.make(), "loss_fn": zoo.loss_fn, "optimizer": zoo.optimizer} | asked
    return autopar.compile(arguments.pop("model"), cluster, zoo.batch(), **arguments)
