"""Fits the cost model's constants to a file of published runs, all rows at once, and cross-validates.

`python -m benchmarks.fit_cost_model --file published_runs.json [--write] [--cv out.json]`

Free are the efficiency curves of device families and the constants of `StepConstants`, nothing per model or row. What a
family reaches of its peak is a share that all families have, times a factor of its own that is held near one: a family
without rows gets what the others reach. The loss is a robust one on log(predicted / measured) (iteratively reweighted
Gauss-Newton in the logarithms of the constants, numerical Jacobian), weakly held to a prior that no fit has touched, each
group weighted by the inverse root of its rows so that no report dominates. Cross-validation leaves out one source, or one
family of reports, and fits everything again from the prior: nothing of what is left out is in what predicts it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cluster.device import EfficiencyCurve, device_preset, load_data, preset_key
from autopar.costmodel.estimator.rows import estimate_row
from autopar.costmodel.software import StepConstants
from benchmarks.measured_kernels import recorded

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "autopar" / "cluster" / "data" / "efficiency.json"
CONSTANTS = ROOT / "costmodel" / "estimator" / "data" / "step.json"
Params = dict[str, float]

PRIOR: Params = {
    "matmul": 0.7,
    "matmul8": 0.6,
    "matmul4": 0.5,
    "attention": 0.5,
    "attention_eager": 0.3,
    "half_dim": 128.0,
    "fused_passes": 1.5,
    "eager_share": 0.8,
    "fp8_cast": 1.0,
    "mx_cast": 1.0,
    "grouped_share": 0.8,
    "permute_passes": 4.0,
    "biased_attention": 0.8,
    "dense_host_s": 0.001,
    "moe_host_s": 0.004,
    "expert_host_s": 0.0002,
    "tp_exposed": 0.3,
    "cp_exposed": 0.3,
    "ep_exposed": 0.5,
    "dp_exposed": 0.2,
    "zero3_exposed": 0.2,
    "jitter": 0.005,
    "step_overhead_s": 0.01,
}
"""Round numbers that stand before any fit to published runs: large products and flash attention as their authors measure
them alone, one tile's side, a pass and a half of memory traffic per fused kernel, a millisecond of launches per layer. Of
messages a third is exposed where products run beside them, a fifth where whole layers do, half of expert dispatch, which its
own products wait for. The fit starts here."""

FITTED = tuple(field.name for field in fields(StepConstants) if field.name in PRIOR)
"""The constants that published runs tell; what they do not is zero for frameworks."""

FAMILIES = {
    "v100": ("matmul",),
    "a100": ("matmul", "attention"),
    "h100": ("matmul", "matmul8", "attention", "attention_eager"),
    "h100-500w": ("matmul", "matmul8"),
    "gb200": ("matmul", "matmul8", "matmul4", "attention"),
    "gb300": ("matmul8", "matmul4"),
}
"""Per device family the shares that have a factor of their own."""
START: Params = PRIOR | {f"{family}.{what}": 1.0 for family, shares in FAMILIES.items() for what in shares}
ITERATIONS, FRESH = 8, (3, 6)
"""Steps of the fit, and those before which its Jacobian is made anew."""
MEASURED_ON = "h100"
KERNELS = [one for one in recorded() if one.is_attention]
"""Attention that was measured one kernel at a time, torch's and cuDNN's: further data of the fit, two groups of rows."""
SELDOM = ("grouped_half", "even", "odd")
"""Figures of a curve that are written where they were measured."""
HELD, HELD_TO_SHARED = 0.01, 0.05
"""Weights of the prior, and of families' factors being one."""


def curves_of(params: Params) -> dict[str, EfficiencyCurve]:
    """Curves of every family: free values, and ties between relatives that have too few rows of their own.

    B200 shares GB200's; GB300 differs by one factor except for its 4-bit products; H100-500W by its products.
    """
    raw = load_data("efficiency.json")["curves"]
    curves = {name: dict(values) for name, values in raw.items()}
    for key, value in params.items():
        family, _, what = key.partition(".")
        if what:
            curves[family][what] = params[what] * value
    h100, slow, gb200, gb300, b200 = (curves[k] for k in ("h100", "h100-500w", "gb200", "gb300", "b200"))
    ratio = slow["matmul"] / h100["matmul"]
    slow["attention"], slow["attention_eager"] = h100["attention"] * ratio, h100["attention_eager"] * ratio
    gb200["attention_eager"] = gb200["attention"]
    faster = gb300["matmul8"] / gb200["matmul8"]
    gb300["matmul"] = gb200["matmul"] * faster
    gb300["attention"] = gb300["attention_eager"] = gb200["attention"] * faster
    for what in ("matmul", "matmul8", "matmul4", "attention", "attention_eager"):
        b200[what] = gb200[what]
    curves["a100"]["attention_eager"] = curves["a100"]["attention"]
    curves["v100"]["attention"] = curves["v100"]["attention_eager"] = curves["a100"]["attention"] * 0.8
    scale = {"v100": 1, "a100": 1, "h100": 2, "h100-500w": 2, "b200": 3, "gb200": 3, "gb300": 3}
    for name, times in scale.items():
        curves[name]["half_dim"] = params["half_dim"] * times
    return {name: EfficiencyCurve(**values) for name, values in curves.items()}


def curve_of_device(name: str) -> str:
    """The family whose curve a device uses."""
    return str(load_data("devices.json")["devices"][name]["curve"])


def kernel_errors(params: Params) -> np.ndarray:
    """log(predicted / measured) of the attention kernels that were measured one by one."""
    device = replace(device_preset(MEASURED_ON), curve=curves_of(params)[curve_of_device(MEASURED_ON)])
    return np.array([np.log(one.predicted_s(device) / one.seconds) for one in KERNELS])


def predict(rows: Sequence[Mapping[str, Any]], params: Params) -> np.ndarray:
    """Predicted step seconds."""
    curves = curves_of(params)
    constants = StepConstants(**{name: params[name] for name in FITTED})
    devices = {}
    out = []
    for row in rows:
        key = preset_key(str(row["hardware"]["gpu"])) or "a100"
        if key not in devices:
            devices[key] = replace(device_preset(key), curve=curves[curve_of_device(key)])
        out.append(estimate_row(row, device=devices[key], constants=constants).step_time_s)
    return np.array(out)


def usable(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Primary, complete rows with a step time, and the shape the model covers."""
    return [
        r
        for r in rows
        if r.get("primary", True)
        and r.get("complete")
        and "step_time" in r.get("score_on", ["step_time"])
        and r.get("derived", {}).get("step_time_s")
    ]


def weights_of(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Inverse root of the group's size; rows with assumed parameters count a third."""
    sizes = Counter(r["group"] for r in rows)
    return np.array([(1.0 if r["quality"] == "A" else 0.33) * sizes[r["group"]] ** -0.4 for r in rows])


def robust(residual: np.ndarray, scale: float = 0.06) -> np.ndarray:
    """Weights of a pseudo-Huber loss: one inside `scale`, falling outside."""
    return 1 / np.sqrt(1 + (residual / scale) ** 2)


def jacobian(rows: Sequence[Mapping[str, Any]], params: Params, names: list[str], base: np.ndarray) -> np.ndarray:
    """d log(step) / d log(constant), by forward differences; curves touch only the rows of their devices."""
    J = np.zeros((len(rows), len(names)))
    related = {"h100": ("h100", "h100-500w"), "gb200": ("gb200", "gb300", "b200"), "a100": ("a100", "v100")}
    family = [curve_of_device(preset_key(str(r["hardware"]["gpu"])) or "a100") for r in rows]
    for j, name in enumerate(names):
        head, _, what = name.partition(".")
        picked = [i for i, f in enumerate(family) if not what or f in related.get(head, (head,))]
        moved = predict([rows[i] for i in picked], {**params, name: params[name] * 1.03})
        J[picked, j] = np.log(moved / base[picked]) / np.log(1.03)
    return J


def solve(J: np.ndarray, r: np.ndarray, w: np.ndarray, offset: np.ndarray, ridge: np.ndarray) -> np.ndarray:
    """The step d that minimises sum w rho(r + J d) + sum ridge (offset + d)^2, reweighted a few times."""
    d = np.zeros(J.shape[1])
    for _ in range(8):
        weight = w * robust(r + J @ d)
        A = J.T @ (J * weight[:, None]) + np.diag(ridge)
        d = np.linalg.solve(A, -(J.T @ (weight * r)) - ridge * offset)
    return d


def bounded(params: Params) -> Params:
    """Shares stay below one; those of a peak, below what any kernel has reached."""
    top = {"matmul": 0.93, "matmul8": 0.88, "matmul4": 0.8, "attention": 0.8, "attention_eager": 0.75}
    out = {k: min(v, 1.0) if k.endswith("exposed") else min(v, top.get(k, np.inf)) for k, v in params.items()}
    for key in out:
        what = key.partition(".")[2]
        if what:
            out[key] = min(out[key], top[what] / out[what])
    return out


def fit(rows: Sequence[Mapping[str, Any]], at_start: np.ndarray | None = None) -> Params:
    """Constants fitted to these rows, from the prior. at_start: their Jacobian there, if it is known."""
    params, names = dict(START), list(START)
    w = np.concatenate([weights_of(rows), np.full(len(KERNELS), (len(KERNELS) / 2) ** -0.4)])
    measured = np.array([r["derived"]["step_time_s"] for r in rows])
    ridge = np.array([HELD_TO_SHARED if "." in name else HELD for name in names])
    J = at_start if at_start is not None else jacobian(rows, params, names, predict(rows, params))
    for iteration in range(ITERATIONS):
        base = predict(rows, params)
        if iteration in FRESH:
            J = jacobian(rows, params, names, base)
        offset = np.log([params[k] / START[k] for k in names])
        errors = kernel_errors(params)
        of_kernels = [kernel_errors({**params, name: params[name] * 1.03}) - errors for name in names]
        both = np.vstack([J, np.stack(of_kernels, axis=1) / np.log(1.03)])
        d = np.clip(solve(both, np.concatenate([np.log(base / measured), errors]), w, offset, ridge), -0.35, 0.35)
        params = bounded({k: params[k] * float(np.exp(x)) for k, x in zip(names, d, strict=True)})
    return params


def errors_of(rows: Sequence[Mapping[str, Any]], params: Params) -> np.ndarray:
    """Relative errors of the predicted step times."""
    return predict(rows, params) / np.array([r["derived"]["step_time_s"] for r in rows]) - 1


def summary(rows: Sequence[Mapping[str, Any]], errors: np.ndarray) -> dict[str, Any]:
    """Per architecture, over rows of quality A: number, median and 90th percentile of the absolute error, median error."""
    result = {}
    for arch in ("dense", "moe"):
        of_arch = errors[[r["category"]["arch"] == arch and r["quality"] == "A" for r in rows]]
        if len(of_arch):
            absolute = np.abs(of_arch)
            result[arch] = {
                "rows": len(of_arch),
                "median": float(np.median(absolute)),
                "p90": float(np.quantile(absolute, 0.9)),
                "bias": float(np.median(of_arch)),
            }
    return result


def cross_validate(rows: Sequence[Mapping[str, Any]], key: str = "source") -> dict[str, Any]:
    """Errors of every source (or `key="group"`: family of reports) under constants fitted to all the others."""
    errors = np.zeros(len(rows))
    at_start = jacobian(rows, START, list(START), predict(rows, START))
    groups: dict[str, dict[str, float]] = {}
    for group in sorted({row[key] for row in rows}):
        out = np.array([row[key] == group for row in rows])
        without = fit([row for row, o in zip(rows, out, strict=True) if not o], at_start[~out])
        errors[out] = errors_of([row for row, o in zip(rows, out, strict=True) if o], without)
        absolute = np.abs(errors[out])
        groups[group] = {
            "rows": int(out.sum()),
            "median": float(np.median(absolute)),
            "bias": float(np.median(errors[out])),
        }
    return {"left_out": key, "groups": groups, **summary(rows, errors)}


def write(params: Params) -> None:
    """Puts the fitted values into the files that the cost model reads."""
    data = json.loads(CURVES.read_text())
    data["note"] = (
        "Fitted by benchmarks/fit_cost_model.py (mi300x and cpu: by hand, from vendors' and own measurements)."
    )
    for name, curve in curves_of(params).items():
        said, usual = asdict(curve), asdict(EfficiencyCurve())
        data["curves"][name] = {k: float(f"{v:.4g}") for k, v in said.items() if k not in SELDOM or v != usual[k]}
    CURVES.write_text(json.dumps(data, indent=1) + "\n")
    data = json.loads(CONSTANTS.read_text())
    data["constants"] = {name: float(f"{params[name]:.4g}") for name in FITTED}
    CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="published runs (JSON)")
    parser.add_argument("--write", action="store_true", help="store the fitted constants")
    parser.add_argument("--cv", help="write the cross-validation here")
    args = parser.parse_args(argv)
    rows = usable(json.loads(Path(args.file).read_text()))
    params = fit(rows)
    for key, value in params.items():
        print(f"  {key:24s} {value:.4g}")
    print(f"fitted: {json.dumps(summary(rows, errors_of(rows, params)))}")
    if args.write:
        write(params)
    if args.cv:
        results = [cross_validate(rows, key) for key in ("source", "group")]
        Path(args.cv).write_text(json.dumps(results, indent=1) + "\n")
        for result in results:
            print(f"left out by {result['left_out']}: {json.dumps({a: result[a] for a in ('dense', 'moe')})}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
