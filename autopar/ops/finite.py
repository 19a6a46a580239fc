"""Ops that keep numbers finite: of finite operands their results and gradients are finite, short of an overflow of sums and
products.

What is not named may divide by zero, grow like exp, or have a slope without bound somewhere (sqrt at zero).
"""

from __future__ import annotations

import math

from autopar.ir.call import OpCall
from autopar.ops.registry import define, named


def _numbers_are(call: OpCall) -> bool:
    """Whether the numbers that the op is given are finite (a fill with -inf is not)."""
    return all(math.isfinite(x) for x in call.arguments.values() if isinstance(x, float))


def _divides_by_a_number(call: OpCall) -> bool:
    return isinstance(call["other"], (int, float)) and call["other"] != 0


def _whole_power(call: OpCall) -> bool:
    return isinstance(call.get("exponent"), int) and call["exponent"] >= 0


define(
    *named("add sub rsub mul neg abs square sin cos tanh sigmoid relu gelu silu leaky_relu elu selu celu hardswish"),
    *named(
        "hardtanh hardsigmoid softplus mish log_sigmoid log_sigmoid_forward _prelu_kernel clamp clamp_min clamp_max"
    ),
    *named("minimum maximum where masked_fill sign floor ceil round trunc erf sum amax amin softmax log_softmax"),
    *named(
        "_softmax _log_softmax eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or"
    ),
    *named(
        "bitwise_not isnan mm bmm matmul embedding index_select index gather cat stack expand view _unsafe_view reshape"
    ),
    *named(
        "permute transpose t numpy_T unsqueeze squeeze select slice split unbind clone alias detach _to_copy flip repeat"
    ),
    *named("constant_pad_nd tril triu split_with_sizes chunk full zeros ones zeros_like ones_like full_like"),
    *("autopar.linear", "autopar.layer_norm", "autopar.rms_norm", "autopar.dropout"),
    *("autopar.embedding", "autopar.embedding_bag", "autopar.embedding_bag_max"),
    *("autopar.einsum", "autopar.times", "autopar.pick", "autopar.attention", "autopar.conv", "autopar.in_range"),
    finite=_numbers_are,
)
define("aten.div", finite=_divides_by_a_number)
define("aten.pow", finite=_whole_power)
